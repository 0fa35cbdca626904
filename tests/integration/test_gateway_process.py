"""The gateway as its own process with the embedded model's tokenizer: the OpenAI SDK, memory, a clean start and a clean end."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest

from gateway.tokenizer import Tokenizer
from shared.config import FATAL_EXIT
from tests.integration.stub_scheduler import Play, StubScheduler

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "The capital of France is Paris. 😀"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@asynccontextmanager
async def gateway(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *flags, cwd=ROOT, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def stub(folder: Path, delay_s: float = 0.0) -> AsyncIterator[tuple[StubScheduler, str]]:
    answer = Tokenizer(folder).encode(ANSWER, False)
    made = StubScheduler(answer)
    made.script = lambda submit, sampling: Play(answer, delay_s=delay_s)
    address = made.start()
    try:
        yield made, address
    finally:
        await made.die()


async def until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        for _ in range(1200):
            try:
                async with client.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError("never ready")


@pytest.mark.model
async def test_the_openai_sdk_and_a_clean_end(smollm2_folder: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        stub(smollm2_folder, delay_s=0.05) as (scheduler, address),
        gateway(
            "--model", str(smollm2_folder), f"--port={port}", f"--gateway-link={address}", "--served-model-name=smol"
        ) as process,
    ):
        await until_ready(url)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            await check_sdk(client)
            assert resident_bytes(process.pid) < 120 * 2**20
            # A stream that runs when the process is told to stop ends well; nothing new is taken.
            scheduler.plays = [Play(Tokenizer(smollm2_folder).encode(ANSWER * 3, False), delay_s=0.05)]
            stream = await client.completions.create(model="smol", prompt="x", stream=True, max_tokens=200)
            texts = [(await anext(stream)).choices[0].text]
            reader, writer = await idle_connection(port)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
            await check_draining(url)
            texts += [chunk.choices[0].text async for chunk in stream]
            assert "".join(texts) == ANSWER * 3
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def idle_connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One that has had an answer and is kept, as clients' pools keep it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.readuntil(b"}")
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"connection: close" not in answer.lower()
    return reader, writer


async def check_draining(url: str) -> None:
    """Whoever comes while streams end is told so, and when to try again; no connection is refused."""
    async with aiohttp.ClientSession() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
            for _ in range(1000):
                async with client.post(url + path, json={"input": "x"} if path == "/v1/responses" else body) as response:
                    if response.status == 200:  # the signal has not arrived yet
                        continue
                    error = (await response.json())["error"]
                    break
            assert (response.status, error["code"], response.headers["Retry-After"]) == (503, "draining", "5")
            assert response.headers["Connection"] == "close"
        async with client.get(f"{url}/health") as response:
            assert response.status == 200


async def check_sdk(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smol"]
    assert (await client.models.retrieve("smol")).id == "smol"
    question = "Tell me the capital of France in one sentence."
    answer = await client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": question}], temperature=0, logprobs=True, top_logprobs=1, user="me"
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == 40
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == ANSWER
    stream = await client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": question}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == answer.usage
    response = await client.responses.create(model="smol", input=question, temperature=0)
    assert response.output_text == ANSWER and response.usage is not None and response.usage.input_tokens == 40
    completion = await client.completions.create(model="smol", prompt="x", max_tokens=3, logprobs=2, echo=True)
    assert completion.choices[0].text == "xThe capital of"
    assert completion.choices[0].logprobs is not None and completion.choices[0].logprobs.text_offset == [0, 1, 4, 12]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "x"}], temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"


@pytest.mark.model
async def test_a_second_signal_ends_running_streams(smollm2_folder: Path) -> None:
    port = free_port()
    async with (
        stub(smollm2_folder) as (scheduler, address),
        gateway("--model", str(smollm2_folder), f"--port={port}", f"--gateway-link={address}") as process,
    ):
        url = f"http://127.0.0.1:{port}"
        await until_ready(url)
        scheduler.plays = [Play([5], hold=True)]
        async with aiohttp.ClientSession() as client:
            request = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "x"}))
            while not scheduler.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            await check_draining(url)  # two signals of one kind that wait are one
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
            assert (await request).status == 503


@pytest.mark.parametrize("flags", [["--model", "/nowhere"], ["--port", "notaport"], ["--gateway-link", "tcp://10.0.0.1:5"]])
async def test_bad_starts_are_one_clear_line(flags: list[str]) -> None:
    async with gateway("--port=0", *flags) as process:
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == FATAL_EXIT
        assert b"Traceback" not in errors
        assert flags[1].encode() in errors


@pytest.mark.model
async def test_a_port_in_use_is_told(smollm2_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with gateway("--model", str(smollm2_folder), f"--port={port}") as process:
            _, errors = await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == FATAL_EXIT
            assert str(port).encode() in errors and b"Traceback" not in errors
