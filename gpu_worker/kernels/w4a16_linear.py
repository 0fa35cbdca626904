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

from gpu_worker.kernels.launch import overlapped, release_next, wait_for_previous
from gpu_worker.kernels.split_k import choose_split, counters, finish_tile
from gpu_worker.quant.packed import KernelInts

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
def _scale_and_zero(table, KIND: tl.constexpr):
    """Entries of a table (see KernelInts) -> f32 scales, i32 zero points."""
    if KIND == "float32":
        return table.to(tl.int32).to(tl.float32, bitcast=True), (table >> 32).to(tl.int32)
    elif KIND == "bfloat16":
        return (table << 16).to(tl.float32, bitcast=True), table >> 16
    else:
        return table.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), table >> 16


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
    x, words, table, bias, out, parts, arrived, x_stride, M, N, K, blocks,
    GROUP: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [M, K] rows of x_stride; words i16[blocks, N, 32]; table [G, N]; out [M, N].
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
    wait_for_previous(PDL)
    total = tl.zeros((BN, BM), tl.float32)
    for block in tl.range(first, tl.minimum(first + tl.cdiv(blocks, SPLIT), blocks), num_stages=STAGES):
        if EVEN_N:  # noqa: SIM108  (the other branch must not be compiled)
            packed = tl.load(word)
        else:
            packed = tl.load(word, mask=n_inside[:, None], other=0)
        word += N * PLANE
        for run in tl.static_range(PLANES // RUN):
            start = (block * PLANES + run * RUN) * PLANE
            cell = table + (start // GROUP) * N + n
            if EVEN_N:  # noqa: SIM108  (the other branch must not be compiled)
                entry = tl.load(cell)
            else:
                entry = tl.load(cell, mask=n_inside, other=0)
            scale, zero = _scale_and_zero(entry, KIND)
            offset = (zero + TOP).to(tl.float32).to(dtype if ASM else tl.float32)
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
            total += of_group * scale[:, None]
    release_next(PDL)
    tile = pid_n * tl.num_programs(0) + pid_m
    finish_tile(out, bias, parts, arrived, tl.trans(total), m, n, tile, part, M, N, SPLIT, HAS_BIAS)


@triton.jit(do_not_specialize=["first", "rows"])
def _unpack(
    words, table, out, first, rows, N, group, columns, BITS: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr
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
        scale, zero = _scale_and_zero(tl.load(table + at, mask=inside, other=0), KIND)
        weight = _plane(packed, zero.to(tl.float32), j, BITS, tl.float32, False) * scale[:, None]
        column = start + i
        cell = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out + cell, weight.to(out.dtype.element_ty), mask=inside[:, None] & (column < columns)[None, :])


def _kind(weight: KernelInts) -> str:
    return str(weight.scale_dtype).removeprefix("torch.")


def unpack_rows(weight: KernelInts, first: int, out: Tensor) -> None:
    """Fill out [rows, columns] with rows first .. first + rows of W; columns past W's own get what fills up its last block."""
    rows, columns = out.shape
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 32 * (16 // weight.bits)))
    _unpack[grid](
        weight.words, weight.table, out, first, rows, weight.words.shape[1], weight.group, columns,
        BITS=weight.bits, BN=16, KIND=_kind(weight), num_warps=4,
    )  # fmt: skip


def w4a16_linear(x: Tensor, weight: KernelInts, bias: Tensor | None = None, unpack_rows_from: int = UNPACK_ROWS) -> Tensor:
    """x [M, K] bf16, f16 or f32, columns in the order of the words, rows contiguous -> [M, N] of x's dtype.

    K <= the columns of the words.
    """
    rows, n = x.shape[0], weight.words.shape[1]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows > unpack_rows_from:
        _unpacked(x, weight, bias, out)
    elif rows:
        _fused(x, weight, bias, out, _shape(rows, n, x.shape[1]))
    return out


def _unpacked(x: Tensor, weight: KernelInts, bias: Tensor | None, out: Tensor) -> None:
    n, k = out.shape[1], x.shape[1]
    step = max(UNPACK_ELEMENTS // k // 16 * 16, 16)
    slice_of_w = torch.empty((min(step, n), k), dtype=x.dtype, device=x.device)
    for first in range(0, n, step):
        rows = slice_of_w[: min(step, n - first)]
        unpack_rows(weight, first, rows)
        part = out[:, first : first + step]
        if bias is None:
            torch.mm(x, rows.t(), out=part)
        else:
            torch.addmm(bias[first : first + step], x, rows.t(), out=part)


def _shape(rows: int, n: int, k: int) -> dict[str, int]:
    """Tile sizes, launch options and waves of programs, as measured on an H200. W [n, k]."""
    wide = n > 8192
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if wide and rows <= SKINNY_ROWS:
        return {"BM": bm, "BN": 128, "num_warps": 4, "STAGES": 4, "waves": 1}
    if rows <= 16:
        long = k > 8192
        return {"BM": bm, "BN": 128 if long or n > 4096 else 64, "num_warps": 4, "STAGES": 3, "waves": 2 if long else 4}
    if rows <= SKINNY_ROWS:
        return {"BM": bm, "BN": 64, "num_warps": 4, "STAGES": 3, "waves": 2}
    return {"BM": 128, "BN": 128, "num_warps": 8, "STAGES": 3, "waves": 1}


def _fused(
    x: Tensor, weight: KernelInts, bias: Tensor | None, out: Tensor, shape: dict[str, int], asm: bool | None = None
) -> None:
    (m, k), (blocks, n, _) = x.shape, weight.words.shape
    planes = 16 // weight.bits
    shape = dict(shape)
    waves = shape.pop("waves")
    tiles = triton.cdiv(m, shape["BM"]) * triton.cdiv(n, shape["BN"])
    split = choose_split(tiles, blocks, x.device, waves) if m <= SKINNY_ROWS else 1
    parts = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else out
    on_gpu = x.device.type == "cuda"
    asm = on_gpu and weight.bits == 4 and x.dtype in (torch.bfloat16, torch.float16) if asm is None else asm
    _int_linear[(triton.cdiv(m, shape["BM"]), triton.cdiv(n, shape["BN"]), split)](
        x, weight.words, weight.table, out if bias is None else bias, out, parts, counters(x.device), x.stride(0), m, n, k,
        blocks, GROUP=weight.group, BITS=weight.bits, RUN=min(weight.group // 32, planes), KIND=_kind(weight), SPLIT=split,
        EVEN_N=n % shape["BN"] == 0, EVEN_K=k == blocks * 32 * planes, HAS_BIAS=bias is not None, ASM=asm, **shape,
        **overlapped(x),
    )  # fmt: skip
