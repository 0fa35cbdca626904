"""y = x W^T + b with x and W of one byte (float8_e4m3fn or int8): rows of x and W have scales, per row or per run of columns.

quantize_rows rounds the inputs. Few rows of x: the tile is computed as y^T = W x^T and the inner dimension is split, as in
w4a16_linear. Torch twins: gpu_worker/quant/rounding.py, gpu_worker/quant/linear.py.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import (
    begin_short_kernel,
    overlapped,
    release_next,
    wait_for_previous,
)
from gpu_worker.kernels.split_k import choose_split, counters, finish_tile

SKINNY_ROWS = 64
LIBRARY_ROWS = 64  # above this, the library multiplies where it can: one scale a row, sizes in multiples of 16
LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
HUGE = tl.constexpr(2.0**127)  # of a scale times the largest value, so that it does not overflow again
INFINITY_BITS = tl.constexpr(0x7F800000)
HALF_ULP = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest whole number


class Rounding(Protocol):
    """The fields of gpu_worker.quant.scheme.Activations that the kernel needs."""

    @property
    def kind(self) -> str: ...
    @property
    def granularity(self) -> str: ...
    @property
    def group(self) -> int: ...


@triton.jit
def _quantize_rows(
    x, out, scales, input_scale, x_stride, K, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, FLOAT: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program a row and group: x [T, K] -> out [T, K], scales f32[T, groups].
    begin_short_kernel(PDL)
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    column = number * GROUP + place
    inside = (place < GROUP) & (column < K)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    largest = LARGEST if FLOAT else 127.0
    if STATIC:
        scale = tl.maximum(tl.load(input_scale), TINY)
    else:
        # The bits of absolute values are ordered as they are, and a NaN is above all: one reduction finds both.
        top_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        top = top_bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(tl.minimum(top, HUGE), largest), TINY)
        scale = tl.where(top_bits > INFINITY_BITS, float("nan"), scale)
    scaled = value * tl.div_rn(1.0, scale)
    scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -largest), largest), 0.0)  # a NaN is in the scale
    if not FLOAT:
        scaled = (scaled + HALF_ULP) - HALF_ULP
    tl.store(out + row * K + column, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row * groups + number, scale)


def quantize_rows(x: Tensor, how: Rounding, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K], rows contiguous -> f8 or i8 [T, K], scales f32[T, ceil(K / group)] (one unless how groups)."""
    rows, k = x.shape
    group = how.group if how.granularity == "group" else k
    groups = triton.cdiv(k, group)
    out = torch.empty((rows, k), dtype=torch.float8_e4m3fn if how.kind == "float" else torch.int8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(group)
    if rows:
        _quantize_rows[(rows, groups)](
            x, out, scales, x if input_scale is None else input_scale, x.stride(0), k, groups,
            GROUP=group, BLOCK=block, FLOAT=how.kind == "float", STATIC=input_scale is not None,
            num_warps=min(max(block // 512, 1), 16), **overlapped(x),
        )  # fmt: skip
    return out, scales


@triton.jit
def _bytes(start, cell, inside, EVEN_K: tl.constexpr):
    """A tile of bytes, 0 outside. Columns outside are loaded as integers: float8 has no constant to fill with."""
    if EVEN_K:
        return tl.load(start + cell)
    else:
        pointer = start.to(tl.pointer_type(tl.int8), bitcast=True)
        return tl.load(pointer + cell, mask=inside[None, :], other=0).to(start.dtype.element_ty, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def _byte_linear(
    x, x_scales, values, scales, bias, out, parts, arrived, M, N, K, x_groups, scale_columns, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, BLOCKED: tl.constexpr,
    SWAP: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [M, K], values [N, K] of one byte, contiguous; x_scales f32[M, x_groups]; scales f32[blocks, N]; out [M, N].
    # BLOCKED: every BK columns lie in one block of scale_columns; otherwise all K columns of a row share a scale.
    pid_m, pid_n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, i = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_inside, n_inside = m < M, n < N
    x_row, w_row = tl.minimum(m, M - 1).to(tl.int64) * K, tl.minimum(n, N - 1).to(tl.int64) * K
    integer: tl.constexpr = values.dtype.element_ty == tl.int8
    kind: tl.constexpr = tl.int32 if integer and not BLOCKED else tl.float32
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), kind)
    per_part = tl.cdiv(steps, SPLIT)
    wait_for_previous(PDL)
    for step in range(part * per_part, tl.minimum((part + 1) * per_part, steps)):
        k = step * BK + i
        # Rows beyond M or N repeat the last one: they are not stored.
        a = _bytes(x, x_row[:, None] + k[None, :], k < K, EVEN_K)
        w = _bytes(values, w_row[:, None] + k[None, :], k < K, EVEN_K)
        if BLOCKED:
            block = step * BK // scale_columns
            x_scale = tl.load(x_scales + m * x_groups + tl.minimum(block, x_groups - 1), mask=m_inside, other=0.0)
            w_scale = tl.load(scales + block * N + n, mask=n_inside, other=0.0)
            if SWAP:
                total += tl.dot(w, tl.trans(a)).to(tl.float32) * w_scale[:, None] * x_scale[None, :]
            else:
                total += tl.dot(a, tl.trans(w)).to(tl.float32) * x_scale[:, None] * w_scale[None, :]
        elif SWAP:
            total = tl.dot(w, tl.trans(a), total, out_dtype=kind)
        else:
            total = tl.dot(a, tl.trans(w), total, out_dtype=kind)
    release_next(PDL)
    result = (tl.trans(total) if SWAP else total).to(tl.float32)
    if not BLOCKED:
        x_scale = tl.load(x_scales + m, mask=m_inside, other=0.0)
        result = result * x_scale[:, None] * tl.load(scales + n, mask=n_inside, other=0.0)[None, :]
    tile = pid_n * tl.num_programs(0) + pid_m
    finish_tile(out, bias, parts, arrived, result, m, n, tile, part, M, N, SPLIT, HAS_BIAS)


def byte_linear(
    x: Tensor, x_scales: Tensor, values: Tensor, scales: Tensor, block: int, bias: Tensor | None, dtype: torch.dtype,
    library_rows: int = LIBRARY_ROWS,
) -> Tensor:  # fmt: skip
    """x f8 or i8 [M, K], x_scales f32[M, 1 or blocks], values [N, K] of x's dtype, scales f32[blocks, N] -> [M, N] of dtype."""
    (m, k), n = x.shape, values.shape[0]
    whole_rows = scales.shape[0] == 1 and x_scales.shape[1] == 1
    can = x.is_cuda and x.dtype != torch.int8 and dtype == torch.bfloat16 and k % 16 == n % 16 == 0
    if m > library_rows and whole_rows and can:
        return torch._scaled_mm(x, values.t(), x_scales, scales, bias=bias, out_dtype=dtype)
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    if m:
        _fused(x, x_scales, values, scales, block, bias, out, _shape(m, n))
    return out


def _shape(rows: int, n: int) -> dict[str, int]:
    """Tile sizes, launch options and waves of programs, as measured on an H200. W [n, K]."""
    wide = n > 8192
    if rows <= 16:
        return {"BM": 16, "BN": 128 if wide else 64, "BK": 256, "SWAP": 1, "num_warps": 8 if wide else 4,
                "num_stages": 3 if wide else 4, "waves": 1}  # fmt: skip
    if rows <= SKINNY_ROWS:
        return {"BM": 64, "BN": 64, "BK": 128 if wide else 256, "SWAP": 1, "num_warps": 4, "num_stages": 3, "waves": 1}
    return {"BM": 128, "BN": 128, "BK": 128, "SWAP": 0, "num_warps": 8, "num_stages": 3, "waves": 1}


def _fused(
    x: Tensor, x_scales: Tensor, values: Tensor, scales: Tensor, block: int, bias: Tensor | None, out: Tensor,
    shape: dict[str, int],
) -> None:  # fmt: skip
    (m, k), n = x.shape, values.shape[0]
    blocked = scales.shape[0] > 1 or x_scales.shape[1] > 1
    shape = dict(shape)
    waves = shape.pop("waves")
    if blocked:
        while block % shape["BK"]:
            shape["BK"] //= 2
    steps = triton.cdiv(k, shape["BK"])
    grid = (triton.cdiv(m, shape["BM"]), triton.cdiv(n, shape["BN"]))
    split = choose_split(grid[0] * grid[1], steps, x.device, waves) if m <= SKINNY_ROWS else 1
    parts = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else out
    _byte_linear[(*grid, split)](
        x, x_scales, values, scales, out if bias is None else bias, out, parts, counters(x.device),
        m, n, k, x_scales.shape[1], block if blocked else k, steps,
        SPLIT=split, BLOCKED=blocked, EVEN_K=k % shape["BK"] == 0, HAS_BIAS=bias is not None,
        **shape, **overlapped(x),
    )  # fmt: skip
