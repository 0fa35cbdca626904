"""Causal attention of every row straight over its pages, new keys included: they are there already.

Keys of a page lie transposed (KVCache), so that one vector holds 16 keys of one dimension and scores need no sums across
lanes. A tile is four to twelve queries of one row and KV head; a key is read once for all of them. Dimensions and values are
taken in pairs, which bfloat16 has an instruction for; weights are rounded to the values' type. Each query's own sums run in
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
    dot_each,
    exp,
    fetch,
    first_lanes,
    jit,
    largest,
    largest_of,
    load,
    load_each,
    load_part,
    multiply,
    next_task,
    next_thread,
    power,
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

LOG2_E = 1.4426950408889634  # scores are powers of two here
TILE = 12  # queries
TASK_TOKENS = 16  # query tokens of a row that one task takes at most
_NOTHING = torch.zeros(16)  # the second of two values where a row has no other
GROUP_ROWS = 8  # decode rows with shared pages that one task takes at most


@jit
def _queries(element, a, q, count, target):
    """Queries [count, head_dim], and TILE lines of zeros after them."""
    size, width = size_of(element), a.head_dim
    for number in range(count + TILE):
        source = q + number // a.group * a.q_stride + number % a.group * width * size
        for i in range(0, width, 16):
            value = zeros()
            if number < count:
                value = load_part(element, source + i * size, width - i)
            store_part(element, target + (number * width + i) * size, width - i, value)


@jit
def _score_tile(element, a, none, q, scores, row_pages, first, length, k_head, v_head):
    """Products of len(none) queries with keys first .. length - 1, from the block of 16 that holds key first."""
    size, width = size_of(element), a.head_dim
    line = a.page_tokens * size  # of one dimension
    start = first // 16 * 16
    for key in range(start, length, 16):
        page, offset = key // a.page_tokens, key % a.page_tokens
        k = k_head + read_int32(row_pages + page * 4) * a.k_page + offset * size
        v = v_head + read_int32(row_pages + page * 4) * a.v_page + offset * width * size
        for i in range(0, 16 * width * size, 64):
            fetch(v + i)
        sums = none
        for i in range(0, width, 2):
            sums = dot_each(element, sums, q + i * size, width * size, k, k + line, 16)
            k += 2 * line
        store_each(sums, scores + (key - start) * 4, a.score_width * 4)


@jit
def _scores(element, a, lines, q, scores, row_pages, first, length, k_head, v_head):
    """Products of queries, and of up to TILE - 1 lines after them, with keys first .. length - 1."""
    z = zeros()
    four = (z, z, z, z)
    for n in range(0, lines, TILE):
        queries, line = q + n * a.head_dim * size_of(element), scores + n * a.score_width * 4
        if lines - n > 8:
            _score_tile(element, a, four + four + four, queries, line, row_pages, first, length, k_head, v_head)
        elif lines - n > 6:
            _score_tile(element, a, four + four, queries, line, row_pages, first, length, k_head, v_head)
        elif lines - n > 4:
            _score_tile(element, a, (*four, z, z), queries, line, row_pages, first, length, k_head, v_head)
        else:
            _score_tile(element, a, four, queries, line, row_pages, first, length, k_head, v_head)


@jit
def _capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap)."""
    twice = exp(multiply(scores, broadcast(2 / soft_cap)))
    return multiply(broadcast(soft_cap), subtract(broadcast(1.0), divide(broadcast(2.0), add(twice, broadcast(1.0)))))


@jit
def _weights(element, scores, count, low, high, scale, soft_cap):
    """Softmax weights of count scores, of which low .. high - 1 may be seen, in their place, all times their sum; 1 / the sum.

    They are elements then, zeros up to the next multiple of 16.
    """
    peak = broadcast(-np.inf)
    for i in range(0, count, 16):
        value = multiply(load(FLOAT32, scores + i * 4), broadcast(scale * LOG2_E))
        if soft_cap:
            value = _capped(value, soft_cap * LOG2_E)
        if high - i < 16:
            value = first_lanes(value, high - i, broadcast(-np.inf))
        if low > i:
            value = first_lanes(broadcast(-np.inf), low - i, value)
        store(FLOAT32, scores + i * 4, value)
        peak = largest(peak, value)
    total, peak = zeros(), broadcast(largest_of(peak))
    for i in range(0, count, 16):
        value = power(subtract(load(FLOAT32, scores + i * 4), peak))
        store(element, scores + i * size_of(element), value)
        total = add(total, value)
    return 1 / sum_of(total)


@jit
def _value_tile(element, a, none, weights, row_pages, first, length, v_head, sums):
    """sums: float32 [len(none), out_width], to which values first (even) .. length - 1 are added, weighted, two at a time."""
    size, width = size_of(element), a.head_dim
    line, weights_line = width * size, a.score_width * 4
    start = first // 16 * 16
    for i in range(0, width, 16):
        part = load_each(none, sums + i * 4, a.out_width * 4)
        for page in range(first // a.page_tokens, (length - 1) // a.page_tokens + 1):
            low, high = max(page * a.page_tokens, first), min((page + 1) * a.page_tokens, length)
            v = v_head + read_int32(row_pages + page * 4) * a.v_page + (low % a.page_tokens * width + i) * size
            weight = weights + (low - start) * size
            for _ in range((high - low) // 2):
                part = dot_each(element, part, weight, weights_line, v, v + line, width - i)
                v, weight = v + 2 * line, weight + 2 * size
            if (high - low) % 2:
                part = dot_each(element, part, weight, weights_line, v, a.nothing, width - i)
        store_each(part, sums + i * 4, a.out_width * 4)


@jit
def _values(element, a, lines, weights, row_pages, first, length, v_head, sums):
    """The same for all lines of sums, and for up to TILE - 1 lines after them."""
    z = zeros()
    four = (z, z, z, z)
    for n in range(0, lines, TILE):
        line, total = weights + n * a.score_width * 4, sums + n * a.out_width * 4
        if lines - n > 8:
            _value_tile(element, a, four + four + four, line, row_pages, first, length, v_head, total)
        elif lines - n > 6:
            _value_tile(element, a, four + four, line, row_pages, first, length, v_head, total)
        elif lines - n > 4:
            _value_tile(element, a, (*four, z, z), line, row_pages, first, length, v_head, total)
        else:
            _value_tile(element, a, four, line, row_pages, first, length, v_head, total)


@jit
def _clear(sums, count):
    for i in range(0, count, 16):
        store(FLOAT32, sums + i * 4, zeros())


@jit
def _finish(element, a, sums, inverses, count, out):
    """Sums of count queries, each times 16 copies of its inverse, where they belong."""
    size, width = size_of(element), a.head_dim
    for number in range(count):
        target = out + number // a.group * a.out_stride + number % a.group * width * size
        inverse = load(FLOAT32, inverses + number * 64)
        for i in range(0, width, 16):
            value = multiply(load(FLOAT32, sums + (number * a.out_width + i) * 4), inverse)
            store_part(element, target + i * size, width - i, value)


@jit
def _tile(element, a, q, out, count, position, row_pages, k_head, v_head, scratch):
    """Attention of count queries, of which a.group stand at each position from the given one on."""
    scores, sums, inverses = scratch + a.scores_at, scratch + a.sums_at, scratch + a.inverses_at
    length = position + (count - 1) // a.group + 1
    first = max(0, position + 1 - a.window) // 2 * 2 if a.window else 0
    start = first // 16 * 16
    _queries(element, a, q, count, scratch)
    _scores(element, a, count, scratch, scores, row_pages, first, length, k_head, v_head)
    for number in range(count):
        high = position + number // a.group + 1
        low = max(0, high - a.window) if a.window else 0
        line = scores + number * a.score_width * 4
        inverse = _weights(element, line, length - start, low - start, high - start, a.scale, a.soft_cap)
        store(FLOAT32, inverses + number * 64, broadcast(inverse))
    _clear(sums, TILE * a.out_width)
    _values(element, a, count, scores, row_pages, first, length, v_head, sums)
    _finish(element, a, sums, inverses, count, out)


@jit
def _row(element, a, q, out, queries, position, row_pages, k_head, v_head, scratch):
    """Attention of neighbouring query tokens of a row, tile by tile: whole tokens, or a part of one."""
    group, line = a.group, a.head_dim * size_of(element)
    done = 0
    while done < queries:
        token, within = done // group, done % group
        count = min(TILE // group * group if group <= TILE else min(TILE, group - within), queries - done)
        at, to = q + token * a.q_stride + within * line, out + token * a.out_stride + within * line
        _tile(element, a, at, to, count, position + token, row_pages, k_head, v_head, scratch)
        done += count


@jit
def _copy(source, target, count):
    for i in range(0, count, 16):
        store(FLOAT32, target + i * 4, load(FLOAT32, source + i * 4))


@jit
def _shared_rows(element, a, q, out, rows, row, shared, k_head, v_head, scratch):
    """Decode rows whose first pages are the same: these are read once for all, then each row's own."""
    scores, sums, inverses = scratch + a.scores_at, scratch + a.sums_at, scratch + a.inverses_at
    group, queries, score_line, sum_line, size = a.group, rows * a.group, a.score_width * 4, a.out_width * 4, size_of(element)
    pages = a.page_table + read_int32(a.row_slots + row * 4) * a.table_row
    first = a.window  # 0: windowed layers have no groups. A literal would have everything compiled once more
    _queries(element, a, q, queries, scratch)
    _scores(element, a, queries, scratch, scores, pages, first, shared, k_head, v_head)
    for r in range(rows):
        own, length = a.page_table + read_int32(a.row_slots + (row + r) * 4) * a.table_row, read_int32(a.lens + (row + r) * 4)
        line = scores + r * group * score_line
        _scores(
            element, a, group, scratch + r * group * a.head_dim * size, line + shared * 4, own, shared, length, k_head, v_head
        )
        for n in range(group):
            inverse = _weights(element, line + n * score_line, length, first, length, a.scale, a.soft_cap)
            store(FLOAT32, inverses + (r * group + n) * 64, broadcast(inverse))
    _clear(sums, (queries + TILE) * a.out_width)
    _values(element, a, queries, scores, pages, first, shared, v_head, sums)
    for r in range(rows):
        own, length = a.page_table + read_int32(a.row_slots + (row + r) * 4) * a.table_row, read_int32(a.lens + (row + r) * 4)
        weights, total = scores + r * group * score_line + shared * size, sums + r * group * sum_line
        # Summed apart, where the queries were: the lines after a row's are another's.
        _copy(total, scratch, group * a.out_width)
        _values(element, a, group, weights, own, shared, length, v_head, scratch)
        _copy(scratch, total, group * a.out_width)
    _finish(element, a, sums, inverses, queries, out)


@jit
def _attend(args, element):
    """A task: one part (see _Work) and one KV head."""
    a = carray(args, 1)[0]
    scratch = a.scratch + next_thread(args) * a.scratch_bytes
    task = next_task(args)
    while task < a.num_tasks:
        part, kv_head = a.parts + task // a.kv_heads * 20, task % a.kv_heads
        row, position, token = read_int32(part), read_int32(part + 4), read_int32(part + 8)
        count, shared = read_int32(part + 12), read_int32(part + 16)
        head = kv_head * a.group * a.head_dim * size_of(element)
        q, out = a.q + token * a.q_stride + head, a.out + token * a.out_stride + head
        k_head, v_head = a.k_cache + kv_head * a.k_head, a.v_cache + kv_head * a.v_head
        if shared:
            _shared_rows(element, a, q, out, count, row, shared, k_head, v_head, scratch)
        else:
            row_pages = a.page_table + read_int32(a.row_slots + row * 4) * a.table_row
            _row(element, a, q, out, count * a.group, position, row_pages, k_head, v_head, scratch)
        task = next_task(args)


def _attend_float32(args):
    _attend(args, FLOAT32)


def _attend_bfloat16(args):
    _attend(args, BFLOAT16)


_ATTEND = Kernel(
    _attend_float32,
    _attend_bfloat16,
    "q q_stride out out_stride k_cache k_page k_head v_cache v_page v_head page_table table_row row_slots lens parts"
    " kv_heads group head_dim page_tokens window scratch scratch_bytes scores_at sums_at inverses_at score_width out_width"
    " nothing",
    "scale soft_cap",
)


class _Work(NamedTuple):
    """What the tasks of a step are; the same for all layers of one shape."""

    parts: Tensor  # i32[parts, 5]: first row, its first query's position and token, query tokens, keys that all rows share
    num_scores: int  # of one head
    score_width: int
    out_width: int
    scratch: Tensor  # u8[threads, ...]: queries, their scores, sums of values, 1 / sums of weights
    scores_at: int  # bytes from the start of a thread's scratch
    sums_at: int
    inverses_at: int


def _parts(batch: Batch, page_tokens: int, window: int) -> list[tuple[int, int, int, int, int]]:
    parts = []
    token = row = 0
    lens, contexts = batch.host_query_lens.tolist(), batch.host_context_lens.tolist()
    for row in range(batch.num_rows - batch.num_decode):
        for done in range(0, lens[row], TASK_TOKENS):
            parts.append((row, contexts[row] - lens[row] + done, token + done, min(TASK_TOKENS, lens[row] - done), 0))
        token += lens[row]
    row = batch.num_rows - batch.num_decode
    groups = [] if window else batch.groups  # a window may hide shared pages
    for rows, pages in [*groups, (batch.num_decode - sum(rows for rows, _ in groups), 0)]:
        together = GROUP_ROWS if rows > 1 and pages else 1
        for first in range(row, row + rows, together):
            count = min(together, row + rows - first)
            shared = pages * page_tokens if count > 1 else 0
            parts.append((first, contexts[first] - 1, token + first - row, count, shared))
        row, token = row + rows, token + rows
    parts.sort(key=lambda part: -part[1] * part[3])  # the longest first, so that threads end together
    return parts


def _work(batch: Batch, group: int, head_dim: int, page_tokens: int, window: int) -> _Work:
    parts = _parts(batch, page_tokens, window)
    lines = TILE + max(TILE, max((part[3] * group for part in parts if part[4]), default=0))
    # An odd number of cache lines, so that the same keys of several queries do not fall on one set of the cache.
    score_width = (int(batch.host_context_lens.max()) // 16 + 2 | 1) * 16
    out_width = -(-head_dim // 16) * 16
    scores_at = lines * out_width * 4
    sums_at = scores_at + lines * score_width * 4
    inverses_at = sums_at + lines * out_width * 4
    scratch = torch.empty((torch.get_num_threads(), inverses_at + lines * 64), dtype=torch.uint8)
    num_scores = int((batch.host_query_lens * batch.host_context_lens.astype(np.int64)).sum())
    table = torch.tensor(parts, dtype=torch.int32)
    return _Work(table, num_scores, score_width, out_width, scratch, scores_at, sums_at, inverses_at)


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
    kv_scales: Tensor | None = None,  # None: pages of float8 have other operations: float8_pages.py
) -> Tensor:
    """See Ops.attention. A page's keys must lie dimension by dimension, its values key by key, as in KVCache on a CPU."""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    group = q.shape[1] // kv_heads
    key = ("attention", group, head_dim, page_tokens, window)
    work: _Work | None = batch.memo.get(key)
    if work is None:
        work = batch.memo[key] = _work(batch, group, head_dim, page_tokens, window)
    out = torch.empty(q.shape, dtype=q.dtype)
    size = q.itemsize
    _ATTEND(
        q.dtype, len(work.parts) * kv_heads, 2 * work.num_scores * kv_heads * head_dim,
        q.data_ptr(), q.stride(0) * size, out.data_ptr(), out.stride(0) * size,
        k_cache.data_ptr(), k_cache.stride(0) * size, k_cache.stride(1) * size,
        v_cache.data_ptr(), v_cache.stride(0) * size, v_cache.stride(1) * size,
        page_table.data_ptr(), page_table.stride(0) * 4, batch.row_slots.data_ptr(), batch.context_lens.data_ptr(),
        work.parts.data_ptr(),
        kv_heads, group, head_dim, page_tokens, window,
        work.scratch.data_ptr(), work.scratch.stride(0), work.scores_at, work.sums_at, work.inverses_at,
        work.score_width, work.out_width, _NOTHING.data_ptr(), scale, soft_cap,
    )  # fmt: skip
    return out
