"""Renders the chat template of the model in a process of its own, within a time and a size limit."""

import asyncio
import contextlib
import json
import secrets
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any

from gateway.errors import BadRequest

CHILD = Path(__file__).with_name("template_child.py")
START_S = 30.0  # seconds the process may take to start
LENGTH = struct.Struct("<I")


class ChatTemplate:
    """One template. Requests are rendered one at a time; a request that breaks the limits costs only itself."""

    def __init__(self, source: str, special: dict[str, Any], *, timeout_s: float, max_chars: int) -> None:
        self.source = source
        self._setup = {"source": source, "special": special, "max_chars": max_chars}
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[str]] = set()

    async def start(self) -> None:
        """Start the process; ValueError when the template does not compile."""
        async with self._turn:
            await self._ensure()

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        async with self._turn:
            await self._kill()

    async def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, arguments: dict[str, Any] | None
    ) -> str:
        """The prompt text; BadRequest when the template refuses the messages or breaks a limit."""
        if "developer" not in self.source:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        request = {"messages": messages, "add_generation_prompt": add_generation_prompt, "arguments": arguments}
        # A client that leaves must not leave half a frame behind: the exchange itself always ends.
        task = asyncio.create_task(self._render(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def continued(self, messages: list[dict[str, Any]], arguments: dict[str, Any] | None) -> str:
        """The prompt text up to the end of the last message's content, which the answer goes on with."""
        mark = secrets.token_hex(16)  # found again wherever the template puts the content, and whatever it trims
        *others, last = messages
        text = await self.render([*others, {**last, "content": last["content"] + mark}], False, arguments)
        before, found, _ = text.partition(mark)
        if not found:
            field = "continue_final_message"
            raise BadRequest("The chat template leaves out the last message, so nothing can go on with it", field)
        return before

    async def _render(self, request: dict[str, Any]) -> str:
        async with self._turn:
            process = await self._ensure()
            broken = True
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await _exchange(process, request)
                broken = False
            except TimeoutError:
                text = f"The chat template took more than {self._timeout_s:g} s"
                raise BadRequest(text, "messages", "chat_template_timeout") from None
            except (OSError, EOFError):
                raise BadRequest("The chat template ended its process", "messages", "chat_template_error") from None
            finally:
                if broken:
                    await self._kill()
        if "text" not in answer:
            raise BadRequest(answer["error"], "messages", answer["code"])
        return answer["text"]

    async def _ensure(self) -> Process:
        if self._process is None:
            # -I: neither the folder of the script nor the environment decides what it imports
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(CHILD), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
            try:
                async with asyncio.timeout(START_S):
                    answer = await _exchange(self._process, self._setup)
            except BaseException:
                await self._kill()
                raise
            if "error" in answer:
                await self._kill()
                raise ValueError(answer["error"])
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(OSError):
            await process.stdin.wait_closed()
        await process.wait()


async def _exchange(process: Process, request: object) -> dict[str, str]:
    assert process.stdin is not None and process.stdout is not None
    frame = json.dumps(request, ensure_ascii=False).encode()  # escapes would take three times as long where all is escaped
    process.stdin.write(LENGTH.pack(len(frame)) + frame)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    answer: dict[str, str] = json.loads(await process.stdout.readexactly(length))
    return answer
