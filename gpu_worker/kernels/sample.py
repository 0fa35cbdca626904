"""Sampling without a sort: argmax(logit + temperature * Gumbel noise) over the logits at or above a row's threshold.

Gumbel-max turns a draw from the softmax into one pass over the logits. top_k, top_p and min_p are each a threshold on
the logit; it is searched with several candidate thresholds per pass, and candidates snap to logits that exist, so the
search ends at the exact one (equal logits live or die together).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.noise import gumbel, row_keys

INFINITY = tl.constexpr(float("inf"))
# A token more than this many temperatures below the largest logit is never drawn: the noise spans less than 27.
REACH = tl.constexpr(60.0)


@triton.jit
def _draw(
    logits,
    tokens,
    row_slots,
    positions,
    seeds,
    temperatures,
    thresholds,
    best_values,
    best_tokens,
    arrivals,
    vocabulary,
    logits_stride,
    record_stride,
    per_split,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    FILTERED: tl.constexpr,
    FAST: tl.constexpr,
):
    # Program (row, split) scans per_split logits; the last split of a row to arrive merges them all.
    row = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(row_slots + row).to(tl.int64)
    line = logits + row.to(tl.int64) * logits_stride
    temperature = 0.0
    record = slot * record_stride
    k0, k1 = row_keys(tl.load(seeds + record), tl.load(seeds + record + 1), tl.load(positions + row))
    if NOISE:
        temperature = tl.load(temperatures + record)
    threshold = -INFINITY
    if FILTERED:
        threshold = tl.load(thresholds + row)
    value = tl.full([BLOCK], -INFINITY, tl.float32)
    token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([BLOCK], tl.int1)
    first_token = split * per_split
    end = tl.minimum(first_token + per_split, vocabulary)
    for first in range(first_token, end, BLOCK):
        id = first + tl.arange(0, BLOCK)
        x = tl.load(line + id, mask=id < end, other=-INFINITY).to(tl.float32)
        broken = broken | (x != x)
        if FILTERED:
            live = x >= threshold
            x = tl.where(live, x, -INFINITY)
            if NOISE:
                if (temperature > 0.0) & (tl.max(live.to(tl.int32), 0) > 0):
                    x += temperature * gumbel(k0, k1, id, FAST)
        else:
            if NOISE:
                if temperature > 0.0:
                    x += temperature * gumbel(k0, k1, id, FAST)
        take = x > value
        value = tl.where(take, x, value)
        token = tl.where(take, id, token)
    best = tl.max(value, 0)
    winner = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
    # Any NaN poisons the row: +inf with no token, which no real logit beats.
    if tl.max(broken.to(tl.int32), 0) > 0:
        best = INFINITY
        winner = -1
    if SPLITS == 1:
        tl.store(tokens + row, tl.where(best == -INFINITY, -1, winner))
    else:
        tl.store(best_values + row * SPLITS + split, best)
        tl.store(best_tokens + row * SPLITS + split, winner)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(arrivals + row, 0)
            every = tl.arange(0, SPLITS_PAD)
            inside = every < SPLITS
            values = tl.load(best_values + row * SPLITS + every, mask=inside, other=-INFINITY, cache_modifier=".cg")
            winners = tl.load(best_tokens + row * SPLITS + every, mask=inside, other=0x7FFFFFFF, cache_modifier=".cg")
            best = tl.max(values, 0)
            winner = tl.min(tl.where(values == best, winners, 0x7FFFFFFF), 0)
            tl.store(tokens + row, tl.where(best == -INFINITY, -1, winner))


class DrawSpace:
    """Scratch of `draw` for up to rows rows: partial winners f32/i32 [rows * MAX_SPLITS], arrivals i32 [rows] (zero)."""

    MAX_SPLITS = 64

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.values = torch.empty(rows * self.MAX_SPLITS, dtype=torch.float32, device=device)
        self.tokens = torch.empty(rows * self.MAX_SPLITS, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(rows, dtype=torch.int32, device=device)


def draw(
    logits: Tensor,
    row_slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    space: DrawSpace,
    thresholds: Tensor | None = None,
    noise: bool = True,
    out: Tensor | None = None,
    block: int = 2048,
    warps: int = 8,
) -> Tensor:
    """One token per row, -1 where no logit is above -inf or any is NaN.

    logits: [S, V] f32 or bf16; row_slots: i32 [S]; positions: i32 [S], index of the sampled token in its sequence;
    seeds: i32 [slots, 2], low and high word; temperatures: f32 [slots], 0: greedy, at the stride of seeds; thresholds: f32 [S], logits below it are dropped;
    noise False: no row has a temperature -> i32 [S].
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if not rows:
        return tokens
    splits = max(1, min(DrawSpace.MAX_SPLITS, 1024 // rows, triton.cdiv(vocabulary, block)))
    per_split = triton.cdiv(triton.cdiv(vocabulary, splits), block) * block
    splits = triton.cdiv(vocabulary, per_split)
    _draw[(rows, splits)](
        logits,
        tokens,
        row_slots,
        positions,
        seeds,
        temperatures,
        thresholds if thresholds is not None else temperatures,
        space.values,
        space.tokens,
        space.arrivals,
        vocabulary,
        logits.stride(0),
        temperatures.stride(0),
        per_split,
        SPLITS=splits,
        SPLITS_PAD=triton.next_power_of_2(splits),
        BLOCK=block,
        NOISE=noise,
        FILTERED=thresholds is not None,
        FAST=logits.is_cuda,
        num_warps=warps,
    )
    return tokens


@triton.jit
def _next_up(x):
    """The next larger float32 of a finite scalar."""
    bits = x.to(tl.int32, bitcast=True)
    up = tl.where(x > 0.0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    return tl.where(x == 0.0, 1.401298464324817e-45, up)


@triton.jit
def _measures(line, vocabulary, t1, t2, t3, t4, largest, inverse, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """For four thresholds: measure of the logits at or above (count, or sum of exp), and the smallest such logit."""
    m1 = tl.zeros([BLOCK], tl.float32)
    m2 = tl.zeros([BLOCK], tl.float32)
    m3 = tl.zeros([BLOCK], tl.float32)
    m4 = tl.zeros([BLOCK], tl.float32)
    s1 = tl.full([BLOCK], INFINITY, tl.float32)
    s2 = tl.full([BLOCK], INFINITY, tl.float32)
    s3 = tl.full([BLOCK], INFINITY, tl.float32)
    s4 = tl.full([BLOCK], INFINITY, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        id = first + tl.arange(0, BLOCK)
        x = tl.load(line + id, mask=id < vocabulary, other=-INFINITY).to(tl.float32)
        if COUNT:
            w = tl.full([BLOCK], 1.0, tl.float32)
        else:
            w = tl.exp2((x - largest) * inverse)
        m1 += tl.where(x >= t1, w, 0.0)
        m2 += tl.where(x >= t2, w, 0.0)
        m3 += tl.where(x >= t3, w, 0.0)
        m4 += tl.where(x >= t4, w, 0.0)
        s1 = tl.minimum(s1, tl.where(x >= t1, x, INFINITY))
        s2 = tl.minimum(s2, tl.where(x >= t2, x, INFINITY))
        s3 = tl.minimum(s3, tl.where(x >= t3, x, INFINITY))
        s4 = tl.minimum(s4, tl.where(x >= t4, x, INFINITY))
    return (
        tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0), tl.sum(m4, 0),
        tl.min(s1, 0), tl.min(s2, 0), tl.min(s3, 0), tl.min(s4, 0),
    )  # fmt: skip


@triton.jit
def _search(line, vocabulary, lowest, largest, inverse, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit x with measure(logits >= x) >= target; lowest is known to satisfy it."""
    low = lowest  # a logit that satisfies it
    high = largest  # no logit above can
    while low < high:
        # The first candidate is just above low: when it fails, low is the answer.
        t1 = _next_up(low)
        step = (high - low) * 0.25
        t2 = tl.maximum(low + step, t1)
        t3 = tl.maximum(low + 2.0 * step, t2)
        t4 = tl.maximum(low + 3.0 * step, t3)
        m1, m2, m3, m4, s1, s2, s3, s4 = _measures(line, vocabulary, t1, t2, t3, t4, largest, inverse, COUNT, BLOCK)
        if m1 < target:
            high = low
        elif m2 < target:
            low = s1
            high = tl.minimum(high, t2)
        elif m3 < target:
            low = s2
            high = tl.minimum(high, t3)
        elif m4 < target:
            low = s3
            high = tl.minimum(high, t4)
        else:
            low = s4
    return low


@triton.jit
def _thresholds(
    logits,
    thresholds,
    rows,
    row_slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    vocabulary,
    logits_stride,
    record_stride,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    slot = tl.load(row_slots + row).to(tl.int64)
    record = slot * record_stride
    temperature = tl.load(temperatures + record)
    threshold = -INFINITY
    if temperature > 0.0:
        line = logits + row * logits_stride
        high = tl.full([BLOCK], -INFINITY, tl.float32)
        low = tl.full([BLOCK], INFINITY, tl.float32)
        for first in range(0, vocabulary, BLOCK):
            id = first + tl.arange(0, BLOCK)
            x = tl.load(line + id, mask=id < vocabulary, other=-INFINITY).to(tl.float32)
            high = tl.maximum(high, x)
            low = tl.minimum(low, tl.where(x > -INFINITY, x, INFINITY))
        largest = tl.max(high, 0)
        smallest = tl.min(low, 0)
        if (largest > -INFINITY) & (largest < INFINITY):
            inverse = 1.4426950408889634 / temperature
            lowest = tl.maximum(smallest, largest - REACH * temperature)
            threshold = lowest
            min_p = tl.load(min_ps + record)
            if min_p > 0.0:
                threshold = tl.minimum(tl.maximum(threshold, largest + temperature * tl.log(min_p)), largest)
            top_k = tl.load(top_ks + record)
            if (top_k > 0) & (top_k < vocabulary):
                # Fewer than top_k at or above the current threshold: the search ends where it starts.
                threshold = _search(line, vocabulary, threshold, largest, inverse, top_k.to(tl.float32), True, BLOCK)
            top_p = tl.load(top_ps + record)
            if top_p < 1.0:
                all_of, _, _, _, _, _, _, _ = _measures(
                    line, vocabulary, threshold, largest, largest, largest, largest, inverse, False, BLOCK
                )
                threshold = _search(line, vocabulary, threshold, largest, inverse, all_of * top_p, False, BLOCK)
    tl.store(thresholds + row, threshold)


def filter_thresholds(
    logits: Tensor,
    rows: Tensor,
    row_slots: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    out: Tensor | None = None,
    block: int = 4096,
    warps: int = 16,
) -> Tensor:
    """The smallest logit each row keeps: min_p, then top_k, then top_p of what is left; -inf for rows not named.

    logits: [S, V] f32 or bf16; rows: i64 [n], rows that have a filter; row_slots: i32 [S]; temperatures, top_ps, min_ps:
    f32 [slots]; top_ks: i32 [slots], 0: all; the four at one stride -> f32 [S]. Logits that the noise cannot lift to the top count as dropped.
    """
    if out is None:
        out = torch.full((logits.shape[0],), float("-inf"), dtype=torch.float32, device=logits.device)
    if rows.shape[0]:
        _thresholds[(rows.shape[0],)](
            logits, out, rows, row_slots, temperatures, top_ks, top_ps, min_ps, logits.shape[1], logits.stride(0),
            temperatures.stride(0), BLOCK=min(block, triton.next_power_of_2(logits.shape[1])), num_warps=warps,
        )  # fmt: skip
    return out
