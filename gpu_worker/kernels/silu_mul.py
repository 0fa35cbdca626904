"""SiLU of the gate half times the up half of an MLP's first product (Shazeer, 2020: SwiGLU)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import begin_short_kernel, overlapped

IN_PLACE_ROWS = 1024


@triton.jit
def _silu_mul(x, out, width, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # x row: [gate: width | up: width], contiguous; out may be the gates.
    begin_short_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """x: [T, 2 * I] bf16 or f32, contiguous -> [T, I]: silu(x[:, :I]) * x[:, I:].

    Of many rows the result overwrites the gates, so that the widest moment of a step needs no third tensor of width I.
    """
    rows, width = x.shape[0], x.shape[1] // 2
    out = x[:, :width] if rows >= IN_PLACE_ROWS else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(width), 1024 if rows < 64 else 2048)
        _silu_mul[(rows, triton.cdiv(width, block))](x, out, width, out.stride(0), BLOCK=block, num_warps=4, **overlapped(x))
    return out
