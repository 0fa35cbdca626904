"""Rotary position tables: inverse frequencies of every scaling, and the table made of them.

Definitions: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (Peng et al., 2023), LongRoPE (Ding et al., 2024),
llama3 (Llama 3.1's release). Where a scaling depends on the length of the sequence (dynamic, longrope), the table is that of
the longest sequence this server allows: one table serves all, and cached keys stay valid while a sequence grows.
"""

import math

import torch
from torch import Tensor

from gpu_worker.model.rope_config import Rope


def cos_sin_table(rope: Rope, max_len: int) -> Tensor:
    """f32[max_len, dim]: cosines of dim / 2 frequencies, then sines."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, max_len))
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def inverse_frequencies(rope: Rope, max_len: int) -> Tensor:
    """f32[dim / 2]."""
    match rope.kind:
        case "default":
            return _plain(rope.theta, rope.dim)
        case "linear":
            return _plain(rope.theta, rope.dim) / rope.factor
        case "dynamic":
            return _plain(_ntk_theta(rope, max_len), rope.dim)
        case "yarn":
            return _yarn(rope)
        case "longrope":
            longer = max_len > rope.original_max_position_embeddings
            factors = torch.tensor(rope.long_factor if longer else rope.short_factor, dtype=torch.float32)
            return 1.0 / (factors * rope.theta ** _exponents(rope.dim))
        case "llama3":
            return _llama3(rope)
        case _:
            raise AssertionError(f"{rope.kind = } passed model/spec.py")


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** _exponents(dim))


def _ntk_theta(rope: Rope, max_len: int) -> float:
    length = max(max_len, rope.max_position_embeddings)
    stretch = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.dim / (rope.dim - 2)))


def _yarn(rope: Rope) -> Tensor:
    """Frequencies that turn often keep their speed, those that turn less than once are slowed by factor, a ramp between."""

    def dim_of(rotations: float) -> float:
        return (
            rope.dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    fast = _plain(rope.theta, rope.dim)
    return fast / rope.factor * ramp + fast * (1 - ramp)


def _llama3(rope: Rope) -> Tensor:
    """Long waves are slowed by factor, short ones kept, those between blended by their wave length."""
    fast = _plain(rope.theta, rope.dim)
    waves_in_context = rope.original_max_position_embeddings * fast / (2 * math.pi)
    smooth = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * fast / rope.factor + smooth * fast
    between = torch.where(waves_in_context > rope.high_freq_factor, fast, blended)
    return torch.where(waves_in_context < rope.low_freq_factor, fast / rope.factor, between)
