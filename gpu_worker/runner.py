"""One worker's model at work: a step plan in, a StepDone out.

launch = prepare (apply the plan, build the batch) + forward (decoder and sampling, device work only); collect waits for the
device and packs the result. Launches happen in plan order on one stream; collect may run in another thread.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch import Batch, Sampled
from gpu_worker.buckets import padded_rows
from gpu_worker.kv_cache import KVCache
from gpu_worker.memory import MemoryPlan
from gpu_worker.model.decoder import Decoder
from gpu_worker.phases import Phases
from gpu_worker.prepare import BadPlan, make_batch, sampling_needs
from gpu_worker.prompt_scores import prompt_scores
from gpu_worker.slots import Slots
from shared.messages import StepDone, StepPlan

if TYPE_CHECKING:  # it imports triton, which only a GPU needs
    from gpu_worker.graphs import DecodeGraphs

Scores = tuple[Tensor, Tensor, Tensor]  # log-probabilities [P], ids [P, width], logs [P, width]


@dataclass(slots=True)
class Step:
    """A launched step: its results on the way to the host."""

    number: int
    sampled: Sampled | None
    scores: Scores | None
    step_us: int  # device time; of a GPU read from the events in collect
    started: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None  # None: computed already


class Runner:
    def __init__(
        self,
        decoder: Decoder,
        memory: MemoryPlan,
        dtype: torch.dtype,
        device: torch.device,
        phases: Phases | None = None,
        *,
        in_step: bool = False,
    ) -> None:
        """in_step: several ranks compute together, so nothing may be computed but what all compute."""
        spec = decoder.spec
        self.decoder = decoder
        self.device = device
        self.slots = Slots(memory.num_slots, memory.max_model_len, memory.page_tokens, device)
        self.cache = KVCache(
            num_layers=spec.num_layers,
            num_pages=memory.num_pages,
            kv_heads=spec.num_kv_heads,
            page_tokens=memory.page_tokens,
            head_dim=spec.head_dim,
            dtype=memory.page_dtype,
            device=device,
        )
        self.graphs: DecodeGraphs | None = None
        self._logits: Tensor | None = None  # [sequences, V] on a GPU: logits of a step's rows
        if device.type == "cuda":
            self._logits = torch.empty((memory.num_slots - 1, spec.vocab_size), dtype=dtype, device=device)
            self.graphs = _ready_gpu(self, self._logits, memory.max_batched_tokens, phases or Phases(), all_graphs=in_step)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Use a moment without plans; False when there is nothing left to prepare."""
        return self.graphs is not None and self.graphs.capture_next()

    def reset(self) -> None:
        """A new incarnation: slots are forgotten, pages keep their content (the inventory names the good ones)."""
        self.slots.reset()

    def device_works(self) -> bool:
        """Whether the device still answers; after some GPU faults nothing in this process can use it any more."""
        if self.device.type == "cpu":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        clock, started = time.perf_counter(), self._event()
        if self.graphs is not None and self.graphs.takes(plan):
            sampled: Sampled | None = self._replay(self.graphs, plan)
            scores: Scores | None = None
        else:
            sampled, scores = self.forward(self.prepare(plan))
        if started is None:
            return Step(plan.step, sampled, scores, int((time.perf_counter() - clock) * 1e6))
        sampled = None if sampled is None else Sampled(*(None if each is None else _to_host(each) for each in sampled))  # type: ignore[arg-type]
        scores = None if scores is None else (_to_host(scores[0]), _to_host(scores[1]), _to_host(scores[2]))
        return Step(plan.step, sampled, scores, 0, started, self._event())

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _replay(self, graphs: "DecodeGraphs", plan: StepPlan) -> Sampled:
        """A plan of decode rows only, as a graph."""
        slots = self.slots
        row_slots = np.frombuffer(plan.row_slots, np.int32)
        if len(row_slots) != plan.num_decode or row_slots.min() < 1 or row_slots.max() >= slots.num_slots:
            raise BadPlan(f"plan {plan.step} names {len(row_slots)} slots for {plan.num_decode} rows, or a slot out of range")
        slots.apply(plan, self.cache, staged=True)
        positions = slots.host_lengths[row_slots]
        if positions.max() >= slots.max_model_len:
            raise BadPlan(
                f"plan {plan.step} makes a slot {positions.max() + 1} tokens long, the limit is {slots.max_model_len}"
            )
        slots.host_lengths[row_slots] = positions + 1
        needs = sampling_needs(slots, row_slots, positions + 1)
        tokens = graphs.replay(plan, positions)
        return Sampled(tokens, None, None, None) if graphs.is_plain(needs) else graphs.resample(needs, plan.num_decode)

    def prepare(self, plan: StepPlan) -> Batch:
        self.slots.apply(plan, self.cache)
        return make_batch(plan, self.slots)

    def forward(self, batch: Batch) -> tuple[Sampled | None, Scores | None]:
        """Compute the batch; sampled tokens become the slots' next inputs."""
        if not batch.num_tokens:
            return None, None
        hidden = self.decoder.hidden(batch, self.cache.layers)
        sampled = None
        if len(batch.sample_slots):
            logits = self._logits_of(hidden, batch.sampled_tokens)
            sampled = self.decoder.ops.sample(logits, self.slots, batch.sample_slots, batch.sample_positions, batch.needs)
            self.slots.store_sampled(sampled, batch.sample_slots, batch.sample_positions, batch.needs.penalized)
        return sampled, None if batch.score_tokens is None else prompt_scores(self.decoder, hidden, batch)

    def _logits_of(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[S, V] of the named tokens (i64 [S]), on a GPU in memory that the next step overwrites."""
        if self._logits is None:
            return self.decoder.logits(hidden.index_select(0, tokens))
        picked = hidden.new_empty((padded_rows(len(tokens), len(self._logits)), hidden.shape[1]))
        torch.index_select(hidden, 0, tokens, out=picked[: len(tokens)])
        self.decoder.logits_into(picked, self._logits[: len(picked)])
        return self._logits[: len(tokens)]

    def collect(self, step: Step) -> StepDone:
        """Wait for the step and pack its results."""
        step_us = step.step_us
        if step.done is not None and step.started is not None:
            step.done.synchronize()
            step_us = int(step.started.elapsed_time(step.done) * 1e3)
        tokens, logprobs, top_ids, top_logprobs = step.sampled or (None, None, None, None)
        score_logprobs, score_ids, score_tops = step.scores or (None, None, None)
        return StepDone(
            step=step.number,
            tokens=_column(tokens),
            logprobs=_column(logprobs),
            top_width=0 if top_ids is None else top_ids.shape[1],
            top_ids=_column(top_ids),
            top_logprobs=_column(top_logprobs),
            score_logprobs=_column(score_logprobs),
            score_top_width=0 if score_ids is None else score_ids.shape[1],
            score_top_ids=_column(score_ids),
            score_top_logprobs=_column(score_tops),
            step_us=step_us,
        )


def _ready_gpu(runner: Runner, logits: Tensor, max_batched_tokens: int, phases: Phases, *, all_graphs: bool) -> "DecodeGraphs":
    from gpu_worker.graphs import DecodeGraphs
    from gpu_worker.kernels import compiling
    from gpu_worker.warm_up import warm_up

    graphs = DecodeGraphs(runner.decoder, runner.slots, runner.cache, logits)
    warm_up(runner, graphs, max_batched_tokens, phases)
    while all_graphs and graphs.capture_next():
        pass
    phases.end("graphs")
    compiling.stop_processes()
    return graphs


def _to_host(tensor: Tensor) -> Tensor:
    """A pinned copy that is complete when the event recorded after it is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _column(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().numpy().tobytes()
