"""One matrix of the model: y = x W^T + b. Other forms of it (packed, quantized, sharded) are made from a finished Linear."""

import importlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Matmul(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""

    @property
    def num_bytes(self) -> int: ...


class Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def into(self, x: Tensor, out: Tensor) -> None:
        """out = self(x), without a tensor in between."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(gate) * up of self(x) = [gate | up]."""
        return silu_mul(self(x))

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


def multiply_into(matrix: Matmul, x: Tensor, out: Tensor) -> None:
    """out = matrix(x), without a tensor in between where the matrix is plain."""
    if isinstance(matrix, Linear):
        matrix.into(x, out)
    else:
        out.copy_(matrix(x))


def gated(matrix: Matmul, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
    """silu(gate) * up of matrix(x) = [gate | up], in one kernel where there is one."""
    return matrix.gated(x, silu_mul) if isinstance(matrix, Linear) else silu_mul(matrix(x))


class PackedLinear:
    """The weight in oneDNN's own block order: two to four times as fast as F.linear on a CPU when there are few rows."""

    PACKED_FOR_ROWS = 32  # the block order is chosen for about this many rows

    def __init__(self, linear: Linear) -> None:
        self._num_bytes = linear.num_bytes
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, self.PACKED_FOR_ROWS)
        self._bias = linear.bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return y

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU gains from PackedLinear."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def for_device(linear: Linear) -> Matmul:
    """The fastest form of a finished matrix where it lies."""
    weight = linear.weight
    if weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16):
        few_rows: Linear = importlib.import_module("gpu_worker.kernels.few_rows_linear").FewRowsLinear(weight, linear.bias)
        return few_rows
    return PackedLinear(linear) if weight.device.type == "cpu" and can_pack(weight.dtype) else linear
