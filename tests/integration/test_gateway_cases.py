"""Public bug reports that no other test of the gateway holds, on a scripted stub, each with its right value."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from shared.messages import Reject
from tests.integration.gateway_bench import Bench
from tests.integration.stub_scheduler import Play
from tests.integration.test_eight_comparisons import Cell, cell

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def say(bench: Bench, text: str, **how: Any) -> None:
    ids = bench.ids(text)
    bench.stub.script = lambda submit, sampling: Play(ids, **how)


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ["\\u0000"]}', '{"a": ' + "[" * 40 + "]" * 40 + "}"]
)
async def test_b29_text_inside_the_arguments_of_a_tool_call_is_checked(bench: Bench, arguments: str) -> None:
    """They are JSON in a JSON string: the body's own text is good, what its escapes stand for is not."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await bench.post(path, {"messages": messages})
        assert answer.status == 400 and answer.error["param"].startswith("messages[1].tool_calls[0].function.arguments.")


async def test_b04_all_text_is_visible_and_stops_where_it_says(bench: Bench) -> None:
    """No part of an answer is hidden: a stop string applies to all of it, and content is text, never null."""
    say(bench, "<think>step 1\n\nstep 2</think>done")
    whole = await bench.chat(stop=["\n\n"], max_tokens=50)
    assert whole.choice()["message"]["content"] == "<think>step 1"
    assert (whole.choice()["finish_reason"], whole.choice()["stop_reason"]) == ("stop", "\n\n")
    assert (await bench.chat(stop=["\n\n"], max_tokens=50, stream=True)).text() == "<think>step 1"
    assert (await bench.chat(stop=["<"], max_tokens=50)).choice()["message"]["content"] == ""
    assert (await bench.chat(max_tokens=50)).text() == "<think>step 1\n\nstep 2</think>done"
    assert (await bench.chat(include_reasoning=False)).error["param"] == "include_reasoning"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "auto", "none"])
async def test_b16_no_tool_calls_are_claimed(bench: Bench, choice: str, stream: bool) -> None:
    refused = await bench.chat(tools=TOOLS, tool_choice=choice, stream=stream)
    assert refused.status == 400 and refused.error["param"] in ("tools", "tool_choice")
    say(bench, '{"name": "look", "arguments": {}}')
    plain = await bench.chat(tool_choice="auto", max_tokens=60, stream=stream)
    assert plain.choice()["finish_reason"] == "stop" and plain.text().startswith('{"name"')
    assert "tool_calls" not in str(plain.body or plain.events)


async def drawn(at: Cell, beside: int = 0) -> Any:
    body: dict[str, Any] = {"max_tokens": 40, "temperature": 1, "return_token_ids": True, "ignore_eos": True}
    others = [at.ask({**body, "prompt": f"other {number} " * 8}) for number in range(beside)]
    mine = at.ask({**body, "prompt": "It rained. " * 8, "seed": 1, "add_special_tokens": False})
    return (await asyncio.gather(*others, mine))[-1]["choices"]


async def test_b23_a_seed_decides_whatever_runs_beside_it(toy_folder: Path) -> None:
    """Alone, beside seven without a seed, in 2 and 5 chunks, preempted: the same tokens. (Migrated: tests/chaos.)"""
    async with cell(toy_folder) as plain:
        alone = await drawn(plain)
        assert await drawn(plain, 7) == alone
    for chunk_tokens in (48, 20):  # of 88
        async with cell(toy_folder, max_num_batched_tokens=chunk_tokens, max_num_seqs=16) as chunked:
            assert await drawn(chunked) == alone
            assert await drawn(chunked, 7) == alone
    async with cell(toy_folder, num_pages=20) as small:
        assert await drawn(small, 7) == alone
        assert small.service.cell.counters.preemptions > 0


@pytest.mark.parametrize("kind", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_b31_structured_output_is_refused_by_name(bench: Bench, kind: Any, stream: bool) -> None:
    asked = {"logit_bias": {str(bench.id("\n")): 100}, "max_tokens": 500, "stream": stream}
    for answer in (await bench.chat(response_format=kind, **asked), await bench.complete(response_format=kind, **asked)):
        assert (answer.status, answer.error["param"]) == (400, "response_format")
    assert bench.stub.submits == []
    assert (await bench.chat(response_format={"type": "text"}, max_tokens=3)).status == 200


async def test_b32_tools_are_refused_before_a_stream_begins(bench: Bench) -> None:
    for fields in ({"stream": True}, {"parallel_tool_calls": False}, {"stream": True, "parallel_tool_calls": False}):
        answer = await bench.chat(tools=TOOLS, **fields)
        assert (answer.status, answer.error["param"]) == (400, "tools")
    assert bench.stub.submits == []


async def test_s19_a_deadline_in_the_queue_is_an_error(bench: Bench) -> None:
    bench.stub.script = lambda submit, sampling: Play([5], hold=True)
    answer = await bench.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout": "0.2"})
    assert answer.status == 504 and answer.error["message"]
    await bench.until_idle()


async def test_s20_a_full_queue_is_429_with_a_time(bench: Bench) -> None:
    bench.stub.script = lambda submit, sampling: Play(
        [5], reject=Reject(0, 429, "queue_full", "4097 wait, limit 4096", "", 3.4)
    )
    for stream in (False, True):
        answer = await bench.complete(stream=stream)
        assert (answer.status, answer.error["code"], answer.headers["Retry-After"]) == (429, "queue_full", "3")


async def test_s28_a_response_cut_by_its_cap_is_incomplete(bench: Bench) -> None:
    say(bench, "abcdef")
    answer = await bench.post("/v1/responses", {"input": "x", "max_output_tokens": 3})
    assert (answer.body["status"], answer.body["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert answer.body["usage"]["output_tokens"] == 3


async def test_s29_embeddings_are_refused_whatever_their_format(bench: Bench) -> None:
    for form in ("base64", "float"):
        answer = await bench.post("/v1/embeddings", {"model": "toy", "input": "x", "encoding_format": form})
        assert (answer.status, answer.error["param"]) == (400, "model")


async def test_s37_prompt_embeddings_are_refused(bench: Bench) -> None:
    for value in ("AAAA", ["AAAA"], {"shape": [-1]}):
        assert (await bench.complete(prompt_embeds=value)).error["param"] == "prompt_embeds"


async def test_s40_health_is_answered_beside_many_streams(bench: Bench) -> None:
    """That it comes within 50 ms is measured in benchmarks; here: while all of them are live."""
    bench.stub.script = lambda submit, sampling: Play([5] * 400, delay_s=0.002)
    streams = [asyncio.create_task(bench.complete(max_tokens=400, stream=True)) for _ in range(50)]
    until = time.monotonic() + 5
    while bench.session.service.num_live < 50 and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with bench.client.get("/health") as response:
        assert response.status == 200
    assert bench.session.service.num_live == 50
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
