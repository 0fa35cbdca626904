"""Checks of single JSON values: each takes (value, path, limits), returns the clean value or raises BadRequest naming path."""

import json
import math
from collections.abc import Callable
from typing import Any

from gateway.errors import BadRequest
from gateway.limits import Limits

Check = Callable[[Any, str, Limits], Any]
NAMES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean", list: "an array", dict: "an object"}


_SHAPES: dict[Check, dict[str, Any]] = {}  # JSON schemas, where a number's bound may name a limit


def _shaped(check: Check, **schema: Any) -> Check:
    _SHAPES[check] = schema
    return check


def shape(check: Check, limits: Limits) -> dict[str, Any]:
    """JSON schema of what a check admits (or more: it is the check that decides)."""
    found = {**_SHAPES.get(check, {})}
    offset = found.pop("offset", 0)
    if isinstance(found.get("maximum"), str):
        found["maximum"] = int(_bound(found["maximum"], limits)) + offset
    return found


def shown(value: object) -> str:
    """A value as error texts print it: short whatever it is."""
    if value is None or type(value) is bool:
        return json.dumps(value)
    text = repr(value) if type(value) in (str, int, float) else NAMES.get(type(value), "a value")
    return text if len(text) <= 60 else text[:57] + "..."


def wrong_type(path: str, expected: str, value: object) -> BadRequest:
    return BadRequest(f"{path} must be {expected}, got {shown(value)}", path, "invalid_type")


def expect(kind: type, value: Any, path: str) -> Any:
    if type(value) is not kind:
        raise wrong_type(path, NAMES[kind], value)
    return value


def _bound(bound: float | str, limits: Limits) -> float:
    named: float = getattr(limits, bound) if isinstance(bound, str) else bound
    return named


def integer(low: int, high: int | str, *, high_offset: int = 0) -> Check:
    """An integer in [low, high]; high may name a limit."""

    def check(value: Any, path: str, limits: Limits) -> int:
        if type(value) is not int:
            raise wrong_type(path, "an integer", value)
        top = int(_bound(high, limits)) + high_offset
        if not low <= value <= top:
            raise BadRequest(f"{path} must be between {low} and {top}, got {shown(value)}", path, "out_of_range")
        return value

    return _shaped(check, type="integer", minimum=low, maximum=high, offset=high_offset)


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A finite number in [low, high], or in (low, high] when above."""

    def check(value: Any, path: str, limits: Limits) -> float:
        if type(value) not in (int, float):
            raise wrong_type(path, "a number", value)
        if not (low < value if above else low <= value) or not value <= high or not math.isfinite(value):
            span = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            raise BadRequest(f"{path} must be {span}, got {shown(value)}", path, "out_of_range")
        return float(value)

    return _shaped(check, type="number", maximum=high, **{"exclusiveMinimum" if above else "minimum": low})


def boolean(value: Any, path: str, limits: Limits) -> bool:
    if type(value) is not bool:
        raise wrong_type(path, "true or false", value)
    return value


def short_string(value: Any, path: str, limits: Limits) -> str:
    if type(value) is not str:
        raise wrong_type(path, "a string", value)
    if len(value) > limits.max_string_chars:
        text = f"{path} has {len(value)} characters, limit {limits.max_string_chars}"
        raise BadRequest(text, path, "string_too_long")
    return value


def text(value: Any, path: str, limits: Limits) -> str:
    checked: str = expect(str, value, path)
    return checked


def one_of(*values: object) -> Check:
    """Exactly one of the given values (of the same type: true is not 1)."""

    def check(value: Any, path: str, limits: Limits) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            raise BadRequest(f"{path} must be one of {', '.join(map(json.dumps, values))}; got {shown(value)}", path)
        return value

    return _shaped(check, enum=[None, *values])


def sized(value: Any, path: str, limit: int, what: str) -> Any:
    """A list or object that is not longer than its limit; checked before its items are."""
    if len(value) > limit:
        raise BadRequest(f"{path} has {len(value)} {what}, limit {limit}", path, "too_many_items")
    return value


def token_id(value: Any, path: str, limits: Limits) -> int:
    if type(value) is not int:
        raise wrong_type(path, "a token id", value)
    if not 0 <= value < limits.vocab_size:
        text = f"{path} is {shown(value)}, but token ids of this model are 0 to {limits.vocab_size - 1}"
        raise BadRequest(text, path, "token_id_out_of_range")
    return value


def token_ids(values: Any, path: str, limits: Limits) -> list[int]:
    """A list of ids, already known to be no longer than its limit."""
    expect(list, values, path)
    if not set(map(type, values)) <= {int} or (values and not (min(values) >= 0 and max(values) < limits.vocab_size)):
        for at, value in enumerate(values):
            token_id(value, f"{path}[{at}]", limits)
    checked: list[int] = values
    return checked


def token_id_list(limit: str) -> Check:
    def check(value: Any, path: str, limits: Limits) -> list[int]:
        return token_ids(sized(expect(list, value, path), path, getattr(limits, limit), "token ids"), path, limits)

    return check


def stop_strings(value: Any, path: str, limits: Limits) -> tuple[str, ...]:
    """One string or a list of them; each not empty."""
    stops = [value] if type(value) is str else value
    if type(stops) is not list:
        raise wrong_type(path, "a string or an array of strings", value)
    sized(stops, path, limits.max_stops, "stop strings")
    for at, stop in enumerate(stops):
        where = path if type(value) is str else f"{path}[{at}]"
        if type(stop) is not str:
            raise wrong_type(where, "a string", stop)
        if not 1 <= len(stop) <= limits.max_stop_chars:
            text = f"{where} must have 1 to {limits.max_stop_chars} characters, got {len(stop)}"
            raise BadRequest(text, where, "invalid_stop")
    total = sum(map(len, stops))
    if total > limits.max_all_stop_chars:
        raise BadRequest(f"{path} has {total} characters in all, limit {limits.max_all_stop_chars}", path, "invalid_stop")
    return tuple(dict.fromkeys(stops))


def bad_words(value: Any, path: str, limits: Limits) -> tuple[str, ...]:
    sized(expect(list, value, path), path, limits.max_bad_words, "strings")
    for at, word in enumerate(value):
        where = f"{path}[{at}]"
        if not 1 <= len(expect(str, word, where)) <= limits.max_bad_word_chars:
            text = f"{where} must have 1 to {limits.max_bad_word_chars} characters, got {len(word)}"
            raise BadRequest(text, where, "out_of_range")
    return tuple(dict.fromkeys(value))


def logit_bias(value: Any, path: str, limits: Limits) -> dict[int, float]:
    """{"token id": bias}, ids below the width of the logits, biases in [-100, 100]."""
    sized(expect(dict, value, path), path, limits.max_bias, "entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        where = f"{path}.{key[:40]}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"{path}: the key {shown(key)} is not a token id", where, "token_id_out_of_range")
        biases[token_id(int(key), where, limits)] = number(-100, 100)(bias, where, limits)
    return biases


def allowed_ids(value: Any, path: str, limits: Limits) -> tuple[int, ...]:
    ids = token_id_list("max_allowed_ids")(value, path, limits)
    if not ids:
        raise BadRequest(f"{path} must not be empty: no token could be sampled", path)
    return tuple(dict.fromkeys(ids))


def stop_ids(value: Any, path: str, limits: Limits) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_id_list("max_stop_ids")(value, path, limits)))


def stream_options(value: Any, path: str, limits: Limits) -> dict[str, bool]:
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    for name, flag in expect(dict, value, path).items():
        where = f"{path}.{name}"
        if name not in known:
            raise BadRequest(f"Unrecognized field {where}", where, "unknown_parameter")
        if flag is not None and boolean(flag, where, limits) and name == "include_obfuscation":
            raise BadRequest(f"{where} is not supported", where, "unsupported_parameter")
    return {name: bool(flag) for name, flag in value.items()}


def plain_stream_options(value: Any, path: str, limits: Limits) -> dict[str, bool]:
    for name in expect(dict, value, path):
        if name != "include_obfuscation":
            raise BadRequest(f"Unrecognized field {path}.{name}", f"{path}.{name}", "unknown_parameter")
    return stream_options(value, path, limits)


def text_options(value: Any, path: str, limits: Limits) -> dict[str, Any]:
    """{"format": {"type": "text"}}, and a verbosity that is the usual one."""
    usual = {"format": (None, {"type": "text"}), "verbosity": (None, "medium")}
    for name, option in expect(dict, value, path).items():
        where = f"{path}.{name}"
        if name not in usual:
            raise BadRequest(f"Unrecognized field {where}", where, "unknown_parameter")
        if option not in usual[name]:
            got = shown(option.get("type")) if type(option) is dict else shown(option)
            raise BadRequest(f"{where}: only {usual[name][1]} is supported, got {got}", where, "unsupported_parameter")
    return {"format": {"type": "text"}}


def prompt(value: Any, path: str, limits: Limits) -> list[str | list[int]]:
    """Text, list of texts, token ids or list of token-id lists; none of them empty."""
    if type(value) is str:
        return [_text_prompt(value, path)]
    if type(value) is not list:
        raise wrong_type(path, "a string, token ids, or an array of either", value)
    if not value:
        raise BadRequest(f"{path} must not be empty", path, "empty_prompt")
    if type(value[0]) is int:
        sized(value, path, limits.max_prompt_ids, "token ids")
        return [token_ids(value, path, limits)]
    sized(value, path, limits.max_prompts, "prompts")
    if sum(len(item) for item in value if type(item) is list) > limits.max_prompt_ids:
        raise BadRequest(f"{path} has more than {limits.max_prompt_ids} token ids", path, "too_many_items")
    return [_one_prompt(item, f"{path}[{at}]", type(value[0]), limits) for at, item in enumerate(value)]


def _text_prompt(text: Any, path: str) -> str:
    if not text:
        raise BadRequest(f"{path} must not be empty", path, "empty_prompt")
    checked: str = text
    return checked


def _one_prompt(item: Any, path: str, kind: type, limits: Limits) -> str | list[int]:
    if type(item) is not kind or kind not in (str, list):
        raise wrong_type(path, "a string or an array of token ids, as the first prompt is", item)
    if kind is str:
        return _text_prompt(item, path)
    if not item:
        raise BadRequest(f"{path} must not be empty", path, "empty_prompt")
    return token_ids(item, path, limits)


_IDS = {"type": "integer", "minimum": 0}
_shaped(boolean, type="boolean")
_shaped(short_string, type="string")
_shaped(stop_strings, type=["string", "array"], items={"type": "string", "minLength": 1})
_shaped(bad_words, type="array", items={"type": "string", "minLength": 1})
_shaped(logit_bias, type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100})
_shaped(allowed_ids, type="array", items=_IDS, minItems=1)
_shaped(stop_ids, type="array", items=_IDS)
_shaped(text, type="string")
_shaped(stream_options, type="object")
_shaped(plain_stream_options, type="object")
_shaped(text_options, type="object")
_shaped(prompt, type=["string", "array"])
