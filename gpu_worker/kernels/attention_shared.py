"""Attention of decode rows over leading pages that a group of rows shares: the pages are read once per tile of rows.

The query heads of many rows form one tensor-core tile (Hydragen, Juravsky et al., 2024; cascade inference, Ye et al.,
2024). The results are partial; attention_decode merges them with the rows' private part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.decode_schedule import DecodeSchedule
from gpu_worker.kernels.launch import overlapped, release_next, wait_for_previous
from gpu_worker.kernels.pages import codes, load_cells, scale_of
from gpu_worker.kernels.softmax import MASKED, capped, update


@triton.jit(do_not_specialize_on_alignment=["row_slots"])
def _attention_shared(
    q,
    k_cache,
    v_cache,
    page_table,
    row_slots,
    shared_items,
    counts,
    row_parts,
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
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(counts + 1):
        return
    first_row = tl.load(shared_items + item * 5)
    rows = tl.load(shared_items + item * 5 + 1)
    begin = tl.load(shared_items + item * 5 + 2)
    end = tl.load(shared_items + item * 5 + 3)
    span = tl.load(shared_items + item * 5 + 4)
    slot = tl.load(row_slots + first_row).to(tl.int64)

    # Tile line m is head m % GROUP of row first_row + m // GROUP.
    line = tl.arange(0, BLOCK_M)
    row = first_row + line // GROUP
    head = kv_head * GROUP + line % GROUP
    offset = tl.arange(0, HEAD_PAD)
    line_mask = line < rows * GROUP
    mask = line_mask[:, None] & (offset < HEAD)[None, :]
    queries = tl.load(
        q + row[:, None].to(tl.int64) * q_row_stride + head[:, None] * HEAD + offset[None, :], mask=mask, other=0.0
    )

    FLOAT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    scale *= scale_of(kv_scales, kv_head, KV_HEADS, False, FLOAT8)
    highest = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
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

    part = tl.load(row_parts + row * 2, mask=line_mask, other=0) + span
    place = part.to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(part_values + place[:, None] * HEAD + offset[None, :], values, mask=mask)
    tl.store(part_sums + place, highest + tl.log2(total), mask=line_mask)


def attention_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_slots: Tensor,
    schedule: DecodeSchedule,
    scale: float,
    soft_cap: float = 0.0,
    kv_scales: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 0,
    stages: int = 5,
    warps: int = 8,
) -> None:
    """Partial results of the shared leading pages of all groups in the schedule; attention_decode follows.

    q: [R, hq, d], heads contiguous; k_cache, v_cache: [pages, hkv, page_tokens, d]; page_table: i32 [slots, max_pages];
    row_slots: i32 [R]; kv_scales: f32 [2, hkv], with pages of float8. block_m equals the schedule's shared_block_m.
    """
    _, q_heads, head = q.shape
    _, kv_heads, page_tokens, _ = k_cache.shape
    head_pad = max(triton.next_power_of_2(head), 16)
    block_n = block_n or (64 if head_pad <= 128 and q.dtype != torch.float32 else 32)
    _attention_shared[(kv_heads, schedule.shared_items.shape[0])](
        q,
        codes(k_cache),
        codes(v_cache),
        page_table,
        row_slots,
        schedule.shared_items,
        schedule.counts,
        schedule.row_parts,
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
        GROUP=q_heads // kv_heads,
        HEAD=head,
        HEAD_PAD=head_pad,
        PAGE=page_tokens,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        HAS_CAP=soft_cap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        **overlapped(q),
    )
