"""Norms and the gated activation of rows."""

import math

import torch
from numba import carray
from torch import Tensor

from gpu_worker.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    add,
    broadcast,
    divide,
    exp,
    fma,
    jit,
    load_part,
    multiply,
    next_task,
    size_of,
    store_part,
    subtract,
    sum_of,
    zeros,
)
from gpu_worker.cpu.team import Kernel


@jit
def norm_rows(args, element):
    """residual += x if there is one, rounded to its type; out = norm of the sum. A task: one row."""
    a = carray(args, 1)[0]
    width, weight, size = a.width, a.weight, size_of(element)
    row = next_task(args)
    while row < a.num_tasks:
        x, out = a.x + row * a.x_stride, a.out + row * width * size
        residual = a.residual + row * width * size
        squares = zeros()
        for i in range(0, width, 16):
            value = load_part(element, x + i * size, width - i)
            if a.residual:
                at = residual + i * size
                store_part(element, at, width - i, add(value, load_part(element, at, width - i)))
                value = load_part(element, at, width - i)
            squares = fma(value, value, squares)
        source = residual if a.residual else x
        scale = broadcast(1 / math.sqrt(sum_of(squares) / width + a.eps))
        for i in range(0, width, 16):
            value = multiply(load_part(element, source + i * size, width - i), scale)
            store_part(element, out + i * size, width - i, multiply(value, load_part(element, weight + i * size, width - i)))
        row = next_task(args)


@jit
def silu_mul_rows(args, element):
    """A task: one row."""
    a = carray(args, 1)[0]
    width, size = a.width, size_of(element)
    row = next_task(args)
    while row < a.num_tasks:
        gate, out = a.x + row * 2 * width * size, a.out + row * width * size
        up = gate + width * size
        for i in range(0, width, 16):
            x = load_part(element, gate + i * size, width - i)
            x = divide(x, add(broadcast(1.0), exp(subtract(zeros(), x))))
            store_part(element, out + i * size, width - i, multiply(x, load_part(element, up + i * size, width - i)))
        row = next_task(args)


def _norm_float32(args):
    norm_rows(args, FLOAT32)


def _norm_bfloat16(args):
    norm_rows(args, BFLOAT16)


def _silu_mul_float32(args):
    silu_mul_rows(args, FLOAT32)


def _silu_mul_bfloat16(args):
    silu_mul_rows(args, BFLOAT16)


_NORM = Kernel(_norm_float32, _norm_bfloat16, "x x_stride residual weight out width", "eps")
_SILU_MUL = Kernel(_silu_mul_float32, _silu_mul_bfloat16, "x out width")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Ops.rms_norm."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Ops.add_rms_norm."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype)
    stride = x.stride(0) * x.itemsize
    target = 0 if residual is None else residual.data_ptr()
    _NORM(x.dtype, rows, rows * width, x.data_ptr(), stride, target, weight.data_ptr(), out.data_ptr(), width, eps)
    return out


def silu_mul(x: Tensor) -> Tensor:
    """See Ops.silu_mul."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype)
    _SILU_MUL(x.dtype, rows, 4 * rows * width, x.data_ptr(), out.data_ptr(), width)
    return out
