"""Models from an object store: a real S3 protocol server on loopback, with a relay in front that can count, break and stop."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from shared import model_store, object_store
from shared.model_folder import ModelError

URL = "s3://models/llama/tiny"
MIB = 2**20


class Relay(ThreadingHTTPServer):
    """Passes requests on to the store. allowed: how many data requests it still answers; then it hangs or breaks."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, backend: int) -> None:
        super().__init__(("127.0.0.1", 0), _Pass)
        self.backend = backend
        self.ranges: list[str] = []  # of data requests answered
        self.allowed = 10**9
        self.ticket = threading.Lock()
        self.status = 0  # answer everything with this
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Pass(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_GET(self) -> None:
        relay = self.server
        span = self.headers.get("Range", "")
        if relay.status:
            self.send_error(relay.status)
            return
        if span:
            with relay.ticket:
                relay.allowed -= 1
                refused = relay.allowed < 0
            if refused:
                time.sleep(60)
                return
        backend = HTTPConnection("127.0.0.1", relay.backend, timeout=30)
        backend.request("GET", self.path, headers=dict(self.headers))
        answer = backend.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        backend.close()
        if span:
            relay.ranges.append(f"{self.path.rsplit('/', 1)[-1]} {span}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def backend() -> Iterator[int]:
    """moto's S3 server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


SERVER = """
import logging, warnings
warnings.simplefilter("ignore")
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def relay(backend: int) -> Iterator[Relay]:
    made = Relay(backend)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(autouse=True)
def settings(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials(relay).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "PIECE_BYTES", MIB)
    monkeypatch.setattr(object_store, "GIVE_UP_S", 3)


def credentials(relay: Relay) -> dict[str, str]:
    return {
        "AWS_ENDPOINT": relay.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


Files = dict[str, bytes]


@pytest.fixture
def files() -> Files:
    noise = random.Random(7)
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors": noise.randbytes(5 * MIB + 12_345),
    }


def sums(files: Files) -> bytes:
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items()).encode()


def upload(backend: int, files: Files) -> None:
    """Make the bucket hold exactly these files, and some that are not wanted."""
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{backend}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="models")
    for old in client.list_objects_v2(Bucket="models").get("Contents", []):
        client.delete_object(Bucket="models", Key=old["Key"])
    for name, content in {**files, "pytorch_model.bin": b"no", "original/model.safetensors": b"no"}.items():
        client.put_object(Bucket="models", Key=f"llama/tiny/{name}", Body=content)


def contents(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_cold_cached_and_offline(
    backend: int, relay: Relay, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    upload(backend, files)
    folder = model_store.resolve(URL, str(tmp_path))
    assert contents(folder) == files
    assert len(relay.ranges) == 6 + 2  # five whole pieces and a rest, and the two small files

    assert model_store.resolve(URL + "/", str(tmp_path)) == folder
    assert len(relay.ranges) == 8

    relay.status = 503
    assert model_store.resolve(URL, str(tmp_path)) == folder
    assert "using the copy in the cache" in caplog.text

    relay.status = 403
    with pytest.raises(ModelError, match="cannot be read"):
        model_store.resolve(URL, str(tmp_path))


def test_a_log_gets_lines_and_no_bar(
    backend: int, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    upload(backend, files)
    model_store.resolve(URL, str(tmp_path))
    lines = [vars(each)["bytes"] for each in caplog.records if each.getMessage() == "fetching"]
    total = sum(map(len, files.values()))
    assert lines[-1] == f"{total}/{total}" and 1 < len(lines) <= 20
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(
    backend: int, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    upload(backend, files)
    model_store.resolve(URL, str(tmp_path))
    assert "tiny: 100%" in capsys.readouterr().err


def test_offline_without_a_copy_is_one_clear_line(relay: Relay, tmp_path: Path) -> None:
    relay.status = 503
    with pytest.raises(ModelError, match=r"^s3://models/llama/tiny cannot be read: [^\n]+$"):
        model_store.resolve(URL, str(tmp_path))


def test_a_changed_model_is_another_folder(backend: int, relay: Relay, files: Files, tmp_path: Path) -> None:
    upload(backend, files)
    first = model_store.resolve(URL, str(tmp_path))
    changed = {**files, "model.safetensors": files["model.safetensors"][::-1]}
    upload(backend, changed)
    second = model_store.resolve(URL, str(tmp_path))
    assert first != second and contents(first) == files and contents(second) == changed
    relay.status = 503
    assert model_store.resolve(URL, str(tmp_path)) == second


CHILD = """
import sys
from shared import model_store, object_store
object_store.PIECE_BYTES = 2**20
print(model_store.resolve("s3://models/llama/tiny", sys.argv[1]))
"""


def test_killed_halfway_and_resumed(backend: int, relay: Relay, files: Files, tmp_path: Path) -> None:
    upload(backend, {**files, "SHA256SUMS": sums(files)})
    relay.allowed = 6
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], env={**os.environ, **credentials(relay)}, stderr=-3)
    until = time.monotonic() + 60
    while time.monotonic() < until and not (len(relay.ranges) == 6 and journal_lines(tmp_path) >= 6):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert journal_lines(tmp_path) == 6
    relay.status = 503  # what has half arrived is no copy
    with pytest.raises(ModelError):
        model_store.resolve(URL, str(tmp_path))
    relay.status, relay.allowed = 0, 10**9
    folder = model_store.resolve(URL, str(tmp_path))
    assert len(set(relay.ranges)) == len(relay.ranges) == 6 + 2 + 1  # no piece was fetched twice
    assert contents(folder) == {**files, "SHA256SUMS": sums(files)}
    assert not list(tmp_path.glob("models/*/*.partial"))


def journal_lines(cache: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in cache.glob("models/*/*.partial/*.pieces"))


def test_a_torn_piece_is_fetched_again(backend: int, relay: Relay, files: Files, tmp_path: Path) -> None:
    """Power was lost: the journal says a piece is there, and its bytes are not."""
    upload(backend, files)
    folder = model_store.resolve(URL, str(tmp_path))
    partial = folder.with_name(folder.name + ".partial")
    shutil.copytree(folder, partial)
    shutil.rmtree(folder)
    weights = bytearray(files["model.safetensors"])
    (partial / "model.safetensors.pieces").write_text(
        "".join(f"{piece} {zlib.crc32(weights[piece * MIB : (piece + 1) * MIB])}\n" for piece in range(6)) + "9 9\n5"
    )
    weights[MIB : MIB + 4096] = bytes(4096)
    (partial / "model.safetensors").write_bytes(weights)
    relay.ranges.clear()
    assert contents(model_store.resolve(URL, str(tmp_path))) == files
    assert [each for each in relay.ranges if "model" in each] == [f"model.safetensors bytes={MIB}-{2 * MIB - 1}"]


def test_wrong_checksum_is_refused(backend: int, relay: Relay, files: Files, tmp_path: Path) -> None:
    wrong = {**files, "model.safetensors": b"\0" + files["model.safetensors"][1:]}
    upload(backend, {**wrong, "SHA256SUMS": sums(files)})
    for _ in range(2):  # and again: nothing wrong is kept
        with pytest.raises(ModelError, match=r"model\.safetensors is not what SHA256SUMS says; refused"):
            model_store.resolve(URL, str(tmp_path))
    assert not list(tmp_path.glob("models/*/current"))
    upload(backend, {**files, "SHA256SUMS": sums(files)})
    assert contents(model_store.resolve(URL, str(tmp_path)))["model.safetensors"] == files["model.safetensors"]


def test_a_model_that_changes_meanwhile_is_never_mixed(
    backend: int, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(backend, files)
    listed = object_store._list

    def then_changed(*args: object) -> list[object_store.Remote]:
        remotes = listed(*args)  # type: ignore[arg-type]
        upload(backend, {**files, "model.safetensors": files["model.safetensors"][::-1]})
        return remotes

    monkeypatch.setattr(object_store, "_list", then_changed)
    with pytest.raises(ModelError, match="cannot be fetched"):
        model_store.resolve(URL, str(tmp_path))
    monkeypatch.setattr(object_store, "_list", listed)
    assert contents(model_store.resolve(URL, str(tmp_path)))["model.safetensors"] == files["model.safetensors"][::-1]


def test_a_damaged_copy_is_fetched_again(backend: int, files: Files, tmp_path: Path) -> None:
    upload(backend, files)
    folder = model_store.resolve(URL, str(tmp_path))
    (folder / "model.safetensors").write_bytes(b"cut")
    assert contents(model_store.resolve(URL, str(tmp_path))) == files


def test_several_processes_fetch_once(backend: int, relay: Relay, files: Files, tmp_path: Path) -> None:
    upload(backend, files)
    environment = {**os.environ, **credentials(relay)}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    children = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-3, text=True) for _ in range(3)]
    folders = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(folders) == 1 and contents(Path(folders.pop())) == files
    assert len(relay.ranges) == 8


def test_without_weights_only_small_files_come(backend: int, relay: Relay, files: Files, tmp_path: Path) -> None:
    upload(backend, files)
    folder = model_store.resolve(URL, str(tmp_path), weights=False)
    assert sorted(contents(folder)) == ["config.json", "tokenizer.json"]
    assert contents(model_store.resolve(URL, str(tmp_path))) == files


def test_a_read_only_cache_serves(backend: int, files: Files, tmp_path: Path) -> None:
    upload(backend, files)
    folder = model_store.resolve(URL, str(tmp_path))
    before = sorted((file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*"))
    assert model_store.resolve(URL, str(tmp_path)) == folder
    assert sorted((file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*")) == before  # nothing was written


@pytest.mark.parametrize("model", ["ftp://host/model", "s3://models/nothing-here"])
def test_what_is_no_model_is_refused(model: str, backend: int, files: Files, tmp_path: Path) -> None:
    upload(backend, files)
    with pytest.raises(ModelError, match=r"ftp is none of|holds no config\.json"):
        model_store.resolve(model, str(tmp_path))
