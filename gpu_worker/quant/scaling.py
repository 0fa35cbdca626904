"""AWQ: channels with strong inputs are scaled up before rounding, and their inputs down by the same factor (Lin et al., 2023).

Of strength^alpha the alpha with the smallest output error over the calibration inputs is taken; it follows from their
covariance alone, so no activations are kept. The inverse factors go into what makes the inputs: a norm's gain, the up
projection (for down), the value projection (for o; heads that share a value head share its factors).
"""

import torch
from torch import Tensor

from gpu_worker.quant.fitting import Grid, encode, fit, output_error

ALPHAS = [step / 12 for step in range(12)]
RANGES = (1.0, 0.88)  # of the extremes: enough to compare factors


def dequantize(codes: Tensor, grid: Grid) -> Tensor:
    """f32[N, K]"""
    scales, zeros = grid.spread(torch.arange(codes.shape[1], device=codes.device))
    return scales * (codes - zeros)


def nearest(weight: Tensor, grid: Grid) -> Tensor:
    """f32[N, K]: each weight's nearest value of the grid."""
    scales, zeros = grid.spread(torch.arange(weight.shape[1], device=weight.device))
    return scales * (encode(weight, scales, zeros, grid.bits) - zeros)


def search(
    weight: Tensor, hessian: Tensor, *, bits: int, group: int, symmetric: bool, shared: int = 1, width: int = 0
) -> Tensor:
    """Factors f32[K] for the columns of weight f32[N, K].

    shared, width: columns of neighbouring runs of `width` must have equal factors, `shared` runs each (value heads).
    """
    strength = hessian.diagonal().sqrt()
    if shared > 1:
        heads = strength.view(-1, shared, width)
        strength = heads.mean(1, keepdim=True).expand_as(heads).flatten()
    strength = (strength / strength.mean()).clamp(min=1e-4)
    best, factors = float("inf"), torch.ones_like(strength)
    for alpha in ALPHAS:
        candidate = strength.pow(alpha)
        candidate = candidate / (candidate.amax() * candidate.amin()).sqrt()
        scaled = weight * candidate
        importance = hessian.diagonal() / candidate.square()
        grid = fit(scaled, importance, bits=bits, group=group, symmetric=symmetric, ranges=RANGES)
        error = output_error(weight, nearest(scaled, grid) / candidate, hessian)
        if error < best:
            best, factors = error, candidate
    return factors
