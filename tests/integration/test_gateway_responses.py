"""/v1/responses as OpenAI's own client uses it, and what it refuses."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from shared import columns
from shared.messages import Reject
from tests.integration.gateway_bench import Bench
from tests.integration.stub_scheduler import Play

EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
async def client(bench: Bench) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{bench.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def says(bench: Bench, text: str) -> None:
    play = Play(bench.ids(text), cached=3, top=[(bench.id("o"), -0.5), (bench.id("x"), -1.5)])
    bench.stub.script = lambda submit, sampling: play


def prompt_of(bench: Bench) -> str:
    submit = bench.stub.submits[-1]
    ids = columns.read_i32(submit.tokens).tolist()[: submit.num_prompt]
    return bench.session.model.tokenizer.decode(ids, False)


async def test_a_whole_answer(bench: Bench, client: AsyncOpenAI) -> None:
    says(bench, "ok now")
    response = await client.responses.create(
        model="toy", input="hi", instructions="Be brief", metadata={"a": "b"}, user="me", temperature=0.5, max_output_tokens=50
    )
    assert (response.status, response.output_text) == ("completed", "ok now")
    assert prompt_of(bench) == "<s>[system]Be brief\n[user]hi\n[assistant]"
    assert (response.instructions, response.metadata, response.user) == ("Be brief", {"a": "b"}, "me")
    assert (response.temperature, response.max_output_tokens, response.store) == (0.5, 50, False)  # type: ignore[attr-defined]
    assert response.usage is not None
    usage, num_prompt = response.usage, bench.stub.submits[-1].num_prompt
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (num_prompt, 3, 7)
    assert usage.total_tokens == num_prompt + 7
    assert response.id.startswith("resp_") and response.output[0].id


async def test_items_and_parts_are_messages(bench: Bench, client: AsyncOpenAI) -> None:
    says(bench, "ok")
    first = await client.responses.create(model="toy", input="hi")
    items: list[Any] = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "B"},
    ]
    await client.responses.create(model="toy", input=items)
    assert prompt_of(bench) == "<s>[system]D\n[user]A\n[assistant]ok\n[user]B\n[assistant]"


async def test_the_events_of_a_stream(bench: Bench, client: AsyncOpenAI) -> None:
    says(bench, "ok now")
    whole = await client.responses.create(model="toy", input="hi", top_logprobs=2)
    stream = await client.responses.create(model="toy", input="hi", top_logprobs=2, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(event.delta for event in deltas) == "ok now"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "ok now" and last.response.usage == whole.usage
    (message,) = last.response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None and [each.token for each in logprobs] == ["o", "k", " ", "n", "o", "w"]
    assert [each.token for event in deltas for each in event.logprobs] == [each.token for each in logprobs]
    assert [(each.token, each.bytes, each.logprob) for each in logprobs[0].top_logprobs] == [
        ("o", [111], -0.5),
        ("x", [120], -1.5),
    ]


async def test_the_clients_helper_collects_a_stream(bench: Bench, client: AsyncOpenAI) -> None:
    says(bench, "ok now")
    async with client.responses.stream(model="toy", input="hi") as stream:
        types = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert types[0] == "response.created" and types[-1] == "response.completed"
    assert (response.status, response.output_text) == ("completed", "ok now")


async def test_an_answer_that_was_cut_off_is_incomplete(bench: Bench, client: AsyncOpenAI) -> None:
    says(bench, "ok now")
    whole = await client.responses.create(model="toy", input="hi", max_output_tokens=2)
    *_, last = [e async for e in await client.responses.create(model="toy", input="hi", max_output_tokens=2, stream=True)]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, response.output_text) == ("incomplete", "ok")
        assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


async def test_a_stream_that_fails_says_so(bench: Bench, client: AsyncOpenAI) -> None:
    bench.stub.plays = [Play(bench.ids("ok now"), delay_s=0.02)]
    stream = await client.responses.create(model="toy", input="hi", stream=True)
    types = []
    async for event in stream:
        types.append(event.type)
        if event.type == "response.output_text.delta":
            bench.session.stop()
    assert types[-1] == "response.failed" and event.type == "response.failed"
    assert event.response.error is not None and "stops" in event.response.error.message
    bench.stub.plays = [Play([], reject=Reject(0, 429, "queue_full", "full", "", 3.0))]
    answer = await bench.post("/v1/responses", {"input": "hi", "stream": True})
    assert (answer.status, answer.error["code"]) == (429, "queue_full")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"background": True}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
    ({"input": "x" * 3000}, "input"),
    ({"input": "x", "max_output_tokens": 3000}, "input"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_is_refused_is_named(bench: Bench, fields: dict[str, Any], param: str) -> None:
    answer = await bench.post("/v1/responses", {"input": "hi", **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert not bench.stub.submits


async def test_the_client_raises_its_own_error(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        await client.responses.create(model="toy", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


async def test_a_long_input_is_cut_where_that_is_asked_for(bench: Bench) -> None:
    says(bench, "ok")
    answer = await bench.post("/v1/responses", {"input": "x" * 3000, "truncation": "auto", "max_output_tokens": 8})
    assert answer.status == 200 and answer.body["truncation"] == "auto"
    assert bench.stub.submits[-1].num_prompt == 2048 - 8
