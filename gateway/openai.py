"""OpenAI's (and vLLM's) request bodies to ValidRequest. Every field is implemented or refused by name; none is ignored."""

import secrets
from collections.abc import Mapping
from typing import Any

from gateway.conversation import parse_messages
from gateway.errors import BadRequest
from gateway.fields import boolean, expect, prompt, short_string, token_id_list
from gateway.limits import Limits
from gateway.request import ValidRequest
from gateway.schema import CHAT, COMPLETION, FIELDS, Field

GREEDY_BELOW = 1e-5  # a temperature below it would only overflow: the likeliest token wins anyway
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older API
# Fields of the body that are fields of ValidRequest under the same name and need no second look.
SAME = (
    *(
        "min_tokens",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "stop",
        "stop_token_ids",
    ),
    *(
        "ignore_eos",
        "skip_special_tokens",
        "prompt_logprobs",
        "echo",
        "stream",
        "resumable",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
    ),
    *("truncate_prompt_tokens", "return_token_ids", "priority"),
)


def parse_chat(body: Mapping[str, Any], limits: Limits) -> ValidRequest:
    """A /v1/chat/completions body; BadRequest names the first field at fault."""
    given = checked(CHAT, body, limits)
    if not limits.has_chat_template:
        raise BadRequest("This model has no chat template; use /v1/completions", "messages", "no_chat_template")
    tops = given.get("top_logprobs", 0)
    if tops and not given.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    _check_continuing(given)
    caps = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(caps) > 1:
        raise BadRequest("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    return ValidRequest(
        messages=parse_messages(required(given, "messages"), "messages", limits),
        template_arguments=template_arguments(given.get("chat_template_kwargs")),
        max_tokens=caps.pop() if caps else None,
        logprobs=tops if given.get("logprobs") else -1,
        **{"add_special_tokens": False, **common(given, limits)},
    )


def parse_completion(body: Mapping[str, Any], limits: Limits) -> ValidRequest:
    """A /v1/completions body; BadRequest names the first field at fault."""
    given = checked(COMPLETION, body, limits)
    request = ValidRequest(
        prompts=required(given, "prompt"),
        max_tokens=given.get("max_tokens"),
        default_max_tokens=max(COMPLETION_MAX_TOKENS, given.get("min_tokens", 0)),
        logprobs=given.get("logprobs", -1),
        **common(given, limits),
    )
    num_sequences = len(request.prompts or ()) * request.n
    if num_sequences > limits.max_sequences:
        text = f"{len(request.prompts or ())} prompts times n = {request.n} are {num_sequences}, limit {limits.max_sequences}"
        raise BadRequest(text, "n", "out_of_range")
    return request


def required(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise BadRequest(f"{name} is required", name, "missing_required_parameter")
    return given[name]


def checked(api: str, body: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Values of the implemented fields that are given (null counts as absent), each checked by itself."""
    given: dict[str, Any] = {}
    for name, value in body.items():
        field = FIELDS[api].get(name)
        if field is None:
            raise BadRequest(f"Unrecognized request field: {name[:200]}", name[:200], "unknown_parameter")
        if value is None:
            continue
        if field.kind == "refused":
            _refuse(field, value, body)
        else:
            assert field.check is not None
            clean = field.check(value, name, limits)
            if field.kind == "implemented":
                given[name] = clean
    check_model(given.get("model", ""), limits)
    return given


def _refuse(field: Field, value: Any, body: Mapping[str, Any]) -> None:
    if any(type(value) is type(each) and value == each for each in field.harmless):
        return
    if field.name == "best_of" and type(value) is int and value == body.get("n", 1):
        return
    raise BadRequest(f"{field.name}: {field.note}", field.name, "unsupported_parameter")


def check_model(name: str, limits: Limits) -> None:
    if name not in ("", limits.model_name):
        text = f"The model {name[:200]!r} does not exist; this server has {limits.model_name!r}"
        raise BadRequest(text, "model", "model_not_found", status=404)


def template_arguments(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    arguments: dict[str, Any] = expect(dict, value, "chat_template_kwargs")
    for name in arguments:
        if name in ("messages", "add_generation_prompt", "tools", "documents", "chat_template", "tokenize"):
            where = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{where} cannot be set there", where, "unsupported_parameter")
    return arguments


def common(given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Fields that the APIs share, and the rules between them."""
    same = {name: given[name] for name in SAME if name in given}
    _check_ending(given)
    stream = given.get("stream", False)
    options = given.get("stream_options", {})
    if "stream_options" in given and not stream:
        raise BadRequest("stream_options is only allowed with stream: true", "stream_options")
    if given.get("resumable"):
        _check_resumable(given, stream, limits)
    if stream and "prompt_logprobs" in given:
        raise BadRequest("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    if options.get("continuous_usage_stats") and not options.get("include_usage"):
        raise BadRequest("continuous_usage_stats needs include_usage: true", "stream_options.continuous_usage_stats")
    defaults = limits.defaults
    temperature = given.get("temperature", defaults.temperature)
    return {
        **same,
        "n": given.get("n", 1),
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "top_p": given.get("top_p", defaults.top_p),
        "top_k": min(max(0, given.get("top_k", defaults.top_k)), limits.vocab_size),
        "min_p": given.get("min_p", defaults.min_p),
        "repetition_penalty": given.get("repetition_penalty", defaults.repetition_penalty),
        "include_stop": given.get("include_stop_str_in_output", False),
        "tokens_as_ids": given.get("return_tokens_as_token_ids", False),
        "include_usage": options.get("include_usage", False),
        "continuous_usage": options.get("continuous_usage_stats", False),
    }


def _check_continuing(given: Mapping[str, Any]) -> None:
    if given.get("continue_final_message") and given.get("add_generation_prompt"):
        text = "continue_final_message keeps the last turn open, add_generation_prompt: true opens another; give one"
        raise BadRequest(text, "continue_final_message")


def _check_resumable(given: Mapping[str, Any], stream: bool, limits: Limits) -> None:
    if not stream:
        raise BadRequest("resumable needs stream: true", "resumable")
    count = len(given.get("prompt", [0])) * given.get("n", 1)
    if count > limits.max_resumable:
        text = f"a resumable stream has at most {limits.max_resumable} choices, this one would have {count}"
        raise BadRequest(text, "resumable", "out_of_range")


def _check_ending(given: Mapping[str, Any]) -> None:
    least = given.get("min_tokens", 0)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        most = given.get(name)
        if most is None:
            continue
        if most == 0 and not (given.get("echo") or "prompt_logprobs" in given):
            raise BadRequest(
                f"{name} must be at least 1 (0 scores a prompt: with echo or prompt_logprobs)", name, "out_of_range"
            )
        if least > most:
            raise BadRequest(f"min_tokens = {least} is above {name} = {most}", "min_tokens", "out_of_range")
    allowed = set(given.get("allowed_token_ids", ()))
    if allowed and least and allowed <= set(given.get("stop_token_ids", ())):
        raise BadRequest("allowed_token_ids are all stop_token_ids, which min_tokens forbids", "allowed_token_ids")


def random_seed() -> int:
    return secrets.randbits(64)


TOKENIZE_FIELDS = (
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "return_token_strs",
)


def parse_tokenize(body: Mapping[str, Any], limits: Limits) -> tuple[ValidRequest, bool]:
    """A /tokenize body: a prompt, or messages. The flag: token strings are wanted."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in (*TOKENIZE_FIELDS, "chat_template_kwargs"):
            raise BadRequest(f"Unrecognized request field: {name[:200]}", name[:200], "unknown_parameter")
    check_model(short_string(given.get("model", ""), "model", limits), limits)
    wanted = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
    flags: dict[str, Any] = {name: boolean(given[name], name, limits) for name in wanted if name in given}
    _check_continuing(flags)
    strings = boolean(given.get("return_token_strs", False), "return_token_strs", limits)
    if ("prompt" in given) == ("messages" in given):
        raise BadRequest("Give either prompt or messages", "prompt", "missing_required_parameter")
    if "messages" in given:
        arguments = template_arguments(given.get("chat_template_kwargs"))
        messages = parse_messages(given["messages"], "messages", limits)
        return ValidRequest(messages=messages, template_arguments=arguments, **{"add_special_tokens": False, **flags}), strings
    if type(given["prompt"]) is not str:
        raise BadRequest("prompt must be a string", "prompt", "invalid_type")
    return ValidRequest(prompts=prompt(given["prompt"], "prompt", limits) if given["prompt"] else [[]], **flags), strings


def parse_detokenize(body: Mapping[str, Any], limits: Limits) -> list[int]:
    """A /detokenize body: {"tokens": [ids]}."""
    for name in body:
        if name not in ("model", "tokens"):
            raise BadRequest(f"Unrecognized request field: {name[:200]}", name[:200], "unknown_parameter")
    check_model(short_string(body.get("model") or "", "model", limits), limits)
    ids: list[int] = token_id_list("max_prompt_ids")(required(body, "tokens"), "tokens", limits)
    return ids
