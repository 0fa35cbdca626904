"""Root mean square norm of rows, alone or after adding into the residual (Zhang and Sennrich, 2019)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import begin_short_kernel, overlapped


@triton.jit
def _rms_norm(
    x, residual, weight, out, x_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    # One program per row. residual and out are contiguous; x may be a view with a row stride.
    begin_short_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        cell = residual + row * HIDDEN + column
        value += tl.load(cell, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(cell, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, add: bool) -> Tensor:
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    if rows:
        warps = min(max(block // 512, 1), 16)
        _rms_norm[(rows,)](
            x, residual, weight, out, x.stride(0), eps, HIDDEN=hidden, BLOCK=block, ADD=add, num_warps=warps, **overlapped(x)
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [T, H] bf16 or f32, rows contiguous; weight: [H] -> [T, H] of x's dtype, float32 inside."""
    return _launch(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, H] += x in place (rounded to its dtype), then the norm of it -> [T, H]."""
    return _launch(x, residual, weight, eps, add=True)
