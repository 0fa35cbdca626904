"""The whole path on a real model, asked through the OpenAI SDK: right answers alone and in a crowd, nothing left behind."""

import asyncio
import json
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.serving import QUESTION, Process, Served, ended, until

MARGIN = 1e-2  # of log-probability: two tokens closer than this are a tie that rounding may decide either way


@pytest.fixture(scope="module")
def served(smollm2_folder: Path) -> Iterator[Served]:
    server = Served("--dtype=float32")
    with ended(server):
        yield server


@pytest.fixture(autouse=True)
def nothing_left_behind(served: Served) -> Iterator[None]:
    """After every test: an ordinary answer, no page held, clean books."""
    yield
    with OpenAI(base_url=served.url, api_key="none") as client:
        answer = client.chat.completions.create(model=served.model, messages=messages(QUESTION), temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    until(lambda: served.metric("quire_pages", state="held") == 0, 2.0)
    assert served.metric("quire_audit_violations_total") == 0
    assert served.metric("quire_internal_errors_total") == 0
    assert served.metric("quire_placement_false_credit_tokens_total") == 0


def messages(question: str) -> Any:
    return [{"role": "user", "content": question}]


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=100) as made:
        yield made


def test_the_sdk_gets_the_capital_of_france(served: Served) -> None:
    with OpenAI(base_url=served.url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == [served.model] == ["SmolLM2-135M-Instruct"]
        answer = client.chat.completions.create(model=served.model, messages=messages(QUESTION), temperature=0)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (40, 8)


def test_the_answer_goes_on_with_words_put_in_its_mouth(served: Served) -> None:
    with OpenAI(base_url=served.url, api_key="none") as client:
        said: Any = [*messages(QUESTION), {"role": "assistant", "content": "The capital of France is"}]
        extra = {"continue_final_message": True}
        answer = client.chat.completions.create(model=served.model, messages=said, temperature=0, extra_body=extra)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" Paris.", "stop")
        assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (45, 3)


def test_the_sdk_gets_the_same_as_a_stream(served: Served) -> None:
    with OpenAI(base_url=served.url, api_key="none") as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = client.chat.completions.create(model=served.model, messages=messages(QUESTION), temperature=0, **options)
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
            "The capital of France is Paris."
        )
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage and chunks[-1].usage.total_tokens == 48
        assert len(chunks) > 6  # it came token by token


def test_one_id_follows_a_request_through_the_logs_of_all_roles(served: Served) -> None:
    with OpenAI(base_url=served.url, api_key="none") as client:
        raw = client.chat.completions.with_raw_response.create(model=served.model, messages=messages(QUESTION), temperature=0)
    name = raw.headers["X-Request-Id"]
    lines = (
        rf"quire\.gateway info: request id={name} route=/v1/chat/completions status=200",
        rf"quire\.scheduler info: ended id={name} .*reason=stop .*output=8 .*decode_ms=",
        rf"quire\.worker info: opened step=\d+ ids=\['{name}'\]",
    )
    for line in lines:
        served.wait_for(line, 5.0)
    assert sum(name in line for line in served.lines) == len(lines), "a line per role, none per token"


async def alone(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> tuple[list[int], int]:
    """Greedy ids of a prompt that runs by itself, and how many of them are beyond doubt."""
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice: Any = answer.choices[0]
    for number, top in enumerate(choice.logprobs.top_logprobs):
        first, second = sorted(top.values(), reverse=True)[:2]
        if first - second < MARGIN:
            return choice.token_ids, number
    return choice.token_ids, num_tokens


async def streamed(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> tuple[str, list[int]]:
    text, ids = "", list[int]()
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    async for chunk in stream:
        choice: Any = chunk.choices[0]
        text += choice.text
        ids += getattr(choice, "token_ids", None) or []
    return text, ids


async def test_64_streams_at_once_say_what_each_says_alone(served: Served, client: AsyncOpenAI) -> None:
    words = ("river", "mountain", "clock", "garden", "engine", "letter", "winter", "music")
    prompts = [f"Write about the {word}. " * (1 + 5 * number) for number, word in enumerate(words)]
    longest = 16
    expected = [await alone(client, served.model, prompt, longest) for prompt in prompts]
    assert sum(sure for _, sure in expected) > longest * len(prompts) / 2  # most tokens are no ties
    work = [(number, 2 * (1 + length)) for length in range(8) for number in range(len(prompts))]
    answers = await asyncio.gather(*(streamed(client, served.model, prompts[number], length) for number, length in work))
    for (number, length), (text, ids) in zip(work, answers, strict=True):
        known, sure = expected[number]
        assert len(ids) == length
        assert ids[:sure] == known[: min(length, sure)]
        assert text == detokenized(served, ids)


def detokenized(served: Served, ids: list[int]) -> str:
    request = urllib.request.Request(
        f"{served.root_url}/detokenize", json.dumps({"tokens": ids}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = json.loads(answer.read())["prompt"]
        return text


async def test_300_abandoned_streams_leave_no_page_held(served: Served, client: AsyncOpenAI) -> None:
    async def abandoned(number: int) -> None:
        stream = await client.completions.create(
            model=served.model,
            prompt=f"{number}: once upon a time",
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        if number % 3:
            async for _ in stream:
                break
        await stream.close()

    before = served.metric("quire_aborts_total")
    for batch in range(3):
        await asyncio.gather(*(abandoned(100 * batch + number) for number in range(100)))
    started = time.monotonic()
    until(lambda: served.metric("quire_pages", state="held") == 0, 1.0)
    assert time.monotonic() - started < 1.0
    assert served.metric("quire_running_sequences") == 0
    assert served.metric("quire_queued_sequences") == 0
    assert served.metric("quire_aborts_total") - before > 200  # they were cut short, not waited for


async def test_requests_cancelled_before_their_first_token_are_gone(served: Served, client: AsyncOpenAI) -> None:
    tasks = [asyncio.create_task(alone(client, served.model, f"{number} " * 300, 500)) for number in range(30)]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    until(lambda: served.metric("quire_running_sequences") + served.metric("quire_queued_sequences") == 0, 2.0)


def test_the_printed_curl_line_works(served: Served) -> None:
    start = next(number for number, line in enumerate(served.lines) if line.startswith("  curl "))
    command = "\n".join(served.lines[start : start + 2])
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in json.loads(ran.stdout)["choices"][0]["message"]["content"]


def test_quire_chat_talks_and_remembers(served: Served) -> None:
    chat = Process("quire.main", "chat", f"--base-url={served.root_url}", "--temperature=0", "--max-tokens=40")
    with ended(chat):
        chat.say(f"{QUESTION}\nIs it a large city? Answer yes or no.\n/reset\n/what\n/quit\n")
        assert chat.wait(60) == 0
        assert f"{served.model} at {served.root_url}" in chat.text
        assert "The capital of France is Paris." in chat.text
        assert "(forgotten)" in chat.text
        assert "unknown command" in chat.text


def test_quire_chat_without_a_server_says_so() -> None:
    chat = Process("quire.main", "chat", "--base-url=http://127.0.0.1:9")
    with ended(chat):
        assert chat.wait() == 1
        assert len(chat.lines) == 1
        assert chat.lines[0].startswith("quire: error: no server at http://127.0.0.1:9 (")


def test_a_ready_server_is_small(served: Served) -> None:
    """Proportional memory of all its processes; float32 weights are twice the 257 MiB that the default has."""
    total = 0
    for pid in (served.pid, *served.children().values()):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    assert total < 1.75e9
