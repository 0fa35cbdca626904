"""Attention of decode rows over their private pages, split over the keys, and the merge of a row's partial results.

Flash-decoding (Dao et al., 2023): all query heads of one key head form one tile and a row's keys are cut into spans. A
row of one span is written at once; the spans of the others are merged by log-sum-exp in a second, small launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.decode_schedule import DecodeSchedule
from gpu_worker.kernels.launch import begin_short_kernel, overlapped, release_next, wait_for_previous
from gpu_worker.kernels.pages import codes, load_cells, scale_of
from gpu_worker.kernels.softmax import MASKED, capped, update


@triton.jit
def _attention_decode(
    q,
    k_cache,
    v_cache,
    out,
    page_table,
    items,
    counts,
    part_values,
    part_sums,
    kv_scales,
    scale,
    soft_cap,
    q_row_stride,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # All at once: the chain of dependent loads before the first key is what a short row waits for.
    count = tl.load(counts)
    row = tl.load(items + item * 8)
    slot = tl.load(items + item * 8 + 1).to(tl.int64)
    begin = tl.load(items + item * 8 + 2)
    end = tl.load(items + item * 8 + 3)
    part = tl.load(items + item * 8 + 4)
    if item >= count:
        return

    # Queries [GROUP_PAD, HEAD_PAD]: the GROUP heads that read this key head.
    member = tl.arange(0, GROUP_PAD)
    offset = tl.arange(0, HEAD_PAD)
    head_mask = (member < GROUP)[:, None] & (offset < HEAD)[None, :]
    head_cells = (kv_head * GROUP + member)[:, None] * HEAD + offset[None, :]
    queries = tl.load(q + row.to(tl.int64) * q_row_stride + head_cells, mask=head_mask, other=0.0)

    FLOAT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    scale *= scale_of(kv_scales, kv_head, KV_HEADS, False, FLOAT8)
    highest = tl.full([GROUP_PAD], MASKED, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    values = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    table = page_table + slot * table_stride
    k_head = k_cache + kv_head * head_stride + offset[None, :]
    v_head = v_cache + kv_head * head_stride + offset[None, :]
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # Token t is cell t % PAGE of page table[t // PAGE]; page ids become 64-bit before the multiplication.
        token = first + tl.arange(0, BLOCK_N)
        live = token < end
        page = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
        cell = (page * page_stride + (token % PAGE) * token_stride)[:, None]
        kv_mask = live[:, None] if HEAD == HEAD_PAD else live[:, None] & (offset < HEAD)[None, :]
        keys = load_cells(k_head + cell, kv_mask, queries.dtype)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        s = tl.where(live[None, :], capped(s, scale, soft_cap, HAS_CAP), MASKED)
        weights, factor, highest, total = update(s, highest, total)
        block = load_cells(v_head + cell, kv_mask, queries.dtype)
        values = tl.dot(weights.to(block.dtype), block, values * factor[:, None], input_precision=PRECISION)
    release_next(PDL)
    values = values * scale_of(kv_scales, kv_head, KV_HEADS, True, FLOAT8) / total[:, None]

    if part < 0:
        out_cells = out + row.to(tl.int64) * (KV_HEADS * GROUP * HEAD) + head_cells
        tl.store(out_cells, values.to(out.dtype.element_ty), mask=head_mask)
    else:
        part_cells = part_values + part.to(tl.int64) * (KV_HEADS * GROUP * HEAD) + head_cells
        tl.store(part_cells, values, mask=head_mask)
        heads = kv_head * GROUP + member
        tl.store(part_sums + part * (KV_HEADS * GROUP) + heads, highest + tl.log2(total), mask=member < GROUP)


@triton.jit
def _merge(
    out,
    row_parts,
    part_values,
    part_sums,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program, one warp: one query head of one row. Line i of the tile merges the parts i, i + PARTS, ..., so no line
    # waits for another before the end.
    begin_short_kernel(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(row_parts + row * 2)
    parts = tl.load(row_parts + row * 2 + 1)
    if parts < 2:
        return
    offset = tl.arange(0, HEAD_PAD)
    line = tl.arange(0, PARTS)
    highest = tl.full([PARTS], MASKED, tl.float32)
    total = tl.zeros([PARTS], tl.float32)
    values = tl.zeros([PARTS, HEAD_PAD], tl.float32)
    for first in range(0, parts, PARTS):
        valid = first + line < parts
        place = (start + first + line).to(tl.int64) * HEADS + head
        sums = tl.load(part_sums + place, mask=valid, other=MASKED)
        mask = valid[:, None] & (offset < HEAD)[None, :]
        some = tl.load(part_values + place[:, None] * HEAD + offset[None, :], mask=mask, other=0.0)
        new_highest = tl.maximum(highest, sums)
        factor = tl.exp2(highest - new_highest)
        share = tl.where(valid, tl.exp2(sums - new_highest), 0.0)
        total = total * factor + share
        values = values * factor[:, None] + some * share[:, None]
        highest = new_highest
    factor = tl.exp2(highest - tl.max(highest, 0))
    result = tl.sum(values * factor[:, None], 0) / tl.sum(total * factor, 0)
    cells = out + (row.to(tl.int64) * HEADS + head) * HEAD + offset
    tl.store(cells, result.to(out.dtype.element_ty), mask=offset < HEAD)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    schedule: DecodeSchedule,
    scale: float,
    soft_cap: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
    merge: bool = True,
    block_n: int = 0,
    stages: int = 3,
    warps: int = 4,
) -> Tensor:
    """One query token per row over the keys the schedule lists (schedule_decode: its lengths, slots, window and groups).

    q: [R, hq, d], heads contiguous; k_cache, v_cache: [pages, hkv, page_tokens, d]; page_table: i32 [slots, max_pages];
    kv_scales: f32 [2, hkv], with pages of float8 -> [R, hq, d]. Rows without an item (padding) are not written. With groups,
    attention_shared runs first with the same schedule. merge False: no row of the schedule has more than one part.
    """
    rows, q_heads, head = q.shape
    _, kv_heads, page_tokens, _ = k_cache.shape
    if out is None:
        out = torch.empty((rows, q_heads, head), dtype=q.dtype, device=q.device)
    group = q_heads // kv_heads
    head_pad = max(triton.next_power_of_2(head), 16)
    block_n = block_n or (64 if head_pad <= 128 and q.dtype != torch.float32 else 32)
    _attention_decode[(kv_heads, schedule.items.shape[0])](
        q,
        codes(k_cache),
        codes(v_cache),
        out,
        page_table,
        schedule.items,
        schedule.counts,
        schedule.part_values,
        schedule.part_sums,
        q if kv_scales is None else kv_scales,
        scale if soft_cap else scale * 1.4426950408889634,
        soft_cap,
        q.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD=head,
        HEAD_PAD=head_pad,
        PAGE=page_tokens,
        BLOCK_N=block_n,
        STAGES=stages,
        HAS_CAP=soft_cap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        **overlapped(q),
    )
    if merge:
        _merge[(rows, q_heads)](
            out,
            schedule.row_parts,
            schedule.part_values,
            schedule.part_sums,
            HEADS=q_heads,
            HEAD=head,
            HEAD_PAD=head_pad,
            PARTS=4,
            num_warps=1,
            **overlapped(q),
        )
    return out
