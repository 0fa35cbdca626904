"""Rotary parameters as config.json says them: rope_scaling and rope_theta beside it, or rope_parameters with all inside."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.model_folder import ModelError

Json = Mapping[str, Any]

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """What the table (model/rope.py) is made of."""

    kind: str
    dim: int  # rotated leading dimensions of a head
    theta: float
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0  # both cos and sin are multiplied by it
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()


def positive(config: Json, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {name} = {value!r}, expected a positive integer")
    return value


def read_rope(config: Json, head_dim: int) -> Rope:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise ModelError(f"config.json: rope scaling {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    limit = positive(config, "max_position_embeddings")
    original = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or limit
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dim = int(head_dim * partial)
    factor = scaling.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise ModelError(f"config.json: rope scaling {kind!r} lacks its factor")
        factor = limit / original
    rope = Rope(
        kind=kind,
        dim=dim,
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        max_position_embeddings=limit,
        original_max_position_embeddings=int(original),
        factor=float(factor),
        attention_factor=_attention_factor(kind, scaling, float(factor), int(original)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        short_factor=tuple(scaling.get("short_factor") or ()),
        long_factor=tuple(scaling.get("long_factor") or ()),
    )
    if kind == "longrope" and not len(rope.short_factor) == len(rope.long_factor) == dim // 2:
        found = f"{len(rope.short_factor)} and {len(rope.long_factor)}"
        raise ModelError(f"config.json: longrope needs {dim // 2} short and long factors, found {found}")
    return rope


def _attention_factor(kind: str, scaling: Json, factor: float, original: int) -> float:
    given = scaling.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return float((0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1))
    return 0.1 * math.log(factor) + 1
