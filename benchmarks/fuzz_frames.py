"""Mutated frames against every decoder and every socket: python benchmarks/fuzz_frames.py [FRAMES], 1,000,000 each by default.

Nothing may be raised but BadFrame, what is accepted must be a message of that link, memory must not grow, a scheduler that
gets it all must go on serving, and with CURVE nothing of a stranger may be acted upon.
"""

import argparse
import asyncio
import gc
import logging
import random
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import zmq

from scheduler.service import Service
from shared import keys, messages
from shared.codec import BadFrame, Codec, encode
from shared.columns import i32
from shared.config import Config
from shared.messages import PROTOCOL, GatewayHello, Reset, StepDone, Submit, WorkerHello
from shared.sampling import Sampling
from shared.wire import Hub

LINKS = {
    "gateway to scheduler": messages.GATEWAY_TO_SCHEDULER,
    "scheduler to gateway": messages.SCHEDULER_TO_GATEWAY,
    "worker to scheduler": messages.WORKER_TO_SCHEDULER,
    "scheduler to worker": messages.SCHEDULER_TO_WORKER,
}
GROWTH_BYTES = 24 * 2**20  # allocator noise; a leak of 25 bytes a frame is more
# Heads of MessagePack values that promise more than follows, or are of kinds that no message has.
HEADS = [
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x00",
]
HEADS += [
    b"\xc0",
    b"\xc1",
    b"\xd4\x00\x00",
    b"\xcb" + struct.pack(">d", float("nan")),
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def seeds(kinds: tuple[type, ...]) -> list[bytes]:
    """One valid frame of every kind."""
    fixed: dict[Any, Any] = {int: 7, float: 2.5, str: "text", bool: True, bytes: b"raw"}
    frames = []
    for kind in kinds:
        values = []
        for hint in get_type_hints(kind, include_extras=True).values():
            values.append(b"\x01" * 2 * get_args(hint)[1] if get_origin(hint) is Annotated else fixed[hint])
        frames.append(encode(kind(*values)))
    return [*frames, *(encode(message) for message in live_messages() if type(message) in kinds)]


def live_messages() -> list[tuple[Any, ...]]:
    """Messages that a scheduler acts upon: mutations of them get deeper than those of made-up ones."""
    sampling = Sampling(num_prompt=5, score_width=-1).pack()
    return [
        GatewayHello(PROTOCOL, "fuzz", "m"),
        Submit(1, i32(range(5)), 5, 4, 0, b"", sampling, b"", bytes(16), b"", 0, "tenant", 0.0, 0.0, -1, "s", 0, 0, b"t"),
        WorkerHello(PROTOCOL, "r", 0, 1, 0, "m", 16, 65, 9, 64, 128, b""),
        StepDone(1, i32([7]), b"", 0, b"", b"", b"", 0, b"", b"", 1000),
    ]


def mutate(rng: random.Random, pool: list[bytes]) -> bytes:
    frame = bytearray(rng.choice(pool))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(8):
            case 0 if frame:
                frame[at % len(frame)] ^= 1 << rng.randrange(8)
            case 1 if frame:
                frame[at % len(frame)] = rng.randrange(256)
            case 2:
                frame[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                del frame[at : at + rng.randrange(1, 9)]
            case 4:
                del frame[at:]
            case 5:
                frame[at:] = rng.choice(pool)[at:]
            case 6:
                frame[at : at + 1] = rng.choice(HEADS)
            case 7:
                frame = bytearray(rng.randbytes(rng.randrange(64)))
    return bytes(frame)


def fuzz_decoder(name: str, frames: int, seed: int) -> int:
    """Messages accepted; AssertionError or the decoder's own exception otherwise."""
    kinds = LINKS[name]
    codec, pool, rng = Codec(kinds), seeds(kinds), random.Random(seed)
    accepted, base = 0, 0
    for count in range(frames):
        frame = mutate(rng, pool)
        try:
            message = codec.decode(frame)
        except BadFrame:
            pass
        else:
            assert type(message) in kinds, f"{name} let {message!r} in"
            accepted += 1
        if count == frames // 10:
            gc.collect()
            base = resident_bytes()
    gc.collect()
    grown = resident_bytes() - base
    assert grown < GROWTH_BYTES, f"{name}: memory grew by {grown} bytes"
    return accepted


class Flood:
    """Raw sockets that send mutated frames to a hub as fast as it reads, under one identity after another."""

    def __init__(self, hub: Hub, kinds: tuple[type, ...], identity: str, seed: int, pair: keys.LinkKeys | None = None) -> None:
        self._hub, self._identity, self._pair = hub, identity, pair
        self._pool, self._rng = seeds(kinds), random.Random(seed)
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._open()

    def _open(self) -> "zmq.Socket[bytes]":
        self._number += 1
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 1000)
        made.setsockopt(zmq.IDENTITY, f"{self._identity}/{self._number}".encode())
        if self._pair:
            made.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
            made.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
            made.setsockopt(zmq.CURVE_SERVERKEY, self._pair.hub_public)
        made.connect(self._hub.address)
        return made

    async def send(self, frames: int) -> int:
        """Frames that the socket took; gives up on a socket that takes none for 2 s."""
        sent, stuck = 0, time.monotonic()
        while sent < frames and time.monotonic() - stuck < 2:
            try:
                self._socket.send(mutate(self._rng, self._pool), zmq.NOBLOCK)
                sent, stuck = sent + 1, time.monotonic()
            except zmq.Again:
                await asyncio.sleep(0.001)
            while self._socket.poll(0):
                self._socket.recv_multipart(zmq.NOBLOCK)
            if sent % 200 == 0:
                await self._read()
            if sent % 10_000 == 0 and self._rng.random() < 0.5:
                self._socket.close()
                self._socket = self._open()
        return sent

    async def _read(self) -> None:
        """Until the hub has read what has arrived: what waits there would look like a leak."""
        await asyncio.sleep(0)
        while self._hub._socket.zmq.poll(0):
            self._hub._socket.read()  # asking took the edge that would have told it
            await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def still_serves(service: Service) -> bool:
    """A newcomer that says hello properly gets its welcome."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, b"g/friend/1")
    made.connect(service.gateways.address)
    made.send(encode(GatewayHello(PROTOCOL, "friend", "m")))
    codec = Codec(messages.SCHEDULER_TO_GATEWAY)
    welcomed, until = False, time.monotonic() + 60
    while not welcomed and time.monotonic() < until:
        await asyncio.sleep(0.01)
        while made.poll(0):
            frame = made.recv()
            welcomed = welcomed or (bool(frame) and not isinstance(codec.decode(frame), Reset))
    made.close(0)
    context.term()
    return welcomed


async def fuzz_sockets(frames: int, seed: int) -> dict[str, int]:
    """A real scheduler service gets the frames of both links at once, and lives."""
    config = Config(gateway_link="tcp://127.0.0.1:0", worker_link="tcp://127.0.0.1:0")
    service = Service(config, bytes(32))
    running = asyncio.create_task(service.run(asyncio.Event()))
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    floods = [
        Flood(service.gateways, messages.GATEWAY_TO_SCHEDULER, "g/fuzz", seed),
        Flood(service.workers, messages.WORKER_TO_SCHEDULER, "w/r/0", seed + 1),
    ]
    sent = sum(await asyncio.gather(*(flood.send(frames // 10) for flood in floods)))
    gc.collect()
    base = resident_bytes()
    sent += sum(await asyncio.gather(*(flood.send(frames - frames // 10) for flood in floods)))
    for flood in floods:
        flood.close()
    assert sent == 2 * (frames // 10 + frames - frames // 10), f"the sockets took {sent} frames only"
    assert await still_serves(service), "the scheduler does not serve any more"
    gc.collect()
    grown = resident_bytes() - base
    counters = service.cell.counters
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not raised, f"the loop caught {raised[0]}"
    assert grown < GROWTH_BYTES, f"sockets: memory grew by {grown} bytes"
    assert counters.audit_violations == 0, f"{counters.audit_violations} audit violations"
    return {"sent": sent, "internal_errors": counters.internal_errors, "grown": grown}


class _Handler:
    heard = 0

    def on_message(self, peer: str, message: Any) -> None:
        self.heard += 1

    def on_gone(self, peer: str, reason: str) -> None: ...


async def fuzz_strangers(frames: int, seed: int) -> int:
    """A hub with keys gets frames without a key, with an unknown one, and noise on the bare port. Messages acted upon."""
    with tempfile.TemporaryDirectory() as folder:
        keys.make(Path(folder) / "ours")
        keys.make(Path(folder) / "theirs")
        own = keys.link_keys(f"{folder}/theirs", keys.GATEWAY)
        known = keys.link_keys(f"{folder}/ours", keys.GATEWAY)
        assert own and known
        handler = _Handler()
        codec, pair = Codec(messages.GATEWAY_TO_SCHEDULER), keys.hub_keys(f"{folder}/ours", keys.GATEWAY)
        hub = Hub("tcp://127.0.0.1:0", codec, handler, heartbeat_s=0.5, silence_s=5.0, keys=pair)
        running = asyncio.create_task(hub.run())
        stranger = keys.LinkKeys(own.public, own.secret, known.hub_public)
        for each in (None, stranger):
            flood = Flood(hub, messages.GATEWAY_TO_SCHEDULER, "g/stranger", seed, each)
            await flood.send(frames)
            flood.close()
        await asyncio.to_thread(bare_noise, int(hub.address.rsplit(":", 1)[1]), frames, seed)
        await asyncio.sleep(0.5)
        running.cancel()
        hub.close()
        return handler.heard


def bare_noise(port: int, frames: int, seed: int) -> None:
    """Bytes on the TCP port: noise, and greetings that stop being ones."""
    rng = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
    for _ in range(max(1, frames // 1000)):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            try:
                raw.sendall(greeting if rng.random() < 0.7 else b"")
                raw.sendall(b"".join(mutate(rng, [greeting]) for _ in range(1000)))
            except OSError:
                pass  # cut off, as it should be


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name in LINKS:
        started = time.monotonic()
        accepted = fuzz_decoder(name, parsed.frames, parsed.seed)
        print(f"decoder {name}: {parsed.frames} frames, {accepted} accepted, {time.monotonic() - started:.0f} s", flush=True)
    started = time.monotonic()
    print(f"sockets: {asyncio.run(fuzz_sockets(parsed.frames, parsed.seed))}, {time.monotonic() - started:.0f} s", flush=True)
    heard = asyncio.run(fuzz_strangers(parsed.frames, parsed.seed))
    print(f"strangers: {heard} messages acted upon")
    return 1 if heard else 0


if __name__ == "__main__":
    sys.exit(main())
