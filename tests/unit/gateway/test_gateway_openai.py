"""Request bodies: every field is implemented or refused by name, and what is wrong is refused before anything is built."""

import json
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from gateway import json_body
from gateway.errors import ApiError, BadRequest
from gateway.limits import Defaults, Limits
from gateway.openai import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from gateway.request import ValidRequest
from gateway.schema import FIELDS, table

LIMITS = Limits(model_name="toy", vocab_size=1000)
HI = [{"role": "user", "content": "hi"}]
# Fields of vLLM's two APIs beyond OpenAI's.
VLLM = [
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
    "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "return_token_offsets", "cache_salt", "kv_transfer_params",
    "ec_transfer_params", "vllm_xargs", "repetition_detection", "stream_interval", "thinking_token_budget", "watermarking",
    "routed_experts_prompt_start", "guided_json", "stream",
]  # fmt: skip
VLLM_CHAT = [
    "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    "mm_processor_kwargs", "media_io_kwargs", "include_reasoning", "return_prompt_text",
]  # fmt: skip


def chat(**fields: Any) -> ValidRequest:
    return parse_chat({"messages": HI, **fields}, LIMITS)


def completion(**fields: Any) -> ValidRequest:
    return parse_completion({"prompt": "x", **fields}, LIMITS)


def refusal(api: str, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        (chat if api == "chat" else completion)(**fields)
    return caught.value


def body_refusal(raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_completion(json_body.decode(raw, LIMITS.max_depth), LIMITS)
    return caught.value


def test_refusals_print_values_as_json_has_them() -> None:
    assert str(refusal("chat", modalities=["text", "audio"])) == 'modalities must be one of ["text"]; got an array'
    assert str(refusal("chat", store=True)) == "store must be one of false; got true"
    assert str(refusal("chat", n=True)) == "n must be an integer, got true"
    assert "or `true` passes" in table("chat") and "True" not in table("chat")


def test_every_field_of_openai_and_vllm_is_known() -> None:
    chat_fields = {*get_type_hints(chat_params.CompletionCreateParamsBase), *VLLM, *VLLM_CHAT}
    completion_fields = {*get_type_hints(completion_params.CompletionCreateParamsBase), *VLLM, "prompt_embeds"}
    assert len(chat_fields) > 60
    assert chat_fields - set(FIELDS["chat"]) == set()
    assert completion_fields - set(FIELDS["completion"]) == set()
    response_fields = {*get_type_hints(response_params.ResponseCreateParamsBase), "stream"}
    assert len(response_fields) > 30
    assert response_fields - set(FIELDS["responses"]) == set()


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_refused_fields_are_named_and_their_harmless_values_pass(api: str) -> None:
    parse = chat if api == "chat" else completion
    plain = parse()
    refused = [field for field in FIELDS[api].values() if field.kind == "refused"]
    assert len(refused) > 20
    for field in refused:
        error = refusal(api, **{field.name: {"some": "thing"}})
        assert (error.status, error.param) == (400, field.name)
        assert field.name in error.text
        for value in (None, *field.harmless):
            assert parse(**{field.name: value}) == plain


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_no_field_changes_nothing_and_says_nothing(api: str) -> None:
    """Whatever is implemented changes the parsed request; only the listed fields are accepted without effect."""
    values: dict[str, Any] = {
        "model": "toy", "messages": [*HI, *HI], "prompt": "y", "max_tokens": 7, "max_completion_tokens": 7, "min_tokens": 3,
        "n": 2, "seed": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {"5": 1}, "allowed_token_ids": [3], "stop": "x",
        "bad_words": ["x"],
        "stop_token_ids": [4], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "logprobs": True if api == "chat" else 2, "top_logprobs": 2, "prompt_logprobs": 2, "echo": True, "stream": True,
        "stream_options": {"include_usage": True}, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1},
            "continue_final_message": True,
        "add_special_tokens": api == "chat", "truncate_prompt_tokens": 5, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "priority": 3, "resumable": True,
    }  # fmt: skip
    needs = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}, "resumable": {"stream": True}}
    parse = chat if api == "chat" else completion
    for field in FIELDS[api].values():
        if field.kind == "implemented" and field.name != "model":
            base = needs.get(field.name, {})
            assert parse(**base, **{field.name: values[field.name]}) != parse(**base), field.name


def test_resumable_is_for_streams_of_few_choices() -> None:
    assert completion(stream=True, resumable=True, prompt=["x"] * 4, n=4).resumable
    assert refusal("chat", resumable=True).param == "resumable"
    error = refusal("completion", stream=True, resumable=True, prompt=["x"] * 4, n=5)
    assert error.param == "resumable" and "at most 16" in error.text and "20" in error.text
    assert "at most 16" in refusal("chat", stream=True, resumable=True, n=17).text


def test_unknown_fields_are_refused_by_name() -> None:
    error = refusal("chat", max_token=5)
    assert (error.status, error.param, error.code) == (400, "max_token", "unknown_parameter")
    assert refusal("chat", stream=True, stream_options={"usage": True}).param == "stream_options.usage"


def test_fields_without_effect_are_checked_all_the_same() -> None:
    assert chat(user="me", metadata={"a": "b"}, store=False, service_tier="auto") == chat()
    assert refusal("chat", user=5).param == "user"
    assert refusal("chat", store=True).param == "store"
    assert refusal("chat", metadata={"a": 5}).param == "metadata.a"


def test_unknown_model_is_404() -> None:
    error = refusal("chat", model="gpt-9")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5_000_000}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1_000_000_000}, "logprobs"),
        ({"logprobs": 1001}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": [999_999_999]}, "prompt[0]"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"prompt": [[5], [1000]]}, "prompt[1][0]"),
        ({"prompt": [[5], "x"]}, "prompt[1]"),
        ({"prompt": [5, "x"]}, "prompt[1]"),
        ({"prompt": [5, True]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 600, "n": 2}, "n"),
        ({"stop": ["s"] * 100_000}, "stop"),
        ({"stop": "s" * 2**20}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["s" * 1000 + str(i) for i in range(10)]}, "stop"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        ({"stop_token_ids": [1000]}, "stop_token_ids[0]"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
        ({"detokenize": False, "stop": ["a"]}, "detokenize"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
)
def test_b13_absurd_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    started = time.perf_counter()
    error = refusal("completion", **fields)
    assert time.perf_counter() - started < 0.1
    assert (error.status, error.param) == (400, param), error.text
    assert len(error.text) < 500


def test_both_numbers_are_in_the_error() -> None:
    assert "0 and 20, got 21" in refusal("completion", logprobs=21).text
    assert "min_tokens = 6" in refusal("completion", min_tokens=6, max_tokens=5).text


@pytest.mark.parametrize(
    "bias",
    [
        {"1000": 5},
        {"-1": 5},
        {"abc": 5},
        {"5": 1e9},
        {"5": -100.5},
        {"5": None},
        {"\u0661": 1},
        {str(i): 1 for i in range(5000)},
    ],
)
def test_b19_logit_bias_outside_the_vocabulary(bias: dict[str, Any]) -> None:
    error = refusal("completion", logit_bias=bias)
    assert error.status == 400
    assert error.param.startswith("logit_bias")


def test_s70_bias_reaches_the_last_id_of_the_logits() -> None:
    assert completion(logit_bias={"999": 5, "0": -100}).logit_bias == {999: 5.0, 0: -100.0}


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "2.5", "1e30"])
def test_b22_temperature_out_of_range_or_not_finite(raw: str) -> None:
    error = body_refusal(f'{{"prompt":"x","temperature":{raw}}}'.encode())
    assert error.status == 400
    assert "NaN" in error.text or "Infinity" in error.text or error.param == "temperature"


@pytest.mark.parametrize("raw", ["0", "1.0001", "NaN", "-0.5"])
def test_b22_top_p_out_of_range(raw: str) -> None:
    assert body_refusal(f'{{"prompt":"x","top_p":{raw}}}'.encode()).status == 400


def test_b22_tiny_temperatures_are_greedy_or_finite() -> None:
    assert completion(temperature=1e-4).temperature == 1e-4
    assert completion(temperature=1e-8).temperature == 0
    assert completion(temperature=1e-38).temperature == 0
    assert completion(temperature=0).temperature == 0
    assert completion(top_p=1e-9).top_p == 1e-9


def test_s71_penalties_keep_their_meaning() -> None:
    assert completion(presence_penalty=0, frequency_penalty=0, repetition_penalty=1) == completion()
    request = completion(presence_penalty=1.5)
    assert (request.presence_penalty, request.repetition_penalty) == (1.5, 1.0)


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", "a"], ["a", ""], [[1], []]])
def test_b28_empty_prompts(prompt: Any) -> None:
    assert refusal("completion", prompt=prompt).code == "empty_prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "mood": 1}], "messages[0].mood"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (["x"], "messages[0]"),
        ("x", "messages"),
    ],
)
def test_messages_are_checked(messages: Any, param: str) -> None:
    error = refusal("chat", messages=messages)
    assert (error.status, error.param) == (400, param)


def test_content_parts_are_joined_and_empty_content_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "a\nb"}]
    assert chat(messages=[{"role": "user", "content": ""}]).messages == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_s23_tool_history_arguments_become_an_object(arguments: Any) -> None:
    call: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]
    messages = chat(messages=history).messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    call["function"]["arguments"] = "{oops"
    assert refusal("chat", messages=history).param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"prompt":"a\\ud800"}', "prompt"),
        (b'{"prompt":"a\xff"}', "prompt"),
        (b'{"prompt":"a\\u0000"}', "prompt"),
        (b'{"prompt":["ok","\\udfff"]}', "prompt[1]"),
        (b'{"prompt":"x","stop":["\\ud83d"]}', "stop[0]"),
        (b'{"prompt":"x","bad_words":["\xc3"]}', "bad_words[0]"),
        (b'{"prompt":"x","a\\ud800":1}', "a?"),
    ],
)
def test_b29_lone_surrogates_bad_utf8_and_nul_name_their_field(raw: bytes, param: str) -> None:
    error = body_refusal(raw)
    assert (error.status, error.param, error.code) == (400, param, "invalid_text")
    json.dumps(error.body()).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"null", b"{", b'{"a":1}x', b'{"prompt":"x","prompt":"y"}', b"[" * 10_000, b'{"a":' * 10_000,
        b'{"prompt":"x","metadata":' + b"[" * 40 + b"]" * 40 + b"}", b'{"seed":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_b13_bodies_that_are_no_object_or_nest_too_deep(raw: bytes) -> None:
    assert body_refusal(raw).status == 400


def test_caps_and_defaults() -> None:
    assert chat().max_tokens is None
    assert completion().default_max_tokens == 16
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert refusal("chat", max_completion_tokens=5, max_tokens=6).param == "max_tokens"
    limits = Limits(model_name="toy", vocab_size=10, defaults=Defaults(temperature=0.6, top_k=20))
    request = parse_chat({"messages": HI}, limits)
    assert (request.temperature, request.top_k) == (0.6, 10)
    assert parse_chat({"messages": HI, "temperature": 1, "top_k": -1}, limits).top_k == 0


def test_logprobs_of_both_apis() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat().logprobs == -1
    assert refusal("chat", top_logprobs=3).param == "top_logprobs"
    assert completion(logprobs=0).logprobs == 0
    assert completion(echo=True, logprobs=2, max_tokens=0).score_width == 2
    assert completion(logprobs=2).score_width == -1


def test_tokenize_bodies() -> None:
    request, strings = parse_tokenize({"prompt": "x", "return_token_strs": True}, LIMITS)
    assert (request.prompts, request.add_special_tokens, strings) == (["x"], True, True)
    request, _ = parse_tokenize({"messages": HI}, LIMITS)
    assert (request.messages, request.add_special_tokens) == (HI, False)
    body: dict[str, Any]
    for body in ({}, {"prompt": "x", "messages": HI}, {"prompt": "x", "y": 1}, {"prompt": 5}):
        with pytest.raises(BadRequest):
            parse_tokenize(body, LIMITS)
    assert parse_detokenize({"tokens": [1, 2]}, LIMITS) == [1, 2]
    for body in ({}, {"tokens": "x"}, {"tokens": [1000]}, {"tokens": [1], "y": 1}):
        with pytest.raises(BadRequest):
            parse_detokenize(body, LIMITS)


def test_the_table_lists_every_field() -> None:
    text = table("chat")
    assert all(f"| `{name}` |" in text for name in FIELDS["chat"])


def test_the_document_is_what_the_tables_say() -> None:
    from gateway import api_doc

    assert Path(api_doc.__file__).with_name("API.md").read_text() == api_doc.document(), (
        "run python -m gateway.api_doc > gateway/API.md"
    )


ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63), "", "x", "0", "\ud800", "a\0b"),
    *([], [0], [-1], [1, 2], [10**9], ["x"], [""], ["\udfff"], [None], [[]], [[1]], [["x"]], [{}], list(range(999))),
    "x" * 10_000,
    *({}, {"5": 1}, {"5": "x"}, {"": 0}, {"x": {"y": []}}, {"type": "text"}, {"type": "json_object"}),
    *({"include_usage": None}, {"include_usage": 1}, [{"role": "user", "content": "x"}]),
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
]  # fmt: skip


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_any_value_of_any_field_is_taken_or_refused_by_the_api(api: str) -> None:
    """Never another exception than the API's own, and every refusal can be sent."""
    parse, base = (parse_chat, {"messages": HI}) if api == "chat" else (parse_completion, {"prompt": "x"})
    taken = refused = 0
    for name in FIELDS[api]:
        for value in ODD:
            for extra in ({}, {"stream": True}, {"n": 2, "max_tokens": 5, "min_tokens": 2}):
                raw = json.dumps({**base, **extra, name: value}).encode()
                try:
                    assert isinstance(parse(json_body.decode(raw, 32), LIMITS), ValidRequest)
                    taken += 1
                except ApiError as error:
                    assert error.status in (400, 404)
                    assert len(json.dumps(error.body(), ensure_ascii=False).encode()) < 2000
                    refused += 1
    assert taken > 500
    assert refused > 5000


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_messages_and_prompts(value: Any) -> None:
    for parse, name in ((parse_chat, "messages"), (parse_completion, "prompt")):
        try:
            parse(json_body.decode(json.dumps({name: value}).encode(), 32), LIMITS)
        except ApiError as error:
            assert error.status == 400


@given(st.binary(max_size=60))
def test_any_bytes(raw: bytes) -> None:
    for body in (raw, b'{"prompt":' + raw + b"}", b'{"prompt":"' + raw + b'"}'):
        try:
            parse_completion(json_body.decode(body, 32), LIMITS)
        except ApiError as error:
            json.dumps(error.body(), ensure_ascii=False).encode()
