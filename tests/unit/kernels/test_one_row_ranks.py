"""The fused products of one decode row on two ranks, in Triton's interpreter: together they are the whole product."""

from typing import Any

import torch
from torch import Tensor

from gpu_worker.kernels import one_row
from gpu_worker.model.linear import Linear
from gpu_worker.parallel.layers import Joined, Summed
from tests.quant_kernel_checks import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Half:
    """One of two ranks that are asked after each other: what it gives to a collective is its result."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def sum_into(self, x: Tensor) -> Tensor:
        return x

    def join_columns(self, x: Tensor, width: int, total: int) -> Tensor:
        assert (width, total) == (40, 77)
        return x


def test_products_of_two_ranks() -> None:
    weight, x, residual = noise(77, 96, device=DEVICE), noise(1, 96, device=DEVICE, seed=1), noise(1, 77, device=DEVICE, seed=2)
    halves: list[Any] = [Half(0), Half(1)]
    matrices = [Summed(Linear(weight[:, 48 * half.rank :][:, :48].contiguous()), half) for half in halves]
    assert all(one_row.known(matrix) for matrix in matrices)
    streams = [residual.clone(), residual.clone()]  # every rank has the whole residual stream
    for half, matrix, stream in zip(halves, matrices, streams, strict=True):
        part = x[:, 48 * half.rank :][:, :48].contiguous()
        assert one_row.product(matrix, part, residual=stream, out=stream) is stream
    assert torch.allclose(sum(streams), x @ weight.t() + residual, atol=1e-4)  # type: ignore[arg-type]
    rows = [Joined(Linear(weight[:40]), halves[0], 40, 77), Joined(Linear(weight[40:].contiguous()), halves[1], 40, 77)]
    gain = noise(96, device=DEVICE, seed=3)
    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * gain
    found = torch.cat([one_row.product(matrix, x, gain=gain, eps=1e-5) for matrix in rows], 1)
    assert torch.allclose(found, normed @ weight.t(), atol=1e-4)
