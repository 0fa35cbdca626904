"""Edits and penalties of the few rows that have them, applied to float32 logits in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count"])
def _keep(logits, kept, rows, tokens, count, logits_stride, BLOCK: tl.constexpr):
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < count
    cell = tl.load(rows + edit, mask=inside, other=0) * logits_stride + tl.load(tokens + edit, mask=inside, other=0)
    tl.store(kept + edit, tl.load(logits + cell, mask=inside), mask=inside)


@triton.jit
def _forbid(logits, rows, vocabulary, logits_stride, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0))
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logits + row * logits_stride + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=token < vocabulary)


@triton.jit(do_not_specialize=["count"])
def _restore(logits, kept, rows, tokens, count, logits_stride, BLOCK: tl.constexpr):
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < count
    cell = tl.load(rows + edit, mask=inside, other=0) * logits_stride + tl.load(tokens + edit, mask=inside, other=0)
    tl.store(logits + cell, tl.load(kept + edit, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add(logits, values, rows, tokens, count, logits_stride, BLOCK: tl.constexpr):
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < count
    cell = tl.load(rows + edit, mask=inside, other=0) * logits_stride + tl.load(tokens + edit, mask=inside, other=0)
    tl.atomic_add(logits + cell, tl.load(values + edit, mask=inside, other=0.0), mask=inside)


def apply_edits(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor, allow_only: Tensor) -> None:
    """Add values to logits[rows, tokens] (repeats add up); in rows of allow_only all other tokens become -inf first.

    logits: f32 [S, V]; rows, tokens: i64 [E]; values: f32 [E]; allow_only: i64 [A].
    """
    count = rows.shape[0]
    vocabulary = logits.shape[1]
    grid = (max(triton.cdiv(count, 256), 1),)
    if allow_only.shape[0]:
        kept = torch.empty(max(count, 1), dtype=torch.float32, device=logits.device)
        _keep[grid](logits, kept, rows, tokens, count, logits.stride(0), BLOCK=256)
        _forbid[(allow_only.shape[0], triton.cdiv(vocabulary, 4096))](
            logits, allow_only, vocabulary, logits.stride(0), BLOCK=4096
        )
        _restore[grid](logits, kept, rows, tokens, count, logits.stride(0), BLOCK=256)
    if count:
        _add[grid](logits, values, rows, tokens, count, logits.stride(0), BLOCK=256)


@triton.jit(do_not_specialize=["num_rows"])
def _penalize(
    logits,
    rows,
    num_rows,
    row_slots,
    positions,
    history,
    num_prompts,
    presence,
    frequency,
    repetition,
    counts,
    logits_stride,
    history_stride,
    counts_stride,
    record_stride,
    BLOCK: tl.constexpr,
):
    # counts: one line of the vocabulary per program, zero between uses. The first pass over the history counts output
    # tokens (steps of 2) and marks prompt tokens (odd); the second takes each count once, clears it and edits the logit.
    seen = counts + tl.program_id(0).to(tl.int64) * counts_stride
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.load(rows + number)
        slot = tl.load(row_slots + row).to(tl.int64)
        length = tl.load(positions + row)
        num_prompt = tl.load(num_prompts + slot * record_stride)
        line = history + slot * history_stride
        for first in range(0, length, BLOCK):
            position = first + tl.arange(0, BLOCK)
            inside = position < length
            token = tl.load(line + position, mask=inside, other=0)
            output = position >= num_prompt
            tl.atomic_add(seen + token, 2, mask=inside & output)
            tl.atomic_or(seen + token, 1, mask=inside & (position < num_prompt))
        tl.debug_barrier()
        once = tl.load(presence + slot * record_stride)
        each = tl.load(frequency + slot * record_stride)
        divisor = tl.load(repetition + slot * record_stride)
        for first in range(0, length, BLOCK):
            position = first + tl.arange(0, BLOCK)
            inside = position < length
            token = tl.load(line + position, mask=inside, other=0)
            taken = tl.atomic_xchg(seen + token, 0, mask=inside)
            mine = inside & (taken > 0)
            outputs = (taken >> 1).to(tl.float32)
            cell = logits + row * logits_stride + token
            x = tl.load(cell, mask=mine, other=0.0)
            x = tl.where(x > 0.0, x / divisor, x * divisor)
            x -= tl.where(outputs > 0.0, once + each * outputs, 0.0)
            tl.store(cell, x, mask=mine)
        tl.debug_barrier()


class PenaltySpace:
    """Counting lines of `apply_penalties`: i32 [programs, V], zero between launches."""

    def __init__(self, vocabulary: int, device: torch.device | str, programs: int = 32) -> None:
        self.counts = torch.zeros((programs, vocabulary), dtype=torch.int32, device=device)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    row_slots: Tensor,
    positions: Tensor,
    history: Tensor,
    num_prompts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    space: PenaltySpace,
) -> None:
    """Repetition penalty of every token of the sequence, then presence and frequency penalties of its output tokens.

    logits: f32 [S, V]; rows: i64 [n], rows with a penalty; row_slots, positions: i32 [S]; history: i32 [slots, max_len],
    tokens [0, position) of those slots are valid; num_prompts: i32 [slots]; presence, frequency, repetition: f32
    [slots]; the four at one stride.
    """
    if rows.shape[0]:
        _penalize[(min(rows.shape[0], space.counts.shape[0]),)](
            logits, rows, rows.shape[0], row_slots, positions, history, num_prompts, presence, frequency, repetition,
            space.counts, logits.stride(0), history.stride(0), space.counts.stride(0), presence.stride(0),
            BLOCK=1024, num_warps=8,
        )  # fmt: skip
