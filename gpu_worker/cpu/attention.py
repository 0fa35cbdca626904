"""Causal attention of every row straight over its pages, new keys included: they are there already.

Keys of a page lie transposed (KVCache), so that one vector holds 16 keys of one dimension and scores need no sums across
lanes. A tile is four or eight queries of one row and KV head; a key is read once for all of them. Each query's own sums run in
the same order in every tile, so a row's result does not depend on chunks or company.
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
    divide,
    exp,
    first_lanes,
    fma_each,
    jit,
    largest,
    largest_of,
    load,
    load_part,
    multiply,
    next_task,
    next_thread,
    read_int32,
    size_of,
    store,
    store_each,
    store_part,
    subtract,
    sum_of,
    zeros,
)
from gpu_worker.cpu.team import Kernel

TILE = 8  # queries
TASK_TOKENS = 16  # query tokens of a row that one task takes at most


@jit
def _queries(element, a, none, q, count, target):
    """Queries as float32 [len(none), head_dim], scaled; those beyond count are zeros."""
    size, width = size_of(element), a.head_dim
    for number in range(len(none)):
        source = q + number // a.group * a.q_stride + number % a.group * width * size
        for i in range(0, width, 16):
            value = zeros()
            if number < count:
                value = multiply(load_part(element, source + i * size, width - i), broadcast(a.scale))
            store_part(FLOAT32, target + (number * width + i) * 4, width - i, value)


@jit
def _scores(element, a, none, q, scores, row_pages, first, length, k_head):
    """Products of queries with keys first .. length - 1, from the block of 16 that holds key first."""
    size, width = size_of(element), a.head_dim
    start = first // 16 * 16
    for key in range(start, length, 16):
        page, offset = key // a.page_tokens, key % a.page_tokens
        k = k_head + read_int32(row_pages + page * 4) * a.k_page + offset * size
        sums = none
        for i in range(width):
            sums = fma_each(sums, q + i * 4, width * 4, load(element, k + i * a.page_tokens * size))
        store_each(sums, scores + (key - start) * 4, a.score_width * 4)


@jit
def _capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap)."""
    twice = exp(multiply(scores, broadcast(2 / soft_cap)))
    return multiply(broadcast(soft_cap), subtract(broadcast(1.0), divide(broadcast(2.0), add(twice, broadcast(1.0)))))


@jit
def _weights(scores, count, low, high, soft_cap):
    """Softmax weights of count scores in place, of which low .. high - 1 may be seen, all times their sum; 1 / the sum."""
    peak = broadcast(-np.inf)
    for i in range(0, count, 16):
        value = load(FLOAT32, scores + i * 4)
        if soft_cap:
            value = _capped(value, soft_cap)
        if high - i < 16:
            value = first_lanes(value, high - i, broadcast(-np.inf))
        if low > i:
            value = first_lanes(broadcast(-np.inf), low - i, value)
        store(FLOAT32, scores + i * 4, value)
        peak = largest(peak, value)
    total, peak = zeros(), broadcast(largest_of(peak))
    for i in range(0, count, 16):
        value = exp(subtract(load(FLOAT32, scores + i * 4), peak))
        store(FLOAT32, scores + i * 4, value)
        total = add(total, value)
    return 1 / sum_of(total)


@jit
def _values(element, a, none, weights, row_pages, first, length, v_head, out):
    """Weighted sums of values first .. length - 1, float32 [queries, head_dim]."""
    size, width = size_of(element), a.head_dim
    start = first // 16 * 16
    for i in range(0, width, 16):
        sums = none
        for page in range(first // a.page_tokens, (length - 1) // a.page_tokens + 1):
            begin = page * a.page_tokens
            v = v_head + read_int32(row_pages + page * 4) * a.v_page + (i - begin * width) * size
            for key in range(max(begin, first), min(begin + a.page_tokens, length)):
                values = load_part(element, v + key * width * size, width - i)
                sums = fma_each(sums, weights + (key - start) * 4, a.score_width * 4, values)
        store_each(sums, out + i * 4, a.out_width * 4)


@jit
def _tile(element, a, none, q, out, count, position, row_pages, k_head, v_head, scratch):
    """Attention of count queries, of which a.group stand at each position from the given one on."""
    size, width = size_of(element), a.head_dim
    scores, sums = scratch + TILE * width * 4, scratch + TILE * (width + a.score_width) * 4
    length = position + (count - 1) // a.group + 1
    first = max(0, position + 1 - a.window) if a.window else 0
    start = first // 16 * 16
    _queries(element, a, none, q, count, scratch)
    _scores(element, a, none, scratch, scores, row_pages, first, length, k_head)
    for number in range(count):
        high = position + number // a.group + 1
        low = max(0, high - a.window) if a.window else 0
        row = scores + number * a.score_width * 4
        inverse = _weights(row, length - start, low - start, high - start, a.soft_cap)
        store(FLOAT32, sums + (TILE * a.out_width + number * 16) * 4, broadcast(inverse))
    _values(element, a, none, scores, row_pages, first, length, v_head, sums)
    for number in range(count):
        target = out + number // a.group * a.out_stride + number % a.group * width * size
        inverse = load(FLOAT32, sums + (TILE * a.out_width + number * 16) * 4)
        for i in range(0, width, 16):
            value = multiply(load(FLOAT32, sums + (number * a.out_width + i) * 4), inverse)
            store_part(element, target + i * size, width - i, value)


@jit
def _attend(args, element):
    """A task: some neighbouring query tokens of a row, and one KV head."""
    a = carray(args, 1)[0]
    size, width, group = size_of(element), a.head_dim, a.group
    none = zeros()
    four, eight = (none, none, none, none), (none, none, none, none, none, none, none, none)
    scratch = a.scratch + next_thread(args) * a.scratch_bytes
    task = next_task(args)
    while task < a.num_tasks:
        part, kv_head = a.parts + task // a.kv_heads * 16, task % a.kv_heads
        slot, position = read_int32(part), read_int32(part + 4)
        token, queries = read_int32(part + 8), read_int32(part + 12) * group
        row_pages = a.page_table + slot * a.table_row
        head = kv_head * group * width * size
        q, out = a.q + token * a.q_stride + head, a.out + token * a.out_stride + head
        k_head, v_head = a.k_cache + kv_head * a.k_head, a.v_cache + kv_head * a.v_head
        done = 0
        while done < queries:
            # A tile begins at a token's first query, or lies within one token.
            begin, within = done // group, done % group
            count = min(TILE // group * group if group <= TILE else min(TILE, group - within), queries - done)
            at, to = q + begin * a.q_stride + within * width * size, out + begin * a.out_stride + within * width * size
            if count > 4:
                _tile(element, a, eight, at, to, count, position + begin, row_pages, k_head, v_head, scratch)
            else:
                _tile(element, a, four, at, to, count, position + begin, row_pages, k_head, v_head, scratch)
            done += count
        task = next_task(args)


def _attend_float32(args):
    _attend(args, FLOAT32)


def _attend_bfloat16(args):
    _attend(args, BFLOAT16)


_ATTEND = Kernel(
    _attend_float32,
    _attend_bfloat16,
    "q q_stride out out_stride k_cache k_page k_head v_cache v_page v_head page_table table_row parts"
    " kv_heads group head_dim page_tokens window scratch scratch_bytes score_width out_width",
    "scale soft_cap",
)


class _Work(NamedTuple):
    """What the tasks of a step are; the same for all layers."""

    parts: Tensor  # i32[parts, 4]: slot, position of the first query token, its place in the batch, query tokens
    num_scores: int  # of one head
    score_width: int
    out_width: int
    scratch: Tensor  # f32[threads, ...]: queries, their scores, sums of values, 1 / sums of weights


def _work(batch: Batch, head_dim: int) -> _Work:
    starts = np.cumsum(batch.host_query_lens) - batch.host_query_lens
    parts = []
    for slot, start, query_len, context in zip(
        batch.host_row_slots.tolist(),
        starts.tolist(),
        batch.host_query_lens.tolist(),
        batch.host_context_lens.tolist(),
        strict=True,
    ):
        for done in range(0, query_len, TASK_TOKENS):
            parts.append((slot, context - query_len + done, start + done, min(TASK_TOKENS, query_len - done)))
    parts.sort(key=lambda part: -part[1] * part[3])  # the longest first, so that threads end together
    score_width = (int(batch.host_context_lens.max()) // 16 + 2) * 16
    out_width = -(-head_dim // 16) * 16
    scratch = torch.empty((torch.get_num_threads(), TILE * (head_dim + score_width + out_width + 16)))
    num_scores = int((batch.host_query_lens * batch.host_context_lens.astype(np.int64)).sum())
    return _Work(torch.tensor(parts, dtype=torch.int32), num_scores, score_width, out_width, scratch)


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
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    work: _Work | None = batch.memo.get(("attention", head_dim))
    if work is None:
        work = batch.memo["attention", head_dim] = _work(batch, head_dim)
    out = torch.empty(q.shape, dtype=q.dtype)
    size = q.itemsize
    _ATTEND(
        q.dtype, len(work.parts) * kv_heads, 2 * work.num_scores * kv_heads * head_dim,
        q.data_ptr(), q.stride(0) * size, out.data_ptr(), out.stride(0) * size,
        k_cache.data_ptr(), k_cache.stride(0) * size, k_cache.stride(1) * size,
        v_cache.data_ptr(), v_cache.stride(0) * size, v_cache.stride(1) * size,
        page_table.data_ptr(), page_table.stride(0) * 4, work.parts.data_ptr(),
        kv_heads, q.shape[1] // kv_heads, head_dim, page_tokens, window,
        work.scratch.data_ptr(), work.scratch.stride(0) * 4, work.score_width, work.out_width, scale, soft_cap,
    )  # fmt: skip
    return out
