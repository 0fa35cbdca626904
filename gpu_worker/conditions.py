"""Edits that act only where the output ends with certain ids. The output's last ids are known to the device alone."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.batch import IntArray
from gpu_worker.slots import Slots, upload


class Conditions:
    """The conditions of one step's active edits, flat: edit e wants id `wanted` at `place` of its slot's history."""

    def __init__(self, slots: Slots, positions: IntArray) -> None:
        self._slots = slots
        self._positions = positions  # i32[S], of the tokens to be sampled
        self._columns: list[npt.NDArray[np.int64]] = []  # [n, 4] of (edit, slot, place, wanted)

    def take(self, edits: npt.NDArray[np.void], row: int, slot: int, index: int, first: int) -> npt.NDArray[np.void]:
        """The edits of one row without their conditions, which are noted. Edits that want more ids than the output has
        are left out. index: of the output token to be sampled. first: number of the first edit that is returned."""
        kept: list[int] = []  # their places in edits
        lines: list[tuple[int, int, int, int]] = []
        pending: list[int] = []  # conditions of the next edit
        for at, token in enumerate(edits["token"].tolist()):
            if token < 0:
                pending.append(-1 - token)
                continue
            if len(pending) <= index:
                place = int(self._positions[row]) - len(pending)
                number = first + len(kept)
                lines += [(number, slot, place + offset, wanted) for offset, wanted in enumerate(pending)]
                kept.append(at)
            pending = []
        if lines:
            self._columns.append(np.array(lines, np.int64))
        return edits[kept]

    def applied(self, values: Tensor) -> Tensor:
        """f32[E] values of all edits, 0 where a condition is not met."""
        if not self._columns:
            return values
        edit, slot, place, wanted = (upload(each.copy(), values.device) for each in np.concatenate(self._columns).T)
        missed = (self._slots.tokens[slot, place] != wanted).float()
        misses = torch.zeros(len(values), device=values.device).index_add_(0, edit, missed)
        return values.masked_fill(misses > 0, 0.0)
