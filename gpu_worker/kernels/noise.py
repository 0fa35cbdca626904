"""Counter-based Gumbel noise of (seed, position, token): integer mixing only, so the torch twin draws the same bits.

The words are defined in ARCHITECTURE.md ("Noise"); mix32 is lowbias32 (Wellons, 2018). All arithmetic is modulo 2^32.
"""

import triton
import triton.language as tl


@triton.jit
def mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed_lo, seed_hi, position):
    """The words of the u64 seed and the position, i32 scalars -> the two u32 keys of a row."""
    k0 = mix32(seed_lo.to(tl.uint32) ^ mix32(position.to(tl.uint32) + 0x9E3779B9))
    return k0, mix32(seed_hi.to(tl.uint32) ^ k0)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST: the hardware's approximation, absolute error 2^-22; the interpreter has none."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def gumbel(k0, k1, token, FAST: tl.constexpr):
    """token: i32 block -> float32 block of Gumbel noise."""
    h = token.to(tl.uint32)
    h = h ^ (h >> 16) ^ k0
    h = h * 0x7FEB352D
    h = h ^ k1
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    h = h ^ (h >> 16)
    # u in (0, 1), fine near 0, where the winners are; h >> 1 fits a signed word, whose conversion is one instruction.
    u = tl.minimum((h >> 1).to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 1.1641532182693481e-10, 0.99999994039535522)
    # -log1p(-u): a series below 2^-4, where 1 - u would lose the digits that matter (terms to u^6 leave 2^-27).
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    exponential = tl.where(u < 0.0625, series, -0.6931471805599453 * _log2(1.0 - u, FAST))
    return -0.6931471805599453 * _log2(exponential, FAST)
