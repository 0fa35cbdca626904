"""Which rows of a step attend together, planned once per step from lengths and read by every layer.

Rows of similar length are padded to one shape. Nothing here depends on the model's values, so a row's result depends on its
company only through rounding.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import Batch, IntArray

# Padding costs about this many (row, key) cells before another group of rows costs more.
DECODE_SPLIT_CELLS = 2048
# Prefill rows shorter than this share of the longest of their group start a group of their own.
PREFILL_SPLIT = 0.75

Tokens = slice | Tensor  # neighbours in the batch, or i64[rows * query_len]


class Pages(NamedTuple):
    """Keys of some rows: num_pages pages each, gathered by (row, head, page)."""

    places: Tensor  # i64[rows * kv_heads * num_pages], page * kv_heads + head; page 0 where a row has fewer
    num_rows: int
    num_keys: int
    keys: Tensor  # [places, page_tokens * head_dim], where every layer gathers: memory that stays in the CPU's cache
    values: Tensor


class Decode(NamedTuple):
    """Decode rows: one query each. Shared leading pages, if any, stand once."""

    tokens: Tokens
    num_rows: int
    shared: Pages | None  # of one row
    private: Pages
    mask: Tensor  # additive [rows, 1, 1, shared keys + private keys]


class Prefill(NamedTuple):
    """Prefill rows padded to query_len. pages None: all their keys are this step's own, and causal order is mask enough."""

    tokens: Tokens
    unpadded: Tensor | None  # i64[real tokens], their places in [rows * query_len]; None: all
    num_rows: int
    query_len: int
    pages: Pages | None
    mask: Tensor | None  # additive [rows, 1, query_len, keys]
    out: Tokens  # batch tokens of the unpadded results


class Layout(NamedTuple):
    prefill: list[Prefill]
    decode: list[Decode]


class Geometry(NamedTuple):
    kv_heads: int
    page_tokens: int
    head_dim: int
    window: int
    dtype: torch.dtype  # of queries
    page_dtype: torch.dtype


def make_layout(batch: Batch, page_table: IntArray, geometry: Geometry) -> Layout:
    prefill_rows = batch.num_chunk + batch.num_last
    starts = np.concatenate(([0], np.cumsum(batch.host_query_lens)))
    rows = _Rows(page_table[batch.host_row_slots], batch.host_query_lens, batch.host_context_lens, starts, geometry)
    return Layout(
        prefill=[_prefill(rows, members) for members in _prefill_groups(rows, prefill_rows)],
        decode=[_decode(rows, members, shared) for members, shared in _decode_groups(rows, prefill_rows, batch.groups)],
    )


class _Rows(NamedTuple):
    page_table: IntArray  # [R, max_pages]
    query_lens: IntArray  # [R]
    context_lens: IntArray  # [R]
    starts: npt.NDArray[np.int64]  # [R + 1], first token of each row
    geometry: Geometry


def _prefill_groups(rows: _Rows, count: int) -> list[npt.NDArray[np.int64]]:
    """Rows of similar query length, those without earlier keys apart from those with some."""
    groups: list[npt.NDArray[np.int64]] = []
    fresh = rows.query_lens[:count] == rows.context_lens[:count]
    if rows.geometry.window:
        fresh &= rows.query_lens[:count] <= rows.geometry.window
    for kind in (fresh, ~fresh):
        members = np.flatnonzero(kind)
        members = members[np.argsort(-rows.query_lens[members], kind="stable")]
        while len(members):
            lens = rows.query_lens[members]
            size = int(np.searchsorted(-lens, -lens[0] * PREFILL_SPLIT, side="right"))
            groups.append(np.sort(members[:size]))
            members = members[size:]
    return groups


def _decode_groups(rows: _Rows, first: int, shared_groups: list[tuple[int, int]]) -> list[tuple[npt.NDArray[np.int64], int]]:
    """(rows, leading pages they share). A window may hide shared pages, so windowed layers take rows one by one."""
    groups: list[tuple[npt.NDArray[np.int64], int]] = []
    if not rows.geometry.window:
        for count, pages in shared_groups:
            members = np.arange(first, first + count)
            first += count
            if count > 1 and pages > 0:
                groups.append((members, pages))
            else:
                groups.extend((part, 0) for part in _by_length(rows, members))
    groups.extend((part, 0) for part in _by_length(rows, np.arange(first, len(rows.query_lens))))
    return groups


def _by_length(rows: _Rows, members: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Cut rows where padding the rest to the longest would cost more than a group of their own."""
    lens = rows.context_lens[members]
    if not len(members) or int(lens.max()) * len(members) - int(lens.sum()) < DECODE_SPLIT_CELLS:
        return [members] if len(members) else []
    members = members[np.argsort(-lens, kind="stable")]
    groups, start = [], 0
    lens = rows.context_lens[members]
    for end in range(1, len(members)):
        if (int(lens[start]) - int(lens[end])) * (len(members) - end) >= DECODE_SPLIT_CELLS:
            groups.append(np.sort(members[start:end]))
            start = end
    return [*groups, np.sort(members[start:])]


def _tokens_of(rows: _Rows, members: npt.NDArray[np.int64], query_len: int) -> Tokens:
    """Tokens of rows padded to query_len; a row's padding repeats its last token."""
    first, lens = rows.starts[members], rows.query_lens[members]
    if (lens == query_len).all() and (np.diff(members) == 1).all():
        return slice(int(first[0]), int(first[0]) + len(members) * query_len)
    places = np.minimum(np.arange(query_len), lens[:, None] - 1) + first[:, None]
    return torch.from_numpy(places.astype(np.int64).reshape(-1))


def _decode(rows: _Rows, members: npt.NDArray[np.int64], shared_pages: int) -> Decode:
    geometry = rows.geometry
    contexts = rows.context_lens[members]
    private, positions = _pages(rows, members, shared_pages)
    mask = _visible(positions, (contexts - 1)[:, None], geometry.window)[:, None, None]
    shared = None
    if shared_pages:
        shared = _gather(rows.page_table[members[:1], :shared_pages].astype(np.int64), geometry)
        mask = np.concatenate((np.ones((len(members), 1, 1, shared.num_keys), np.bool_), mask), axis=-1)
    return Decode(_tokens_of(rows, members, 1), len(members), shared, private, _additive(mask, geometry.dtype))


def _prefill(rows: _Rows, members: npt.NDArray[np.int64]) -> Prefill:
    lens, contexts = rows.query_lens[members], rows.context_lens[members]
    query_len = int(lens.max())
    tokens = _tokens_of(rows, members, query_len)
    real = np.arange(query_len) < lens[:, None]
    unpadded = None if real.all() else torch.from_numpy(np.flatnonzero(real))
    out = tokens if unpadded is None or isinstance(tokens, slice) else tokens[unpadded]
    window = rows.geometry.window
    if (lens == contexts).all() and (not window or query_len <= window):
        return Prefill(tokens, unpadded, len(members), query_len, None, None, out)
    pages, positions = _pages(rows, members, 0)
    queries = (contexts - lens)[:, None] + np.minimum(np.arange(query_len), lens[:, None] - 1)
    mask = _visible(positions[:, None, :], queries[:, :, None], window)[:, None]
    return Prefill(tokens, unpadded, len(members), query_len, pages, _additive(mask, rows.geometry.dtype), out)


def _pages(rows: _Rows, members: npt.NDArray[np.int64], skip: int) -> tuple[Pages, npt.NDArray[np.int64]]:
    """Pages that the rows' queries see, without the first skip ones, and the positions [rows, keys] of their cells."""
    geometry = rows.geometry
    contexts = rows.context_lens[members].astype(np.int64)
    first = np.full(len(members), skip, np.int64)
    if geometry.window:
        oldest_query = contexts - rows.query_lens[members]
        first = np.maximum(0, oldest_query - geometry.window + 1) // geometry.page_tokens
    counts = -(-contexts // geometry.page_tokens) - first
    indexes = first[:, None] + np.arange(max(1, int(counts.max())))
    held = indexes < (first + counts)[:, None]
    table = rows.page_table[members]
    pages = np.where(held, np.take_along_axis(table, np.minimum(indexes, table.shape[1] - 1), axis=1), 0)
    positions = indexes[:, :, None] * geometry.page_tokens + np.arange(geometry.page_tokens)
    positions = np.where(held[:, :, None], positions, np.iinfo(np.int64).max)
    return _gather(pages.astype(np.int64), geometry), positions.reshape(len(members), -1)


def _gather(pages: npt.NDArray[np.int64], geometry: Geometry) -> Pages:
    places = pages[:, None, :] * geometry.kv_heads + np.arange(geometry.kv_heads)[:, None]
    shape = (places.size, geometry.page_tokens * geometry.head_dim)
    keys, values = (torch.empty(shape, dtype=geometry.page_dtype) for _ in range(2))
    return Pages(torch.from_numpy(places.reshape(-1)), len(pages), pages.shape[1] * geometry.page_tokens, keys, values)


def _visible(keys: npt.NDArray[Any], queries: npt.NDArray[Any], window: int) -> npt.NDArray[np.bool_]:
    """Which key positions a query at its position sees."""
    seen: npt.NDArray[np.bool_] = keys <= queries
    return seen & (keys > queries - window) if window else seen


def _additive(visible: npt.NDArray[np.bool_], dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -torch.inf)
