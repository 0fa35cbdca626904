"""Quantized matrices with the call of gpu_worker.model.linear: y = x W^T + b, few bits in memory.

On a GPU the Triton kernels run; elsewhere torch, a block of rows at a time, so that no whole matrix is ever unpacked.
"""

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.quant.joining import Form, can_join, join
from gpu_worker.quant.packed import PackedInts, for_kernels, pack
from gpu_worker.quant.rounding import float8_to_bf16, quantize_rows
from gpu_worker.quant.weights import ByteWeight, Weight

BLOCK_ELEMENTS = 2**20  # unpacked at once on a CPU


class Matmul(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""

    @property
    def num_bytes(self) -> int: ...


def quantized_linear(parts: Iterable[Weight], bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> Matmul:
    """One matrix of the parts, one under the other along the outputs; bias [out]: of all of them. dtype: of x and of y.

    Parts may be read as they are asked for: each is packed before the next one, so that only one lies unpacked at a time.
    """
    forms = list(map(partial(_form, device=device), parts))  # map, unlike a loop's variable, keeps no part
    bias = _placed(bias, device, dtype)
    if can_join(forms):
        return _linear(join(forms), bias, device, dtype)
    return _Stacked([_linear(form, None, device, dtype) for form in forms], bias)


def _form(weight: Weight, device: torch.device) -> Form:
    if isinstance(weight, ByteWeight):
        return weight
    if device.type == "cpu" and weight.bits == 8 and weight.zeros is None and weight.scales.shape[1] == 1:
        return weight.as_bytes()  # unpacks faster
    return pack(weight).to(device)


def _linear(form: Form, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> Matmul:
    if isinstance(form, ByteWeight):
        return ByteLinear(form, bias, device)
    if device.type == "cpu" and dtype == torch.bfloat16 and _has_fused_int4(form):
        return FusedInt4Linear(form, bias)
    return IntLinear(form, bias)


def _placed(bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(device=device, dtype=dtype)


def _size(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class IntLinear:
    """Weights of 4 or 8 bits, inputs as they are."""

    def __init__(self, packed: PackedInts, bias: Tensor | None) -> None:
        self._columns = packed.columns
        self._multiply = partial(int_linear, packed=packed, bias=bias)
        self._num_bytes = packed.num_bytes + _size(bias)
        if packed.words.device.type == "cuda":
            multiply = importlib.import_module("gpu_worker.kernels.w4a16_linear").w4a16_linear
            weight = for_kernels(packed)
            self._multiply = partial(multiply, weight=weight, bias=bias)
            self._num_bytes = weight.num_bytes + _size(packed.columns, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x if self._columns is None else x.index_select(1, self._columns))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


def int_linear(x: Tensor, packed: PackedInts, bias: Tensor | None) -> Tensor:
    """Torch twin of kernels/w4a16_linear. x: [T, K], columns arranged -> [T, N] of x's dtype."""
    rows = packed.num_rows
    out = x.new_empty((x.shape[0], rows))
    step = max(BLOCK_ELEMENTS // max(packed.num_columns, 1), 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        weight = packed.dequantize(start, stop, x.dtype)[:, : x.shape[1]]
        out[:, start:stop] = F.linear(x, weight, None if bias is None else bias[start:stop])
    return out


_FUSED_GROUPS = (128, 64, 32)  # what torch's kernel knows (256 too, which is never needed)


def _has_fused_int4(packed: PackedInts) -> bool:
    fits = packed.bits == 4 and packed.num_rows % 16 == 0
    return fits and hasattr(torch, "_weight_int4pack_mm_for_cpu") and hasattr(torch, "_convert_weight_to_int4pack_for_cpu")


class FusedInt4Linear:
    """4-bit weights and bf16 inputs on a CPU through torch's fused kernel, which reads 4 bits where F.linear reads 16."""

    def __init__(self, packed: PackedInts, bias: Tensor | None) -> None:
        self._columns = packed.columns
        self._bias = bias
        self._num_columns = packed.num_columns
        self._group = next(size for size in _FUSED_GROUPS if packed.group % size == 0 and packed.num_columns % size == 0)
        scales = packed.scales.float().repeat_interleave(packed.group // self._group, 0)[: packed.num_columns // self._group]
        zeros = torch.zeros_like(scales)  # of w = (code - 8) * scale + zero
        if packed.zeros is not None:
            spread = packed.zeros.float().repeat_interleave(packed.group // self._group, 0)[: scales.shape[0]]
            zeros = (8 - spread) * scales
        self._scales_and_zeros = torch.stack([scales, zeros], 2).to(torch.bfloat16)
        step = max(BLOCK_ELEMENTS // packed.num_columns // 64, 1) * 64  # the layout goes by tiles of 64 rows
        self._tiles = torch.empty((packed.num_rows, packed.num_columns // 2), dtype=torch.uint8)
        for start in range(0, packed.num_rows, step):
            stop = min(start + step, packed.num_rows)
            codes = packed.codes(start, stop).int()
            self._tiles[start:stop] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)

    def __call__(self, x: Tensor) -> Tensor:
        if self._columns is not None:
            x = x.index_select(1, self._columns)
        x = F.pad(x, (0, self._num_columns - x.shape[1])).contiguous()
        y = torch._weight_int4pack_mm_for_cpu(x, self._tiles, self._group, self._scales_and_zeros)
        return y if self._bias is None else y + self._bias

    @property
    def num_bytes(self) -> int:
        return _size(self._tiles, self._scales_and_zeros, self._columns, self._bias)


class ByteLinear:
    """Weights of one byte (int8 or float8), inputs rounded to the same kind."""

    def __init__(self, weight: ByteWeight, bias: Tensor | None, device: torch.device) -> None:
        self.values = weight.values.to(device).contiguous()  # [N, K]
        self.scales = weight.scales.t().contiguous().to(device)  # f32[blocks, N]
        self._block = weight.block
        self.how = weight.activations
        self._input_scale = None if weight.input_scale is None else weight.input_scale.to(device)
        self.bias = bias
        self._kernels = importlib.import_module("gpu_worker.kernels.fp8_linear") if device.type == "cuda" else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.how is None or x.shape[0] == 0:
            return byte_weight_linear(x, self.values, self.scales, self._block, self.bias)
        if self._kernels is not None:
            rounded, x_scales = self._kernels.quantize_rows(x, self.how, self._input_scale)
            y: Tensor = self._kernels.byte_linear(rounded, x_scales, self.values, self.scales, self._block, self.bias, x.dtype)
            return y
        rounded, x_scales = quantize_rows(x, self.how, self._input_scale)
        return byte_linear(rounded, x_scales, self.values, self.scales, self._block, self.bias, x.dtype)

    @property
    def num_bytes(self) -> int:
        return _size(self.values, self.scales, self._input_scale, self.bias)


def byte_linear(
    x: Tensor, x_scales: Tensor, values: Tensor, scales: Tensor, block: int, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Torch twin of kernels/fp8_linear.byte_linear.

    x f8 or i8 [T, K], x_scales f32[T, 1 or blocks], values [N, K] of x's dtype, scales f32[blocks, N] -> [T, N] of dtype.
    """
    tokens, k = x.shape
    rows = values.shape[0]
    out = torch.empty((tokens, rows), dtype=dtype, device=x.device)
    step = max(BLOCK_ELEMENTS // max(k, 1), 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        total = torch.zeros((tokens, stop - start), device=x.device)
        for number in range(scales.shape[0]):
            part = slice(number * block, min((number + 1) * block, k))
            product = _product(x[:, part], values[start:stop, part], dtype)
            x_scale = x_scales[:, min(number, x_scales.shape[1] - 1), None]
            total += product * x_scale * scales[number, start:stop]
        out[:, start:stop] = total if bias is None else total + bias[start:stop].float()
    return out


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """f32[T, N] of small integers, exact, or of float8 values, which bf16 holds exactly: float32 sums, rounded to dtype."""
    if x.dtype == torch.int8:
        return torch._int_mm(x.contiguous(), weight.t()).float()
    a, b = float8_to_bf16(x), float8_to_bf16(weight)
    return F.linear(a, b).float() if dtype == torch.bfloat16 else F.linear(a.float(), b.float())


def byte_weight_linear(x: Tensor, values: Tensor, scales: Tensor, block: int, bias: Tensor | None) -> Tensor:
    """Weights of one byte, inputs as they are: unpacked a block of rows at a time."""
    rows, k = values.shape
    out = x.new_empty((x.shape[0], rows))
    step = max(BLOCK_ELEMENTS // max(k, 1), 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        weight = values[start:stop]
        weight = weight.to(x.dtype) if weight.dtype == torch.int8 else float8_to_bf16(weight).to(x.dtype)
        if scales.shape[0] == 1:
            part = F.linear(x, weight) * scales[0, start:stop]
        else:
            spread = scales[:, start:stop].t().repeat_interleave(block, 1)[:, :k]
            part = F.linear(x, (weight * spread).to(x.dtype))
        out[:, start:stop] = part if bias is None else part + bias[start:stop]
    return out


class _Stacked:
    """Parts that no single multiplication can do: their outputs side by side."""

    def __init__(self, parts: list[Matmul], bias: Tensor | None) -> None:
        self._parts = parts
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([part(x) for part in self._parts], 1)
        return y if self._bias is None else y + self._bias

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts) + _size(self._bias)
