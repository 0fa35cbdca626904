"""From a step plan to a Batch. All lengths are known on the host, so the columns are computed here with numpy and uploaded."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import Batch, Edits, IntArray, Needs
from gpu_worker.conditions import Conditions
from gpu_worker.slots import Slots, i32_table, upload
from shared.messages import StepPlan
from shared.sampling import Flag

LongArray = npt.NDArray[np.int64]


class BadPlan(ValueError):
    """A plan that contradicts the worker's state or limits: the scheduler and the worker disagree, which is a bug."""


def make_batch(plan: StepPlan, slots: Slots) -> Batch:
    """Build the batch of a plan whose deltas are applied, and let the slots' lengths grow by their rows."""
    device = slots.device
    num_prefill = plan.num_chunk + plan.num_last
    row_slots = np.frombuffer(plan.row_slots, np.int32)
    if len(plan.row_lens) != 4 * num_prefill:
        raise BadPlan(f"plan {plan.step} has {len(plan.row_lens) // 4} lengths for {num_prefill} prefill rows")
    query_lens = np.ones(len(row_slots), np.int32)
    query_lens[:num_prefill] = np.frombuffer(plan.row_lens, np.int32)
    starts = np.zeros(len(row_slots) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    _check_rows(plan, row_slots, query_lens, slots)
    before = slots.host_lengths[row_slots]
    context_lens = before + query_lens
    if context_lens.max(initial=0) > slots.max_model_len:
        raise BadPlan(f"plan {plan.step} makes a slot {context_lens.max()} tokens long, the limit is {slots.max_model_len}")
    slots.host_lengths[row_slots] = context_lens

    row_of_token = np.repeat(np.arange(len(row_slots)), query_lens)
    positions = np.arange(starts[-1], dtype=np.int32) - starts[row_of_token] + before[row_of_token]
    pages = slots.host_page_table[row_slots[row_of_token], positions // slots.page_tokens]
    cells = pages.astype(np.int64) * slots.page_tokens + positions % slots.page_tokens

    sampled = row_slots[plan.num_chunk :]
    sample_positions = context_lens[plan.num_chunk :]
    return Batch(
        input_ids=_input_ids(plan, slots, row_slots[num_prefill:]),
        positions=upload(positions, device),
        cells=upload(cells, device),
        row_slots=upload(row_slots.copy(), device),
        query_starts=upload(starts, device),
        context_lens=upload(context_lens, device),
        page_table=slots.page_table,
        num_chunk=plan.num_chunk,
        num_last=plan.num_last,
        num_decode=plan.num_decode,
        groups=[(rows, pages) for rows, pages in i32_table(plan.group_counts, 2).tolist()],
        sampled_tokens=upload(starts[plan.num_chunk + 1 :].astype(np.int64) - 1, device),
        sample_slots=upload(sampled.copy(), device),
        sample_positions=upload(sample_positions.copy(), device),
        needs=sampling_needs(slots, sampled, sample_positions),
        score_tokens=_long_column(plan.score_positions, device),
        score_targets=_long_column(plan.score_targets, device),
        score_width=plan.score_width,
        host_row_slots=row_slots,
        host_query_lens=query_lens,
        host_context_lens=context_lens,
    )


def _check_rows(plan: StepPlan, row_slots: IntArray, query_lens: IntArray, slots: Slots) -> None:
    num_rows = plan.num_chunk + plan.num_last + plan.num_decode
    if len(row_slots) != num_rows:
        raise BadPlan(f"plan {plan.step} names {len(row_slots)} slots for {num_rows} rows")
    if num_rows and not (row_slots.min() > 0 and row_slots.max() < slots.num_slots):
        raise BadPlan(
            f"plan {plan.step} names slot {row_slots.min()} or {row_slots.max()}, there are 1 to {slots.num_slots - 1}"
        )
    num_tokens = int(query_lens.sum()) - plan.num_decode
    if query_lens.min(initial=1) < 1 or len(plan.tokens) != 4 * num_tokens:
        raise BadPlan(f"plan {plan.step} has {len(plan.tokens) // 4} tokens for prefill rows of {num_tokens}")


def _long_column(column: bytes, device: torch.device) -> Tensor | None:
    return upload(np.frombuffer(column, np.int32).astype(np.int64), device) if column else None


def _input_ids(plan: StepPlan, slots: Slots, decode_slots: IntArray) -> Tensor:
    """i32[T]: the plan's ids, then each decode row's last token, which only the device knows."""
    if not len(decode_slots):
        return upload(np.frombuffer(plan.tokens, np.int32).copy(), slots.device)
    last = slots.last_tokens.index_select(0, upload(decode_slots.astype(np.int64), slots.device))
    if not plan.tokens:
        return last
    return torch.cat((upload(np.frombuffer(plan.tokens, np.int32).copy(), slots.device), last))


def _rows_where(wanted: npt.NDArray[np.bool_], device: torch.device) -> Tensor | None:
    rows = np.flatnonzero(wanted)
    return upload(rows, device) if len(rows) else None


def sampling_needs(slots: Slots, sampled: IntArray, positions: IntArray) -> Needs:
    """What the sampled slots ask for; positions: i32[S], of the tokens to be sampled."""
    records = slots.host_records[sampled]
    logprobs = records["logprobs"]
    filtered = (records["top_k"] > 0) | (records["top_p"] < 1) | (records["min_p"] > 0)
    filtered &= records["temperature"] > 0  # the likeliest token survives every filter
    return Needs(
        noise=bool((records["temperature"] > 0).any()),
        edits=_edits(slots, sampled, positions, records) if slots.host_edits else None,
        penalized=_rows_where((records["flags"] & Flag.NEEDS_HISTORY) != 0, slots.device),
        filtered=_rows_where(filtered, slots.device),
        scored=_rows_where(logprobs >= 0, slots.device),
        top_width=max(0, int(logprobs.max(initial=0))),
    )


def _edits(slots: Slots, sampled: IntArray, positions: IntArray, records: npt.NDArray[np.void]) -> Edits | None:
    """The edits that are active at these output indexes."""
    rows: list[LongArray] = []
    tokens: list[LongArray] = []
    values: list[npt.NDArray[np.float32]] = []
    conditions = Conditions(slots, positions)
    for row, slot in enumerate(sampled.tolist()):
        edits = slots.host_edits.get(slot)
        if edits is None:
            continue
        index = int(positions[row] - records["num_prompt"][row])
        active = edits[edits["until"] > index]
        if slot in slots.conditional:
            active = conditions.take(active, row, slot, index, first=sum(len(each) for each in rows))
        rows.append(np.full(len(active), row, np.int64))
        tokens.append(active["token"].astype(np.int64))
        values.append(active["value"])
    allow_only = np.flatnonzero(records["flags"] & Flag.ALLOW_ONLY)
    if not len(allow_only) and not any(len(each) for each in rows):
        return None
    none = [np.zeros(0, np.int64)]
    return Edits(
        rows=upload(np.concatenate(rows or none), slots.device),
        tokens=upload(np.concatenate(tokens or none), slots.device),
        values=conditions.applied(upload(np.concatenate(values or [np.zeros(0, np.float32)]), slots.device)),
        allow_only=upload(allow_only, slots.device),
    )
