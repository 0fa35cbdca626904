"""Inputs rounded to 8 bits with a scale per row or per group of columns: torch twin of kernels/fp8_linear.quantize_rows."""

import torch
from torch import Tensor

from gpu_worker.quant.formats.fp8 import LARGEST, TINY
from gpu_worker.quant.scheme import Activations

_HUGE = torch.finfo(torch.float32).max


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
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % group)).reshape(len(x), -1, group)
        scales = (padded.abs().amax(2).clamp(max=_HUGE) / largest).clamp(min=TINY)
    spread = scales.repeat_interleave(group, 1)[:, : x.shape[1]]
    scaled = (values / spread).clamp(-largest, largest)
    if how.kind == "float":
        return scaled.to(torch.float8_e4m3fn), scales
    return scaled.round().to(torch.int8), scales
