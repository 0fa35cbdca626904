"""Attention of decode rows over their private pages, split over the keys, and the merge of a row's partial results.

Flash-decoding (Dao et al., 2023): all query heads of one key head form one tile, a row's keys are cut into spans, and
the program that finishes a row last merges its spans by log-sum-exp, so a layer is one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.decode_schedule import DecodeSchedule
from gpu_worker.kernels.softmax import MASKED, capped, update


@triton.jit
def _attention_decode(
    q,
    k_cache,
    v_cache,
    out,
    page_table,
    row_slots,
    items,
    counts,
    row_parts,
    part_values,
    part_sums,
    arrivals,
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
    MERGE_PARTS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(counts):
        return
    row = tl.load(items + item * 4)
    begin = tl.load(items + item * 4 + 1)
    end = tl.load(items + item * 4 + 2)
    part = tl.load(items + item * 4 + 3)
    slot = tl.load(row_slots + row).to(tl.int64)
    parts = tl.load(row_parts + row * 3 + 1)

    # Queries [GROUP_PAD, HEAD_PAD]: the GROUP heads that read this key head.
    member = tl.arange(0, GROUP_PAD)
    offset = tl.arange(0, HEAD_PAD)
    head_mask = (member < GROUP)[:, None] & (offset < HEAD)[None, :]
    head_cells = (kv_head * GROUP + member)[:, None] * HEAD + offset[None, :]
    queries = tl.load(q + row.to(tl.int64) * q_row_stride + head_cells, mask=head_mask, other=0.0)

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
        if HEAD == HEAD_PAD:
            kv_mask = live[:, None]
        else:
            kv_mask = live[:, None] & (offset < HEAD)[None, :]
        keys = tl.load(k_head + cell, mask=kv_mask, other=0.0)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        s = tl.where(live[None, :], capped(s, scale, soft_cap, HAS_CAP), MASKED)
        weights, factor, highest, total = update(s, highest, total)
        block = tl.load(v_head + cell, mask=kv_mask, other=0.0)
        values = tl.dot(weights.to(block.dtype), block, values * factor[:, None], input_precision=PRECISION)
    values = values / total[:, None]

    out_cells = out + row.to(tl.int64) * (KV_HEADS * GROUP * HEAD) + head_cells
    if parts == 1:
        tl.store(out_cells, values.to(out.dtype.element_ty), mask=head_mask)
        return

    # Leave the partial result; the last program of this (row, key head) to arrive merges them all.
    part_cells = part_values + part.to(tl.int64) * (KV_HEADS * GROUP * HEAD) + head_cells
    tl.store(part_cells, values, mask=head_mask)
    heads = kv_head * GROUP + member
    tl.store(part_sums + part * (KV_HEADS * GROUP) + heads, highest + tl.log2(total), mask=member < GROUP)
    tl.debug_barrier()
    arrival = arrivals + row * KV_HEADS + kv_head
    before = tl.atomic_add(arrival, 1, sem="acq_rel")
    if before != tl.load(row_parts + row * 3 + 2) - 1:
        return
    tl.debug_barrier()
    tl.store(arrival, 0)
    start = tl.load(row_parts + row * 3)
    highest = tl.full([GROUP_PAD], MASKED, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    values = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for first in range(0, parts, MERGE_PARTS):
        # [MERGE_PARTS, GROUP_PAD, HEAD_PAD] partial values, weighted by their share of the sum.
        number = first + tl.arange(0, MERGE_PARTS)
        valid = (number < parts)[:, None] & (member < GROUP)[None, :]
        place = (start + number).to(tl.int64)
        sums = tl.load(
            part_sums + place[:, None] * (KV_HEADS * GROUP) + heads[None, :], mask=valid, other=MASKED, cache_modifier=".cg"
        )
        some = tl.load(
            part_values + place[:, None, None] * (KV_HEADS * GROUP * HEAD) + head_cells[None, :, :],
            mask=valid[:, :, None] & (offset < HEAD)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(sums, 0))
        share = tl.exp2(sums - new_highest[None, :])
        factor = tl.exp2(highest - new_highest)
        highest = new_highest
        total = total * factor + tl.sum(share, 0)
        values = values * factor[:, None] + tl.sum(some * share[:, :, None], 0)
    tl.store(out_cells, (values / total[:, None]).to(out.dtype.element_ty), mask=head_mask)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_slots: Tensor,
    schedule: DecodeSchedule,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    block_n: int = 0,
    stages: int = 3,
    warps: int = 4,
) -> Tensor:
    """One query token per row over the keys the schedule lists (schedule_decode: its lengths, window and groups).

    q: [R, hq, d], heads contiguous; k_cache, v_cache: [pages, hkv, page_tokens, d]; page_table: i32 [slots, max_pages];
    row_slots: i32 [R] -> [R, hq, d]. Rows without an item (padding) are not written. With groups, attention_shared runs
    first with the same schedule.
    """
    rows, q_heads, head = q.shape
    _, kv_heads, page_tokens, _ = k_cache.shape
    if out is None:
        out = torch.empty((rows, q_heads, head), dtype=q.dtype, device=q.device)
    group = q_heads // kv_heads
    head_pad = triton.next_power_of_2(head)
    block_n = block_n or (64 if head_pad <= 128 and q.dtype != torch.float32 else 32)
    _attention_decode[(kv_heads, schedule.items.shape[0])](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        row_slots,
        schedule.items,
        schedule.counts,
        schedule.row_parts,
        schedule.part_values,
        schedule.part_sums,
        schedule.arrivals,
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
        MERGE_PARTS=4 if head_pad <= 128 else 2,
        num_warps=warps,
    )
    return out
