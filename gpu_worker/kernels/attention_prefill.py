"""Causal attention of prefill rows: the cached prefix through pages, this step's keys and values contiguously.

FlashAttention-2 (Dao, 2023) with the query heads of one key head packed into the tile: tile line m is head m % GROUP of
token m // GROUP, so short chunks fill the tensor cores and keys are read once for all their heads. Per tile:

    [0, prefix) pages   [0, whole) new keys every line sees   [whole, end) new keys under the causal mask

A row whose keys gather_keys has copied reads all of them as new ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import padded
from gpu_worker.kernels.pages import codes, load_cells, scale_of
from gpu_worker.kernels.softmax import MASKED, capped, update


@triton.jit
def _new_keys(
    queries,
    highest,
    total,
    values,
    k_new,
    v_new,
    new_stride,
    line_token,
    first_token,
    end_token,
    scale,
    soft_cap,
    window,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys [first_token, end_token) of the row's new tokens. MASK: causal mask and the row's end, else all visible."""
    offset = tl.arange(0, HEAD_PAD)
    cells = tl.arange(0, BLOCK_N)[:, None] * new_stride + offset[None, :]
    for first in tl.range(first_token, end_token, BLOCK_N, num_stages=STAGES):
        token = first + tl.arange(0, BLOCK_N)
        start = first * new_stride  # within one row: 32 bits do
        if MASK:
            kv_mask = (token < end_token)[:, None] & (offset < HEAD)[None, :]
            keys = tl.load(k_new + start + cells, mask=kv_mask, other=0.0)
        elif HEAD == HEAD_PAD:
            keys = tl.load(k_new + start + cells)
        else:
            keys = tl.load(k_new + start + cells, mask=(offset < HEAD)[None, :], other=0.0)
        s = capped(tl.dot(queries, tl.trans(keys), input_precision=PRECISION), scale, soft_cap, HAS_CAP)
        if MASK:
            s = tl.where((token[None, :] <= line_token[:, None]) & (token < end_token)[None, :], s, MASKED)
        if HAS_WINDOW:
            s = tl.where(token[None, :] > line_token[:, None] - window, s, MASKED)
        weights, factor, highest, total = update(s, highest, total)
        if MASK:
            kv_mask = (token < end_token)[:, None] & (offset < HEAD)[None, :]
            block = tl.load(v_new + start + cells, mask=kv_mask, other=0.0)
        elif HEAD == HEAD_PAD:
            block = tl.load(v_new + start + cells)
        else:
            block = tl.load(v_new + start + cells, mask=(offset < HEAD)[None, :], other=0.0)
        values = tl.dot(weights.to(block.dtype), block, values * factor[:, None], input_precision=PRECISION)
    return highest, total, values


@triton.jit(
    do_not_specialize=["num_rows", "window"],
    do_not_specialize_on_alignment=["row_slots", "query_starts", "context_lens", "copied_starts", "kv_scales"],
)
def _attention_prefill(
    q,
    k_new,
    v_new,
    k_cache,
    v_cache,
    out,
    page_table,
    row_slots,
    query_starts,
    context_lens,
    k_copied,
    v_copied,
    copied_starts,
    kv_scales,
    num_rows,
    scale,
    soft_cap,
    window,
    q_stride,
    new_stride,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGED_N: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Tiles of all rows in row order; the last tile of the last row, the longest of its row, starts first.
    every = tl.arange(0, ROWS)
    begins = tl.load(query_starts + every, mask=every < num_rows, other=0)
    ends = tl.load(query_starts + every + 1, mask=every < num_rows, other=0)
    tiles_before = tl.cumsum((ends - begins + TILE_TOKENS - 1) // TILE_TOKENS, 0)
    tile = tl.max(tiles_before, 0) - 1 - tl.program_id(1)
    if tile < 0:
        return
    row = tl.sum((tiles_before <= tile).to(tl.int32), 0)
    tile -= tl.max(tl.where(every < row, tiles_before, 0), 0)
    kv_head = tl.program_id(0)
    begin = tl.load(query_starts + row)
    new_tokens = tl.load(query_starts + row + 1) - begin
    prefix = tl.load(context_lens + row) - new_tokens
    slot = tl.load(row_slots + row).to(tl.int64)

    line = tl.arange(0, BLOCK_M)
    first_line = tile * TILE_TOKENS
    line_token = first_line + line // GROUP  # among the row's new tokens
    head = kv_head * GROUP + line % GROUP
    offset = tl.arange(0, HEAD_PAD)
    mask = ((line < TILE_TOKENS * GROUP) & (line_token < new_tokens))[:, None] & (offset < HEAD)[None, :]
    token_cells = (begin + line_token).to(tl.int64)[:, None]
    queries = tl.load(q + token_cells * q_stride + head[:, None] * HEAD + offset[None, :], mask=mask, other=0.0)

    highest = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)

    table = page_table + slot * table_stride
    k_head = k_cache + kv_head * head_stride + offset[None, :]
    v_head = v_cache + kv_head * head_stride + offset[None, :]
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(prefix + first_line - window + 1, 0)
        lowest = (lowest // PAGE) * PAGE
    k_row = k_new + begin.to(tl.int64) * new_stride + kv_head * HEAD
    v_row = v_new + begin.to(tl.int64) * new_stride + kv_head * HEAD
    paged = prefix
    if HAS_COPIES:
        # Selected without a branch, so that the compiler still knows how addresses are aligned.
        start = tl.load(copied_starts + row)
        copied = start >= 0
        place = tl.maximum(start, 0).to(tl.int64) * (KV_HEADS * HEAD) + kv_head * HEAD
        k_row = tl.where(copied, k_copied + place, k_row)
        v_row = tl.where(copied, v_copied + place, v_row)
        new_stride = tl.where(copied, KV_HEADS * HEAD, new_stride)
        paged = tl.where(copied, 0, prefix)
        first_line += prefix - paged
        line_token += prefix - paged
        new_tokens += prefix - paged
    FLOAT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    paged_scale = scale * scale_of(kv_scales, kv_head, KV_HEADS, False, FLOAT8)
    for first in tl.range(lowest, paged, PAGED_N, num_stages=PAGED_STAGES):
        # Token t is cell t % PAGE of page table[t // PAGE]; page ids become 64-bit before the multiplication.
        token = first + tl.arange(0, PAGED_N)
        live = token < prefix
        page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
        cell = (page * page_stride + (token % PAGE) * token_stride)[:, None]
        kv_mask = live[:, None] if HEAD == HEAD_PAD else live[:, None] & (offset < HEAD)[None, :]
        keys = load_cells(k_head + cell, kv_mask, queries.dtype)
        s = capped(tl.dot(queries, tl.trans(keys), input_precision=PRECISION), paged_scale, soft_cap, HAS_CAP)
        s = tl.where(live[None, :], s, MASKED)
        if HAS_WINDOW:
            s = tl.where(token[None, :] > (prefix + line_token)[:, None] - window, s, MASKED)
        weights, factor, highest, total = update(s, highest, total)
        block = load_cells(v_head + cell, kv_mask, queries.dtype)
        values = tl.dot(weights.to(block.dtype), block, values * factor[:, None], input_precision=PRECISION)
    values *= scale_of(kv_scales, kv_head, KV_HEADS, True, FLOAT8)

    # This step's keys, indexed by token of the row.
    whole = ((first_line + 1) // BLOCK_N) * BLOCK_N
    lowest = 0
    if HAS_WINDOW:
        lowest = (tl.maximum(first_line - window + 1, 0) // BLOCK_N) * BLOCK_N
    highest, total, values = _new_keys(
        queries, highest, total, values, k_row, v_row, new_stride, line_token, lowest, whole, scale, soft_cap, window,
        HEAD, HEAD_PAD, BLOCK_N, STAGES, False, HAS_WINDOW, HAS_CAP, PRECISION,
    )  # fmt: skip
    end = tl.minimum(first_line + TILE_TOKENS, new_tokens)
    highest, total, values = _new_keys(
        queries, highest, total, values, k_row, v_row, new_stride, line_token, whole, end, scale, soft_cap, window,
        HEAD, HEAD_PAD, BLOCK_N, 1, True, HAS_WINDOW, HAS_CAP, PRECISION,
    )  # fmt: skip
    values = values / total[:, None]
    cells = token_cells * (KV_HEADS * GROUP * HEAD) + head[:, None] * HEAD + offset[None, :]
    tl.store(out + cells, values.to(out.dtype.element_ty), mask=mask)


def _tile(tokens_per_row: int, wide: bool) -> tuple[int, int, int]:
    """block_m, block_n, warps, as measured on an H200 with 32/8 heads of 128. wide: large heads, or float32."""
    if wide:
        return 64, 32, 8
    if tokens_per_row < 1024:
        return 128, 64, 8
    if tokens_per_row < 8192:
        return 256, 64, 16
    return 128, 128, 8


def attention_prefill(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    copies: tuple[Tensor, Tensor, Tensor] | None = None,
    kv_scales: Tensor | None = None,
    block_m: int = 0,
    block_n: int = 0,
    stages: int = 3,
    paged_n: int = 64,
    paged_stages: int = 5,
    warps: int = 8,
) -> Tensor:
    """Causal attention of R rows of any lengths over their whole context.

    q: [T, hq, d] and k_new, v_new: [T, hkv, d], heads contiguous, tokens at any stride (k_new and v_new at one);
    k_cache, v_cache: [pages, hkv, page_tokens, d], read for the first context - new tokens of a row only;
    page_table: i32 [slots, max_pages]; row_slots: i32 [R]; query_starts: i32 [R + 1]; context_lens: i32 [R], after this
    step; window: a token sees the last `window` tokens, itself included, 0: all; copies: keys and values [C, hkv, d] of rows
    whose whole context was copied, and where a row's begin, i32 [R], -1: not copied; kv_scales: f32 [2, hkv],
    with pages of float8 -> [T, hq, d].
    """
    tokens, q_heads, head = q.shape
    _, kv_heads, page_tokens, _ = k_cache.shape
    rows = row_slots.shape[0]
    if out is None:
        out = torch.empty((tokens, q_heads, head), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    assert k_new.stride(0) == v_new.stride(0), f"{k_new.stride() = } {v_new.stride() = }"
    group = q_heads // kv_heads
    head_pad = max(triton.next_power_of_2(head), 16)
    wide = head_pad > 128 or q.dtype == torch.float32
    if not block_m:
        block_m, block_n, warps = _tile(tokens // rows, wide)
    tiles = triton.cdiv(tokens, block_m // group) + rows
    _attention_prefill[(kv_heads, tiles)](
        q,
        k_new,
        v_new,
        codes(k_cache),
        codes(v_cache),
        out,
        page_table,
        row_slots,
        query_starts,
        context_lens,
        *(copies or (k_new, v_new, context_lens)),
        q if kv_scales is None else kv_scales,
        rows,
        scale if soft_cap else scale * 1.4426950408889634,
        soft_cap,
        window,
        q.stride(0),
        k_new.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD=head,
        HEAD_PAD=head_pad,
        PAGE=page_tokens,
        ROWS=padded(rows),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PAGED_N=min(block_n, paged_n),
        STAGES=stages,
        PAGED_STAGES=paged_stages,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        HAS_COPIES=copies is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
    )
    return out
