"""Norms and the gated activation."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H]; float32 inside."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])
