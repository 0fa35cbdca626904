"""Batches over hand-made pages: rows with given lengths, highest page ids shuffled, every cell nobody may read NaN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.prepare import make_batch
from gpu_worker.slots import Slots
from shared.columns import i32
from tests.plan_driver import make_plan

CPU = torch.device("cpu")


@dataclass
class Case:
    batch: Batch
    slots: Slots
    k_cache: Tensor  # [num_pages, hkv, page, d]; pages of rows and page 0 finite, all others NaN
    v_cache: Tensor

    def context(self, row: int) -> tuple[Tensor, Tensor]:
        """k and v [context, hkv, d] of a row."""
        slot, length = int(self.batch.row_slots[row]), int(self.batch.context_lens[row])
        page_tokens = self.k_cache.shape[2]
        pages = self.slots.page_table[slot, : -(-length // page_tokens)].long()
        k, v = (cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in (self.k_cache, self.v_cache))
        return k, v

    def on_cpu(self) -> tuple[Tensor, Tensor]:
        """The caches as a worker on a CPU has them: keys dimension by dimension, NaN in every cell that holds no key."""
        live = torch.zeros(self.k_cache.shape[0], self.k_cache.shape[2], dtype=torch.bool)
        for slot, length in zip(self.batch.host_row_slots.tolist(), self.batch.host_context_lens.tolist(), strict=True):
            for position in range(length):
                page = self.slots.host_page_table[slot, position // live.shape[1]]
                live[page, position % live.shape[1]] = True
        k, v = (torch.where(live[:, None, :, None], cache, torch.nan) for cache in (self.k_cache, self.v_cache))
        return k.transpose(2, 3).contiguous().transpose(2, 3), v.contiguous()


def make_case(
    prefill: list[tuple[int, int]],
    decode: list[int],
    *,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    groups: list[tuple[int, int]] | None = None,
    seed: int = 0,
) -> Case:
    """prefill: (query length, context length after the step) of each row; decode: context length of each row."""
    generator = torch.Generator().manual_seed(seed)
    rows = [*prefill, *((1, length) for length in decode)]
    slots = Slots(len(rows) + 3, max([length for _, length in rows]) + 5, page_tokens, CPU)
    order = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)].add(1).tolist()  # slots, shuffled
    counts = [-(-length // page_tokens) for _, length in rows]
    num_pages = sum(counts) + 9
    free = (torch.randperm(sum(counts), generator=generator) + 9).tolist()  # the highest page ids
    slots.host_page_table[:] = num_pages + 1_000_000  # entries past a row's pages mean nothing
    for slot, count, (query_len, length) in zip(order, counts, rows, strict=True):
        slots.host_page_table[slot, :count] = [free.pop() for _ in range(count)]
        slots.host_lengths[slot] = length - query_len
    first = len(prefill)
    for members, shared in groups or []:
        for slot in order[first + 1 : first + members]:
            slots.host_page_table[slot, :shared] = slots.host_page_table[order[first], :shared]
        first += members
    plan = make_plan(
        num_last=len(prefill),
        num_decode=len(decode),
        row_slots=i32(order),
        row_lens=i32(query_len for query_len, _ in prefill),
        tokens=i32([1] * sum(query_len for query_len, _ in prefill)),
        group_counts=i32(number for group in groups or [] for number in group),
    )
    caches = torch.full((2, num_pages, kv_heads, page_tokens, head_dim), torch.nan, dtype=dtype)
    used = torch.from_numpy(slots.host_page_table[order]).long()
    for slot, count, (_, length) in zip(order, counts, rows, strict=True):
        for index in range(count):
            page = caches[:, slots.host_page_table[slot, index]]
            page.zero_()
            live = min(page_tokens, length - index * page_tokens)
            page[:, :, :live] = torch.randn(page[:, :, :live].shape, generator=generator).to(dtype)
    assert used.max() > 9
    caches[:, 0] = 0
    return Case(make_batch(plan, slots), slots, caches[0], caches[1])


def new_tokens(case: Case) -> tuple[Tensor, Tensor]:
    """k and v [T, hkv, d] of this step's tokens, as rope_and_store would have returned them."""
    keys, values = [], []
    for row, query_len in enumerate(case.batch.host_query_lens.tolist()):
        k, v = case.context(row)
        keys.append(k[-query_len:])
        values.append(v[-query_len:])
    return torch.cat(keys), torch.cat(values)
