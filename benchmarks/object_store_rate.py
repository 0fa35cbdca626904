"""Rate of fetching a model from an object store against the bare client's: python benchmarks/object_store_rate.py [MIB].

The store is moto's S3 server on loopback, or the one at --endpoint (npm's s3rver is ten times faster and shows more of the
client's own cost). The two sides take turns, five times, and the best of each counts; the bare client syncs its file too.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import obstore
from obstore.store import from_url

from shared import model_store
from shared.object_store import PIECE_BYTES, STREAMS

URL = "s3://models/big"
SERVER = """
import logging
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server, WSGIRequestHandler
logging.disable(logging.CRITICAL)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def store(content: bytes, endpoint: str) -> Iterator[None]:
    if endpoint:
        upload(content, endpoint)
        yield
        return
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            upload(content, f"http://127.0.0.1:{int(process.stdout.readline())}")
            yield
        finally:
            process.kill()


def upload(content: bytes, endpoint: str) -> None:
    os.environ |= {"AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"}
    client = boto3.client("s3", endpoint_url=endpoint)
    with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket="models")
    for name, body in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": content}.items():
        client.put_object(Bucket="models", Key=f"big/{name}", Body=body)


def bare(folder: Path, size: int) -> None:
    """The client's own range reads, as many at once and as large as ours, into a file."""
    opened = from_url(URL)
    with (folder / "bare").open("wb") as file, ThreadPoolExecutor(STREAMS) as pool:
        starts = range(0, size, PIECE_BYTES)
        pieces = pool.map(
            lambda start: obstore.get_range(opened, "model.safetensors", start=start, end=min(size, start + PIECE_BYTES)),
            starts,
        )
        for piece in pieces:
            file.write(memoryview(piece))
        file.flush()
        os.fsync(file.fileno())


def ours(folder: Path, size: int) -> None:
    model_store.resolve(URL, str(folder))


def timed(fetch: Callable[[Path, int], None], size: int) -> float:
    folder = Path(tempfile.mkdtemp())
    started = time.perf_counter()
    fetch(folder, size)
    taken = time.perf_counter() - started
    shutil.rmtree(folder)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mib", type=int, nargs="?", default=256)
    parser.add_argument("--endpoint", default="", help="address of an S3 server that runs already")
    parsed = parser.parse_args()
    size = parsed.mib * 2**20
    content = os.urandom(size)
    seconds = {"bare": float("inf"), "ours": float("inf")}
    with store(content, parsed.endpoint):
        for fetch in (bare, ours) * 5:
            seconds[fetch.__name__] = min(seconds[fetch.__name__], timed(fetch, size))
    for name, taken in seconds.items():
        print(f"{name}: {taken:.2f} s, {size / taken / 1e6:.0f} MB/s")
    print(f"ours / bare: {seconds['bare'] / seconds['ours']:.0%}")
    with store(content, parsed.endpoint):
        cached = Path(tempfile.mkdtemp())
        ours(cached, size)
        started = time.perf_counter()
        ours(cached, size)
        print(f"from the cache: {time.perf_counter() - started:.3f} s")
        shutil.rmtree(cached)


if __name__ == "__main__":
    main()
