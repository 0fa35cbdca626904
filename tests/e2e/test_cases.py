"""Public bug reports of other servers (B.., S..) asked of the real model over HTTP, each with its right value.

What the model says is forced where that matters: by a bias of 100, or by a single allowed id. `tests/unit/test_cases_table.py`
keeps the list, and the tests of the same cases on a scripted stub.
"""

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from gateway.api_keys import hashed
from gateway.app import OPEN
from gateway.handlers import ROUTES
from tests.e2e.serving import QUESTION, Served, ended, until
from tests.integration.gateway_bench import Answer, parse_events

KEY = {"Authorization": "Bearer key-of-cases"}
VOCABULARY = 49152
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def served(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[tenants.cases]\nkeys = ["{hashed("key-of-cases")}"]\n')
    server = Served("--dtype=float32", "--max-num-batched-tokens=256", f"--api-key-file={keys}")
    with ended(server):
        yield server


class Api:
    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(
            path, data=io.BytesIO(sent), headers={"Content-Type": "application/json", **(headers or {})}
        ) as response:
            text = await response.text()
            assert response.status < 500 or headers, text
            if response.content_type == "text/event-stream":
                return Answer(response.status, response.headers, events=parse_events(text))
            return Answer(response.status, response.headers, json.loads(text, parse_constant=pytest.fail))

    async def complete(self, prompt: Any = "One, two,", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})

    async def chat(self, content: Any = QUESTION, **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
        return await self.post("/v1/chat/completions", body)

    async def refused(self, param: str, **fields: Any) -> str:
        """The message of the 400 that names this field, asked as a completion, or as a chat where that has the field."""
        ask = self.chat if {"tools", "messages", "chat_template", "top_logprobs"} & set(fields) else self.complete
        answer = await ask(**fields)
        named = str(answer.error["param"]).startswith(param)  # prompt[0], logit_bias.49152
        assert answer.status == 400 and named, (fields, answer.body)
        return str(answer.error["message"])

    async def ids(self, text: str) -> list[int]:
        answer = await self.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        found: list[int] = answer.body["tokens"]
        return found


@pytest.fixture
async def api(served: Served) -> AsyncIterator[Api]:
    """After every case: an ordinary answer, no page held, clean books."""
    async with aiohttp.ClientSession(served.root_url, headers=KEY) as client:
        made = Api(client)
        yield made
        canary = await made.chat(max_tokens=20)
        assert canary.text() == "The capital of France is Paris."
    until(lambda: served.metric("quire_pages", state="held") == 0, 2.0)
    assert served.metric("quire_audit_violations_total") == served.metric("quire_internal_errors_total") == 0


async def test_b04_a_stop_string_leaves_text_and_never_null(api: Api) -> None:
    """No part of an answer is hidden, so stop strings apply to all of it."""
    (break_id,) = await api.ids("\n\n")
    answer = await api.chat(stop=["\n\n"], logit_bias={str(break_id): 100})
    assert answer.choice()["message"]["content"] == ""
    assert (answer.choice()["finish_reason"], answer.choice()["stop_reason"]) == ("stop", "\n\n")
    assert answer.usage["completion_tokens"] == 1


async def test_b10_log_probabilities_are_json(api: Api) -> None:
    allowed = await api.ids(" a") + await api.ids(" b")
    answers = [
        await api.complete(top_k=1, logprobs=5, max_tokens=1),
        await api.chat(logprobs=True, top_logprobs=20, logit_bias={"5": -100}, max_tokens=1),
        await api.chat(logprobs=True, top_logprobs=20, allowed_token_ids=allowed, max_tokens=1),
    ]
    assert [answer.status for answer in answers] == [200, 200, 200]
    (value,) = answers[0].choice()["logprobs"]["token_logprobs"]
    assert -9999 <= value <= 0
    for answer in answers[1:]:
        (entry,) = answer.choice()["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == 20
        assert all(-9999 <= each["logprob"] <= 0 for each in [entry, *entry["top_logprobs"]])


async def test_b11_bytes_of_partial_characters_are_exact(api: Api) -> None:
    allowed = sorted({*await api.ids("“😀”"), *await api.ids("é👩‍👧")})
    fields = {"logprobs": True, "top_logprobs": 5, "allowed_token_ids": allowed, "temperature": 1, "max_tokens": 40}
    answer = await api.chat(**fields, seed=3)
    content = answer.choice()["logprobs"]["content"]
    assert len(content) == 40
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode(errors="replace") == answer.text() and not raw.isascii()
    assert all(each["bytes"] for entry in content for each in [entry, *entry["top_logprobs"]])
    streamed = await api.chat(**fields, seed=3, stream=True)
    assert streamed.text() == answer.text()


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 5_000_000}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 10**9}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": VOCABULARY + 1}),
        ("prompt", {"prompt": [999_999_999]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt_logprobs", {"prompt_logprobs": VOCABULARY + 1}),
        ("stop", {"stop": ["s"] * 100_000}),
        ("stop", {"stop": "s" * 1_000_000}),
        ("stop_token_ids", {"stop_token_ids": list(range(100)) * 1000}),
        ("max_tokens", {"max_tokens": 2**63}),
    ],
)
async def test_b13_absurd_counts_are_refused(api: Api, served: Served, param: str, fields: dict[str, Any]) -> None:
    before = resident_mib(served)
    await api.refused(param, **fields)
    assert resident_mib(served) - before < 64


async def test_b13_deep_and_large_bodies(api: Api, served: Served) -> None:
    before = resident_mib(served)
    assert (await api.post("/v1/completions", b'{"prompt":' + b"[" * 10_000)).status == 400
    url = URL(served.root_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {KEY['Authorization']}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 209715200\r\n\r\n".encode() + b'{"prompt":"')
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert b" 413 " in status
    assert resident_mib(served) - before < 64


def resident_mib(served: Served) -> int:
    status = Path(f"/proc/{served.children()['gateway']}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "look"}}])
async def test_b16_no_tool_calls_are_claimed(api: Api, choice: Any) -> None:
    answer = await api.chat(tools=TOOLS, tool_choice=choice)
    assert answer.status == 400 and answer.error["param"] in ("tools", "tool_choice")
    plain = await api.chat(tool_choice="auto", max_tokens=20)
    assert plain.choice()["finish_reason"] == "stop" and "tool_calls" not in plain.choice()["message"]


async def test_b17_min_tokens_are_exact(api: Api) -> None:
    (end_id,) = await api.ids("<|im_end|>")
    for prompt in ("x", "x y " * 50):
        answer = await api.complete(
            prompt, logit_bias={str(end_id): 100}, min_tokens=4, max_tokens=16, return_token_ids=True, skip_special_tokens=False
        )
        assert answer.usage["completion_tokens"] == 5
        assert len(answer.choice()["token_ids"]) == 4 and end_id not in answer.choice()["token_ids"]
        assert answer.choice()["finish_reason"] == "stop"
    (a_id,) = await api.ids("a")
    answer = await api.complete(allowed_token_ids=[a_id], stop=["a"], min_tokens=4, max_tokens=16)
    assert (answer.text(), answer.choice()["finish_reason"], answer.usage["completion_tokens"]) == ("aaaa", "stop", 5)
    await api.refused("allowed_token_ids", allowed_token_ids=[a_id], stop_token_ids=[a_id], min_tokens=4)  # nothing is left
    assert "5" in await api.refused("min_tokens", min_tokens=5, max_tokens=4)


async def test_b19_bias_outside_the_vocabulary(api: Api) -> None:
    for bias in ({str(VOCABULARY): 5}, {"-1": 5}, {"abc": 5}, {"5": 1e9}, {str(each): 1 for each in range(5000)}):
        await api.refused("logit_bias", logit_bias=bias)


async def test_s70_bias_reaches_every_id(api: Api) -> None:
    for each in (0, VOCABULARY - 1):
        answer = await api.complete(logit_bias={str(each): 100}, max_tokens=1, ignore_eos=True, return_token_ids=True)
        assert answer.choice()["token_ids"] == [each]


async def test_b20_everything_forbidden_is_refused_and_hurts_nobody(api: Api) -> None:
    (a_id,) = await api.ids(" a")
    alone = await api.complete(max_tokens=12, return_token_ids=True)
    beside = asyncio.create_task(api.complete(max_tokens=12, return_token_ids=True))
    message = (await api.complete(allowed_token_ids=[a_id], bad_words=["a"])).error["message"]
    assert "allowed_token_ids" in message or "bad_words" in message
    hated = await api.complete(allowed_token_ids=[a_id], logit_bias={str(a_id): -100}, max_tokens=3, return_token_ids=True)
    assert hated.choice()["token_ids"] == [a_id] * 3
    assert (await beside).choice() == alone.choice()


async def test_b22_temperatures(api: Api) -> None:
    greedy = await api.complete(max_tokens=8, temperature=0)
    for fields in ({"temperature": 1e-4}, {"temperature": 1e-8}, {"temperature": 1e-38}, {"temperature": 1, "top_p": 1e-9}):
        assert (await api.complete(max_tokens=8, **fields)).text() == greedy.text(), fields
    for name, raws in {"temperature": ("-1", "2.5", "1e30", "NaN", "Infinity"), "top_p": ("1.0001", "-1", "NaN")}.items():
        for raw in raws:
            answer = await api.post("/v1/completions", f'{{"prompt":"x","max_tokens":1,"{name}":{raw}}}'.encode())
            assert answer.status == 400, (name, raw)
            assert answer.error["param"] == name or raw in ("NaN", "Infinity")


async def test_b23_a_seed_decides_whatever_runs_beside_it(api: Api) -> None:
    fields: dict[str, Any] = {"temperature": 1, "max_tokens": 16, "return_token_ids": True}
    alone = await api.complete(seed=1, **fields)
    others = [api.complete(f"{number} and", **fields) for number in range(7)]
    crowd = await asyncio.gather(api.complete(seed=1, **fields), *others)
    assert crowd[0].choice()["token_ids"] == alone.choice()["token_ids"]
    long = "It rained. " * 150  # several chunks beside rows that decode
    whole = await api.complete(long, seed=1, **fields)
    others = [api.complete(f"{number} or", **fields) for number in range(7)]
    chunked = await asyncio.gather(*others, api.complete(long, seed=1, **fields))
    assert chunked[-1].choice()["token_ids"] == whole.choice()["token_ids"]
    assert (await api.complete(seed=2, **fields)).choice()["token_ids"] != alone.choice()["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_b25_choices_are_complete(api: Api, stream: bool) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 1, "max_tokens": 8, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answers = await asyncio.gather(*(api.complete(n=3, **fields) for _ in range(2)))
    texts = [[answer.text(index) for index in range(3)] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    many = await api.complete(n=32, **{**fields, "max_tokens": 2})
    ends = [many.choice(index)["finish_reason"] for index in range(32)]
    assert set(ends) <= {"length", "stop"} and many.usage["prompt_tokens"] < 20
    stop = texts[0][1][:1]  # one choice stops at once
    cut = await api.complete(n=3, stop=[stop], **fields)
    assert cut.text(1) == "" and cut.choice(1)["finish_reason"] == "stop"
    assert [cut.text(index) for index in (0, 2)] == [texts[0][index].split(stop)[0] for index in (0, 2)]
    assert (await api.complete(n=2, priority=-1, **fields)).text(1) == texts[0][1]


@pytest.mark.parametrize("stream", [False, True])
async def test_b26_prompts_and_choices_come_in_order(api: Api, stream: bool) -> None:
    prompts = ["A long prompt that says very little. " * 40, "short"]
    answer = await api.complete(prompts, echo=True, n=2, temperature=1, stream=stream)
    for index in range(4):
        assert answer.text(index).startswith(prompts[index // 2])
    if not stream:
        assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2, 3]


async def test_b29_bad_text_names_its_field(api: Api) -> None:
    for field, raw in (
        ("prompt", b'{"prompt":"\\ud800"}'),
        ("prompt", b'{"prompt":"a\xff"}'),
        ("stop", b'{"prompt":"x","stop":"\\ud800"}'),
        ("bad_words", b'{"prompt":"x","bad_words":["\\ud800"]}'),
    ):
        answer = await api.post("/v1/completions", raw)
        assert answer.status == 400 and "Traceback" not in answer.error["message"]
        assert str(answer.error["param"]).startswith(field), answer.body
    marks = await api.complete("e\u0301" * 300_000)
    assert marks.status == 400
    assert (await api.complete("a\0b", max_tokens=1)).status in (200, 400)


@pytest.mark.parametrize("kind", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}])
async def test_b31_structured_output_is_refused_by_name(api: Api, kind: Any) -> None:
    (line_id,) = await api.ids("\n")
    answer = await api.chat(response_format=kind, logit_bias={str(line_id): 100}, max_tokens=500)
    assert (answer.status, answer.error["param"]) == (400, "response_format")
    assert (await api.chat(response_format={"type": "text"})).status == 200


async def test_b32_tools_are_refused_before_a_stream_begins(api: Api) -> None:
    for fields in ({"stream": True}, {"parallel_tool_calls": False}, {"stream": True, "parallel_tool_calls": False}):
        await api.refused("tools", tools=TOOLS, **fields)


async def test_b34_no_route_without_a_key(served: Served, api: Api) -> None:
    paths = {route.path.replace("{name:.*}", "x").replace("{id}", "x") for route in ROUTES} - set(OPEN)
    tricks = [
        "//v1/models",
        "/v1/models/",
        "/V1/models",
        "/v1%2fmodels",
        "/%76%31/models",
        "/v1/./models",
        "/health/../v1/models",
    ]
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "eA==", "Sec-WebSocket-Version": "13"}
    async with aiohttp.ClientSession() as client:

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            async with client.request(method, URL(served.root_url + path, encoded=True), headers=headers) as response:
                return response.status

        for path in sorted(paths) + tricks:
            for method in ("GET", "POST", "DELETE", "PUT"):
                for headers in ({}, {"Authorization": "Bearer wrong"}, upgrade):
                    assert await status(method, path, headers) == 401, (method, path, headers)
        assert [await status("GET", path, {}) for path in ("/health", "/ready")] == [200, 200]


# --- spares


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("detokenize", {"detokenize": False, "stop": ["a"]}),  # S01
        ("n", {"n": 0}),  # S16
        ("chat_template", {"chat_template": "{% for a in range(9999999) %}{% endfor %}"}),  # S32
        ("prompt_embeds", {"prompt_embeds": "AAAA"}),  # S37
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_s01_s16_s32_s37_are_refused_by_name(api: Api, param: str, fields: dict[str, Any], stream: bool) -> None:
    """Also in a stream before its headers (S13)."""
    await api.refused(param, stream=stream, **fields)


async def test_s04_the_first_token_is_the_stop_and_probabilities_are_wanted(api: Api) -> None:
    (a_id,) = await api.ids(" a")
    answer = await api.complete(allowed_token_ids=[a_id], stop=[" a"], logprobs=3)
    assert (answer.text(), answer.usage["completion_tokens"], answer.choice()["finish_reason"]) == ("", 1, "stop")


async def test_s05_special_tokens_have_their_name(api: Api) -> None:
    (end_id,) = await api.ids("<|im_end|>")
    fields = {"logit_bias": {str(end_id): 100}, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 1}
    answer = await api.chat(logprobs=True, top_logprobs=20, **fields)
    (entry,) = answer.choice()["logprobs"]["content"]
    assert entry["token"] == answer.text() == "<|im_end|>"


async def test_s07_bad_words_with_and_without_a_space(api: Api) -> None:
    for prompt in ("The capital of France is", "The capital of France is "):
        fields: dict[str, Any] = {"max_tokens": 6}
        assert "Paris" in (await api.complete(prompt, **fields)).text() or prompt.endswith(" ")
        assert "Paris" not in (await api.complete(prompt, bad_words=["Paris"], **fields)).text()


async def test_s10_s11_s64_the_numbers_of_a_length(api: Api) -> None:
    limit = (await api.post("/tokenize", {"prompt": "x"})).body["max_model_len"]
    message = await api.refused("prompt", max_tokens=limit)  # both together are too long
    assert str(limit) in message and str(len(await api.ids("One, two,"))) in message
    message = await api.refused("prompt", prompt=[5] * (limit + 1))
    assert str(limit) in message and str(limit + 1) in message
    cut = await api.complete([5] * (limit + 1), truncate_prompt_tokens=7, max_tokens=1)
    assert cut.usage["prompt_tokens"] == 7


async def test_s14_s29_one_error_shape(api: Api) -> None:
    embeddings = await api.post("/v1/embeddings", {"model": "x", "input": "x"})
    assert (embeddings.status, embeddings.error["param"]) == (400, "model")
    missing = await api.post("/v1/nope", {})
    assert (missing.status, missing.error["code"]) == (404, "not_found")


async def test_s17_done_comes_last(api: Api) -> None:
    assert (await api.chat(stream=True)).events[-1] == "[DONE]"
    assert (await api.complete(stream=True, stop=[" "])).events[-1] == "[DONE]"


async def test_s19_a_deadline_is_told_as_one(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    answer = await api.post("/v1/completions", body, {"X-Request-Timeout": "0.3"})
    assert answer.status in (408, 504) and answer.error["message"]


async def test_s26_no_token_is_doubled_by_the_template(api: Api) -> None:
    answer = await api.chat(return_token_ids=True)
    text = (await api.post("/detokenize", {"tokens": answer.body["prompt_token_ids"]})).body["prompt"]
    assert text.count("<|im_start|>") == 3 and text.endswith("<|im_start|>assistant\n")


async def test_s28_a_response_cut_by_its_cap_is_incomplete(api: Api) -> None:
    answer = await api.post("/v1/responses", {"input": QUESTION, "max_output_tokens": 3, "temperature": 0})
    assert answer.body["status"] == "incomplete"
    assert answer.body["incomplete_details"]["reason"] == "max_output_tokens"
    assert answer.body["usage"]["output_tokens"] == 3


async def test_s56_stop_lists_of_many_requests(api: Api) -> None:
    whole = (await api.complete(max_tokens=12)).text()
    answers = await asyncio.gather(*(api.complete(max_tokens=12, stop=[whole[at]]) for at in range(1, len(whole))))
    for at, answer in enumerate(answers, 1):
        assert answer.text() == whole[: whole.index(whole[at])]


async def test_s71_a_presence_penalty_of_zero_changes_nothing(api: Api) -> None:
    (a_id, b_id) = await api.ids(" a") + await api.ids(" b")
    plain = await api.complete(max_tokens=12)
    assert (await api.complete(max_tokens=12, presence_penalty=0)).text() == plain.text()
    scored = await api.complete(max_tokens=1, logprobs=0, allowed_token_ids=[a_id])
    other = await api.complete(max_tokens=1, logprobs=0, allowed_token_ids=[b_id])
    gap = scored.choice()["logprobs"]["token_logprobs"][0] - other.choice()["logprobs"]["token_logprobs"][0]
    assert math.isfinite(gap)
    tilted = {"logit_bias": {str(b_id if gap > 0 else a_id): abs(gap) + 0.5}, "allowed_token_ids": [a_id, b_id]}
    fields = {"max_tokens": 2, "return_token_ids": True, "temperature": 0}
    first = (await api.complete(**fields, **tilted, presence_penalty=2)).choice()["token_ids"]
    assert first[0] == (b_id if gap > 0 else a_id)
