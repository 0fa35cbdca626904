"""A small scheduler for tests and measurements of the worker: sequences, pages and step plans without sockets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_worker.runner import Runner
from shared.columns import i32
from shared.messages import StepDone, StepPlan
from shared.sampling import Edit, Flag, Sampling, pack_edits

GREEDY = Sampling(temperature=0.0)


def make_plan(step: int = 1, **fields: Any) -> StepPlan:
    """A plan that does nothing but what fields say."""
    ints = dict.fromkeys(("num_chunk", "num_last", "num_decode"), 0)
    columns = {name: b"" for name in StepPlan._fields if name not in ints and name not in StepPlan._field_defaults}
    values: dict[str, Any] = {**columns, **ints, "step": step, "score_width": 0, **fields}
    return StepPlan(**values)


@dataclass
class Running:
    known: list[int]
    num_prompt: int
    slot: int
    sampling: Sampling
    edits: list[Edit] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    opened: bool = False
    logprobs: list[float] = field(default_factory=list)  # of the output, when asked for
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.known[self.num_prompt :]


class Driver:
    """Builds plans for a runner and applies their results. One plan in flight."""

    def __init__(self, runner: Runner, *, pages: Sequence[int] | None = None, chunk: int = 10**9) -> None:
        self.runner = runner
        self.page_tokens = runner.slots.page_tokens
        self.free_pages = list(pages if pages is not None else range(runner.cache.num_pages - 1, 0, -1))
        self.free_slots = list(range(1, runner.slots.num_slots))
        self.chunk = chunk  # prefill tokens of one row in one step
        self.sequences: list[Running] = []
        self.step = 0
        self.use_groups = False

    def add(
        self,
        tokens: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        edits: Sequence[Edit] = (),
        shared: Running | None = None,
        num_prompt: int | None = None,
    ) -> Running:
        """shared: another sequence whose full pages of the same leading tokens this one reads."""
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        sequence = Running(
            list(tokens), num_prompt, self.free_slots.pop(0), sampling._replace(num_prompt=num_prompt), list(edits)
        )
        if shared is not None:
            same = 0
            while same < min(len(tokens) - 1, shared.computed) and tokens[same] == shared.known[same]:
                same += 1
            count = same // self.page_tokens
            sequence.pages = shared.pages[:count]
            sequence.computed = count * self.page_tokens
        self.sequences.append(sequence)
        return sequence

    def finish(self, sequence: Running) -> None:
        self.sequences.remove(sequence)
        self.free_slots.append(sequence.slot)
        used = {page for other in self.sequences for page in other.pages}
        self.free_pages.extend(page for page in sequence.pages if page not in used)

    def plan(self, members: Sequence[Running] | None = None) -> tuple[StepPlan, list[Running], list[tuple[Running, int]]]:
        """(plan, sampled sequences, scored positions) of one step over the sequences; their computed tokens advance."""
        self.step += 1
        chunks: list[Running] = []
        lasts: list[Running] = []
        decodes: list[Running] = []
        lens: dict[int, int] = {}
        opens, edit_counts, edits, history_counts, history, writes = b"", [], b"", [], b"", []
        for sequence in members if members is not None else self.sequences:
            missing = len(sequence.known) - sequence.computed
            decoding = sequence.opened and missing == 1 and len(sequence.known) > sequence.num_prompt
            length = min(missing, self.chunk)
            lens[sequence.slot] = length
            (decodes if decoding else lasts if length == missing else chunks).append(sequence)
            if not sequence.opened:
                sequence.opened = True
                opens += i32([sequence.slot, sequence.computed]) + sequence.sampling.pack()
                writes += [(sequence.slot, index, page) for index, page in enumerate(sequence.pages)]
                if sequence.edits:
                    edit_counts += [sequence.slot, len(sequence.edits)]
                    edits += pack_edits(sequence.edits)
                if sequence.sampling.flags & Flag.NEEDS_HISTORY:
                    history_counts += [sequence.slot, 0, len(sequence.known)]
                    history += i32(sequence.known)
            while len(sequence.pages) * self.page_tokens < sequence.computed + length:
                writes.append((sequence.slot, len(sequence.pages), self.free_pages[-1]))
                sequence.pages.append(self.free_pages.pop())
        groups: list[int] = []
        if self.use_groups:
            decodes, groups = self._grouped(decodes)
        rows = [*chunks, *lasts, *decodes]
        tokens: list[int] = []
        scored: list[tuple[Running, int]] = []
        positions, targets, width = [], [], 0
        for row in [*chunks, *lasts]:
            part = row.known[row.computed : row.computed + lens[row.slot]]
            if row.sampling.score_width >= 0:
                width = max(width, row.sampling.score_width)
                for offset in range(len(part)):
                    if row.computed + offset + 1 < row.num_prompt:
                        positions.append(len(tokens) + offset)
                        targets.append(row.known[row.computed + offset + 1])
                        scored.append((row, row.computed + offset + 1))
            tokens += part
        plan = make_plan(
            self.step,
            num_chunk=len(chunks),
            num_last=len(lasts),
            num_decode=len(decodes),
            row_slots=i32(row.slot for row in rows),
            row_lens=i32(lens[row.slot] for row in [*chunks, *lasts]),
            tokens=i32(tokens),
            page_writes=i32(np.array(writes, np.int32).reshape(-1).tolist()),
            opens=opens,
            edit_counts=i32(edit_counts),
            edits=edits,
            history_counts=i32(history_counts),
            history=history,
            score_positions=i32(positions),
            score_targets=i32(targets),
            score_width=width,
            group_counts=i32(groups),
        )
        for row in rows:
            row.computed += lens[row.slot]
        return plan, [*lasts, *decodes], scored

    def run_step(self, members: Sequence[Running] | None = None) -> StepDone:
        plan, sampled, scored = self.plan(members)
        done = self.runner.collect(self.runner.launch(plan))
        self.commit(done, sampled, scored)
        return done

    def commit(self, done: StepDone, sampled: list[Running], scored: list[tuple[Running, int]]) -> None:
        logprobs = np.frombuffer(done.logprobs, np.float32)
        top_ids = np.frombuffer(done.top_ids, np.int32).reshape(len(sampled), done.top_width)
        top_logprobs = np.frombuffer(done.top_logprobs, np.float32).reshape(len(sampled), done.top_width)
        for row, (sequence, token) in enumerate(zip(sampled, np.frombuffer(done.tokens, np.int32).tolist(), strict=True)):
            sequence.known.append(token)
            if sequence.sampling.logprobs >= 0:
                sequence.logprobs.append(float(logprobs[row]))
                sequence.top_ids.append(top_ids[row].tolist())
                sequence.top_logprobs.append(top_logprobs[row].tolist())
        for (sequence, _), value in zip(scored, np.frombuffer(done.score_logprobs, np.float32).tolist(), strict=True):
            sequence.prompt_logprobs.append(value)

    def generate(self, count: int) -> None:
        """Step until every sequence has count output tokens."""
        while any(len(sequence.output) < count for sequence in self.sequences):
            self.run_step([sequence for sequence in self.sequences if len(sequence.output) < count])

    def _grouped(self, decodes: list[Running]) -> tuple[list[Running], list[int]]:
        """Neighbours that share leading pages, as group_counts wants them."""
        by_first: dict[int, list[Running]] = {}
        for sequence in decodes:
            by_first.setdefault(sequence.pages[0], []).append(sequence)
        ordered, groups = [], []
        for members in sorted(by_first.values(), key=len, reverse=True):
            if len(members) > 1:
                same = 0
                while len({member.pages[same] if same < len(member.pages) else id(member) for member in members}) == 1:
                    same += 1
                groups += [len(members), same]
            ordered += members
        return ordered, groups
