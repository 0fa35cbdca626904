"""A plan's deltas on the slots, batches built from plans, and contradictions refused."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.batch import Sampled
from gpu_worker.kv_cache import KVCache
from gpu_worker.prepare import BadPlan, make_batch
from gpu_worker.slots import Slots
from shared.columns import i32
from shared.sampling import Edit, Flag, Sampling, pack_edits
from tests.plan_driver import make_plan
from tests.unit.worker.batches import CPU


def make_slots() -> tuple[Slots, KVCache]:
    cache = KVCache(num_layers=2, num_pages=20, kv_heads=2, page_tokens=16, head_dim=4, dtype=torch.float32, device=CPU)
    cache.storage.fill_(torch.nan)
    return Slots(8, 100, 16, CPU), cache


def opening(slot: int, computed: int, sampling: Sampling | None = None) -> bytes:
    return i32([slot, computed]) + (sampling or Sampling()).pack()


def test_open_sets_length_sampling_and_empties_edits() -> None:
    slots, cache = make_slots()
    sampling = Sampling(seed=2**63 + 5, temperature=0.5, top_p=0.25, min_p=0.125, top_k=7, num_prompt=9, logprobs=3, flags=2)
    edits: dict[str, Any] = {
        "edit_counts": i32([3, 2, 4, 1]),
        "edits": pack_edits([Edit(1, 2.0), Edit(3, 4.0, 5), Edit(6, 7.0)]),
    }
    slots.apply(make_plan(opens=opening(3, 32, sampling) + opening(4, 0), **edits), cache)
    assert slots.host_lengths.tolist() == [0, 0, 0, 32, 0, 0, 0, 0]
    assert float(slots.column_f32("temperature")[3]) == 0.5 and float(slots.column_f32("top_p")[3]) == 0.25
    assert int(slots.column_i32("top_k")[3]) == 7 and int(slots.column_i32("num_prompt")[3]) == 9
    assert slots.seeds[3].numpy().view(np.uint64)[0] == 2**63 + 5
    assert slots.host_edits[3]["token"].tolist() == [1, 3] and slots.host_edits[4]["until"].tolist() == [2**31 - 1]
    slots.apply(make_plan(opens=opening(3, 0)), cache)
    assert 3 not in slots.host_edits and 4 in slots.host_edits
    assert float(slots.column_f32("temperature")[3]) == 1.0


def test_page_writes_touch_no_page() -> None:
    slots, cache = make_slots()
    slots.apply(make_plan(opens=opening(2, 16), page_writes=i32([2, 0, 5, 2, 1, 6])), cache)
    assert slots.page_table[2, :2].tolist() == [5, 6]
    assert cache.storage.isnan().all()


def test_page_copies_read_before_they_write() -> None:
    slots, cache = make_slots()
    for page in range(20):
        cache.storage[:, :, page] = page
    slots.apply(make_plan(page_copies=i32([3, 4, 4, 5])), cache)
    assert [float(cache.storage[:, :, page].mean()) for page in (3, 4, 5, 6)] == [3, 3, 4, 6]


def test_a_batch_of_all_kinds_of_rows() -> None:
    slots, cache = make_slots()
    slots.apply(
        make_plan(
            opens=opening(1, 16) + opening(2, 0) + opening(3, 30),
            page_writes=i32([1, 0, 5, 1, 1, 6, 2, 0, 7, 3, 0, 8, 3, 1, 9]),
        ),
        cache,
    )
    slots.last_tokens[3] = 77
    plan = make_plan(
        num_chunk=1, num_last=1, num_decode=1, row_slots=i32([1, 2, 3]), row_lens=i32([2, 3]), tokens=i32([10, 11, 12, 13, 14])
    )
    batch = make_batch(plan, slots)
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 77]
    assert batch.positions.tolist() == [16, 17, 0, 1, 2, 30]
    assert batch.cells.tolist() == [6 * 16, 6 * 16 + 1, 7 * 16, 7 * 16 + 1, 7 * 16 + 2, 9 * 16 + 14]
    assert batch.query_starts.tolist() == [0, 2, 5, 6] and batch.context_lens.tolist() == [18, 3, 31]
    assert batch.sampled_tokens.tolist() == [4, 5] and batch.sample_positions.tolist() == [3, 31]
    assert slots.host_lengths[1:4].tolist() == [18, 3, 31]
    assert make_batch(make_plan(num_decode=1, row_slots=i32([3])), slots).positions.tolist() == [31]


def test_sampled_tokens_become_inputs_and_history() -> None:
    slots, cache = make_slots()
    with_history = Sampling(num_prompt=2, flags=Flag.NEEDS_HISTORY, presence_penalty=1.0)
    history: dict[str, Any] = {"history_counts": i32([1, 0, 2]), "history": i32([41, 42])}
    slots.apply(
        make_plan(opens=opening(1, 1, with_history) + opening(2, 5), page_writes=i32([1, 0, 3, 2, 0, 4]), **history), cache
    )
    batch = make_batch(make_plan(num_decode=2, row_slots=i32([1, 2])), slots)
    sampled = Sampled(torch.tensor([43, -1], dtype=torch.int32), None, None, None)
    slots.store_sampled(sampled, batch.sample_slots, batch.sample_positions, batch.needs.penalized)
    assert slots.last_tokens[1:3].tolist() == [43, 0]  # no allowed token: the row in flight behind it still has an input
    assert slots.tokens[1, :3].tolist() == [41, 42, 43] and slots.tokens[2].eq(0).all()


@pytest.mark.parametrize(("fields", "words"), [
    ({"num_decode": 2, "row_slots": i32([1])}, "names 1 slots for 2 rows"),
    ({"num_decode": 1, "row_slots": i32([0])}, "slot 0"),
    ({"num_decode": 1, "row_slots": i32([8])}, "slot 8"),
    ({"num_last": 1, "row_slots": i32([1]), "row_lens": i32([3]), "tokens": i32([1, 2])}, "2 tokens for prefill rows of 3"),
    ({"num_last": 1, "row_slots": i32([1]), "row_lens": i32([0])}, "tokens for prefill rows"),
    ({"num_last": 1, "row_slots": i32([1]), "tokens": i32([1])}, "0 lengths for 1 prefill rows"),
    ({"num_last": 1, "row_slots": i32([1]), "row_lens": i32([101]), "tokens": i32([1] * 101)}, "101 tokens long, the limit is"),
])  # fmt: skip
def test_contradictions_are_refused_before_anything_changes(fields: dict[str, Any], words: str) -> None:
    slots, _ = make_slots()
    with pytest.raises(BadPlan, match=words):
        make_batch(make_plan(**fields), slots)
    assert slots.host_lengths.tolist() == [0] * 8


def test_reset_forgets_slots_and_keeps_pages() -> None:
    slots, cache = make_slots()
    slots.apply(make_plan(opens=opening(1, 16), page_writes=i32([1, 0, 5])), cache)
    slots.reset()
    assert slots.host_lengths.sum() == 0 and slots.page_table.sum() == 0 and float(slots.column_f32("top_p")[1]) == 0
