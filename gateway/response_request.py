"""A /v1/responses body to a ValidRequest: input items become chat messages; what only the answer repeats stays beside it."""

from collections.abc import Mapping
from typing import Any

from gateway.conversation import texts_of
from gateway.errors import BadRequest
from gateway.fields import expect, shown, sized, wrong_type
from gateway.limits import Limits
from gateway.openai import checked, common, required, template_arguments
from gateway.request import ValidRequest
from gateway.schema import RESPONSES

ROLES = ("user", "assistant", "system", "developer")
PART_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # the field of a part that is its text
PART_FIELDS = ("type", "annotations", "logprobs")  # of an answer that is sent back
ITEM_FIELDS = ("type", "role", "content", "id", "status", "phase")
REPEATED = ("instructions", "max_output_tokens", "metadata", "prompt_cache_key", "safety_identifier", "user")


def parse_response(body: Mapping[str, Any], limits: Limits) -> ValidRequest:
    """BadRequest names the first field at fault."""
    given = checked(RESPONSES, body, limits)
    if not limits.has_chat_template:
        raise BadRequest("This model has no chat template; use /v1/completions", "input", "no_chat_template")
    messages = _input(required(given, "input"), limits)
    if given.get("instructions"):
        messages.insert(0, {"role": "system", "content": given["instructions"]})
    tops = given.get("top_logprobs", 0)
    return ValidRequest(
        messages=messages,
        named="input",
        template_arguments=template_arguments(given.get("chat_template_kwargs")),
        max_tokens=given.get("max_output_tokens"),
        truncate_prompt_tokens=-1 if given.get("truncation") == "auto" else 0,
        logprobs=tops if tops or given.get("include") else -1,
        **{"add_special_tokens": False, **common(given, limits)},
    )


def repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer says again of a body that passed parse_response."""
    return {name: body.get(name) for name in REPEATED} | {"truncation": body.get("truncation") or "disabled"}


def _input(value: Any, limits: Limits) -> list[dict[str, Any]]:
    if type(value) is str:
        if not value:
            raise BadRequest("input must not be empty", "input", "empty_prompt")
        return [{"role": "user", "content": value}]
    if type(value) is not list:
        raise wrong_type("input", "a string or an array of message items", value)
    if not sized(value, "input", limits.max_messages, "items"):
        raise BadRequest("input must not be empty", "input", "empty_prompt")
    return [_message(each, f"input[{at}]", limits) for at, each in enumerate(value)]


def _message(item: Any, path: str, limits: Limits) -> dict[str, Any]:
    kind, role = expect(dict, item, path).get("type", "message"), item.get("role")
    if kind != "message":
        text = f"{path}.type: items of type {shown(kind)} are not supported, only message"
        raise BadRequest(text, f"{path}.type", "unsupported_parameter")
    for name in item:
        if name not in ITEM_FIELDS:
            raise BadRequest(f"Unrecognized field {path}.{name}", f"{path}.{name}", "unknown_parameter")
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}; got {shown(role)}", f"{path}.role")
    return {"role": role, "content": texts_of(item.get("content"), f"{path}.content", limits, PART_TEXTS, PART_FIELDS)}
