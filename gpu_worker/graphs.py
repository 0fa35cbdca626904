"""Whole decode steps as CUDA graphs, one per bucket of rows: a step is one copy to the device and one launch.

A graph applies the plan's deltas, builds its inputs, computes from embedding to sampled token and makes that token the slot's
next input. Rows past the batch are slot 0 and page 0. All buckets share their inputs and their memory: only one runs at a time.
"""

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch import Batch, IntArray, Needs, Sampled
from gpu_worker.buckets import bucket_sizes, first_sizes
from gpu_worker.kernels import apply_plan, one_row
from gpu_worker.kernels.decode_schedule import Groups
from gpu_worker.kernels.sample import draw
from gpu_worker.kernels.table import Shape, draw_space, plan_decode
from gpu_worker.kv_cache import KVCache
from gpu_worker.model.decoder import Decoder
from gpu_worker.slots import Slots
from shared.messages import StepPlan

log = logging.getLogger("quire.worker")

MAX_GROUPS = 63  # groups of rows that share leading pages, per step; more groups read their pages row by row
STAGED_WORDS = 1 << 18  # int32 words of one plan's deltas; a larger plan takes the eager path
STAGING_BUFFERS = 4  # more than plans in flight, so that none is overwritten before its copy is done
_PLAIN = Needs(noise=True, edits=None, penalized=None, filtered=None, scored=None, top_width=0)


class Kind(NamedTuple):
    rows: int
    groups: bool  # reads pages that several rows share once; pays only where such groups are


def all_kinds(max_rows: int) -> list[Kind]:
    """Largest first, so that the smaller ones fit into its memory."""
    sizes = bucket_sizes(max_rows)
    return [Kind(rows, groups) for rows in reversed(sizes) for groups in (False, True) if rows > 1 or not groups]


def first_kinds(max_rows: int) -> list[Kind]:
    """The graphs a worker starts with; the others follow while it has nothing to do."""
    sizes = first_sizes(max_rows)
    grouped = {min(size, max_rows) for size in (16, 64, 256, 512, max_rows)} - {1}
    return [kind for kind in all_kinds(max_rows) if kind.rows in (grouped if kind.groups else sizes)]


@dataclass(slots=True)
class _Staging:
    host: Tensor  # i32 [STAGED_WORDS], pinned
    copied: torch.cuda.Event


class DecodeGraphs:
    def __init__(self, decoder: Decoder, slots: Slots, cache: KVCache, logits: Tensor) -> None:
        """logits: [most rows, V], where steps leave the logits of their rows."""
        max_rows = logits.shape[0]
        device = slots.device
        self._decoder = decoder
        self._slots = slots
        self._cache = cache
        self._max_rows = max_rows
        self._inputs = apply_plan.allocate(max_rows, MAX_GROUPS, device)
        self._staged = torch.zeros(STAGED_WORDS, dtype=torch.int32, device=device)
        self._staging = [
            _Staging(torch.zeros(STAGED_WORDS, dtype=torch.int32, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(STAGING_BUFFERS)
        ]
        self._turn = 0
        self._logits = logits
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # memory of all graphs

    # --- capture ------------------------------------------------------------------------------------------------------

    def run_first(self) -> None:
        """The kernels of the first graphs, without graphs."""
        for kind in first_kinds(self._max_rows):
            self._run_empty(kind)

    def capture_first(self) -> None:
        for kind in first_kinds(self._max_rows):
            self._capture(kind)

    def capture_next(self) -> bool:
        """One more graph, for a moment without work; False when all are there."""
        missing = [kind for kind in all_kinds(self._max_rows) if kind not in self._graphs]
        if missing:
            self._capture(missing[-1])
        return len(missing) > 1

    def _capture(self, kind: Kind) -> None:
        self._run_empty(kind)  # compiles, and makes scratch memory outside the graph
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._compute(kind)
        if self._pool is None:
            self._pool = graph.pool()
        self._graphs[kind] = graph
        log.debug("captured a decode graph", extra=kind._asdict())

    def _run_empty(self, kind: Kind) -> None:
        self._staged[: apply_plan.HEADER_WORDS] = 0  # a plan of nothing: all rows are padding
        self._compute(kind)

    def _compute(self, kind: Kind) -> None:
        rows = kind.rows
        slots, decoder = self._slots, self._decoder
        inputs = self._inputs_of(rows)
        apply_plan.apply_plan(
            self._staged, slots.records, slots.page_table, slots.tokens, slots.last_tokens, inputs, slots.page_tokens
        )
        batch = self._batch(kind, inputs)
        logits = self._logits[:rows]
        if rows == 1 and one_row.fits(decoder):
            logits.copy_(one_row.logits(decoder, batch, self._cache.layers))
            decoder.hide_padding(logits)
        else:
            decoder.logits_into(decoder.hidden(batch, self._cache.layers), logits)
        draw(
            logits, inputs.row_slots, inputs.sample_positions, slots.seeds, slots.column_f32("temperature"),
            draw_space(self._max_rows, slots.device), out=self._tokens[:rows],
        )  # fmt: skip
        slots.last_tokens[inputs.row_slots.long()] = self._tokens[:rows].clamp(min=0)

    def _inputs_of(self, rows: int) -> apply_plan.DecodeInputs:
        """The first rows of the shared inputs."""
        whole = self._inputs
        return whole._replace(
            **{name: getattr(whole, name)[:rows] for name in whole._fields if name not in ("groups", "query_starts")},
            query_starts=whole.query_starts[: rows + 1],
        )

    def _batch(self, kind: Kind, inputs: apply_plan.DecodeInputs) -> Batch:
        slots, spec = self._slots, self._decoder.spec
        nothing: IntArray = np.zeros(0, np.int32)
        batch = Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            cells=inputs.cells,
            row_slots=inputs.row_slots,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            page_table=slots.page_table,
            num_chunk=0,
            num_last=0,
            num_decode=kind.rows,
            groups=[],
            sampled_tokens=inputs.positions,  # not read here
            sample_slots=inputs.row_slots,
            sample_positions=inputs.sample_positions,
            needs=_PLAIN,
            host_row_slots=nothing,
            host_query_lens=nothing,
            host_context_lens=nothing,
        )
        groups = Groups(inputs.row_groups, inputs.groups[0], inputs.groups[1], inputs.groups[2]) if kind.groups else None
        for window in sorted({layer.window for layer in self._decoder.layers}):
            shape = Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim, window)
            batch.memo[shape] = plan_decode(inputs.context_lens, inputs.row_slots, groups, shape, slots.page_tokens)
        return batch

    # --- replay -------------------------------------------------------------------------------------------------------

    def takes(self, plan: StepPlan) -> bool:
        """Whether the plan is only decode rows, as many as a captured graph has, and small enough to stage."""
        if plan.num_chunk or plan.num_last or not plan.num_decode or plan.page_copies:
            return False
        words = len(plan.opens) + len(plan.page_writes) + len(plan.history_counts) + len(plan.history)
        return plan.num_decode <= self._max_rows and bool(self._graphs) and words // 4 + 8 * plan.num_decode < STAGED_WORDS // 2

    def replay(self, plan: StepPlan, positions: IntArray) -> Tensor:
        """Run the step. positions: of each row's input token, i32 [n] on the host. The sampled tokens, i32 [n], which the
        next step overwrites."""
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        staging.copied.synchronize()
        words = apply_plan.pack(plan, positions, staging.host.numpy(), MAX_GROUPS)
        self._staged[:words].copy_(staging.host[:words], non_blocking=True)
        staging.copied.record()
        self._graphs[self._best(plan)].replay()
        return self._tokens[: plan.num_decode]

    def _best(self, plan: StepPlan) -> Kind:
        """The smallest graph with rows enough; one that knows groups only where there are some."""
        has_groups = bool(plan.group_counts)
        return min(kind for kind in self._graphs if kind.rows >= plan.num_decode and kind.groups == has_groups)

    def resample(self, needs: Needs, num_rows: int) -> Sampled:
        """Draw the rows of the last replay again, with all that they ask for."""
        inputs, slots = self._inputs_of(num_rows), self._slots
        sampled = self._decoder.ops.sample(self._logits[:num_rows], slots, inputs.row_slots, inputs.sample_positions, needs)
        slots.store_sampled(sampled, inputs.row_slots, inputs.sample_positions, needs.penalized)
        return sampled

    @staticmethod
    def is_plain(needs: Needs) -> bool:
        """Whether the graph's own draw is all that the rows ask for."""
        return needs.edits is None and needs.penalized is None and needs.filtered is None and needs.scored is None
