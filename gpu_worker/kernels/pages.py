"""How kernels read and write cells of pages: as they are, or as float8_e4m3fn with a scale per head.

Kernels see float8 as the int8 of its code: masked loads need a constant to fill with, and float8 has none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def codes(cache: Tensor) -> Tensor:
    """A cache as kernels take it."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def load_cells(at, mask, TYPE: tl.constexpr):
    """Keys or values [N, d] in TYPE; of float8 without their scale, for which all of a head are multiplied once."""
    cells = tl.load(at, mask=mask, other=0)
    if at.dtype.element_ty == tl.int8:
        cells = cells.to(tl.float8e4nv, bitcast=True).to(TYPE)
    return cells


@triton.jit
def scale_of(kv_scales, kv_head, KV_HEADS: tl.constexpr, VALUES: tl.constexpr, FLOAT8: tl.constexpr):
    """kv_scales f32[2, KV_HEADS]: of keys, of values. Read by every launch, so that graphs hold no number of it."""
    scale = 1.0
    if FLOAT8:
        scale = tl.load(kv_scales + VALUES * KV_HEADS + kv_head)
    return scale


@triton.jit
def float8_code(x):
    """float32 -> i8, the code of the nearest float8_e4m3fn, ties to even; beyond 448 it saturates, NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # below 2^-6: how many times 2^-9
    word = size.to(tl.int32, bitcast=True)
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def float8_value(code):
    """i8 -> float32."""
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
