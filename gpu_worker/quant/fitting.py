"""Scales and zero points of groups, and GPTQ: rounding that lets later columns make up for the errors of earlier ones.

GPTQ: Frantar et al. (2022), with the columns in the order of falling importance inside groups that were fixed before ("static
groups"), so that the checkpoint needs no g_idx. The range of a group is not its extremes: of some narrower ranges the one with
the smallest error, columns weighted by how strong their inputs are, is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHRINK = [1.06 - 0.03 * step for step in range(19)]  # of the extremes, down to 0.52
BLOCK = 128  # columns whose errors are spread among themselves before the rest hears of them
DAMP = 0.01  # of the mean diagonal, added to it


@dataclass(frozen=True)
class Grid:
    """What the codes of a group mean: scale * (code - zero)."""

    bits: int
    group: int
    scales: Tensor  # f32[N, G], values that float16 holds
    zeros: Tensor  # f32[N, G], whole numbers

    def spread(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zero points of these columns: f32[N, len(columns)] each."""
        of = columns // self.group
        return self.scales[:, of], self.zeros[:, of]


def encode(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Nearest codes, as float32."""
    return (torch.round(weight / scales) + zeros).clamp(0, 2**bits - 1)


def fit(
    weight: Tensor, importance: Tensor, *, bits: int, group: int, symmetric: bool, ranges: Sequence[float] = SHRINK
) -> Grid:
    """weight f32[N, K], importance f32[K] (mean square of each input); ranges: what to try, parts of the extremes."""
    n, k = weight.shape
    grouped = weight.view(n, k // group, group)
    weights = importance.view(1, k // group, group)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in ranges:
        scales, zeros = _range(low * shrink, high * shrink, bits, symmetric)
        codes = encode(grouped, scales[:, :, None], zeros[:, :, None], bits)
        error = ((scales[:, :, None] * (codes - zeros[:, :, None]) - grouped).square() * weights).sum(2)
        if best is None:
            best = error, scales, zeros
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, scales, best[1]),
                torch.where(better, zeros, best[2]),
            )
    assert best is not None
    return Grid(bits, group, best[1], best[2])


def _range(low: Tensor, high: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Zero points stay above 0: what version 1 of the GPTQ format writes for 0 is read in two ways."""
    top = 2**bits - 1
    if symmetric:
        scales = torch.maximum(-low, high) * 2 / top
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / top
        zeros = torch.round(-low / scales.clamp(min=1e-12)).clamp(1, top)
    scales = scales.clamp(min=2**-24).to(torch.float16).float()  # the smallest float16 above 0
    return scales, zeros


def gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """weight f32[N, K], hessian f32[K, K] (sum of x x^T) -> u8[N, K], the codes."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1
    order = torch.argsort(diagonal, descending=True)
    factor = _factor(hessian[order][:, order])
    scales, zeros = grid.spread(order)
    left = torch.where(unused, 0, weight)[:, order].contiguous()
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], BLOCK):
        stop = min(start + BLOCK, left.shape[1])
        errors = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            scale, zero = scales[:, column], zeros[:, column]
            code = encode(left[:, column], scale, zero, grid.bits)
            codes[:, column] = code
            error = (left[:, column] - scale * (code - zero)) / factor[column, column]
            left[:, column:stop] -= torch.outer(error, factor[column, column:stop])
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    back = torch.empty_like(codes)
    back[:, order] = codes
    return back.to(torch.uint8)


def _factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse; more is added to the diagonal as long as there is none."""
    damp = DAMP
    while True:
        damped = hessian.double()
        damped.diagonal().add_(damp * float(damped.diagonal().mean()))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                factor: Tensor = upper.float()
                return factor
        damp *= 10
        if damp > 1e3:
            raise ValueError("the inputs of a layer have no usable covariance (infinite or NaN activations?)")


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Sum of squared differences of the outputs over the calibration inputs."""
    difference = rounded - weight
    return float(((difference @ hessian) * difference).sum())
