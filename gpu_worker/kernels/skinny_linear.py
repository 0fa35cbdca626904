"""y = x W^T for one row: reads the weights once at memory speed, with the neighbours of the product fused in.

A layer of one decode row is bound by its weights and by the number of dependent launches, so the norm before the product
and the SiLU or the residual after it ride along. The sum of squares that the norm needs is taken from the same reads of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import overlapped, release_next, wait_for_previous


@triton.jit
def _tile(cells, inside, EVEN: tl.constexpr):
    """A tile of weights, 0 where columns end (float8 has no constant to fill with: its columns must be even)."""
    if EVEN:
        return tl.load(cells)
    else:
        return tl.load(cells, mask=inside[None, :], other=0.0)


@triton.jit
def _skinny_linear(
    x,
    weight,
    gain,
    residual,
    row_scales,
    out,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Lines of the weight [outputs (twice that with SILU: gates, then ups), INPUTS], contiguous.
    wait_for_previous(PDL)
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = line < outputs
    column = tl.arange(0, BLOCK_K)
    cells = weight + tl.minimum(line, outputs - 1).to(tl.int64)[:, None] * INPUTS + column[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for first in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        w = _tile(cells + first, first + column < INPUTS, INPUTS % BLOCK_K == 0)
        value = tl.load(x + first + column, mask=first + column < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(gain + first + column, mask=first + column < INPUTS, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * value[None, :]
        if SILU:
            up = _tile(cells + outputs * INPUTS + first, first + column < INPUTS, INPUTS % BLOCK_K == 0)
            ups += up.to(tl.float32) * value[None, :]
    release_next(PDL)
    y = tl.sum(sums, 1)
    if SCALED:
        y *= tl.load(row_scales + line, mask=inside, other=0.0)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        y *= scale
    if SILU:
        up = tl.sum(ups, 1) * scale
        if SCALED:
            up *= tl.load(row_scales + outputs + line, mask=inside, other=0.0)
        y = y / (1.0 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual + line, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + line, y.to(out.dtype.element_ty), mask=inside)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    row_scales: Tensor | None = None,
    block_n: int = 0,
    block_k: int = 0,
    warps: int = 4,
    stages: int = 0,
) -> Tensor:
    """x: [1, K] times weight [N, K] -> [1, N], float32 sums.

    gain [K]: x is replaced by its RMS norm with this gain; silu: the weight is [gate: N / 2 | up: N / 2] and the result
    silu(gate) * up, [1, N / 2]; residual [1, N]: added; out may be the residual; row_scales f32 [N]: of the weight's rows,
    which may then be float8 (K a multiple of the tile).
    """
    inputs = x.shape[1]
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    stages = stages or (3 if outputs <= 4096 and not silu else 4)
    if not block_n:
        # Measured on an H200: long tiles for few outputs, square ones for many.
        block_n, block_k = (8, 512) if outputs <= 4096 and not silu else (16, 256)
    _skinny_linear[(triton.cdiv(outputs, block_n),)](
        x, weight, gain if gain is not None else x, residual if residual is not None else x,
        row_scales if row_scales is not None else x, out, outputs, eps,
        INPUTS=inputs, BLOCK_N=block_n, BLOCK_K=block_k, NORM=gain is not None, SILU=silu,
        RESIDUAL=residual is not None, SCALED=row_scales is not None, STAGES=stages, num_warps=warps, **overlapped(x),
    )  # fmt: skip
    return out
