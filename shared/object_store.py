"""A model folder from an object store (s3://, gs://, az://, ...) into the cache: in parallel, resumed, checked, all or nothing.

BASE/<version> is a complete copy, made by renaming BASE/<version>.partial, and BASE/current names the newest one, which serves
when the store cannot be reached. The version is a hash of what the store lists (names, sizes, entity tags), so a changed model
is another folder and pieces of two versions never mix. A SHA256SUMS file in the store is checked when it is there. Credentials
and endpoints come from the usual variables of each cloud (AWS_ACCESS_KEY_ID, AWS_ENDPOINT, ...), read by the client library.
"""

import fnmatch
import hashlib
import json
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url
from tqdm import tqdm  # type: ignore[import-untyped]

from shared.model_folder import ModelError
from shared.process import locked

if TYPE_CHECKING:
    from obstore import GetOptions

log = logging.getLogger("quire.model")

SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")
PIECE_BYTES = 16 * 2**20  # of one range request
STREAMS = 8  # range requests under way
GIVE_UP_S = 60  # one request is repeated for this long
SUMS = "SHA256SUMS"
_CANNOT = (BaseError, OSError, ValueError)  # what the client raises, one way or the other


@dataclass(frozen=True)
class Remote:
    """One object of the model, as the store lists it."""

    name: str
    size: int
    tag: str  # entity tag: every piece must come from this very version

    @property
    def num_pieces(self) -> int:
        return -(-self.size // PIECE_BYTES)


def is_url(model: str) -> bool:
    return urlsplit(model).scheme in SCHEMES


def fetch(url: str, cache: Path, patterns: Iterable[str]) -> Path:
    """The folder in the cache that holds what is at url; ModelError with one line when it cannot be had."""
    base = cache / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:8]}"
    try:
        store = _open(url)
        remotes = _list(store, [*patterns, SUMS])
    except _CANNOT as error:
        return _offline(url, base, error)
    if not any(remote.name == "config.json" for remote in remotes):
        raise ModelError(f"{url} holds no config.json, so it is no model folder")
    folder = base / _version(remotes)
    if not _is_whole(folder, remotes):
        try:
            with locked(base / "lock"):
                if not _is_whole(folder, remotes):  # another process may have been first
                    _download(url, store, remotes, folder)
        except OSError as error:
            raise ModelError(f"{url} cannot be stored in {base}: {error}") from None
    return folder


def _open(url: str) -> Any:
    # No client_options: they would replace those of the environment (AWS_ALLOW_HTTP, proxies).
    return from_url(url, retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=GIVE_UP_S)})


def _list(store: Any, patterns: list[str]) -> list[Remote]:
    """Objects directly under the URL whose names match."""
    remotes = []
    for batch in obstore.list(store):
        for found in batch:
            name = found["path"]
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and "/" not in name:
                remotes.append(Remote(name, found["size"], found["e_tag"] or str(found["last_modified"])))
    return sorted(remotes, key=lambda remote: remote.name)


def _version(remotes: list[Remote]) -> str:
    listed = json.dumps([(remote.name, remote.size, remote.tag) for remote in remotes])
    return hashlib.sha256(listed.encode()).hexdigest()[:12]


def _offline(url: str, base: Path, error: Exception) -> Path:
    """The newest complete copy, unless the store answered that we may not have it."""
    reason = _line(error)
    try:
        folder = base / (base / "current").read_text().strip()
    except OSError:
        folder = None
    if folder is None or not folder.is_dir() or _is_refusal(error):
        raise ModelError(f"{url} cannot be read: {reason}") from None
    log.warning("the object store cannot be reached, using the copy in the cache", extra={"folder": str(folder), "why": reason})
    return folder


def _is_refusal(error: Exception) -> bool:
    """The store answered that we may not. A refused listing is a generic error, told by its text only."""
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return True
    return any(f"status code: {status}" in str(error) for status in (401, 403))


def _line(error: Exception) -> str:
    """What a person needs of an error; the client's own debug output is left out."""
    return " ".join(str(error).split("Debug source:")[0].split())[:300] or type(error).__name__


def _is_whole(folder: Path, remotes: list[Remote]) -> bool:
    """It appeared by a rename, so it was whole; a file that was cut or removed since shows by its size."""
    try:
        return all((folder / remote.name).stat().st_size == remote.size for remote in remotes)
    except OSError:
        return False


def _download(url: str, store: Any, remotes: list[Remote], folder: Path) -> None:
    """Make folder. What an earlier try left in the partial folder is used where its pieces are intact."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    log.info("fetching a model", extra={"url": url, "bytes": sum(remote.size for remote in remotes), "folder": str(folder)})
    try:
        _get_pieces(store, remotes, partial, url.rstrip("/").rsplit("/", 1)[-1])
    except _CANNOT as error:
        raise ModelError(f"{url} cannot be fetched: {_line(error)}; what has arrived is kept, start again to go on") from None
    _check_sums(url, partial)
    for file in partial.iterdir():
        if file.name.endswith(".pieces"):
            file.unlink()
        else:
            _sync(file)
    if folder.exists():  # damaged: somebody cut one of its files
        shutil.rmtree(folder)
    partial.rename(folder)
    _write_current(folder)
    for old in folder.parent.glob("*.partial"):  # of versions that the store no longer has; we hold the lock
        shutil.rmtree(old)


def _get_pieces(store: Any, remotes: list[Remote], partial: Path, title: str) -> None:
    files = [_File(remote, partial) for remote in remotes]
    total, have = sum(remote.size for remote in remotes), sum(file.bytes_here() for file in files)
    with _progress(total, have, title) as arrived, ThreadPoolExecutor(STREAMS) as pool:
        todo = [pool.submit(file.get, store, piece) for file in files for piece in file.missing()]
        try:
            for done in todo:
                arrived(done.result())
        finally:
            for each in todo:
                each.cancel()
    for file in files:
        file.close()


@contextmanager
def _progress(total: int, have: int, title: str) -> Iterator[Callable[[int], object]]:
    """To be told of bytes that arrive: a bar on a terminal, elsewhere (a container's log) a line for every twentieth."""
    if sys.stderr.isatty():
        with tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=title, mininterval=0.5) as bar:
            yield bar.update
        return

    def arrived(more: int) -> None:
        nonlocal have
        if (have + more) * 20 // total > have * 20 // total:
            log.info("fetching", extra={"model": title, "bytes": f"{have + more}/{total}"})
        have += more

    yield arrived


class _File:
    """One file on its way: its bytes, and a journal with a line (piece number, CRC-32) for every piece that is in place."""

    def __init__(self, remote: Remote, partial: Path) -> None:
        self._remote = remote
        self._file = os.open(partial / remote.name, os.O_RDWR | os.O_CREAT, 0o644)
        self._journal = os.open(partial / f"{remote.name}.pieces", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._here = {piece for piece, crc in self._noted() if zlib.crc32(self._read(piece)) == crc}
        os.ftruncate(self._file, remote.size)

    def _noted(self) -> Iterator[tuple[int, int]]:
        with closing(os.fdopen(os.dup(self._journal), "rb")) as journal:
            for line in journal.read().split(b"\n")[:-1]:  # the last one may be cut
                piece, _, crc = line.partition(b" ")
                if piece.isdigit() and crc.isdigit() and int(piece) < self._remote.num_pieces:
                    yield int(piece), int(crc)

    def _span(self, piece: int) -> tuple[int, int]:
        return piece * PIECE_BYTES, min(self._remote.size, (piece + 1) * PIECE_BYTES)

    def _read(self, piece: int) -> bytes:
        start, end = self._span(piece)
        return os.pread(self._file, end - start, start)

    def missing(self) -> list[int]:
        return [piece for piece in range(self._remote.num_pieces) if piece not in self._here]

    def bytes_here(self) -> int:
        return sum(end - start for start, end in map(self._span, self._here))

    def get(self, store: Any, piece: int) -> int:
        """Fetch one piece and put it in place; returns its bytes."""
        start, end = self._span(piece)
        options: GetOptions = {"range": (start, end)}
        if self._remote.tag.startswith(('"', "W/")):
            options["if_match"] = self._remote.tag
        content = memoryview(obstore.get(store, self._remote.name, options=options).bytes())
        if len(content) != end - start:
            raise OSError(f"{self._remote.name}: got {len(content)} bytes of {end - start} at {start}")
        written = 0
        while written < len(content):
            written += os.pwrite(self._file, content[written:], start + written)
        os.write(self._journal, b"%d %d\n" % (piece, zlib.crc32(content)))
        return end - start

    def close(self) -> None:
        os.close(self._file)
        os.close(self._journal)


def _check_sums(url: str, partial: Path) -> None:
    """Compare with SHA256SUMS where the store has one. A file that differs is removed, so that the next try fetches it anew."""
    sums = partial / SUMS
    if not sums.is_file():
        return
    expected = {}
    for line in sums.read_text("utf-8", "replace").splitlines():
        digest, _, name = line.strip().partition(" ")
        expected[name.strip().lstrip("*").removeprefix("./")] = digest.lower()
    files = [file for file in partial.iterdir() if file.name in expected]
    with ThreadPoolExecutor(min(STREAMS, os.cpu_count() or 1)) as pool:
        wrong = [file for file, digest in zip(files, pool.map(_sha256, files), strict=True) if digest != expected[file.name]]
    for file in wrong:
        file.unlink()
        file.with_name(file.name + ".pieces").unlink()
    if wrong:
        raise ModelError(f"{url}: {', '.join(file.name for file in wrong)} is not what {SUMS} says; refused")


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_current(folder: Path) -> None:
    draft = folder.with_name(f".current.{os.getpid()}")
    draft.write_text(folder.name + "\n")
    draft.replace(folder.with_name("current"))
