"""Causal attention on a CPU: decode rows straight over their pages, prefill rows by torch.

Keys of a page lie transposed (KVCache), so that one vector holds 16 keys of one dimension and scores need no sums across
lanes. Four query heads of a KV head are computed together; every key is then read once for all of them.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    add,
    broadcast,
    copy_element,
    divide,
    exp,
    first_lanes,
    fma,
    jit,
    largest,
    largest_of,
    load,
    load_part,
    multiply,
    next_task,
    next_thread,
    read_float32,
    read_int32,
    read_int64,
    size_of,
    store,
    store_part,
    subtract,
    sum_of,
    zeros,
)
from gpu_worker.cpu.team import Kernel
from gpu_worker.reference.attention import prefill, put
from gpu_worker.reference.attention_layout import Geometry, Pages, Prefill, make_prefill


@jit
def _capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap)."""
    twice = exp(multiply(scores, broadcast(2 / soft_cap)))
    return multiply(broadcast(soft_cap), subtract(broadcast(1.0), divide(broadcast(2.0), add(twice, broadcast(1.0)))))


@jit
def _finished(scores, low, high, soft_cap):
    """Scores of 16 keys, of which only low .. high - 1 may be seen."""
    if soft_cap:
        scores = _capped(scores, soft_cap)
    if high < 16:
        scores = first_lanes(scores, high, broadcast(-np.inf))
    if low > 0:
        scores = first_lanes(broadcast(-np.inf), low, scores)
    return scores


@jit
def _weigh(scores, count, peak):
    """exp(score - peak) of count scores, in place; their sum."""
    total, peak = zeros(), broadcast(peak)
    for i in range(0, count, 16):
        weights = exp(subtract(load(FLOAT32, scores + i * 4), peak))
        store(FLOAT32, scores + i * 4, weights)
        total = add(total, weights)
    return sum_of(total)


@jit
def _score_tile(element, a, q, scores, row_pages, first, length, k_head):
    """Scores of four queries (float32 [4, head_dim] at q) over keys first .. length - 1; their largest.

    scores: float32 [4, score_width], from the block of 16 that holds key first.
    """
    size, width = size_of(element), a.head_dim
    m0 = m1 = m2 = m3 = broadcast(-np.inf)
    q1, q2, q3 = q + width * 4, q + width * 8, q + width * 12
    start = first // 16 * 16
    for key in range(start, length, 16):
        page, offset = key // a.page_tokens, key % a.page_tokens
        k = k_head + read_int32(row_pages + page * 4) * a.k_page + offset * size
        s0 = s1 = s2 = s3 = zeros()
        for i in range(width):
            keys = load(element, k + i * a.page_tokens * size)
            s0 = fma(broadcast(read_float32(q + i * 4)), keys, s0)
            s1 = fma(broadcast(read_float32(q1 + i * 4)), keys, s1)
            s2 = fma(broadcast(read_float32(q2 + i * 4)), keys, s2)
            s3 = fma(broadcast(read_float32(q3 + i * 4)), keys, s3)
        s0 = _finished(s0, first - key, length - key, a.soft_cap)
        s1 = _finished(s1, first - key, length - key, a.soft_cap)
        s2 = _finished(s2, first - key, length - key, a.soft_cap)
        s3 = _finished(s3, first - key, length - key, a.soft_cap)
        at = scores + (key - start) * 4
        store(FLOAT32, at, s0)
        store(FLOAT32, at + a.score_width * 4, s1)
        store(FLOAT32, at + a.score_width * 8, s2)
        store(FLOAT32, at + a.score_width * 12, s3)
        m0, m1, m2, m3 = largest(m0, s0), largest(m1, s1), largest(m2, s2), largest(m3, s3)
    return largest_of(m0), largest_of(m1), largest_of(m2), largest_of(m3)


@jit
def _sum_values(element, a, weights, row_pages, first, length, v_head, count):
    """Sums of the values of count dimensions (at most 16), weighted by four rows of weights."""
    size, width = size_of(element), a.head_dim
    w1, w2, w3 = weights + a.score_width * 4, weights + a.score_width * 8, weights + a.score_width * 12
    o0 = o1 = o2 = o3 = zeros()
    start = first // 16 * 16
    for page in range(first // a.page_tokens, (length - 1) // a.page_tokens + 1):
        begin = page * a.page_tokens
        v = v_head + read_int32(row_pages + page * 4) * a.v_page - begin * width * size
        for key in range(max(begin, first), min(begin + a.page_tokens, length)):
            values = load_part(element, v + key * width * size, count)
            at = (key - start) * 4
            o0 = fma(broadcast(read_float32(weights + at)), values, o0)
            o1 = fma(broadcast(read_float32(w1 + at)), values, o1)
            o2 = fma(broadcast(read_float32(w2 + at)), values, o2)
            o3 = fma(broadcast(read_float32(w3 + at)), values, o3)
    return o0, o1, o2, o3


@jit
def _take_queries(element, a, q, count, target):
    """count queries as float32 [4, head_dim], scaled; the others are zeros."""
    size, width = size_of(element), a.head_dim
    for number in range(4):
        for i in range(0, width, 16):
            value = zeros()
            if number < count:
                value = multiply(load_part(element, q + (number * width + i) * size, width - i), broadcast(a.scale))
            store_part(FLOAT32, target + (number * width + i) * 4, width - i, value)


@jit
def _tile(element, a, q, out, count, row_pages, first, length, k_head, v_head, scratch):
    """Attention of count queries (at most four) that see keys first .. length - 1."""
    size, width = size_of(element), a.head_dim
    scores, row = scratch + width * 16, a.score_width * 4
    _take_queries(element, a, q, count, scratch)
    m0, m1, m2, m3 = _score_tile(element, a, scratch, scores, row_pages, first, length, k_head)
    keys = length - first // 16 * 16
    d0, d1 = _weigh(scores, keys, m0), _weigh(scores + row, keys, m1)
    d2, d3 = _weigh(scores + 2 * row, keys, m2), _weigh(scores + 3 * row, keys, m3)
    for i in range(0, width, 16):
        o0, o1, o2, o3 = _sum_values(element, a, scores, row_pages, first, length, v_head + i * size, width - i)
        at = out + i * size
        store_part(element, at, width - i, multiply(o0, broadcast(1 / d0)))
        if count > 1:
            store_part(element, at + width * size, width - i, multiply(o1, broadcast(1 / d1)))
        if count > 2:
            store_part(element, at + 2 * width * size, width - i, multiply(o2, broadcast(1 / d2)))
        if count > 3:
            store_part(element, at + 3 * width * size, width - i, multiply(o3, broadcast(1 / d3)))


@jit
def _rows(args, element):
    """A task: one decode row and KV head."""
    a = carray(args, 1)[0]
    size, width = size_of(element), a.head_dim
    scratch = a.scratch + next_thread(args) * a.scratch_bytes
    task = next_task(args)
    while task < a.num_tasks:
        row, kv_head = task // a.kv_heads, task % a.kv_heads
        length = read_int32(a.context_lens + row * 4)
        first = max(0, length - a.window) if a.window else 0
        row_pages = a.page_table + read_int32(a.row_slots + row * 4) * a.table_row
        head = kv_head * a.group
        q, out = a.q + row * a.q_stride + head * width * size, a.out + (row * a.kv_heads * a.group + head) * width * size
        k_head, v_head = a.k_cache + kv_head * a.k_head, a.v_cache + kv_head * a.v_head
        for tile in range(0, a.group, 4):
            at = tile * width * size
            _tile(element, a, q + at, out + at, a.group - tile, row_pages, first, length, k_head, v_head, scratch)
        task = next_task(args)


@jit
def _gather(args, element):
    """A task: one head of one page, keys and values of its first live cells, then zeros."""
    a = carray(args, 1)[0]
    size, width = size_of(element), a.head_dim
    cells = a.page_tokens * width * size
    task = next_task(args)
    while task < a.num_tasks:
        place = read_int64(a.places + task * 8)
        live = read_int64(a.live + task * 8)
        k, v = a.k_cache + place * cells, a.v_cache + place * cells
        for key in range(a.page_tokens):
            target = task * cells + key * width * size
            for i in range(0, width, 16):
                values = load_part(element, v + (key * width + i) * size, width - i) if key < live else zeros()
                store_part(element, a.values + target + i * size, width - i, values)
                if key >= live:
                    store_part(element, a.keys + target + i * size, width - i, zeros())
            if key < live:
                for i in range(width):
                    copy_element(element, a.keys + target + i * size, k + (i * a.page_tokens + key) * size)
        task = next_task(args)


def _rows_float32(args):
    _rows(args, FLOAT32)


def _rows_bfloat16(args):
    _rows(args, BFLOAT16)


def _gather_float32(args):
    _gather(args, FLOAT32)


def _gather_bfloat16(args):
    _gather(args, BFLOAT16)


_ROWS = Kernel(
    _rows_float32,
    _rows_bfloat16,
    "q q_stride out k_cache k_page k_head v_cache v_page v_head page_table table_row row_slots context_lens"
    " kv_heads group head_dim page_tokens window scratch scratch_bytes score_width",
    "scale soft_cap",
)
_GATHER = Kernel(_gather_float32, _gather_bfloat16, "places live k_cache v_cache keys values page_tokens head_dim")


def attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    page_table: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """See Ops.attention. A page's keys must lie dimension by dimension, its values key by key, as in KVCache on a CPU."""
    out = torch.empty(q.shape, dtype=q.dtype)
    if batch.num_decode:
        _decode(q, k_cache, v_cache, batch, page_table, scale, window, soft_cap, out)
    if batch.num_decode == batch.num_rows:
        return out
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    geometry = Geometry(kv_heads, page_tokens, head_dim, window, k_cache.dtype)
    parts: list[Prefill] | None = batch.memo.get(geometry)
    if parts is None:
        parts = batch.memo[geometry] = make_prefill(batch, page_table.numpy(), geometry)
    grouped, into = q.unflatten(1, (kv_heads, -1)), out.unflatten(1, (kv_heads, -1))
    for part in parts:
        held = None if part.pages is None else _held(part.pages, k_cache, v_cache)
        put(into, part.out, prefill(part, grouped, k_new, v_new, held, scale, soft_cap))
    return out


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    page_table: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    out: Tensor,
) -> None:
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    size, token, row = q.itemsize, batch.first_decode_token, batch.num_rows - batch.num_decode
    scratch = _scratch(batch, row, head_dim)
    _ROWS(
        q.dtype, batch.num_decode * kv_heads, scratch.num_keys * kv_heads * head_dim * 4,
        q.data_ptr() + token * q.stride(0) * size, q.stride(0) * size, out.data_ptr() + token * out.stride(0) * size,
        k_cache.data_ptr(), k_cache.stride(0) * size, k_cache.stride(1) * size,
        v_cache.data_ptr(), v_cache.stride(0) * size, v_cache.stride(1) * size,
        page_table.data_ptr(), page_table.stride(0) * 4,
        batch.row_slots.data_ptr() + row * 4, batch.context_lens.data_ptr() + row * 4,
        kv_heads, q.shape[1] // kv_heads, head_dim, page_tokens, window,
        scratch.memory.data_ptr(), scratch.memory.stride(0) * 4, scratch.width, scale, soft_cap,
    )  # fmt: skip


class _Scratch(NamedTuple):
    memory: Tensor  # f32[threads, 4 * (head_dim + width)]: four queries, then their scores
    width: int  # scores of one query
    num_keys: int  # of all decode rows


def _scratch(batch: Batch, first_row: int, head_dim: int) -> _Scratch:
    """Once per step."""
    key = ("scratch", head_dim)
    scratch: _Scratch | None = batch.memo.get(key)
    if scratch is None:
        lens = batch.host_context_lens[first_row:]
        width = (int(lens.max()) // 16 + 2) * 16
        memory = torch.empty((torch.get_num_threads(), 4 * (head_dim + width)))
        scratch = batch.memo[key] = _Scratch(memory, width, int(lens.sum()))
    return scratch


def _held(pages: Pages, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, kv_heads, keys, d]; zeros where a row has no key."""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    _GATHER(
        k_cache.dtype, len(pages.places), 2 * pages.keys.numel(), pages.places.data_ptr(), pages.live.data_ptr(),
        k_cache.data_ptr(), v_cache.data_ptr(), pages.keys.data_ptr(), pages.values.data_ptr(), page_tokens, head_dim,
    )  # fmt: skip
    shape = (pages.num_rows, kv_heads, pages.num_keys, head_dim)
    return pages.keys.view(shape), pages.values.view(shape)
