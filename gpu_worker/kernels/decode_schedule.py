"""The work list of decode attention, made on the device once per step and read by every layer.

Rows differ in length and a CUDA graph fixes the grid, so the grid counts items, not rows: an item is one span of one
row's keys. Spans are cut so that all items together fill the card whatever the lengths are (the device-side form of
FlashInfer's plan, Ye et al., 2025). Rows of a group read their shared leading pages through items of their own, one per
(tile of rows, span). A row's partial results stand next to each other:

    parts of row r: [start, start + shared spans) shared, then its private spans
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import padded

SPAN_STEP = 64  # tokens; spans are multiples of it
TARGET_PROGRAMS = 528  # four on each of an H200's 132 multiprocessors
SHARED_TARGET_PROGRAMS = 264  # their tiles are larger: two


class DecodeSchedule(NamedTuple):
    """Device memory of one work list. R rows, G groups (0: none)."""

    items: Tensor  # i32 [max_items, 8] of (row, slot, first token, end token, part or -1 for a row of one part, 0, 0, 0)
    shared_items: Tensor  # i32 [max_shared_items, 5] of (first row, rows, first token, end token, span)
    counts: Tensor  # i32 [2]: items, shared items
    row_parts: Tensor  # i32 [R, 2] of (first part, parts)
    part_values: Tensor  # f32 [max_parts, hq, d]
    part_sums: Tensor  # f32 [max_parts, hq], log2 of the sum of weights


class Groups(NamedTuple):
    """Groups of decode rows that share leading pages; entry 0 is reserved and means no group."""

    row_groups: Tensor  # i32 [R], index of the row's group, 0: none
    starts: Tensor  # i32 [G], first row
    rows: Tensor  # i32 [G], number of rows
    pages: Tensor  # i32 [G], leading pages shared


def rows_per_tile(block_m: int, q_heads: int, kv_heads: int) -> int:
    return block_m // (q_heads // kv_heads)


def allocate(
    rows: int,
    q_heads: int,
    kv_heads: int,
    head: int,
    device: torch.device | str,
    max_groups: int = 0,
    target_programs: int = TARGET_PROGRAMS,
    shared_target_programs: int = SHARED_TARGET_PROGRAMS,
    shared_block_m: int = 128,
) -> DecodeSchedule:
    """Memory for a batch of up to rows decode rows. target_programs: programs wanted when there is work enough."""
    budget = triton.cdiv(target_programs, kv_heads)
    shared_budget = triton.cdiv(shared_target_programs, kv_heads)
    items = rows + budget
    tile_rows = rows_per_tile(shared_block_m, q_heads, kv_heads)
    shared = parts = 0
    if max_groups:
        tiles = triton.cdiv(rows, tile_rows) + max_groups
        shared = shared_budget + tiles
        parts = rows + tile_rows * shared_budget
    return DecodeSchedule(
        items=torch.zeros((items, 8), dtype=torch.int32, device=device),
        shared_items=torch.zeros((max(shared, 1), 5), dtype=torch.int32, device=device),
        counts=torch.zeros(2, dtype=torch.int32, device=device),
        row_parts=torch.zeros((rows, 2), dtype=torch.int32, device=device),
        part_values=torch.empty((items + parts, q_heads, head), dtype=torch.float32, device=device),
        part_sums=torch.empty((items + parts, q_heads), dtype=torch.float32, device=device),
    )


@triton.jit
def _spans(tokens, work, budget, min_span, STEP: tl.constexpr):
    """How many spans a range is cut into (its share of the budget, to the nearest), and their even length."""
    share = tokens.to(tl.float32) * budget / tl.maximum(work, 1).to(tl.float32)
    count = tl.minimum((share + 0.5).to(tl.int32), (tokens + min_span - 1) // min_span)
    count = tl.maximum(count, 1)
    length = (tokens + count - 1) // count
    length = tl.maximum(((length + STEP - 1) // STEP) * STEP, STEP)
    return (tokens + length - 1) // length, length


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "window", "budget", "shared_budget", "min_span"],
    do_not_specialize_on_alignment=["context_lens", "row_slots", "row_groups", "group_starts", "group_rows", "group_pages"],
)
def _schedule(
    context_lens,
    row_slots,
    row_groups,
    group_starts,
    group_rows,
    group_pages,
    items,
    shared_items,
    counts,
    row_parts,
    num_rows,
    num_groups,
    window,
    budget,
    shared_budget,
    min_span,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Program r knows every row's length, so it finds its own place without talking to the others.
    me = tl.program_id(0)
    row = tl.arange(0, ROWS)
    length = tl.load(context_lens + row, mask=row < num_rows, other=0)
    begin = tl.zeros([ROWS], tl.int32)
    if window > 0:
        begin = tl.maximum(length - window, 0)
    shared_count = tl.zeros([ROWS], tl.int32)
    if HAS_GROUPS:
        group = tl.arange(0, GROUPS)
        rows_of = tl.load(group_rows + group, mask=group < num_groups, other=0)
        tokens_of = tl.load(group_pages + group, mask=(group < num_groups) & (rows_of > 0), other=0) * PAGE
        tiles_of = (rows_of + TILE_ROWS - 1) // TILE_ROWS
        work = tl.sum(tiles_of * tokens_of, 0)
        count_of, length_of = _spans(tokens_of, work, shared_budget, min_span, STEP)
        mine = tl.load(row_groups + row, mask=row < num_rows, other=0)
        begin = tl.load(group_pages + mine, mask=(row < num_rows) & (mine > 0), other=0) * PAGE
        shared_count, _ = _spans(begin, work, shared_budget, min_span, STEP)
        # Items of group `me`: tile by tile, so that tiles of one span run together and find its keys in L2.
        if me < num_groups:
            base = tl.sum(tl.where(group < me, tiles_of * count_of, 0), 0)
            spans = tl.sum(tl.where(group == me, count_of, 0), 0)
            span_tokens = tl.sum(tl.where(group == me, length_of, 0), 0)
            tiles = tl.sum(tl.where(group == me, tiles_of, 0), 0)
            tokens = tl.sum(tl.where(group == me, tokens_of, 0), 0)
            rows = tl.sum(tl.where(group == me, rows_of, 0), 0)
            start = tl.load(group_starts + me)
            for first in range(0, spans * tiles, WIDTH):
                item = first + tl.arange(0, WIDTH)
                tile = item % tl.maximum(tiles, 1)
                chunk = item // tl.maximum(tiles, 1)
                cell = shared_items + (base + item) * 5
                inside = item < spans * tiles
                tl.store(cell, start + tile * TILE_ROWS, mask=inside)
                tl.store(cell + 1, tl.minimum(rows - tile * TILE_ROWS, TILE_ROWS), mask=inside)
                tl.store(cell + 2, chunk * span_tokens, mask=inside)
                tl.store(cell + 3, tl.minimum((chunk + 1) * span_tokens, tokens), mask=inside)
                tl.store(cell + 4, chunk, mask=inside)
        if me == 0:
            tl.store(counts + 1, tl.sum(tiles_of * count_of, 0))

    private = tl.maximum(length - begin, 0)
    count, span_length = _spans(private, tl.sum(private, 0), budget, min_span, STEP)
    if me == 0:
        tl.store(counts, tl.sum(count, 0))
    if me < num_rows:
        base = tl.sum(tl.where(row < me, count, 0), 0)
        part = tl.sum(tl.where(row < me, count + shared_count, 0), 0)
        my_count = tl.sum(tl.where(row == me, count, 0), 0)
        my_shared = tl.sum(tl.where(row == me, shared_count, 0), 0)
        my_begin = tl.sum(tl.where(row == me, begin, 0), 0)
        my_end = tl.sum(tl.where(row == me, length, 0), 0)
        my_span = tl.sum(tl.where(row == me, span_length, 0), 0)
        my_slot = tl.load(row_slots + me)
        tl.store(row_parts + me * 2, part)
        tl.store(row_parts + me * 2 + 1, my_shared + my_count)
        for first in range(0, my_count, WIDTH):
            item = first + tl.arange(0, WIDTH)
            cell = items + (base + item) * 8
            inside = item < my_count
            tl.store(cell, me, mask=inside)
            tl.store(cell + 1, my_slot, mask=inside)
            tl.store(cell + 2, my_begin + item * my_span, mask=inside)
            tl.store(cell + 3, tl.minimum(my_begin + (item + 1) * my_span, my_end), mask=inside)
            tl.store(cell + 4, tl.where(my_shared + my_count == 1, -1, part + my_shared + item), mask=inside)


def schedule_decode(
    into: DecodeSchedule,
    context_lens: Tensor,
    row_slots: Tensor,
    page_tokens: int,
    q_heads: int,
    kv_heads: int,
    groups: Groups | None = None,
    window: int = 0,
    target_programs: int = TARGET_PROGRAMS,
    shared_target_programs: int = SHARED_TARGET_PROGRAMS,
    min_span: int = SPAN_STEP,
    shared_block_m: int = 128,
) -> None:
    """Fill `into` for decode rows of context_lens (0: padding) and row_slots, i32 [R] each.

    One list serves all layers of one window.

    The targets and shared_block_m must equal those of allocate. A windowed list reads no shared pages.
    """
    rows = context_lens.shape[0]
    shared = groups if groups is not None and window == 0 else None
    num_groups = shared.starts.shape[0] if shared is not None else 0
    unused = context_lens
    _schedule[(max(rows, num_groups),)](
        context_lens,
        row_slots,
        shared.row_groups if shared is not None else unused,
        shared.starts if shared is not None else unused,
        shared.rows if shared is not None else unused,
        shared.pages if shared is not None else unused,
        into.items,
        into.shared_items,
        into.counts,
        into.row_parts,
        rows,
        num_groups,
        window,
        triton.cdiv(target_programs, kv_heads),
        triton.cdiv(shared_target_programs, kv_heads),
        min_span,
        ROWS=padded(rows),
        GROUPS=padded(num_groups),
        PAGE=page_tokens,
        TILE_ROWS=rows_per_tile(shared_block_m, q_heads, kv_heads),
        STEP=SPAN_STEP,
        HAS_GROUPS=shared is not None,
        WIDTH=32,
        num_warps=4,
    )
