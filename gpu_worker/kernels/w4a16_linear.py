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
UNPACK_ROWS = 384
UNPACK_ELEMENTS = 2**24  # of a slice of W: 32 MB
PLANE = tl.constexpr(32)

# Two 16-bit words at once: plane j of both, as 128 + code (bf16) or 1024 + code (float16), minus (128 or 1024) + zero.
_BF16 = "{{ .reg .b32 t; shr.u32 t, $1, {}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 $0, t, $2; }}"
_F16 = "{{ .reg .b32 t; shr.u32 t, $1, {}; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 $0, t, $2; }}"
_BF16_0, _BF16_1 = tl.constexpr(_BF16.format(0)), tl.constexpr(_BF16.format(4))
_BF16_2, _BF16_3 = tl.constexpr(_BF16.format(8)), tl.constexpr(_BF16.format(12))
_F16_0, _F16_1 = tl.constexpr(_F16.format(0)), tl.constexpr(_F16.format(4))
_F16_2, _F16_3 = tl.constexpr(_F16.format(8)), tl.constexpr(_F16.format(12))


@triton.jit
def _offset(zeros, at, inside, BITS: tl.constexpr, TOP: tl.constexpr, HAS_ZEROS: tl.constexpr, BN: tl.constexpr):
    """f32[BN]: TOP + the zero point of one group."""
    if HAS_ZEROS:  # noqa: SIM108  (the other branch must not be compiled)
        zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    else:
        zero = tl.full((BN,), 1 << (BITS - 1), tl.float32)
    return zero + TOP


@triton.jit
def _plane(words, offset, J: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """words i16[BN, 32] -> the codes of plane J minus the zero point, exact, as DTYPE [BN, 32].

    offset [BN]: the zero point as float32, or with ASM, 128 (bf16) or 1024 (float16) more than it as DTYPE.
    """
    if ASM:
        return _plane_asm(words, tl.broadcast_to(offset[:, None], words.shape), J, DTYPE)
    else:
        codes = (words >> (BITS * J)) & ((1 << BITS) - 1)
        return (codes.to(tl.float32) - offset[:, None]).to(DTYPE)


@triton.jit
def _plane_asm(words, zero, J: tl.constexpr, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
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


@triton.jit(do_not_specialize=["M"])
def _int_linear(
    x, words, scales, zeros, bias, out, parts, arrived, x_stride, M, N, K, blocks,
    GROUP: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # x [M, K] rows of x_stride; words i16[blocks, N, 32]; scales, zeros [G, N]; out [M, N].
    # RUN: planes of a block that share a scale. Programs of one tile: SPLIT runs of blocks.
    PLANES: tl.constexpr = 16 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    TOP: tl.constexpr = 0 if not ASM else (128 if dtype == tl.bfloat16 else 1024)
    pid_m, pid_n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, i = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), tl.arange(0, PLANE)
    m_inside, n_inside = m < M, n < N
    x_row = x + m.to(tl.int64)[None, :] * x_stride
    first = part * tl.cdiv(blocks, SPLIT)
    word = words + (first.to(tl.int64) * N + n)[:, None] * PLANE + i[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    for block in range(first, tl.minimum(first + tl.cdiv(blocks, SPLIT), blocks)):
        packed = tl.load(word, mask=n_inside[:, None], other=0)
        word += N * PLANE
        for run in tl.static_range(PLANES // RUN):
            start = (block * PLANES + run * RUN) * PLANE
            at = (start // GROUP) * N + n
            offset = _offset(zeros, at, n_inside, BITS, TOP, HAS_ZEROS, BN).to(dtype if ASM else tl.float32)
            of_group = tl.zeros((BN, BM), tl.float32)
            if RUN == 4:
                # One product of 128 columns: the matrix unit is waited for once.
                k = start + tl.arange(0, 4 * PLANE)
                if EVEN_K:
                    x_tile = tl.load(x_row + k[:, None], mask=m_inside[None, :], other=0.0)
                else:
                    x_tile = tl.load(x_row + k[:, None], mask=m_inside[None, :] & (k < K)[:, None], other=0.0)
                low = tl.join(_plane(packed, offset, 0, BITS, dtype, ASM), _plane(packed, offset, 1, BITS, dtype, ASM))
                high = tl.join(_plane(packed, offset, 2, BITS, dtype, ASM), _plane(packed, offset, 3, BITS, dtype, ASM))
                weight = tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), (BN, 4 * PLANE))
                of_group = tl.dot(weight, x_tile, of_group, input_precision="ieee")
            for j in tl.static_range(RUN if RUN < 4 else 0):
                k = start + j * PLANE + i
                if EVEN_K:
                    x_tile = tl.load(x_row + k[:, None], mask=m_inside[None, :], other=0.0)
                else:
                    x_tile = tl.load(x_row + k[:, None], mask=m_inside[None, :] & (k < K)[:, None], other=0.0)
                weight = _plane(packed, offset, run * RUN + j, BITS, dtype, ASM)
                of_group = tl.dot(weight, x_tile, of_group, input_precision="ieee")
            scale = tl.load(scales + at, mask=n_inside, other=0.0).to(tl.float32)
            total += of_group * scale[:, None]
    tile = pid_n * tl.num_programs(0) + pid_m
    finish_tile(out, bias, parts, arrived, tl.trans(total), m, n, tile, part, M, N, SPLIT, HAS_BIAS)


@triton.jit(do_not_specialize=["first", "rows"])
def _unpack(
    words, scales, zeros, out, first, rows, N, group, columns,
    BITS: tl.constexpr, BN: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    # Rows first .. first + rows of W [N, columns], unpacked into out [rows, columns]: exact products, rounded once.
    PLANES: tl.constexpr = 16 // BITS
    block = tl.program_id(1)
    row, i = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, PLANE)
    n = first + row
    inside = row < rows
    packed = tl.load(words + (block.to(tl.int64) * N + n)[:, None] * PLANE + i[None, :], mask=inside[:, None], other=0)
    for j in tl.static_range(PLANES):
        start = (block * PLANES + j) * PLANE
        at = (start // group) * N + n
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        offset = _offset(zeros, at, inside, BITS, 0, HAS_ZEROS, BN)
        weight = _plane(packed, offset, j, BITS, tl.float32, False) * scale[:, None]
        column = start + i
        cell = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out + cell, weight.to(out.dtype.element_ty), mask=inside[:, None] & (column < columns)[None, :])


def unpack_rows(words: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int, first: int, out: Tensor) -> None:
    """Fill out [rows, columns] with rows first .. first + rows of W; columns past W's own get what fills up its last block."""
    rows, columns = out.shape
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 32 * (16 // bits)))
    has_zeros = zeros is not None
    _unpack[grid](
        words, scales, zeros if has_zeros else scales, out, first, rows, words.shape[1], group, columns,
        BITS=bits, BN=16, HAS_ZEROS=has_zeros, num_warps=4,
    )  # fmt: skip


def w4a16_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bits: int,
    bias: Tensor | None = None,
    unpack_rows_from: int = UNPACK_ROWS,
) -> Tensor:
    """x [M, K] bf16, f16 or f32, columns in the order of the words, rows contiguous -> [M, N] of x's dtype.

    words i16[blocks, N, 32], K <= blocks * 32 * 16 / bits; scales [G, N], zeros u8[G, N], group: columns per scale.
    """
    rows = x.shape[0]
    out = torch.empty((rows, words.shape[1]), dtype=x.dtype, device=x.device)
    if rows > unpack_rows_from:
        _unpacked(x, words, scales, zeros, group, bits, bias, out)
    elif rows:
        _fused(x, words, scales, zeros, group, bits, bias, out, _shape(rows, out.shape[1], x.shape[1]))
    return out


def _unpacked(
    x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int, bias: Tensor | None, out: Tensor
) -> None:
    n, k = out.shape[1], x.shape[1]
    step = max(UNPACK_ELEMENTS // k // 16 * 16, 16)
    slice_of_w = torch.empty((min(step, n), k), dtype=x.dtype, device=x.device)
    for first in range(0, n, step):
        weight = slice_of_w[: min(step, n - first)]
        unpack_rows(words, scales, zeros, group, bits, first, weight)
        part = out[:, first : first + step]
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias[first : first + step], x, weight.t(), out=part)


def _shape(rows: int, n: int, k: int) -> dict[str, int]:
    """Tile sizes, launch options and waves of programs, as measured on an H200. W [n, k]."""
    if rows <= 16:
        return {"BM": 16, "BN": 64, "num_warps": 4, "num_stages": 3, "waves": 8 if k <= 8192 else 4}
    if rows <= 32:
        return {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 3, "waves": 2 if n > 8192 else 4}
    if rows <= SKINNY_ROWS:
        wide = n > 8192
        return {"BM": 64, "BN": 128 if wide else 64, "num_warps": 4, "num_stages": 3, "waves": 1 if wide else 2}
    return {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3, "waves": 1}


def _fused(
    x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int, bias: Tensor | None, out: Tensor,
    shape: dict[str, int], asm: bool | None = None,
) -> None:  # fmt: skip
    (m, k), (blocks, n, _) = x.shape, words.shape
    planes = 16 // bits
    shape = dict(shape)
    waves = shape.pop("waves")
    tiles = triton.cdiv(m, shape["BM"]) * triton.cdiv(n, shape["BN"])
    split = choose_split(tiles, blocks, x.device, waves) if m <= SKINNY_ROWS else 1
    parts = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else out
    on_gpu = x.device.type == "cuda"
    asm = on_gpu and bits == 4 and x.dtype in (torch.bfloat16, torch.float16) if asm is None else asm
    _int_linear[(triton.cdiv(m, shape["BM"]), triton.cdiv(n, shape["BN"]), split)](
        x, words, scales, scales if zeros is None else zeros, out if bias is None else bias, out, parts, counters(x.device),
        x.stride(0), m, n, k, blocks, GROUP=group,
        BITS=bits, RUN=min(group // 32, planes), SPLIT=split, EVEN_K=k == blocks * 32 * planes, HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None, ASM=asm, **shape,
    )  # fmt: skip
