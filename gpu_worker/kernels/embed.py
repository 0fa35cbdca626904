"""Gather of embedding rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import begin_short_kernel, overlapped


@triton.jit
def _embed(input_ids, weight, out, scale, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_short_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    token = tl.load(input_ids + row).to(tl.int64)
    value = tl.load(weight + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, (value * scale).to(out.dtype.element_ty), mask=inside)


def embed(input_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """input_ids: i32 [T]; weight: [V, H] bf16 or f32 -> [T, H], times scale."""
    rows, hidden = input_ids.shape[0], weight.shape[1]
    out = torch.empty((rows, hidden), dtype=weight.dtype, device=weight.device)
    if rows:
        block = min(triton.next_power_of_2(hidden), 2048)
        _embed[(rows, triton.cdiv(hidden, block))](
            input_ids, weight, out, scale, HIDDEN=hidden, BLOCK=block, num_warps=4, **overlapped(weight)
        )
    return out
