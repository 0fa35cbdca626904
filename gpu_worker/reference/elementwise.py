"""Norms and the gated activation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H]; float32 inside. Half the passes over x of F.rms_norm on a CPU."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().add_(size * eps).rsqrt_().mul_(size**0.5)
    return torch.mul(x, scale).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])
