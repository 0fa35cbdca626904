"""Online softmax in powers of two, shared by the attention kernels (Milakov and Gimelshein, 2018; Dao et al., 2022)."""

import triton
import triton.language as tl

# Finite stand-in for minus infinity: differences of two masked scores stay defined.
MASKED = tl.constexpr(-1.0e30)


@triton.jit
def capped(s, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Scores in units of log2(e): scale already holds log2(e), unless a cap needs natural units first."""
    if HAS_CAP:
        # soft_cap * tanh(scale * s / soft_cap), then log2(e)
        s = soft_cap * (1.0 - 2.0 / (tl.exp(s * (2.0 * scale / soft_cap)) + 1.0)) * 1.4426950408889634
        return s
    return s * scale


@triton.jit
def update(s, highest, total):
    """One block of scores [M, N] into the running maximum and sum -> (weights, factor of older results, maximum, sum)."""
    new_highest = tl.maximum(highest, tl.max(s, 1))
    weights = tl.exp2(s - new_highest[:, None])
    factor = tl.exp2(highest - new_highest)
    return weights, factor, new_highest, total * factor + tl.sum(weights, 1)
