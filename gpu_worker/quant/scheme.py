"""What a quantized checkpoint says of itself: a scheme per linear layer, found by the layer's name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.model_folder import ModelError

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Activations:
    """How the inputs of a layer are rounded before the product."""

    kind: Literal["int", "float"]  # int8, or float8_e4m3fn
    granularity: Literal["tensor", "token", "group"]
    group: int = 0  # columns per scale of "group"
    dynamic: bool = True  # False: the checkpoint has one scale, input_scale


@dataclass(frozen=True)
class Scheme:
    """How one layer's weight [N, K] lies in the checkpoint."""

    layout: Literal["gptq", "gptq_v2", "awq", "packed", "plain"]  # packed: compressed-tensors; plain: one value an element
    kind: Literal["int", "float"]  # integers with bits, or float8_e4m3fn
    bits: int
    granularity: Literal["tensor", "channel", "group", "block"]  # what shares a scale; channel: an output row
    group: int = 0  # columns per scale of "group"
    block: tuple[int, int] = (0, 0)  # rows, columns per scale of "block"
    symmetric: bool = True
    act_order: bool = False  # the columns of a group are scattered: g_idx matters
    activations: Activations | None = None  # None: inputs stay as they are


@dataclass(frozen=True)
class QuantSpec:
    """The quantization of a whole model. rules: the first that matches a layer's name decides; none: not quantized."""

    method: str
    rules: tuple[tuple[Callable[[str], bool], Scheme | None], ...]
    kv_scales: bool = False  # the checkpoint carries scales of an fp8 KV cache

    def scheme_of(self, layer: str) -> Scheme | None:
        """layer: its name in the checkpoint without ".weight", as model.layers.0.self_attn.q_proj."""
        for matches, scheme in self.rules:
            if matches(layer):
                return scheme
        return None


def refuse(what: str) -> ModelError:
    return ModelError(f"config.json: quantization_config: {what}")


def choose(config: Json, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """A field whose value must be one of these; ModelError says what was found."""
    value = config.get(name, default)
    value = default if value is None else value
    if value not in allowed or (isinstance(value, bool) and not any(isinstance(each, bool) for each in allowed)):
        raise refuse(f"{name} = {value!r} is not supported (supported: {', '.join(map(repr, allowed))})")
    return value


def flag(config: Json, name: str, default: bool) -> bool:
    return bool(choose(config, name, (True, False), default))


def whole(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if type(value) is not int:
        raise refuse(f"{name} = {value!r}, expected a whole number")
    return value


def group_size(config: Json, default: int) -> int:
    """Columns per scale; -1: all."""
    group = whole(config, "group_size", default)
    if group != -1 and group < 1:
        raise refuse(f"group_size = {group}, expected -1 or a positive number")
    return group


def texts(config: Json, name: str) -> list[str]:
    """A list of strings; none when the field is absent."""
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise refuse(f"{name} = {value!r}, expected a list of names")
    return value


def an_object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise refuse(f"{name} = {value!r}, expected an object")
    return value


def two_numbers(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int and each > 0 for each in value):
        raise refuse(f"{name} = {value!r}, expected two positive numbers")
    return value[0], value[1]


# --- matchers of layer names ---


def everything(layer: str) -> bool:
    return True


def path_part(names: list[str]) -> Callable[[str], bool]:
    """Matches a layer when one of the names is its name or a run of whole components of it: lm_head, self_attn.q_proj."""
    return lambda layer: any(f".{name}." in f".{layer}." for name in names)


def pattern(text: str, found_in: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise refuse(f"{found_in}: {text!r} is no regular expression: {error}") from None
