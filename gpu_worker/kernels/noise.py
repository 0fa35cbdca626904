"""Counter-based noise of the sampler: 32 bits from (seed, position, token), and the Gumbel variable made of them.

Integer mixing only, so the torch twin draws the same bits. `mix32` is lowbias32 of Chris Wellons (2018), a bijection of
32-bit words. For one row the map token -> bits is a bijection too. All arithmetic is modulo 2^32:

    a    = mix32(position + 0x9E3779B9)
    k0   = mix32(seed_lo ^ a)
    k1   = mix32(seed_hi ^ k0)
    bits = mix32(mix32(token ^ k0) + k1)
    u    = (float(bits >> 9) + 0.5) * 2^-23      exact in float32, in (0, 1); 24 bits would round up to 1
    g    = -log(-log(u))                         argmax(logit / temperature + g) is a sample (Gumbel-max)
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
def row_keys(seed, position):
    """seed: i64 scalar (the bits of the u64), position: i32 scalar -> two u32 keys of the row."""
    seed_lo = (seed & 0xFFFFFFFF).to(tl.uint32)
    seed_hi = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = mix32(position.to(tl.uint32) + 0x9E3779B9)
    k0 = mix32(seed_lo ^ a)
    return k0, mix32(seed_hi ^ k0)


@triton.jit
def gumbel(k0, k1, token):
    """token: i32 block -> float32 block of Gumbel noise."""
    bits = mix32(mix32(token.to(tl.uint32) ^ k0) + k1)
    u = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(u))
