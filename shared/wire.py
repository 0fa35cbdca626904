"""The sockets between roles: a Hub (ROUTER, bound by the scheduler) and a Link (DEALER, one per gateway or worker).

Frames carry one encoded message, or nothing: an empty frame is a heartbeat. Every incarnation of a Link has an identity with
a fresh nonce, so a frame of an earlier incarnation can only come from a peer nobody knows any more. Nothing is dropped
silently: what cannot be sent is reported, by the return value of send and by on_gone or on_lost.

Sockets are polled through their file descriptor on the running asyncio loop; handlers are called from that loop only.
With keys (shared.keys) both ends are authenticated and everything is encrypted by CURVE; without, only loopback is allowed.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from shared.codec import MAX_FRAME_BYTES, BadFrame, Codec, encode
from shared.config import LOOPBACK
from shared.keys import HubKeys, LinkKeys
from shared.messages import Reset

log = logging.getLogger("quire.wire")

SEND_QUEUE_FRAMES = 100_000  # per peer; a peer this far behind is treated as gone
REFUSALS_LOGGED_S = 10.0  # strangers may knock often; a line at most this often
TURN_S = 0.005  # of the loop's time for frames that have arrived, before others have theirs
RETRY_S = 0.2  # pause between attempts to reach a peer that is not there


class HubHandler(Protocol):
    def on_message(self, peer: str, message: Any) -> None:
        """A message arrived. The first one of a peer should be its hello; answer anything else with Reset."""

    def on_gone(self, peer: str, reason: str) -> None:
        """A peer that had sent something is silent, unreachable or too far behind; it is forgotten."""


class LinkHandler(Protocol):
    def hello(self) -> tuple[Any, ...]:
        """First message of the incarnation that is being opened."""

    def on_message(self, message: Any) -> None: ...

    def on_lost(self, reason: str, fatal: bool) -> None:
        """The other side is gone, silent or does not know us. Nothing sent so far will be answered; a new incarnation is
        opened soon, unless fatal."""


class _Socket:
    """A non-blocking ZeroMQ socket on the running loop. Its descriptor is edge-triggered: read until empty, after sends too."""

    def __init__(
        self, kind: int, on_frames: Callable[[list[bytes]], None], context: "zmq.Context[zmq.Socket[bytes]] | None" = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self.zmq: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
        self.zmq.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.zmq.setsockopt(zmq.LINGER, 200)  # ms: a last Drain or Reset still leaves
        self.zmq.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        self.zmq.setsockopt(zmq.RCVHWM, 0)
        self._read_again: asyncio.Handle | None = None
        self._descriptor = self._option(zmq.FD)

    def _option(self, option: int) -> int:
        value = self.zmq.getsockopt(option)
        assert isinstance(value, int)
        return value

    def listen(self) -> None:
        self._loop.add_reader(self._descriptor, self.read)
        self._schedule_read()

    def _schedule_read(self) -> None:
        if self._read_again is None:
            self._read_again = self._loop.call_soon(self.read)

    def read(self) -> None:
        """Hand out what has arrived, for a bounded time."""
        if self._read_again is not None:
            self._read_again.cancel()
            self._read_again = None
        try:
            for frames in self._frames(time.monotonic() + TURN_S):
                self._on_frames(frames)
        finally:  # a handler that fails must not cost us the edge: nobody would tell us again
            if not self.zmq.closed and self._option(zmq.EVENTS) & zmq.POLLIN:
                self._schedule_read()

    def _frames(self, until: float) -> Iterator[list[bytes]]:
        while not self.zmq.closed and time.monotonic() < until:  # (uvloop's own clock stands still within a callback)
            try:
                yield self.zmq.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def send_frames(self, frames: list[bytes]) -> bool:
        if self.zmq.closed:
            return False
        try:
            self.zmq.send_multipart(frames, zmq.NOBLOCK, copy=len(frames[-1]) < 65536)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        self._schedule_read()
        return True

    def close(self) -> None:
        if self.zmq.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._read_again is not None:
            self._read_again.cancel()
        self.zmq.close()


class _Doorkeeper:
    """Answers libzmq (ZAP, RFC 27) whether a peer that proved its key may connect. Serves all sockets of one context."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: HubKeys) -> None:
        self._keys = keys
        self._refused = 0  # since the last log line about it
        self._logged = float("-inf")
        self._socket = _Socket(zmq.REP, self._on_frames, context)
        self._socket.zmq.bind("inproc://zeromq.zap.01")
        self._socket.listen()

    def _on_frames(self, frames: list[bytes]) -> None:
        version, request, _domain, address, _identity, mechanism, *credentials = frames
        admitted = mechanism == b"CURVE" and len(credentials) == 1 and self._keys.admits(z85.encode(credentials[0]))
        if not admitted:
            self._log_refusal(address.decode("ascii", "replace"))
        status = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self._socket.send_frames([version, request, *status, b"", b""])

    def _log_refusal(self, address: str) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._logged >= REFUSALS_LOGGED_S:
            log.warning("refused a peer with an unknown key", extra={"address": address, "refused": self._refused})
            self._logged, self._refused = now, 0

    def close(self) -> None:
        self._socket.close()


class Hub:
    """The scheduler's end of one link kind. Created inside a running loop; run() keeps it alive until cancelled."""

    def __init__(
        self,
        address: str,
        codec: Codec,
        handler: HubHandler,
        *,
        heartbeat_s: float,
        silence_s: float,
        keys: HubKeys | None = None,
    ) -> None:
        """Bind address (tcp://host:port, port 0 or * for any free one). OSError when it cannot be bound."""
        if keys is None:
            require_loopback(address)
        self._codec = codec
        self._handler = handler
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._seen: dict[str, float] = {}  # peer -> loop time of its last frame
        self._loop = asyncio.get_running_loop()
        # The doorkeeper's address is one per context, and the two links admit different keys.
        self._context = zmq.Context() if keys else None
        self._doorkeeper = _Doorkeeper(self._context, keys) if self._context and keys else None
        self._socket = _Socket(zmq.ROUTER, self._on_frames, self._context)
        self._socket.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys:
            self._socket.zmq.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.zmq.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.zmq.setsockopt(zmq.ZAP_DOMAIN, b"quire")
        try:
            self._socket.zmq.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot bind {address}: {error}") from None
        self.address: str = self._socket.zmq.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket.listen()

    @property
    def peers(self) -> list[str]:
        return list(self._seen)

    def send(self, peer: str, message: tuple[Any, ...]) -> bool:
        """Queue a message. False: the peer is unknown, unreachable or too far behind; on_gone follows if it was known."""
        if peer not in self._seen:
            return False
        if self._socket.send_frames([peer.encode(), encode(message)]):
            return True
        self._loop.call_soon(self._forget, peer, "unreachable or too far behind")
        return False

    def forget(self, peer: str) -> None:
        """Stop knowing a peer without on_gone; its next frame makes it a new one."""
        self._seen.pop(peer, None)

    async def run(self) -> None:
        """Send heartbeats and notice silence, until cancelled."""
        woke = self._loop.time()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            now = self._loop.time()
            # Time in which this process itself did not run is nobody's silence.
            stalled_s, woke = now - woke - self._heartbeat_s, now
            for peer, seen in list(self._seen.items()):
                if stalled_s > self._heartbeat_s:
                    self._seen[peer] = seen + stalled_s
                elif now - seen > self._silence_s:
                    self._forget(peer, f"silent for {now - seen:.1f} s")
                    continue
                if not self._socket.send_frames([peer.encode(), b""]):
                    self._forget(peer, "unreachable")

    def close(self) -> None:
        self._socket.close()
        if self._doorkeeper and self._context:
            self._doorkeeper.close()
            threading.Thread(target=self._context.term, daemon=True).start()  # waits for the last frames to leave

    def _forget(self, peer: str, reason: str) -> None:
        if self._seen.pop(peer, None) is not None:
            self._handler.on_gone(peer, reason)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            return
        try:
            peer = frames[0].decode("ascii")
        except UnicodeDecodeError:
            return
        if not frames[1]:
            if peer in self._seen:
                self._seen[peer] = self._loop.time()
            else:  # a heartbeat of somebody who never said hello to this process: make it say so
                self._socket.send_frames([frames[0], encode(Reset("unknown peer", False))])
            return
        self._seen[peer] = self._loop.time()
        try:
            message = self._codec.decode(frames[1])
        except BadFrame as error:
            log.warning("bad frame from a peer", extra={"peer": peer, "reason": str(error)})
            self.send(peer, Reset(f"bad frame: {error}", False))
            return
        self._handler.on_message(peer, message)


class Link:
    """A gateway's or worker's end. Opens a new incarnation whenever the connection breaks, the hub is silent or resets us."""

    def __init__(
        self,
        address: str,
        kind_and_name: str,
        codec: Codec,
        handler: LinkHandler,
        *,
        heartbeat_s: float,
        silence_s: float,
        keys: LinkKeys | None = None,
    ) -> None:
        """kind_and_name: "g/<name>" or "w/<replica>/<rank>"; the nonce is appended."""
        if keys is None:
            require_loopback(address)
        self._keys = keys
        self._address = address
        self._kind_and_name = kind_and_name
        self._codec = codec
        self._handler = handler
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._socket: _Socket | None = None
        self._events: _Socket | None = None  # tells when the connection of _socket breaks
        self._lost = asyncio.Event()  # since the last hello
        self._opened = 0.0  # loop time at which this incarnation began to connect
        self._seen = 0.0  # loop time of the last frame, or of the hello
        self._said_hello = False
        self._fatal = False

    def send(self, message: tuple[Any, ...]) -> bool:
        """Queue a message. False: there is no connection, or the hub is too far behind; on_lost was or will be called."""
        if self._socket is None or not self._said_hello:
            return False
        if self._socket.send_frames([encode(message)]):
            return True
        self._loop.call_soon(self._lose, self._socket, "the scheduler is unreachable or too far behind")
        return False

    async def run(self) -> None:
        """Connect, say hello, keep heartbeats flowing; returns when the hub refuses us for good."""
        try:
            while not self._fatal:
                if self._socket is None:
                    self._open()
                if not self._said_hello:
                    await self._say_hello()
                    continue
                await self._beat()
        finally:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            # First the monitor: an event with nobody to take it would block ZeroMQ's own thread, and with it every socket.
            self._socket.zmq.monitor(None, 0)
            self._socket.close()
        if self._events is not None:
            self._events.close()
        self._socket = self._events = None
        self._said_hello = False

    def _open(self) -> None:
        self._opened = self._loop.time()
        self._socket = socket = _Socket(zmq.DEALER, self._on_frames)
        socket.zmq.setsockopt(zmq.IMMEDIATE, 1)
        socket.zmq.setsockopt(zmq.IDENTITY, f"{self._kind_and_name}/{secrets.token_hex(6)}".encode())
        socket.zmq.setsockopt(zmq.RECONNECT_IVL, 50)  # ms
        socket.zmq.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys:
            socket.zmq.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.zmq.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.zmq.setsockopt(zmq.CURVE_SERVERKEY, self._keys.hub_public)
        # ZeroMQ would reconnect under the same identity, and what was on its way would be lost with nobody the wiser.
        broken = f"inproc://{secrets.token_hex(8)}"
        socket.zmq.monitor(broken, zmq.EVENT_DISCONNECTED)
        self._events = _Socket(zmq.PAIR, lambda _: self._on_disconnect(socket))
        self._events.zmq.connect(broken)
        socket.zmq.connect(self._address)
        socket.listen()
        self._events.listen()

    async def _say_hello(self) -> None:
        assert self._socket is not None
        if self._socket.send_frames([encode(self._handler.hello())]):
            self._lost.clear()
            self._said_hello = True
            self._seen = self._loop.time()
            return
        await asyncio.sleep(RETRY_S)
        if self._loop.time() - self._opened > self._silence_s:
            log.warning("the scheduler cannot be reached, or refuses our key", extra={"address": self._address})
            self.close()  # libzmq never tries again after a refusal, but the key may be added while we run

    async def _beat(self) -> None:
        """Wait for a heartbeat's time, then send one; or until the connection is lost, and a moment more."""
        slept = self._loop.time()
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._lost.wait()
            await asyncio.sleep(RETRY_S)  # a hub that keeps refusing us is not asked in a tight circle
            return
        except TimeoutError:
            now = self._loop.time()
        # Time in which this process did not run is not the hub's silence (but the hub may have given us up).
        stalled_s = now - slept - self._heartbeat_s
        if stalled_s > self._heartbeat_s:
            self._seen += stalled_s
        if self._socket is None or not self._said_hello:
            return
        if now - self._seen > self._silence_s:
            self._lose(self._socket, f"no answer for {now - self._seen:.1f} s")
        else:
            self._socket.send_frames([b""])

    def _lose(self, socket: _Socket, reason: str, *, fatal: bool = False) -> None:
        """This incarnation is over. Nothing happens when socket belongs to an earlier one, or has not said hello."""
        if socket is not self._socket or not self._said_hello:
            return
        self.close()
        self._fatal = fatal
        self._lost.set()
        self._handler.on_lost(reason, fatal)

    def _on_disconnect(self, socket: _Socket) -> None:
        if socket is self._socket:
            socket.read()  # its last words, perhaps a Reset
            self._lose(socket, "the connection broke")

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 1 or self._socket is None:
            return
        self._seen = self._loop.time()
        if not frames[0]:
            return
        try:
            message = self._codec.decode(frames[0])
        except BadFrame as error:
            log.warning("bad frame from the scheduler", extra={"reason": str(error)})
            self._lose(self._socket, f"bad frame: {error}")
            return
        match message:
            case Reset(reason=reason, fatal=fatal):
                self._lose(self._socket, reason, fatal=fatal)
            case _:
                self._handler.on_message(message)


def require_loopback(address: str) -> None:
    """ValueError unless address is only reachable from this machine: without keys nothing else may be bound."""
    if urlsplit(address).hostname not in LOOPBACK:
        raise ValueError(f"{address} is not a loopback address: without keys (curve_dir) the inner sockets use loopback only")
