"""Keys and values in pages of float8_e4m3fn: rounded when they are stored, each head with a scale of its own."""

import torch
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn; what is larger saturates


def to_float8(x: Tensor, scales: Tensor) -> Tensor:
    """x [T, hkv, d], scales f32[hkv] -> f8[T, hkv, d], rounded to the nearest, ties to even. NaN stays NaN."""
    return (x.float() / scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def from_float8(pages: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """pages f8[..., hkv, t, d] or [..., hkv, d] with one scale for each head, given as f32 of the same number of dimensions."""
    return (pages.float() * scales).to(dtype)
