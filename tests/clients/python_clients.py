"""The libraries that people call OpenAI with, each against a running Quire: answers, streams, usage, and the right exceptions.

Runs in a virtual environment of its own (make test-clients); the server's address is in CLIENTS_URL.
"""

import asyncio
import os
import time
import urllib.request
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import instructor
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL = os.environ["CLIENTS_URL"]
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Tell me the capital of France in one sentence."
PARIS = "The capital of France is Paris."
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
LITELLM: Any = {**ASK, "model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0}


class City(BaseModel):
    name: str


def metric(name: str) -> float:
    with urllib.request.urlopen(URL.removesuffix("/v1") + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}_total ")))


def until_nobody_computes() -> None:
    deadline = time.monotonic() + 90
    while metric("quire_gateway_live_sequences"):
        assert time.monotonic() < deadline, "what a client left is still computed"
        time.sleep(0.1)


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)


def test_openai_chat_stream_and_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == PARIS and whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.total_tokens == 48
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == PARIS
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 48
    with client.chat.completions.stream(**ASK) as stream:
        assert stream.get_final_completion().choices[0].message.content == PARIS


def test_openai_n_stop_seed_and_logprobs(client: openai.OpenAI) -> None:
    drawn = {**ASK, "temperature": 1, "seed": 7, "n": 3, "max_tokens": 12}
    first, second = (client.chat.completions.create(**drawn) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) > 1
    cut = client.chat.completions.create(**ASK, stop=[" is"])
    assert cut.choices[0].message.content == "The capital of France"
    scored = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert scored.choices[0].logprobs is not None
    content = scored.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == PARIS
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_openai_completions_responses_and_models(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0)
    assert "Paris" in text.choices[0].text
    assert client.responses.create(model=MODEL, input=QUESTION, temperature=0).output_text == PARIS
    assert [model.id for model in client.models.list()] == [client.models.retrieve(MODEL).id]


def test_openai_errors_have_their_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(**{**ASK, "temperature": 5})
    assert bad.value.param == "temperature" and bad.value.status_code == 400
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**ASK, "model": "nobody"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, stream=True, n=0)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input="x")


def test_openai_timeouts_and_streams_that_are_left(client: openai.OpenAI) -> None:
    endless: Any = {**ASK, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    before = metric("quire_gateway_generated_tokens")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**endless)
    stream = client.chat.completions.create(**endless, stream=True)
    next(iter(stream))
    stream.close()
    until_nobody_computes()
    assert metric("quire_gateway_generated_tokens") - before < 1500  # both together: neither was computed to its end
    assert client.chat.completions.create(**ASK).choices[0].message.content == PARIS


async def test_openai_async_tasks_may_be_cancelled() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        task = asyncio.create_task(client.chat.completions.create(**ASK, max_tokens=1500, extra_body={"ignore_eos": True}))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.chat.completions.create(**ASK)).choices[0].message.content == PARIS


def test_langchain() -> None:
    options: Any = {"base_url": URL, "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options)
    answer = chat.invoke(QUESTION)
    assert answer.content == PARIS and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None and answer.usage_metadata["total_tokens"] == 48
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == PARIS
    assert [each.content for each in chat.batch([QUESTION] * 3)] == [PARIS] * 3
    assert chat.invoke(QUESTION, stop=[" is"]).content == "The capital of France"
    assert chat.bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert "Paris" in OpenAI(**options, max_tokens=3).invoke("The capital of France is")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ChatOpenAI(**options, top_p=7).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([City]).invoke(QUESTION)


def test_litellm() -> None:
    answer: Any = litellm.completion(**LITELLM)
    assert answer.choices[0].message.content == PARIS and answer.usage.total_tokens == 48
    stream: Any = litellm.completion(**LITELLM, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == PARIS
    many: Any = litellm.completion(**{**LITELLM, "temperature": 1}, n=2, seed=3, stop=["."])
    assert len(many.choices) == 2
    text: Any = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="The capital of France is", max_tokens=3, temperature=0,
        api_base=URL, api_key="none",
    )  # fmt: skip
    assert "Paris" in text.choices[0].text
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**LITELLM, "temperature": 5})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**LITELLM, "model": "openai/nobody"})
    with pytest.raises(litellm.Timeout):
        litellm.completion(**LITELLM, max_tokens=1500, timeout=0.5, extra_body={"ignore_eos": True})


@pytest.mark.parametrize(
    ("mode", "field"),
    [
        (instructor.Mode.TOOLS, "tool_choice"),
        (instructor.Mode.JSON, "response_format"),
        (instructor.Mode.JSON_SCHEMA, "response_format"),
    ],
)
def test_instructor_is_refused_by_name(client: openai.OpenAI, mode: Any, field: str) -> None:
    """Structured output does not exist: no answer that only looks like one."""
    asking: Any = instructor.from_openai(client, mode=mode)
    with pytest.raises(Exception, match=field) as refused:
        asking.chat.completions.create(**ASK, response_model=City, max_retries=1)
    assert "400" in str(refused.value)
