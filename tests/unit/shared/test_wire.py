"""Hub and Link over real sockets: who is known, who is gone, and that nothing is lost without somebody being told."""

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared import codec, wire
from shared.codec import Codec, encode
from shared.messages import Abort, Drain, GatewayHello, GatewayWelcome, Reset
from shared.wire import Hub, Link, require_loopback

ROOT = Path(__file__).resolve().parents[3]
CODEC = Codec(tuple(codec.TAGS))
BEAT_S, SILENCE_S = 0.05, 0.4
HELLO = GatewayHello(1, "one", "model")
WELCOME = GatewayWelcome(1, 1, 16, b"k" * 16)


class Scheduler:
    """Answers a hello with a welcome and anything else of a stranger with Reset."""

    def __init__(self) -> None:
        self.hub: Hub | None = None
        self.hellos: list[str] = []
        self.messages: list[tuple[str, Any]] = []
        self.gone: list[tuple[str, str]] = []
        self.fatal = False
        self.broken = False

    def on_message(self, peer: str, message: Any) -> None:
        assert self.hub is not None
        if self.broken:
            raise RuntimeError("a fault in the handler")
        if isinstance(message, GatewayHello):
            self.hellos.append(peer)
            self.hub.send(peer, Reset("another model", True) if self.fatal else WELCOME)
        elif peer not in self.hellos:
            self.hub.send(peer, Reset("say hello first", False))
        else:
            self.messages.append((peer, message))

    def on_gone(self, peer: str, reason: str) -> None:
        self.gone.append((peer, reason))


class Gateway:
    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.lost: list[tuple[str, bool]] = []

    def hello(self) -> tuple[Any, ...]:
        return HELLO

    def on_message(self, message: Any) -> None:
        self.messages.append(message)

    def on_lost(self, reason: str, fatal: bool) -> None:
        self.lost.append((reason, fatal))


@asynccontextmanager
async def running(*ends: Hub | Link) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(end.run()) for end in ends]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            end.close()


def open_hub(
    scheduler: Scheduler, address: str = "tcp://127.0.0.1:*", beat_s: float = BEAT_S, silence_s: float = SILENCE_S
) -> Hub:
    scheduler.hub = Hub(address, CODEC, scheduler, heartbeat_s=beat_s, silence_s=silence_s)
    return scheduler.hub


def open_link(gateway: Gateway, address: str, name: str = "g/one", silence_s: float = SILENCE_S) -> Link:
    return Link(address, name, CODEC, gateway, heartbeat_s=BEAT_S, silence_s=silence_s)


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what is awaited happens in handlers that know no event
            await asyncio.sleep(0.005)


async def test_hello_welcome_and_messages_both_ways() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    link = open_link(gateway, hub.address)
    assert not link.send(Drain("before hello"))
    async with running(hub, link):
        await until(lambda: gateway.messages)
        assert gateway.messages == [WELCOME]
        assert hub.peers == scheduler.hellos
        assert scheduler.hellos[0].startswith("g/one/")
        assert link.send(Abort(b"", "because"))
        assert hub.send(hub.peers[0], Drain("soon"))
        await until(lambda: len(gateway.messages) == 2 and scheduler.messages)
        assert scheduler.messages == [(hub.peers[0], Abort(b"", "because"))]
        await asyncio.sleep(2 * SILENCE_S)  # heartbeats alone keep both sides known
        assert (scheduler.gone, gateway.lost) == ([], [])


async def test_the_order_and_number_of_many_messages() -> None:
    """Bursts in both directions at once: an edge-triggered descriptor must not leave anything unread."""
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    link = open_link(gateway, hub.address)
    async with running(hub, link):
        await until(lambda: gateway.messages)
        for round_number in range(40):
            for number in range(50):
                assert link.send(Drain(f"{round_number} {number}"))
                assert hub.send(hub.peers[0], Drain(f"{round_number} {number}"))
            await asyncio.sleep(0)
        await until(lambda: len(scheduler.messages) == 2000 and len(gateway.messages) == 2001)
        expected = [Drain(f"{round_number} {number}") for round_number in range(40) for number in range(50)]
        assert [message for _, message in scheduler.messages] == expected
        assert gateway.messages[1:] == expected


async def test_a_large_message_arrives_whole() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    link = open_link(gateway, hub.address)
    async with running(hub, link):
        await until(lambda: gateway.messages)
        large = Abort(os.urandom(8 * 2**20), "large")
        assert link.send(large)
        await until(lambda: scheduler.messages)
        assert scheduler.messages[0][1] == large


async def test_a_link_waits_for_a_hub_that_is_not_there_yet() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    probe = open_hub(scheduler)
    address = probe.address
    probe.close()
    link = open_link(gateway, address)
    async with running(link):
        await asyncio.sleep(0.5)
        assert not link.send(Drain("nobody"))
        assert gateway.lost == []
        hub = open_hub(scheduler, address)
        async with running(hub):
            await until(lambda: gateway.messages)


async def test_a_hub_that_restarts_gets_a_hello_under_a_new_nonce_and_nothing_old() -> None:
    first, second, gateway = Scheduler(), Scheduler(), Gateway()
    hub = open_hub(first)
    address = hub.address
    link = open_link(gateway, address)
    async with running(link):
        async with running(hub):
            await until(lambda: gateway.messages)
        await until(lambda: gateway.lost)
        assert gateway.lost == [("the connection broke", False)]
        for _ in range(10):
            assert not link.send(Drain("nobody hears this"))
        async with running(open_hub(second, address)):
            await until(lambda: len(gateway.messages) == 2)
            assert link.send(Drain("after"))
            await until(lambda: second.messages)
            assert second.messages == [(second.hellos[0], Drain("after"))]
            await asyncio.sleep(3 * wire.RETRY_S)
            assert len(second.hellos) == 1  # one hello is enough
            assert second.hellos[0] != first.hellos[0]
            assert len(gateway.lost) == 1


async def test_a_connection_that_breaks_under_two_living_ends_is_noticed() -> None:
    """ZeroMQ would reconnect by itself and lose what was on its way: the link must take a new nonce instead."""
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    async with relay(hub.address) as (address, cut):
        link = open_link(gateway, address, silence_s=60)
        async with running(hub, link):
            await until(lambda: gateway.messages)
            await cut()
            await until(lambda: len(scheduler.hellos) == 2)
            assert gateway.lost == [("the connection broke", False)]
            await until(lambda: scheduler.gone)
            assert [peer for peer, _ in scheduler.gone] == scheduler.hellos[:1]
            assert hub.peers == scheduler.hellos[1:]


async def test_a_silent_hub_is_noticed_and_left() -> None:
    """A partition: the connection stands, but nothing comes through it."""
    gateway = Gateway()
    address, close = await deaf_server()
    link = open_link(gateway, address)
    try:
        async with running(link):
            await until(lambda: gateway.lost)
            assert gateway.lost[0][0].startswith("no answer for 0.")
    finally:
        await close()


async def test_a_silent_peer_is_gone() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    link = open_link(gateway, hub.address)
    async with running(hub):
        link._open()  # a link that never runs: it says hello once and then sends no heartbeat
        await until(lambda: link._socket and link._socket.send_frames([encode(HELLO)]))
        await until(lambda: scheduler.gone)
        assert scheduler.gone[0][0] == scheduler.hellos[0]
        assert "silent for" in scheduler.gone[0][1]
        assert hub.peers == []
        link.close()


async def test_a_peer_that_was_never_introduced_is_told_to_say_hello() -> None:
    scheduler = Scheduler()
    hub = open_hub(scheduler)
    with raw_dealer(hub.address, "g/old/1234") as dealer:
        async with running(hub):
            dealer.send(b"")  # a heartbeat of an incarnation that this process never met
            assert CODEC.decode(await received(dealer)) == Reset("unknown peer", False)
            assert hub.peers == []
            dealer.send(encode(Drain("hello?")))
            assert CODEC.decode(await received(dealer)) == Reset("say hello first", False)


async def test_a_link_that_is_reset_says_hello_again_under_a_new_nonce() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    async with running(hub, open_link(gateway, hub.address)):
        await until(lambda: gateway.messages)
        hub.send(hub.peers[0], Reset("whoever you are", False))
        hub.forget(hub.peers[0])
        await until(lambda: len(gateway.messages) == 2)
        assert gateway.lost == [("whoever you are", False)]
        await asyncio.sleep(3 * wire.RETRY_S)
        assert len(scheduler.hellos) == len(set(scheduler.hellos)) == 2


async def test_a_fatal_reset_ends_the_link() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    scheduler.fatal = True
    hub = open_hub(scheduler)
    link = open_link(gateway, hub.address)
    async with running(hub, link) as (_, link_task):
        await until(link_task.done)
        assert gateway.lost == [("another model", True)]
        assert not link.send(Drain("x"))


async def test_bad_frames_are_answered_with_reset_and_reach_no_handler() -> None:
    scheduler = Scheduler()
    hub = open_hub(scheduler)
    with raw_dealer(hub.address, "g/evil/1") as dealer:
        async with running(hub):
            for bad in (b"\xc1", b"\x90", b"\x92\x01\x02", encode(HELLO)[:-1], os.urandom(50)):
                dealer.send(bad)
                answer = CODEC.decode(await received(dealer))
                assert isinstance(answer, Reset)
                assert answer.reason.startswith("bad frame")
            dealer.send_multipart([b"two", b"frames"])
            dealer.send(encode(HELLO))
            assert CODEC.decode(await received(dealer)) == WELCOME
            assert scheduler.messages == []


async def test_a_peer_with_a_strange_identity_is_ignored() -> None:
    scheduler = Scheduler()
    hub = open_hub(scheduler)
    with raw_dealer(hub.address, b"\xff\xfe\x01") as dealer:
        async with running(hub):
            dealer.send(encode(HELLO))
            await asyncio.sleep(0.2)
            assert (hub.peers, scheduler.hellos) == ([], [])


async def test_a_bad_frame_from_the_hub_opens_a_new_incarnation() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    async with running(hub, open_link(gateway, hub.address)):
        await until(lambda: gateway.messages)
        hub._socket.send_frames([hub.peers[0].encode(), b"\xc1"])
        await until(lambda: len(scheduler.hellos) == 2)
        assert gateway.lost[0][0].startswith("bad frame")


async def test_others_have_their_turn_between_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TURN_S", 0.0005)
    turns = 0
    seen: list[int] = []  # how often others had had their turn when a message came

    class Slow(Gateway):
        def on_message(self, message: Any) -> None:
            time.sleep(0.002)
            seen.append(turns)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    scheduler = Scheduler()
    hub = open_hub(scheduler)
    async with running(hub, open_link(Slow(), hub.address)):
        await until(lambda: seen)
        task = asyncio.create_task(other())
        for _ in range(40):
            hub.send(hub.peers[0], Drain("x"))
        await until(lambda: len(seen) == 41)
        task.cancel()
    assert all(later > earlier for earlier, later in itertools.pairwise(seen)), seen


async def test_send_to_a_gone_or_unknown_peer_is_reported() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler, beat_s=60, silence_s=120)  # only a send can notice
    link = open_link(gateway, hub.address)
    async with running(hub):
        assert not hub.send("g/nobody/1", Drain("x"))
        async with running(link):
            await until(lambda: gateway.messages)
        peer = hub.peers[0]
        await until(lambda: not hub.send(peer, Drain("x")))
        await until(lambda: scheduler.gone)
        assert scheduler.gone == [(peer, "unreachable or too far behind")]
        assert not hub.send(peer, Drain("x"))
        await asyncio.sleep(0.05)
        assert len(scheduler.gone) == 1


PEER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from tests.unit.shared.test_wire import Gateway, open_link
class Loud(Gateway):
    def on_message(self, message):
        print("got", type(message).__name__, flush=True)
    def on_lost(self, reason, fatal):
        print("lost", flush=True)
async def main():
    await open_link(Loud(), sys.argv[1]).run()
asyncio.run(main())
"""


@asynccontextmanager
async def peer_process(address: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """A link in a process of its own, and the lines it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, address, str(ROOT), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    lines: list[str] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            lines.append(line.decode().strip())

    reader = asyncio.create_task(read())
    try:
        yield process, lines
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reader


async def test_a_stopped_peer_is_gone_and_comes_back_as_a_new_one() -> None:
    scheduler = Scheduler()
    hub = open_hub(scheduler)
    async with running(hub), peer_process(hub.address) as (process, lines):
        await until(lambda: lines, 20)
        process.send_signal(signal.SIGSTOP)
        await until(lambda: scheduler.gone)
        assert scheduler.gone[0][0] == scheduler.hellos[0]
        process.send_signal(signal.SIGCONT)
        await until(lambda: len(scheduler.hellos) == 2)
        await until(lambda: lines == ["got GatewayWelcome", "lost", "got GatewayWelcome"])
        assert hub.peers == scheduler.hellos[1:]


async def test_a_killed_peer_is_gone_at_the_next_heartbeat() -> None:
    scheduler = Scheduler()
    hub = open_hub(scheduler, silence_s=60)
    async with running(hub), peer_process(hub.address) as (process, lines):
        await until(lambda: lines, 20)
        process.kill()
        await until(lambda: scheduler.gone)
        assert scheduler.gone == [(scheduler.hellos[0], "unreachable")]


async def test_a_peer_too_far_behind_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEND_QUEUE_FRAMES", 100)
    scheduler = Scheduler()
    hub = open_hub(scheduler, silence_s=60)
    async with running(hub), peer_process(hub.address) as (process, lines):
        await until(lambda: lines, 20)
        process.send_signal(signal.SIGSTOP)
        peer, large = hub.peers[0], Drain("x" * 60_000)
        sent = 0
        while hub.send(peer, large):
            sent += 1
            assert sent < 10_000
            if not sent % 100:
                await asyncio.sleep(0)
        assert sent >= 90
        await until(lambda: scheduler.gone)
        assert scheduler.gone == [(peer, "unreachable or too far behind")]


async def test_a_hub_that_was_stopped_does_not_give_up_its_peers() -> None:
    """Time in which the hub's own process did not run is nobody's silence."""
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler)
    link = open_link(gateway, hub.address)
    async with running(hub, link):
        await until(lambda: gateway.messages)
        stop_this_loop(3 * SILENCE_S)
        await asyncio.sleep(2 * BEAT_S)
        assert (scheduler.gone, gateway.lost) == ([], [])
        assert hub.peers == scheduler.hellos
        assert len(scheduler.hellos) == 1


def stop_this_loop(seconds: float) -> None:
    """Block the event loop, as a stopped process would."""
    import time

    time.sleep(seconds)


async def test_a_busy_peer_does_not_hide_another() -> None:
    """One peer floods the hub; another one's hello and heartbeats still get through."""
    scheduler, busy, quiet = Scheduler(), Gateway(), Gateway()
    hub = open_hub(scheduler)
    flood = open_link(busy, hub.address, "g/busy")
    calm = open_link(quiet, hub.address, "g/calm")

    async def send_much() -> None:
        while True:
            for _ in range(200):
                flood.send(Drain("x" * 100))
            await asyncio.sleep(0)

    async with running(hub, flood):
        await until(lambda: busy.messages)
        flooding = asyncio.create_task(send_much())
        async with running(calm):
            await until(lambda: quiet.messages)
            await asyncio.sleep(2 * SILENCE_S)
            assert (scheduler.gone, quiet.lost, busy.lost) == ([], [], [])
        flooding.cancel()


async def test_a_handler_that_fails_costs_its_own_message_only() -> None:
    scheduler, gateway = Scheduler(), Gateway()
    hub = open_hub(scheduler, beat_s=60, silence_s=120)  # no heartbeat may come to the rescue
    link = Link(hub.address, "g/one", CODEC, gateway, heartbeat_s=60, silence_s=120)
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with running(hub, link):
        await until(lambda: gateway.messages)
        scheduler.broken = True
        for number in range(3):
            link.send(Drain(str(number)))
        await until(lambda: faults)
        scheduler.broken = False
        link.send(Drain("last"))
        await until(lambda: scheduler.messages)
        assert scheduler.messages[-1][1] == Drain("last")
        assert len(faults) + len(scheduler.messages) == 4
        assert all(str(fault["exception"]) == "a fault in the handler" for fault in faults)


async def test_ends_closed_in_any_order_leave_the_others_working() -> None:
    """The disconnect monitor must never block ZeroMQ's own thread: every socket of the process would hang with it."""
    for number in range(40):
        scheduler, gateway = Scheduler(), Gateway()
        hub = open_hub(scheduler)
        link = open_link(gateway, hub.address)
        tasks = [asyncio.create_task(end.run()) for end in (hub, link)]
        await until(lambda gateway=gateway: gateway.messages)  # type: ignore[misc]
        for task in tasks:
            task.cancel()
        first, second = (hub, link) if number % 2 else (link, hub)
        first.close()
        await asyncio.sleep(0.0005 * (number % 4))
        second.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_address_in_use_or_not_on_loopback_is_refused() -> None:
    hub = open_hub(Scheduler())
    with pytest.raises(OSError, match=r"cannot bind tcp://127\.0\.0\.1:"):
        open_hub(Scheduler(), hub.address)
    hub.close()
    for address in ("tcp://0.0.0.0:5711", "tcp://*:5711", "tcp://10.0.0.1:5711", "ipc:///tmp/x"):
        with pytest.raises(ValueError, match="loopback"):
            open_hub(Scheduler(), address)
    for address in ("tcp://127.0.0.1:0", "tcp://localhost:1", "tcp://[::1]:1"):
        require_loopback(address)


# --- the other side of a link, played by hand ---------------------------------------------------------------------------


class raw_dealer:
    """A DEALER with an identity of our choice."""

    def __init__(self, address: str, identity: str | bytes) -> None:
        self._address = address
        self._identity = identity.encode() if isinstance(identity, str) else identity

    def __enter__(self) -> "zmq.Socket[bytes]":
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._address)
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close()


async def received(socket: "zmq.Socket[bytes]") -> bytes:
    """The next frame that is no heartbeat."""
    frames: list[bytes] = []

    def arrived() -> bool:
        with suppress(zmq.Again):
            frames.append(socket.recv(zmq.NOBLOCK))
        return bool(frames and frames[-1])

    await until(arrived)
    return frames[-1]


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """A TCP relay to target, whose connections can be cut while both ends live."""
    port = int(target.rsplit(":", 1)[1])
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, far_writer))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async def cut() -> None:
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        server.close()
        await cut()
        await server.wait_closed()


async def deaf_server() -> tuple[str, Callable[[], Any]]:
    """A ROUTER that accepts connections and never says a word."""
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind("tcp://127.0.0.1:*")

    async def close() -> None:
        router.close()

    return router.getsockopt_string(zmq.LAST_ENDPOINT), close
