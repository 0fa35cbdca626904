"""The threshold that min_p, top_k and top_p leave on a row's logits, without a sort.

Rounds narrow a bracket of the threshold eight candidates at a time (each round is one launch over rows and splits of the
vocabulary, and begins by adding up what the round before it counted), then the few logits inside the bracket are
gathered and the threshold is bisected among them, exactly: the result is one of the row's logits, and equal logits live
or die together. Launches are the same for every content of the logits, so a CUDA graph may hold them.

    state of a row, f32 [16]: largest, 1 / temperature in log2 units, target, low, high, measure(low), measure(high), 0,
    then the 8 candidates of the round; measure(t) is the count (top_k) or else the weight exp((x - largest) /
    temperature) of the logits >= t, and measure(low) >= target > measure(high). How many logits the bracket holds is
    bounded by its weight over the weight of its lowest logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INFINITY = tl.constexpr(float("inf"))
# A token this many temperatures below the largest logit is never drawn: the noise spans less than 27.
REACH = tl.constexpr(60.0)
CAPACITY = tl.constexpr(8192)  # logits gathered per row
STATE = tl.constexpr(16)
SPLITS = 64  # at most, of a row
PROGRAMS = 1056  # wanted per launch: each begins by adding up what all splits of its row counted
ROUNDS = 3


class FilterSpace:
    """Scratch of `filter_thresholds` for up to rows rows."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.partials = torch.empty((ROUNDS + 1, rows * SPLITS * 8), dtype=torch.float32, device=device)
        self.states = torch.empty((ROUNDS + 1, rows * STATE.value), dtype=torch.float32, device=device)
        self.gathered = torch.empty((rows, CAPACITY.value), dtype=torch.float32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["per_split"])
def _extremes(logits, rows, partials, vocabulary, logits_stride, per_split, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    split = tl.program_id(1)
    line = logits + tl.load(rows + number) * logits_stride
    high = tl.full([BLOCK], -INFINITY, tl.float32)
    low = tl.full([BLOCK], INFINITY, tl.float32)
    end = tl.minimum((split + 1) * per_split, vocabulary)
    for first in range(split * per_split, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(line + token, mask=token < end, other=-INFINITY).to(tl.float32)
        high = tl.maximum(high, x)
        low = tl.minimum(low, tl.where(x > -INFINITY, x, INFINITY))
    cell = partials + (number * tl.num_programs(1) + split) * 8
    tl.store(cell, tl.max(high, 0))
    tl.store(cell + 1, tl.min(low, 0))


@triton.jit
def _pick(values, place):
    return tl.sum(tl.where(tl.arange(0, 8) == place, values, 0.0), 0)


@triton.jit
def _bound(by_count, measure_low, measure_high, low, largest, inverse):
    """At most so many logits are gathered: for top_k everything from low on, else the bracket."""
    lightest = tl.exp2((low - largest) * inverse)
    return tl.where(by_count, measure_low, 1.001 * (measure_low - measure_high) / tl.maximum(lightest, 1e-30))


@triton.jit(do_not_specialize=["per_split", "splits"])
def _round(
    logits,
    rows,
    row_slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    old_state,
    new_state,
    old_partials,
    new_partials,
    gathered,
    gathered_counts,
    vocabulary,
    logits_stride,
    record_stride,
    per_split,
    splits,
    ROUND: tl.constexpr,
    GATHER: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + number)
    record = tl.load(row_slots + row).to(tl.int64) * record_stride
    top_k = tl.load(top_ks + record)
    by_count = (top_k > 0) & (top_k < vocabulary)
    candidate = tl.arange(0, 8)
    every = tl.arange(0, SPLITS_PAD)
    old_partials += number * splits * 8
    old_state += number * STATE
    if ROUND == 1:
        highs = tl.load(old_partials + every * 8, mask=every < splits, other=-INFINITY)
        lows = tl.load(old_partials + every * 8 + 1, mask=every < splits, other=INFINITY)
        largest = tl.max(highs, 0)
        temperature = tl.load(temperatures + record)
        min_p = tl.load(min_ps + record)
        low = tl.maximum(tl.min(lows, 0), largest - REACH * temperature)
        if min_p > 0.0:
            low = tl.minimum(tl.maximum(low, largest + temperature * tl.log(min_p)), largest)
        inverse = 1.4426950408889634 / temperature
        target = top_k.to(tl.float32)
        high = INFINITY
        measure_low = 0.0
        measure_high = 0.0
        # Candidates 64, 32, ... 0.5 temperatures below the largest, the first of them `low` itself.
        steps = temperature * tl.exp2(6.0 - candidate.to(tl.float32))
        thresholds = tl.where(candidate == 0, low, tl.maximum(low, largest - steps))
        wide = True
    else:
        cells = old_partials + every[:, None] * 8 + candidate[None, :]
        measures = tl.sum(tl.load(cells, mask=(every < splits)[:, None], other=0.0), 0)
        thresholds = tl.load(old_state + 8 + candidate)
        largest = tl.load(old_state)
        inverse = tl.load(old_state + 1)
        target = tl.load(old_state + 2)
        low = tl.load(old_state + 3)
        high = tl.load(old_state + 4)
        measure_low = tl.load(old_state + 5)
        measure_high = tl.load(old_state + 6)
        if ROUND == 2:
            # Candidate 0 is `low`: its measure is that of everything the filters before top_p leave.
            measure_low = _pick(measures, 0)
            if by_count == 0:
                target = measure_low * tl.load(top_ps + record)
        # A round that was skipped left candidates at +inf: nothing reaches them.
        passed = tl.sum((measures >= target).to(tl.int32) * (thresholds < INFINITY).to(tl.int32), 0)
        skipped = _pick(thresholds, 0) == INFINITY
        if skipped == 0:
            if passed < 8:
                high = _pick(thresholds, passed)
                measure_high = _pick(measures, passed)
            if passed > 0:
                low = _pick(thresholds, passed - 1)
                measure_low = _pick(measures, passed - 1)
        wide = _bound(by_count, measure_low, measure_high, low, largest, inverse) > CAPACITY
        top = tl.minimum(high, largest)
        thresholds = low + (top - low) * (candidate + 1).to(tl.float32) * 0.1111111111
        thresholds = tl.where(wide, thresholds, INFINITY)
    new_state += number * STATE
    if split == 0:
        tl.store(new_state, largest)
        tl.store(new_state + 1, inverse)
        tl.store(new_state + 2, target)
        tl.store(new_state + 3, low)
        tl.store(new_state + 4, high)
        tl.store(new_state + 5, measure_low)
        tl.store(new_state + 6, measure_high)
        tl.store(new_state + 8 + candidate, thresholds)
    line = logits + row * logits_stride
    first_token = split * per_split
    end = tl.minimum(first_token + per_split, vocabulary)
    if GATHER:
        if wide == 0:
            # Everything at or above low for top_k (top_p may cut there too), else only the bracket.
            ceiling = tl.where(by_count, INFINITY, high)
            target_line = gathered + number.to(tl.int64) * CAPACITY
            for first in range(first_token, end, BLOCK):
                token = first + tl.arange(0, BLOCK)
                x = tl.load(line + token, mask=token < end, other=-INFINITY).to(tl.float32)
                chosen = ((x >= low) & ((x < ceiling) | (by_count & (x == INFINITY)))).to(tl.int32)
                many = tl.sum(chosen, 0)
                if many > 0:
                    place = tl.atomic_add(gathered_counts + number, many, sem="relaxed") + tl.cumsum(chosen, 0) - 1
                    tl.store(target_line + place, x, mask=(chosen > 0) & (place < CAPACITY))
    else:
        if wide:
            t0 = _pick(thresholds, 0)
            t1 = _pick(thresholds, 1)
            t2 = _pick(thresholds, 2)
            t3 = _pick(thresholds, 3)
            t4 = _pick(thresholds, 4)
            t5 = _pick(thresholds, 5)
            t6 = _pick(thresholds, 6)
            t7 = _pick(thresholds, 7)
            zero = tl.zeros([BLOCK], tl.float32)
            m0, m1, m2, m3, m4, m5, m6, m7 = zero, zero, zero, zero, zero, zero, zero, zero
            for first in range(first_token, end, BLOCK):
                token = first + tl.arange(0, BLOCK)
                x = tl.load(line + token, mask=token < end, other=-INFINITY).to(tl.float32)
                w = tl.exp2((x - largest) * inverse)
                w = tl.where(by_count, 1.0, w)
                m0 = tl.where(x >= t0, m0 + w, m0)
                m1 = tl.where(x >= t1, m1 + w, m1)
                m2 = tl.where(x >= t2, m2 + w, m2)
                m3 = tl.where(x >= t3, m3 + w, m3)
                m4 = tl.where(x >= t4, m4 + w, m4)
                m5 = tl.where(x >= t5, m5 + w, m5)
                m6 = tl.where(x >= t6, m6 + w, m6)
                m7 = tl.where(x >= t7, m7 + w, m7)
            cell = new_partials + (number * splits + split) * 8
            tl.store(cell, tl.sum(m0, 0))
            tl.store(cell + 1, tl.sum(m1, 0))
            tl.store(cell + 2, tl.sum(m2, 0))
            tl.store(cell + 3, tl.sum(m3, 0))
            tl.store(cell + 4, tl.sum(m4, 0))
            tl.store(cell + 5, tl.sum(m5, 0))
            tl.store(cell + 6, tl.sum(m6, 0))
            tl.store(cell + 7, tl.sum(m7, 0))
        else:
            # Nothing to narrow; finite zeros keep the next round's sums defined.
            blank = new_partials + (number * splits + split) * 8 + candidate
            tl.store(blank, tl.zeros([8], tl.float32))


@triton.jit
def _order(x):
    """float32 -> int32 of the same order, and back: the map is its own inverse."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _bisect(keys, weights, above, target, floor, ceiling):
    """The largest key k in [floor, ceiling] with above + sum(weights of keys >= k) >= target; floor if none."""
    low = floor
    high = ceiling
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        if above + tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _scan_bisect(line, vocabulary, largest, inverse, by_count, target, floor, ceiling, BLOCK: tl.constexpr):
    """_bisect over the whole row, for the rare row whose bracket holds more than CAPACITY logits."""
    low = floor
    high = ceiling
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        measure = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocabulary, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = tl.load(line + token, mask=token < vocabulary, other=-INFINITY).to(tl.float32)
            w = tl.where(by_count, 1.0, tl.exp2((x - largest) * inverse))
            measure += tl.where(_order(x.to(tl.int32, bitcast=True)) >= middle, w, 0.0)
        if tl.sum(measure, 0) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _finish(
    logits,
    thresholds,
    rows,
    row_slots,
    temperatures,
    top_ks,
    top_ps,
    states,
    gathered,
    gathered_counts,
    vocabulary,
    logits_stride,
    record_stride,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
):
    number = tl.program_id(0)
    row = tl.load(rows + number)
    record = tl.load(row_slots + row).to(tl.int64) * record_stride
    state = states + number * STATE
    largest = tl.load(state)
    inverse = tl.load(state + 1)
    target = tl.load(state + 2)
    low = tl.load(state + 3)
    high = tl.load(state + 4)
    measure_low = tl.load(state + 5)
    measure_high = tl.load(state + 6)
    top_k = tl.load(top_ks + record)
    top_p = tl.load(top_ps + record)
    by_count = (top_k > 0) & (top_k < vocabulary)
    count = tl.load(gathered_counts + number)
    tl.debug_barrier()
    tl.store(gathered_counts + number, 0)
    threshold = low
    floor = _order(low.to(tl.int32, bitcast=True))
    ceiling = _order(tl.minimum(high, largest).to(tl.int32, bitcast=True))
    inside = _bound(by_count, measure_low, measure_high, low, largest, inverse)
    sane = (largest > -INFINITY) & (largest < INFINITY) & (tl.load(temperatures + record) > 0.0)
    if sane == 0:
        threshold = -INFINITY
    elif (by_count == 0) & (top_p >= 1.0):
        threshold = low
    elif inside <= CAPACITY:
        source = gathered + number.to(tl.int64) * CAPACITY
        if count <= SMALL:
            few = tl.arange(0, SMALL)
            x_few = tl.load(source + few, mask=few < count, other=-INFINITY)
            threshold = _among(x_few, largest, inverse, by_count, target, floor, ceiling, measure_high, top_p)
        else:
            many = tl.arange(0, CAPACITY)
            x_many = tl.load(source + many, mask=many < count, other=-INFINITY)
            threshold = _among(x_many, largest, inverse, by_count, target, floor, ceiling, measure_high, top_p)
    else:
        line = logits + row * logits_stride
        key = _scan_bisect(line, vocabulary, largest, inverse, by_count, target, floor, ceiling, BLOCK)
        top = _order(largest.to(tl.int32, bitcast=True))
        if by_count & (top_p < 1.0):
            total = tl.zeros([BLOCK], tl.float32)
            for first in range(0, vocabulary, BLOCK):
                token = first + tl.arange(0, BLOCK)
                x = tl.load(line + token, mask=token < vocabulary, other=-INFINITY).to(tl.float32)
                kept = _order(x.to(tl.int32, bitcast=True)) >= key
                total += tl.where(kept, tl.exp2((x - largest) * inverse), 0.0)
            key = _scan_bisect(line, vocabulary, largest, inverse, False, tl.sum(total, 0) * top_p, key, top, BLOCK)
        threshold = _order(key).to(tl.float32, bitcast=True)
    tl.store(thresholds + row, threshold)


@triton.jit
def _among(x, largest, inverse, by_count, target, floor, ceiling, above, top_p):
    """The threshold among gathered logits: for top_k these are all at or above the bracket, else those inside it."""
    keys = _order(x.to(tl.int32, bitcast=True))
    weights = tl.where(x > -INFINITY, tl.exp2((x - largest) * inverse), 0.0)
    key = floor
    if by_count:
        ones = tl.where(x > -INFINITY, 1.0, 0.0)
        key = _bisect(keys, ones, 0.0, target, floor, ceiling)
        if top_p < 1.0:
            kept = tl.sum(tl.where(keys >= key, weights, 0.0), 0)
            key = _bisect(keys, weights, 0.0, kept * top_p, key, _order(largest.to(tl.int32, bitcast=True)))
    else:
        key = _bisect(keys, weights, above, target, floor, ceiling)
    return _order(key).to(tl.float32, bitcast=True)


def filter_thresholds(
    logits: Tensor,
    rows: Tensor,
    row_slots: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    space: FilterSpace,
    out: Tensor | None = None,
    block: int = 1024,
    warps: int = 8,
) -> Tensor:
    """The smallest logit each row keeps: min_p, then top_k, then top_p of what is left; -inf for rows not named.

    logits: [S, V] f32 or bf16; rows: i64 [n], rows that have a filter; row_slots: i32 [S]; temperatures, top_ps, min_ps:
    f32 [slots]; top_ks: i32 [slots], 0: all; the four at one stride -> f32 [S]. Logits that the noise cannot lift to the
    top count as dropped.
    """
    count, vocabulary = rows.shape[0], logits.shape[1]
    if out is None:
        out = torch.full((logits.shape[0],), float("-inf"), dtype=torch.float32, device=logits.device)
    if not count:
        return out
    block = min(block, triton.next_power_of_2(vocabulary))
    splits = max(1, min(SPLITS, PROGRAMS // count, triton.cdiv(vocabulary, block)))
    per_split = triton.cdiv(triton.cdiv(vocabulary, splits), block) * block
    splits = triton.cdiv(vocabulary, per_split)
    grid = (count, splits)
    stride = logits.stride(0)
    wide = min(4 * block, triton.next_power_of_2(vocabulary))
    _extremes[grid](logits, rows, space.partials[0], vocabulary, stride, per_split, BLOCK=wide, num_warps=warps)
    for number in range(1, ROUNDS + 2):
        gather = number == ROUNDS + 1
        new = min(number, ROUNDS)
        _round[grid](
            logits, rows, row_slots, temperatures, top_ks, top_ps, min_ps,
            space.states[number - 1], space.states[0 if gather else new], space.partials[number - 1], space.partials[new],
            space.gathered, space.counts, vocabulary, stride, temperatures.stride(0), per_split, splits,
            ROUND=min(number, 3), GATHER=gather, SPLITS_PAD=SPLITS,
            BLOCK=wide if gather else block, num_warps=warps,
        )  # fmt: skip
    _finish[(count,)](
        logits, out, rows, row_slots, temperatures, top_ks, top_ps, space.states[0], space.gathered, space.counts,
        vocabulary, stride, temperatures.stride(0), BLOCK=wide, SMALL=1024, num_warps=16,
    )  # fmt: skip
    return out
