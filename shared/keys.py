"""CURVE keys of the inner sockets: a folder of key files, made by `quire keys DIR` or `python -m shared.keys DIR`.

<role>.secret is for that role alone, <role>.public for those it talks to. The scheduler admits every gateway*.public on the
gateways' link and every worker*.public on the workers' link and reads them anew for every connection, so a key is rotated by
adding one file and removing another. No key is ever logged.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from shared.config import BadConfig

SCHEDULER, GATEWAY, WORKER = ROLES = ("scheduler", "gateway", "worker")
KEY_CHARACTERS = 40  # Z85 text of 32 bytes
_Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@dataclass(frozen=True)
class HubKeys:
    """What the scheduler needs on one link. peers: the role that connects there."""

    secret: bytes = field(repr=False)
    folder: Path
    peers: str

    def admits(self, public: bytes) -> bool:
        """Whether a peer that proved to hold this public key's secret may connect. Unreadable files admit nobody."""
        for file in self.folder.glob(f"{self.peers}*.public"):
            try:
                if _read(file) == public:
                    return True
            except BadConfig:
                continue
        return False


@dataclass(frozen=True)
class LinkKeys:
    """What a gateway or worker needs: its own pair, and the scheduler's public key, which it insists on."""

    public: bytes
    secret: bytes = field(repr=False)
    hub_public: bytes


def hub_keys(curve_dir: str, peers: str) -> HubKeys | None:
    """The scheduler's keys for the link of these peers; None without a folder. BadConfig names the file at fault."""
    if not curve_dir:
        return None
    folder = Path(curve_dir).expanduser()
    keys = HubKeys(_read(folder / f"{SCHEDULER}.secret"), folder, peers)
    if not any(folder.glob(f"{peers}*.public")):
        raise BadConfig(f"curve_dir = {curve_dir!r}: holds no {peers}*.public, so nobody could connect")
    return keys


def link_keys(curve_dir: str, role: str) -> LinkKeys | None:
    """A gateway's or worker's keys; None without a folder. BadConfig names the file at fault."""
    if not curve_dir:
        return None
    folder = Path(curve_dir).expanduser()
    secret = _read(folder / f"{role}.secret")
    return LinkKeys(zmq.curve_public(secret), secret, _read(folder / f"{SCHEDULER}.public"))


def _read(file: Path) -> bytes:
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise BadConfig(f"the key file {file} cannot be read: {error.strerror}") from None
    if len(key) != KEY_CHARACTERS or not _Z85.issuperset(key):
        raise BadConfig(f"the key file {file} holds no key of {KEY_CHARACTERS} Z85 characters")
    return key


def make(folder: Path) -> list[Path]:
    """A pair for every role that has none; existing keys stay. Returns the files made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    for role in ROLES:
        secret_file, public_file = folder / f"{role}.secret", folder / f"{role}.public"
        if not secret_file.exists():
            _, secret = zmq.curve_keypair()
            _write(secret_file, secret, 0o600)
            public_file.unlink(missing_ok=True)
            made.append(secret_file)
        if not public_file.exists():
            _write(public_file, zmq.curve_public(_read(secret_file)), 0o644)
            made.append(public_file)
    return made


def split(folder: Path, out: Path) -> None:
    """One folder per role under out with only what that role may see: what each container or pod gets."""
    for role in ROLES:
        own = out / role
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = [f"{role}.secret", *(f"{each}.public" for each in (ROLES if role == SCHEDULER else (SCHEDULER,)))]
        for name in wanted:
            _write(own / name, _read(folder / name), 0o600 if name.endswith(".secret") else 0o644)


def _write(file: Path, key: bytes, mode: int) -> None:
    """Appears complete or not at all, and is never readable by others in between."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as handle:
        handle.write(key + b"\n")
    partial.chmod(mode)
    partial.rename(file)


def main(argv: list[str]) -> int:
    """DIR [OUT]: make the keys in DIR and, when OUT is given, split them into one folder per role."""
    if not 1 <= len(argv) <= 2 or argv[0].startswith("-"):
        print("usage: keys DIR [FOLDER-PER-ROLE]", file=sys.stderr)
        return 2
    folder = Path(argv[0]).expanduser()
    try:
        made = make(folder)
        if len(argv) == 2:
            split(folder, Path(argv[1]).expanduser())
    except (OSError, BadConfig) as error:
        print(f"keys: error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {len(made)} key files made" if made else f"{folder}: the keys are all there")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
