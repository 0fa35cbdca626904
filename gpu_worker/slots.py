"""Permanent state of all slots: page table, length, last token, sampling record, token history, edits. Slot 0 is unused.

Lengths and page tables follow from the plans alone, so the host keeps them too (host_*); on a CPU both are the same memory.
Only sampled tokens are born on the device and stay there.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import IntArray, Sampled
from gpu_worker.kv_cache import KVCache
from shared.messages import StepPlan
from shared.sampling import EDIT_FIELDS, OPEN_FIELDS, SAMPLING_BYTES

OPEN_DTYPE = np.dtype(OPEN_FIELDS)
RECORD_DTYPE = np.dtype(OPEN_FIELDS[2:])  # one Sampling record
EDIT_DTYPE = np.dtype(EDIT_FIELDS)
RECORD_WORDS = SAMPLING_BYTES // 4
_WORD = {name: RECORD_DTYPE.fields[name][1] // 4 for name in RECORD_DTYPE.names or () if RECORD_DTYPE.fields}


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device; on a CPU it shares memory, elsewhere the copy does not wait."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def i32_table(column: bytes, width: int) -> IntArray:
    """An int32 column as a table of that many columns."""
    return np.frombuffer(column, np.int32).reshape(-1, width)


class Slots:
    def __init__(self, num_slots: int, max_model_len: int, page_tokens: int, device: torch.device) -> None:
        max_pages = -(-max_model_len // page_tokens)
        self.page_tokens = page_tokens
        self.max_model_len = max_model_len
        self.device = device
        self.host_lengths: IntArray = np.zeros(num_slots, np.int32)
        self.host_page_table: IntArray = np.zeros((num_slots, max_pages), np.int32)
        self.host_records: npt.NDArray[np.void] = np.zeros(num_slots, RECORD_DTYPE)
        self.host_edits: dict[int, npt.NDArray[np.void]] = {}  # slot -> its edits, absent when it has none
        self.conditional: set[int] = set()  # of them, those whose edits have conditions
        record_words = self.host_records.view(np.int32).reshape(num_slots, RECORD_WORDS)
        self.page_table = torch.from_numpy(self.host_page_table).to(device)  # i32[slots, max_pages], page ids
        self.records = torch.from_numpy(record_words).to(device)  # i32[slots, words of a Sampling record]
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)  # i32[slots]
        # i32[slots, max_model_len + 1]: ids of slots with NEEDS_HISTORY; on a CPU untouched memory costs nothing
        self.tokens = torch.zeros((num_slots, max_model_len + 1), dtype=torch.int32, device=device)

    @property
    def num_slots(self) -> int:
        return len(self.host_lengths)

    # --- sampling columns on the device, [slots] each -------------------------------------------------------------------

    def column_f32(self, name: str) -> Tensor:
        """temperature, top_p, min_p, presence_penalty, frequency_penalty or repetition_penalty: f32[slots], strided."""
        return self.records.view(torch.float32)[:, _WORD[name]]

    def column_i32(self, name: str) -> Tensor:
        """top_k, num_prompt, logprobs or flags: i32[slots], strided."""
        return self.records[:, _WORD[name]]

    @property
    def seeds(self) -> Tensor:
        """i32[slots, 2]: low and high word of the u64 seed."""
        return self.records[:, 0:2]

    # --- a plan's deltas, in the order the contract gives -----------------------------------------------------------------

    def apply(self, plan: StepPlan, cache: KVCache, *, staged: bool = False) -> None:
        """staged: only what the host keeps; kernels.apply_plan brings the same deltas to the device."""
        upload_too = self.device.type != "cpu" and not staged
        self._open(plan.opens, upload_too)
        self._edit(plan.edit_counts, plan.edits)
        if not staged:
            self._remember(plan.history_counts, plan.history)
        self._write_pages(plan.page_writes, upload_too)
        if plan.page_copies:
            copies = i32_table(plan.page_copies, 2)
            cache.copy_pages(
                upload(copies[:, 0].astype(np.int64), self.device), upload(copies[:, 1].astype(np.int64), self.device)
            )

    def reset(self) -> None:
        """Forget everything, as after a start."""
        self.host_lengths[:] = 0
        self.host_page_table[:] = 0
        self.host_records[:] = np.zeros(1, RECORD_DTYPE)
        self.host_edits.clear()
        self.conditional.clear()
        self.page_table.zero_()
        self.records.zero_()
        self.last_tokens.zero_()

    def _open(self, column: bytes, upload_too: bool) -> None:
        if not column:
            return
        opens = np.frombuffer(column, OPEN_DTYPE)
        slots = opens["slot"]
        self.host_lengths[slots] = opens["computed"]
        records = np.ascontiguousarray(np.frombuffer(column, np.int32).reshape(-1, 2 + RECORD_WORDS)[:, 2:])
        self.host_records[slots] = records.view(RECORD_DTYPE)[:, 0]
        if upload_too:
            self.records[upload(slots.astype(np.int64), self.device)] = upload(records, self.device)
        for slot in slots.tolist():
            self.host_edits.pop(slot, None)
            self.conditional.discard(slot)

    def _edit(self, counts: bytes, column: bytes) -> None:
        start = 0
        for slot, count in i32_table(counts, 2).tolist():
            edits = np.frombuffer(column, EDIT_DTYPE)[start : start + count]
            start += count
            self.host_edits.pop(slot, None)
            self.conditional.discard(slot)
            if count:
                self.host_edits[slot] = edits
                if edits["token"].min() < 0:
                    self.conditional.add(slot)

    def _remember(self, counts: bytes, column: bytes) -> None:
        start = 0
        ids = np.frombuffer(column, np.int32)
        for slot, first, count in i32_table(counts, 3).tolist():
            self.tokens[slot, first : first + count] = upload(ids[start : start + count].copy(), self.device)
            start += count

    def _write_pages(self, column: bytes, upload_too: bool) -> None:
        if not column:
            return
        slots, indexes, pages = i32_table(column, 3).T
        self.host_page_table[slots, indexes] = pages
        if upload_too:
            where = (upload(slots.astype(np.int64), self.device), upload(indexes.astype(np.int64), self.device))
            self.page_table[where] = upload(pages.copy(), self.device)

    # --- what a step leaves behind ----------------------------------------------------------------------------------------

    def store_sampled(self, sampled: Sampled, slots: Tensor, positions: Tensor, with_history: Tensor | None) -> None:
        """Make sampled tokens the slots' next inputs. A row without an allowed token (-1) continues with id 0: its result is
        an error, but a row of it may already be in flight. with_history: i64[n], sampled rows that keep their history."""
        self.last_tokens[slots.long()] = sampled.tokens.clamp(min=0)
        if with_history is not None:
            self.tokens[slots[with_history].long(), positions[with_history].long()] = sampled.tokens[with_history].clamp(min=0)
