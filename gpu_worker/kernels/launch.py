"""Programmatic dependent launch (Hopper): a kernel's blocks are placed while the kernel before it still runs.

Every kernel of a decode step begins with `begin_step_kernel`, which lets the next kernel be placed and then waits until
all memory of the previous one is visible; nothing may be read before it. Kernels without it are simply waited for.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_step_kernel(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def overlapped(tensor: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch on the tensor's device."""
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
