"""Inputs rounded to 8 bits with a scale per row or per group of columns: torch twin of kernels/fp8_linear.quantize_rows."""

import torch
from torch import Tensor

from gpu_worker.quant.formats.fp8 import LARGEST, TINY
from gpu_worker.quant.scheme import Activations

_HUGE = 2.0**127  # of a scale times the largest value, so that it does not overflow again


def float8_to_bf16(values: Tensor) -> Tensor:
    """Exact, and 15 times as fast as torch's conversion on a CPU; NaN becomes 480, so it must be in the scales.

    The bits of a float8_e4m3fn, moved to where bf16 has its sign, its low exponent bits and its high fraction bits, are the
    value divided by 2^120: the biases are 127 and 7. Subnormal values come out right too.
    """
    bits = (values.view(torch.int8).to(torch.int16) << 4) & (-0x8000 | 0x7F0)
    return bits.view(torch.bfloat16) * 2.0**120


def quantize_rows(x: Tensor, how: Activations, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] -> f8 or i8 [T, K], scales f32[T, ceil(K / group)] (one column unless how groups).

    A row of zeros stays exact zeros; a tiny row keeps a finite scale; infinities saturate at the largest value; a NaN makes the
    scale of its row (or group) NaN and no other.
    """
    largest = LARGEST if how.kind == "float" else 127.0
    group = max(how.group if how.granularity == "group" else x.shape[1], 1)
    values = x.float()
    if input_scale is not None:
        scales = input_scale.clamp(min=TINY).reshape(1, 1).expand(x.shape[0], 1)
    else:
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % group)).reshape(
            len(x), -(-values.shape[1] // group), group
        )
        scales = (padded.abs().amax(2).clamp(max=_HUGE) / largest).clamp(min=TINY)
    spread = scales.repeat_interleave(group, 1)[:, : x.shape[1]]
    scaled = (values * spread.reciprocal()).clamp(-largest, largest)
    if how.kind == "float":
        return scaled.to(torch.float8_e4m3fn), scales
    return scaled.round().to(torch.int8), scales
