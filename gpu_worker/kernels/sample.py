"""Sampling without a sort: argmax(logit + temperature * Gumbel noise) over the logits at or above a row's threshold.

Gumbel-max turns a draw from the softmax into one pass over the logits; top_k, top_p and min_p are one threshold on the
logit, found by filter_logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import overlapped, release_next, wait_for_previous
from gpu_worker.kernels.noise import gumbel, row_keys

INFINITY = tl.constexpr(float("inf"))


@triton.jit(
    do_not_specialize=["per_split", "splits"], do_not_specialize_on_alignment=["row_slots", "positions", "tokens", "logits"]
)
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
    splits,
    SPLITS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    FILTERED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # Program (row, split) scans per_split logits; the last split of a row to arrive merges them all.
    wait_for_previous(PDL)
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
            if NOISE:  # noqa: SIM102 - a compile-time condition around one of the run
                if (temperature > 0.0) & (tl.max(live.to(tl.int32), 0) > 0):
                    x += temperature * gumbel(k0, k1, id, FAST)
        else:
            if NOISE:  # noqa: SIM102
                if temperature > 0.0:
                    x += temperature * gumbel(k0, k1, id, FAST)
        take = x > value
        value = tl.where(take, x, value)
        token = tl.where(take, id, token)
    release_next(PDL)
    best = tl.max(value, 0)
    winner = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
    # Any NaN poisons the row: +inf with no token, which no real logit beats.
    if tl.max(broken.to(tl.int32), 0) > 0:
        best = INFINITY
        winner = -1
    if splits == 1:
        tl.store(tokens + row, tl.where(best == -INFINITY, -1, winner))
    else:
        tl.store(best_values + row * splits + split, best)
        tl.store(best_tokens + row * splits + split, winner)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            tl.store(arrivals + row, 0)
            every = tl.arange(0, SPLITS_PAD)
            inside = every < splits
            values = tl.load(best_values + row * splits + every, mask=inside, other=-INFINITY, cache_modifier=".cg")
            winners = tl.load(best_tokens + row * splits + every, mask=inside, other=0x7FFFFFFF, cache_modifier=".cg")
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
    seeds: i32 [slots, 2], low and high word; temperatures: f32 [slots], 0: greedy, at the stride of seeds;
    thresholds: f32 [S], logits below it are dropped; noise False: no row has a temperature -> i32 [S].
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
        splits,
        SPLITS_PAD=DrawSpace.MAX_SPLITS,
        BLOCK=block,
        NOISE=noise,
        FILTERED=thresholds is not None,
        FAST=logits.is_cuda,
        num_warps=warps,
        **overlapped(logits),
    )
    return tokens
