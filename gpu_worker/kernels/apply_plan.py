"""A plan's deltas and a decode batch's inputs, from one staged int32 buffer: one copy to the device and one kernel a step.

The host knows every length, so a row carries its position; only last tokens and page tables live on the device. Staged
words (all sections follow the header, in this order):

    header   [opens, page writes, history runs, decode rows, groups, 0, 0, 0]
    opens    [n, 1 + RECORD_WORDS]   slot, its Sampling record
    writes   [n, 3]                  slot, index in its page table, page
    history  [n, 3]                  slot, first position, ids; the ids of all runs follow the last run
    rows     [n, 3]                  slot, position of its input token, group (0: none)
    groups   [n, 3]                  first row, rows, shared pages; entry 0 is reserved
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.messages import StepPlan
from shared.sampling import SAMPLING_BYTES

IntArray = npt.NDArray[np.int32]
HEADER_WORDS = 8
RECORD_WORDS = SAMPLING_BYTES // 4


class DecodeInputs(NamedTuple):
    """What a graph of a bucket of B decode rows reads. Rows past the batch are padding: slot 0, page 0, length 0."""

    input_ids: Tensor  # i32 [B]
    positions: Tensor  # i32 [B]
    cells: Tensor  # i64 [B]
    row_slots: Tensor  # i32 [B]
    query_starts: Tensor  # i32 [B + 1]
    context_lens: Tensor  # i32 [B]
    sample_positions: Tensor  # i32 [B]
    row_groups: Tensor  # i32 [B]
    groups: Tensor  # i32 [3, G]: first row, rows, shared pages


def allocate(rows: int, groups: int, device: torch.device | str) -> DecodeInputs:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeInputs(
        zeros(rows), zeros(rows), zeros(rows, dtype=torch.int64), zeros(rows), zeros(rows + 1), zeros(rows),
        zeros(rows), zeros(rows), zeros(3, groups + 1),
    )  # fmt: skip


def pack(plan: StepPlan, decode_positions: IntArray, staged: IntArray, max_groups: int) -> int:
    """Write the plan's deltas and its decode rows into staged; the number of words written.

    decode_positions: position of each decode row's input token (its slot's length before the step). Page copies and
    edits are applied elsewhere. Groups past max_groups are dropped: their rows read all their pages themselves.
    """
    record = np.frombuffer(plan.opens, np.int32).reshape(-1, 2 + RECORD_WORDS)
    opens = np.delete(record, 1, axis=1)
    writes = np.frombuffer(plan.page_writes, np.int32)
    runs = np.frombuffer(plan.history_counts, np.int32)
    history = np.frombuffer(plan.history, np.int32)
    rows = np.zeros((plan.num_decode, 3), np.int32)
    rows[:, 0] = np.frombuffer(plan.row_slots, np.int32)[plan.num_chunk + plan.num_last :]
    rows[:, 1] = decode_positions
    counts = np.frombuffer(plan.group_counts, np.int32).reshape(-1, 2)[:max_groups]
    groups = np.zeros((len(counts) + 1, 3), np.int32)
    groups[1:, 0] = np.cumsum(counts[:, 0]) - counts[:, 0]
    groups[1:, 1:] = counts
    grouped = int(counts[:, 0].sum())
    rows[:grouped, 2] = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts[:, 0])
    header = np.array([len(opens), len(writes) // 3, len(runs) // 3, len(rows), len(groups), 0, 0, 0], np.int32)
    end = 0
    for section in (header, opens, writes, runs, history, rows, groups):
        words = section.reshape(-1)
        staged[end : end + len(words)] = words
        end += len(words)
    return end


@triton.jit(do_not_specialize=["bucket", "max_groups", "table_stride", "history_stride"])
def _apply_plan(
    staged,
    records,
    page_table,
    history,
    last_tokens,
    input_ids,
    positions,
    cells,
    row_slots,
    query_starts,
    context_lens,
    sample_positions,
    row_groups,
    groups,
    table_stride,
    history_stride,
    bucket,
    max_groups,
    HEADER: tl.constexpr,
    RECORD: tl.constexpr,
    RECORD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, so that a barrier orders page writes before the rows that use them.
    num_opens = tl.load(staged)
    num_writes = tl.load(staged + 1)
    num_runs = tl.load(staged + 2)
    num_rows = tl.load(staged + 3)
    num_groups = tl.load(staged + 4)
    lane = tl.arange(0, BLOCK)
    section = staged + HEADER

    word = tl.arange(0, RECORD_PAD)
    line = tl.arange(0, BLOCK // RECORD_PAD)
    for first in range(0, num_opens, BLOCK // RECORD_PAD):
        number = first + line
        inside = (number < num_opens)[:, None] & (word < RECORD)[None, :]
        slot = tl.load(section + number * (1 + RECORD), mask=number < num_opens, other=0)
        value = tl.load(section + number[:, None] * (1 + RECORD) + 1 + word[None, :], mask=inside)
        tl.store(records + slot[:, None] * RECORD + word[None, :], value, mask=inside)
    section += num_opens * (1 + RECORD)

    for first in range(0, num_writes, BLOCK):
        number = first + lane
        inside = number < num_writes
        slot = tl.load(section + number * 3, mask=inside, other=0).to(tl.int64)
        place = tl.load(section + number * 3 + 1, mask=inside, other=0)
        page = tl.load(section + number * 3 + 2, mask=inside, other=0)
        tl.store(page_table + slot * table_stride + place, page, mask=inside)
    section += num_writes * 3

    ids = section + num_runs * 3
    for run in range(0, num_runs):
        slot = tl.load(section + run * 3).to(tl.int64)
        start = tl.load(section + run * 3 + 1)
        count = tl.load(section + run * 3 + 2)
        for first in range(0, count, BLOCK):
            number = first + lane
            token = tl.load(ids + number, mask=number < count)
            tl.store(history + slot * history_stride + start + number, token, mask=number < count)
        ids += count
    section = ids
    tl.debug_barrier()

    for first in range(0, bucket, BLOCK):
        row = first + lane
        exists = row < num_rows
        in_bucket = row < bucket
        slot = tl.load(section + row * 3, mask=exists, other=0)
        position = tl.load(section + row * 3 + 1, mask=exists, other=0)
        group = tl.load(section + row * 3 + 2, mask=exists, other=0)
        token = tl.load(last_tokens + slot, mask=exists, other=0)
        page = tl.load(page_table + slot.to(tl.int64) * table_stride + position // PAGE, mask=exists, other=0)
        tl.store(input_ids + row, token, mask=in_bucket)
        tl.store(positions + row, position, mask=in_bucket)
        tl.store(cells + row, page.to(tl.int64) * PAGE + tl.where(exists, position % PAGE, 0), mask=in_bucket)
        tl.store(row_slots + row, slot, mask=in_bucket)
        tl.store(query_starts + row, row, mask=row <= bucket)
        tl.store(context_lens + row, tl.where(exists, position + 1, 0), mask=in_bucket)
        tl.store(sample_positions + row, tl.where(exists, position + 1, 0), mask=in_bucket)
        tl.store(row_groups + row, group, mask=in_bucket)
    tl.store(query_starts + bucket, bucket)
    section += num_rows * 3
    for first in range(0, max_groups, BLOCK):
        number = first + lane
        inside = number < num_groups
        for column in range(0, 3):
            value = tl.load(section + number * 3 + column, mask=inside, other=0)
            tl.store(groups + column * max_groups + number, value, mask=number < max_groups)


def apply_plan(
    staged: Tensor,
    records: Tensor,
    page_table: Tensor,
    history: Tensor,
    last_tokens: Tensor,
    inputs: DecodeInputs,
    page_tokens: int,
) -> None:
    """Apply what `pack` wrote and fill the inputs of the bucket.

    staged: i32 [words]; records: i32 [slots, RECORD_WORDS]; page_table: i32 [slots, max_pages];
    history: i32 [slots, max_len]; last_tokens: i32 [slots], of the step before.
    """
    _apply_plan[(1,)](
        staged, records, page_table, history, last_tokens, *inputs, page_table.stride(0), history.stride(0),
        inputs.input_ids.shape[0], inputs.groups.shape[1],
        HEADER=HEADER_WORDS, RECORD=RECORD_WORDS, RECORD_PAD=16, PAGE=page_tokens, BLOCK=512, num_warps=8,
    )  # fmt: skip
