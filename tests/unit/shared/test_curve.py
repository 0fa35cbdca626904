"""CURVE on the inner sockets: who holds a known key gets through encrypted, everybody else is never heard."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypedDict

import pytest

from quire import main
from shared import keys, messages, wire
from shared.codec import Codec
from shared.config import BadConfig, from_sources
from shared.messages import Drain, GatewayHello, Status

TO_SCHEDULER = Codec(messages.GATEWAY_TO_SCHEDULER)
TO_GATEWAY = Codec(messages.SCHEDULER_TO_GATEWAY)


class Times(TypedDict):
    heartbeat_s: float
    silence_s: float


TIMES: Times = {"heartbeat_s": 0.05, "silence_s": 0.5}
STATUS = Status("ready", "", 8192, 100_000, 0, 0, 0.0)


class Scheduler:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.hub: wire.Hub | None = None

    def on_message(self, peer: str, message: Any) -> None:
        self.heard.append((peer, message))
        assert self.hub is not None
        self.hub.send(peer, STATUS)

    def on_gone(self, peer: str, reason: str) -> None: ...


class Gateway:
    def __init__(self, name: str = "one") -> None:
        self.name = name
        self.heard: list[Any] = []

    def hello(self) -> tuple[Any, ...]:
        return GatewayHello(messages.PROTOCOL, self.name, "model")

    def on_message(self, message: Any) -> None:
        self.heard.append(message)

    def on_lost(self, reason: str, fatal: bool) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
async def tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    running: list[asyncio.Task[None]] = []
    yield running
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def scheduler(folder: Path, tasks: list[asyncio.Task[None]]) -> AsyncIterator[Scheduler]:
    handler = Scheduler()
    handler.hub = wire.Hub("tcp://127.0.0.1:0", TO_SCHEDULER, handler, **TIMES, keys=keys.hub_keys(str(folder), keys.GATEWAY))
    tasks.append(asyncio.create_task(handler.hub.run()))
    yield handler
    handler.hub.close()


def link(scheduler: Scheduler, gateway: Gateway, pair: keys.LinkKeys | None, tasks: list[asyncio.Task[None]]) -> wire.Link:
    assert scheduler.hub is not None
    made = wire.Link(scheduler.hub.address, f"g/{gateway.name}", TO_GATEWAY, gateway, **TIMES, keys=pair)
    tasks.append(asyncio.create_task(made.run()))
    return made


async def until(condition: Any, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is a list that a handler fills
            await asyncio.sleep(0.01)


async def test_known_key_gets_through(scheduler: Scheduler, folder: Path, tasks: list[asyncio.Task[None]]) -> None:
    gateway = Gateway()
    link(scheduler, gateway, keys.link_keys(str(folder), keys.GATEWAY), tasks)
    await until(lambda: gateway.heard)
    assert gateway.heard == [STATUS]
    assert scheduler.heard[0][1] == gateway.hello()


@pytest.mark.parametrize("who", ["no key", "own key", "worker", "wrong scheduler"])
async def test_stranger_is_never_heard(
    who: str, scheduler: Scheduler, folder: Path, tmp_path: Path, tasks: list[asyncio.Task[None]]
) -> None:
    keys.make(tmp_path / "others")
    own = keys.link_keys(str(tmp_path / "others"), keys.GATEWAY)
    known = keys.link_keys(str(folder), keys.GATEWAY)
    assert own and known
    pair = {
        "no key": None,
        "own key": keys.LinkKeys(own.public, own.secret, known.hub_public),
        "worker": keys.link_keys(str(folder), keys.WORKER),  # known, but not on this link
        "wrong scheduler": keys.LinkKeys(known.public, known.secret, own.hub_public),
    }[who]
    stranger, friend = Gateway("stranger"), Gateway("friend")
    link(scheduler, stranger, pair, tasks)
    await asyncio.sleep(1.0)
    link(scheduler, friend, known, tasks)
    await until(lambda: friend.heard)  # the door is open, but not to everybody
    assert not stranger.heard
    assert {peer.split("/")[1] for peer, _ in scheduler.heard} == {"friend"}


async def test_link_with_key_tells_nothing_to_a_hub_without(folder: Path, tasks: list[asyncio.Task[None]]) -> None:
    handler = Scheduler()
    handler.hub = wire.Hub("tcp://127.0.0.1:0", TO_SCHEDULER, handler, **TIMES)
    tasks.append(asyncio.create_task(handler.hub.run()))
    gateway = Gateway()
    link(handler, gateway, keys.link_keys(str(folder), keys.GATEWAY), tasks)
    await asyncio.sleep(1.0)
    assert not gateway.heard and not handler.heard
    handler.hub.close()


async def test_key_is_rotated_without_a_restart(
    scheduler: Scheduler, folder: Path, tmp_path: Path, tasks: list[asyncio.Task[None]]
) -> None:
    keys.make(tmp_path / "new")
    own, known = keys.link_keys(str(tmp_path / "new"), keys.GATEWAY), keys.link_keys(str(folder), keys.GATEWAY)
    assert own and known
    late = Gateway("late")
    link(scheduler, late, keys.LinkKeys(own.public, own.secret, known.hub_public), tasks)
    await asyncio.sleep(0.7)
    assert not late.heard
    (folder / "gateway-2.public").write_bytes(own.public)
    await until(lambda: late.heard)
    (folder / "gateway.public").unlink()
    old = Gateway("old")
    link(scheduler, old, known, tasks)
    await asyncio.sleep(0.7)
    assert not old.heard


async def test_what_crosses_the_wire_is_encrypted(scheduler: Scheduler, folder: Path, tasks: list[asyncio.Task[None]]) -> None:
    """A relay between the two sees every byte; the text in our messages is not among them."""
    assert scheduler.hub is not None
    port = int(scheduler.hub.address.rsplit(":", 1)[1])
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                seen.extend(chunk)
                writer.write(chunk)
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        tasks.extend((asyncio.create_task(pump(reader, forth)), asyncio.create_task(pump(back, writer))))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    gateway = Gateway("plainly-visible-name")
    made = wire.Link(address, "g/x", TO_GATEWAY, gateway, **TIMES, keys=keys.link_keys(str(folder), keys.GATEWAY))
    tasks.append(asyncio.create_task(made.run()))
    await until(lambda: gateway.heard)
    made.send(Drain("plainly-visible-reason"))
    await until(lambda: len(scheduler.heard) > 1)
    server.close()
    assert len(seen) > 200
    assert b"plainly-visible" not in seen


async def test_frame_beyond_the_limit_is_cut_off_by_the_socket(
    folder: Path, tasks: list[asyncio.Task[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10_000)
    handler = Scheduler()
    handler.hub = wire.Hub("tcp://127.0.0.1:0", TO_SCHEDULER, handler, **TIMES, keys=keys.hub_keys(str(folder), keys.GATEWAY))
    tasks.append(asyncio.create_task(handler.hub.run()))
    gateway = Gateway()
    made = link(handler, gateway, keys.link_keys(str(folder), keys.GATEWAY), tasks)
    await until(lambda: gateway.heard)
    made.send(Drain("x" * 20_000))
    made.send(Drain("after"))
    await asyncio.sleep(0.5)
    assert all(not isinstance(message, Drain) or len(message.reason) < 10_000 for _, message in handler.heard)
    handler.hub.close()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5711", "tcp://*:5711", "tcp://scheduler:5711", "tcp://[::]:5711"])
async def test_without_keys_only_loopback(address: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="loopback"):
        wire.Hub(address, TO_SCHEDULER, Scheduler(), **TIMES)
    with pytest.raises(ValueError, match="loopback"):
        wire.Link(address, "g/x", TO_GATEWAY, Gateway(), **TIMES)
    for name in ("gateway_link", "worker_link"):
        with pytest.raises(BadConfig, match=f"{name} = .*without keys"):
            from_sources({name: address}, {})
    assert from_sources({"gateway_link": address, "curve_dir": str(folder)}, {}).gateway_link == address


async def test_with_keys_any_address(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hub = wire.Hub(f"tcp://0.0.0.0:{port}", TO_SCHEDULER, Scheduler(), **TIMES, keys=keys.hub_keys(str(folder), keys.GATEWAY))
    hub.close()


async def test_refusals_are_logged_without_the_key(
    scheduler: Scheduler, folder: Path, tmp_path: Path, tasks: list[asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    keys.make(tmp_path / "others")
    own, known = keys.link_keys(str(tmp_path / "others"), keys.GATEWAY), keys.link_keys(str(folder), keys.GATEWAY)
    assert own and known
    with caplog.at_level(logging.DEBUG):
        link(scheduler, Gateway(), keys.LinkKeys(own.public, own.secret, known.hub_public), tasks)
        await until(lambda: "unknown key" in caplog.text)
        await asyncio.sleep(0.7)
    assert caplog.text.count("unknown key") == 1  # it keeps knocking, we do not keep writing
    for secret in (own.secret, known.secret, own.public):
        assert secret.decode() not in caplog.text


def test_files(folder: Path, tmp_path: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        f"{role}.{kind}" for role in keys.ROLES for kind in ("public", "secret")
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.glob("*.secret"))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(set(before.values())) == 6
    assert keys.make(folder) == []
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    keys.split(folder, tmp_path / "split")
    names = {role: sorted(file.name for file in (tmp_path / "split" / role).iterdir()) for role in keys.ROLES}
    assert names["gateway"] == ["gateway.secret", "scheduler.public"]
    assert names["worker"] == ["scheduler.public", "worker.secret"]
    assert names["scheduler"] == ["gateway.public", "scheduler.public", "scheduler.secret", "worker.public"]
    assert keys.hub_keys(str(tmp_path / "split" / "scheduler"), keys.WORKER)
    assert keys.link_keys(str(tmp_path / "split" / "worker"), keys.WORKER)


def test_bad_files_are_refused_without_their_content(folder: Path, tmp_path: Path) -> None:
    assert keys.hub_keys("", keys.GATEWAY) is None and keys.link_keys("", keys.GATEWAY) is None
    with pytest.raises(BadConfig, match=r"scheduler\.secret cannot be read"):
        keys.hub_keys(str(tmp_path / "nothing"), keys.GATEWAY)
    (folder / "gateway.secret").write_text("hunter2-is-not-a-key")
    with pytest.raises(BadConfig) as caught:
        keys.link_keys(str(folder), keys.GATEWAY)
    assert "gateway.secret holds no key" in str(caught.value) and "hunter2" not in str(caught.value)
    (folder / "gateway.public").unlink()
    with pytest.raises(BadConfig, match="nobody could connect"):
        keys.hub_keys(str(folder), keys.GATEWAY)
    pair = keys.link_keys(str(folder), keys.WORKER)
    assert pair and pair.secret.decode() not in repr(pair)
    hub = keys.hub_keys(str(folder), keys.WORKER)
    assert hub and hub.secret.decode() not in repr(hub)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main([str(tmp_path / "k"), str(tmp_path / "split")]) == 0
    assert "6 key files made" in capsys.readouterr().out
    assert keys.main([str(tmp_path / "k")]) == 0
    assert "all there" in capsys.readouterr().out
    assert keys.main([]) == 2
    (tmp_path / "k" / "scheduler.public").unlink()
    (tmp_path / "k" / "scheduler.secret").write_text("broken")
    assert keys.main([str(tmp_path / "k")]) == 2
    assert "keys: error: the key file" in capsys.readouterr().err


def test_the_quire_command_makes_them_too(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["keys", str(tmp_path / "k"), str(tmp_path / "split")])
    assert ended.value.code == 0
    assert keys.link_keys(str(tmp_path / "split" / "gateway"), keys.GATEWAY)
