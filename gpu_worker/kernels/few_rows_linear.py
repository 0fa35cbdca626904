"""y = x W^T + b for a few rows of 16-bit weights, bound by reading W; or silu(gate) * up of y = [gate | up].

Its programs are placed while the short kernel before it still runs (launch.py), which the library's are not. Wide tiles are
computed as y^T = W x^T, so that few rows fill the matrix units. Parts of the inner dimension gained nothing: narrow tiles do.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import overlapped, release_next, wait_for_previous
from gpu_worker.kernels.skinny_linear import skinny_linear
from gpu_worker.kernels.split_k import store_tile
from gpu_worker.model.linear import Linear

MOST_ROWS = 64


@triton.jit
def _tile(cells, row_inside, column_inside, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(cells)
    elif EVEN_COLUMNS:
        return tl.load(cells, mask=row_inside[:, None], other=0.0)
    else:
        return tl.load(cells, mask=row_inside[:, None] & column_inside[None, :], other=0.0)


@triton.jit(do_not_specialize=["M"])
def _few_rows_linear(
    x, weight, bias, out, x_stride, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # x [M, K] rows of x_stride; weight [N, K] (with SILU [2 N, K]: gates, then ups), out [M, N] contiguous.
    # A program: a tile of BN outputs.
    m, n, i = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    line = weight + tl.minimum(n, N - 1).to(tl.int64) * K  # lines beyond N repeat the last: they are not stored
    wait_for_previous(PDL)
    x_row = x + m.to(tl.int64) * x_stride
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    ups = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        k = first + i
        inside = k < K
        a = _tile(x_row[:, None] + k[None, :], m < M, inside, False, EVEN_K)
        w = _tile(line[:, None] + k[None, :], n < N, inside, EVEN_N, EVEN_K)
        total = _add_product(a, w, total, SWAP)
        if SILU:
            up = _tile(line[:, None] + tl.cast(N, tl.int64) * K + k[None, :], n < N, inside, EVEN_N, EVEN_K)
            ups = _add_product(a, up, ups, SWAP)
    release_next(PDL)
    result = total / (1.0 + tl.exp(-total)) * ups if SILU else total
    result = tl.trans(result) if SWAP else result
    store_tile(out, bias, result, m, n, M, N, HAS_BIAS)


@triton.jit
def _add_product(a, w, total, SWAP: tl.constexpr):
    """total + w a^T where SWAP, else total + a w^T."""
    if SWAP:
        return tl.dot(w, tl.trans(a), total, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(w), total, input_precision="ieee")


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    silu: bool = False,
    shape: dict[str, int] | None = None,
) -> Tensor:
    """x [M, K], M <= MOST_ROWS, rows contiguous; weight [N, K] of x's dtype; out [M, N] contiguous -> [M, N], float32 sums.

    silu: the weight is [gate: N / 2 | up: N / 2], without bias, and the result silu(gate) * up, [M, N / 2].
    """
    (m, k), n = x.shape, weight.shape[0] // 2 if silu else weight.shape[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device) if out is None else out
    shape = shape or few_rows_shape(m, n, silu)
    _few_rows_linear[(triton.cdiv(n, shape["BN"]),)](
        x, weight, out if bias is None else bias, out, x.stride(0), m, n, k, **shape,
        EVEN_N=n % shape["BN"] == 0, EVEN_K=k % shape["BK"] == 0, SILU=silu, HAS_BIAS=bias is not None,
        **overlapped(x),
    )  # fmt: skip
    return out


def few_rows_shape(rows: int, outputs: int, silu: bool) -> dict[str, int]:
    """Tile sizes and launch options, as measured on an H200."""
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if silu:
        return {"BM": bm, "BN": 64, "BK": 128, "STAGES": 4 if bm == 64 else 5, "SWAP": 1, "num_warps": 4}
    if outputs > 8192 and rows > 16:
        return {"BM": bm, "BN": 128, "BK": 128, "STAGES": 2, "SWAP": 1, "num_warps": 8}
    if outputs > 4096:
        return {"BM": bm, "BN": 64, "BK": 128, "STAGES": 5, "SWAP": 1, "num_warps": 4}
    return {"BM": bm, "BN": 32, "BK": 128 if bm == 64 else 256, "STAGES": 8, "SWAP": 0, "num_warps": 4}


class FewRowsLinear(Linear):
    """A Linear on a GPU whose products of 2 to MOST_ROWS rows take this kernel, and those of one row skinny_linear."""

    def __call__(self, x: Tensor) -> Tensor:
        if not 0 < x.shape[0] <= MOST_ROWS:
            return super().__call__(x)
        if x.shape[0] == 1 and self.bias is None:
            return skinny_linear(x, self.weight)
        return few_rows_linear(x, self.weight, self.bias)

    def into(self, x: Tensor, out: Tensor) -> None:
        if not 0 < x.shape[0] <= MOST_ROWS:
            super().into(x, out)
        elif x.shape[0] == 1 and self.bias is None:
            skinny_linear(x, self.weight, out=out)
        else:
            few_rows_linear(x, self.weight, self.bias, out)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        if 0 < x.shape[0] <= MOST_ROWS and self.bias is None:
            return few_rows_linear(x, self.weight, silu=True)
        return super().gated(x, silu_mul)
