"""Which pages hold known content, for the next hello. Kept on the asyncio thread, from plans as they arrive.

A registration counts once its step's StepDone was sent, and until a later plan gives the page to a slot that writes it.
"""

import struct

import numpy as np

from gpu_worker.slots import OPEN_DTYPE, i32_table
from shared.messages import StepPlan

_REGISTRATION = struct.Struct("<i16s")


class Inventory:
    def __init__(self, num_slots: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._cached_tokens = np.zeros(num_slots, np.int64)  # of each slot when it was opened; later pages are its own to write
        self._hashes: dict[int, bytes] = {}  # page -> hash of its content
        self._announced: dict[int, list[tuple[int, bytes]]] = {}  # step in flight -> its registrations
        self._written: dict[int, int] = {}  # page -> last step in flight that gave it to a writer

    def on_plan(self, plan: StepPlan) -> None:
        """A plan arrived: pages it will write lose their content, whatever becomes of the plan."""
        if plan.opens:
            opens = np.frombuffer(plan.opens, OPEN_DTYPE)
            self._cached_tokens[opens["slot"]] = opens["computed"]
        written = []
        if plan.page_writes:
            slots, indexes, pages = i32_table(plan.page_writes, 3).T
            written += pages[indexes.astype(np.int64) * self._page_tokens >= self._cached_tokens[slots]].tolist()
        if plan.page_copies:
            written += i32_table(plan.page_copies, 2)[:, 1].tolist()
        for page in written:
            self._hashes.pop(page, None)
            self._written[page] = plan.step
        self._announced[plan.step] = list(_REGISTRATION.iter_unpack(plan.registrations))

    def on_done(self, step: int) -> None:
        """The step's result was sent: what it registered is known, unless a later plan took the page."""
        for page, digest in self._announced.pop(step, ()):
            if self._written.get(page, 0) <= step:
                self._hashes[page] = digest
        if not self._announced:
            self._written.clear()

    def on_new_incarnation(self) -> None:
        """Steps in flight will never be acknowledged."""
        self._announced.clear()
        self._written.clear()

    @property
    def pages(self) -> dict[int, bytes]:
        """Page -> hash of its content."""
        return dict(self._hashes)

    def column(self) -> bytes:
        return b"".join(_REGISTRATION.pack(page, digest) for page, digest in self._hashes.items())
