"""y = x W^T + b with W of 4- or 8-bit integers, unpacked in registers in the main loop; layout: gpu_worker/quant/packed.py.

The tile is computed as y^T = W x^T, so that unpacked weights are the left operand, which the matrix units take from registers:
they never pass through shared memory, and a few rows of x waste no more than 16 columns. The codes minus their zero point are
exact in bf16; scales are applied in float32 to the sum over each group. The result therefore does not depend on which variant
ran, but for the order of float32 sums. Above UNPACK_ROWS rows of x, W is unpacked once (a slice at a time, small enough to stay
in the cache) and the library multiplies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.split_k import choose_split, counters, finish_tile

SKINNY_ROWS = 64
UNPACK_ROWS = 768
UNPACK_ELEMENTS = 2**24  # of a slice of W: 32 MB
PLANE = tl.constexpr(32)
TOP_BF16 = tl.constexpr(0x4300)  # the bits of 128: its low four bits count ones
TOP_F16 = tl.constexpr(0x6400)  # the bits of 1024: likewise

# Two 16-bit words at once: plane j of both, as 128 + code (bf16) or 1024 + code (float16), minus (128 or 1024) + zero.
_BF16 = "{{ .reg .b32 t; shr.u32 t, $1, {}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 $0, t, $2; }}"
_F16 = "{{ .reg .b32 t; shr.u32 t, $1, {}; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 $0, t, $2; }}"
_BF16_0, _BF16_1 = tl.constexpr(_BF16.format(0)), tl.constexpr(_BF16.format(4))
_BF16_2, _BF16_3 = tl.constexpr(_BF16.format(8)), tl.constexpr(_BF16.format(12))
_F16_0, _F16_1 = tl.constexpr(_F16.format(0)), tl.constexpr(_F16.format(4))
_F16_2, _F16_3 = tl.constexpr(_F16.format(8)), tl.constexpr(_F16.format(12))


@triton.jit
def _zero_offset(zeros, at, inside, BITS: tl.constexpr, DTYPE: tl.constexpr, HAS_ZEROS: tl.constexpr, BN: tl.constexpr):
    """[BN]: what to subtract from the codes of one group as `_plane` makes them."""
    if HAS_ZEROS:
        zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    else:
        zero = tl.full((BN,), 1 << (BITS - 1), tl.float32)
    if BITS == 4 and DTYPE == tl.bfloat16:
        zero += 128.0
    if BITS == 4 and DTYPE == tl.float16:
        zero += 1024.0
    return zero.to(DTYPE)


@triton.jit
def _plane(words, zero, J: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """words i16[BN, 32], zero [BN] -> the codes of plane J minus the zero point, exact, as DTYPE [BN, 32]."""
    if BITS == 8:
        return ((words >> (8 * J)) & 0xFF).to(DTYPE) - zero[:, None]
    if ASM:
        return _plane_asm(words, tl.broadcast_to(zero[:, None], words.shape), J, DTYPE)
    codes = (words >> (4 * J)) & 0xF
    if DTYPE == tl.bfloat16:
        return (codes | TOP_BF16).to(tl.int16).to(tl.bfloat16, bitcast=True) - zero[:, None]
    elif DTYPE == tl.float16:
        return (codes | TOP_F16).to(tl.int16).to(tl.float16, bitcast=True) - zero[:, None]
    else:
        return codes.to(DTYPE) - zero[:, None]


@triton.jit
def _plane_asm(words, zero, J: tl.constexpr, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        if J == 0:
            return tl.inline_asm_elementwise(_BF16_0, "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif J == 1:
            return tl.inline_asm_elementwise(_BF16_1, "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif J == 2:
            return tl.inline_asm_elementwise(_BF16_2, "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_BF16_3, "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        if J == 0:
            return tl.inline_asm_elementwise(_F16_0, "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2)
        elif J == 1:
            return tl.inline_asm_elementwise(_F16_1, "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2)
        elif J == 2:
            return tl.inline_asm_elementwise(_F16_2, "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_F16_3, "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _int_linear(
    x, words, scales, zeros, bias, out, parts, arrived, x_stride, M, N, K, blocks, group,
    BITS: tl.constexpr, RUN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # x [M, K] rows of x_stride; words i16[blocks, N, 32]; scales, zeros [G, N]; out [M, N].
    # RUN: planes of a block that share a scale. Programs of one tile: SPLIT runs of blocks.
    PLANES: tl.constexpr = 16 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    pid_m, pid_n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, i = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), tl.arange(0, PLANE)
    m_inside, n_inside = m < M, n < N
    x_row = x + m.to(tl.int64)[None, :] * x_stride
    word = words + n[:, None] * PLANE + i[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    per_part = tl.cdiv(blocks, SPLIT)
    for block in range(part * per_part, tl.minimum((part + 1) * per_part, blocks)):
        packed = tl.load(word + block.to(tl.int64) * N * PLANE, mask=n_inside[:, None], other=0)
        for run in tl.static_range(PLANES // RUN):
            start = (block * PLANES + run * RUN) * PLANE
            at = (start // group) * N + n
            zero = _zero_offset(zeros, at, n_inside, BITS, dtype, HAS_ZEROS, BN)
            of_group = tl.zeros((BN, BM), tl.float32)
            for j in tl.static_range(RUN):
                k = start + j * PLANE + i
                inside = m_inside[None, :] & ((k < K)[:, None] | EVEN_K)
                x_tile = tl.load(x_row + k[:, None], mask=inside, other=0.0)
                weight = _plane(packed, zero, run * RUN + j, BITS, dtype, ASM)
                of_group = tl.dot(weight, x_tile, of_group, input_precision="ieee")
            scale = tl.load(scales + at, mask=n_inside, other=0.0).to(tl.float32)
            total += of_group * scale[:, None]
    tile = pid_n * tl.num_programs(0) + pid_m
    finish_tile(out, bias, parts, arrived, tl.trans(total), m, n, tile, part, M, N, SPLIT, HAS_BIAS)


@triton.jit
def _unpack(
    words, scales, zeros, out, first, N, group, columns,
    BITS: tl.constexpr, BN: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    # Rows first .. first + gridDim.0 * BN of W, unpacked into out [rows, columns]: exact products, rounded once.
    PLANES: tl.constexpr = 16 // BITS
    block = tl.program_id(1)
    row, i = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, PLANE)
    n = first + row
    inside = n < N
    packed = tl.load(words + (block.to(tl.int64) * N + n)[:, None] * PLANE + i[None, :], mask=inside[:, None], other=0)
    for j in tl.static_range(PLANES):
        start = (block * PLANES + j) * PLANE
        at = (start // group) * N + n
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        zero = _zero_offset(zeros, at, inside, BITS, tl.float32, HAS_ZEROS, BN)
        weight = _plane(packed, zero, j, BITS, tl.float32, False) * scale[:, None]
        column = start + i
        cell = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out + cell, weight.to(out.dtype.element_ty), mask=inside[:, None] & (column < columns)[None, :])


def unpack_rows(
    words: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int, first: int, out: Tensor
) -> Tensor:
    """Fill out [rows, columns] with rows first .. first + rows of W."""
    rows, columns = out.shape
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, PLANE.value * (16 // bits)))
    has_zeros = zeros is not None
    # Rows past out's end are masked by N: the slice ends there.
    limit = first + rows
    _unpack_launch(grid, words, scales, zeros if has_zeros else scales, out, first, limit, words.shape[1], group, bits, has_zeros)
    return out
