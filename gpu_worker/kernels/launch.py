"""Programmatic dependent launch (Hopper): a kernel's blocks are placed while the kernel before it still runs.

A kernel of a decode step waits first: nothing may be read before all memory of the previous kernel is visible. A short
kernel lets the next one be placed at once (`begin_short_kernel`); one that streams memory does so only when its loop is
done (`wait_for_previous` ... `release_next`), because waiting blocks would take room from its own: on an H200 an early
release made a 28 us product of one row take 38 us. Kernels that do neither are simply waited for.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_short_kernel(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


def overlapped(tensor: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch on the tensor's device."""
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def padded(count: int) -> int:
    """A compile-time size for count things. Few sizes, because each one compiles its kernel anew."""
    return next(size for size in (64, 256, 1024, 4096, 16384, 65536) if size >= count)
