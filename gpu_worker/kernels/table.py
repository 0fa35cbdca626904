"""The operation table of ARCHITECTURE.md on a GPU: from a Batch to launches. Scratch memory is made once and kept."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from gpu_worker.batch import Batch, Needs, Sampled
from gpu_worker.kernels import rope_and_store as rope
from gpu_worker.kernels.adjust_logits import PenaltySpace, apply_edits, apply_penalties
from gpu_worker.kernels.attention_decode import attention_decode
from gpu_worker.kernels.attention_prefill import attention_prefill
from gpu_worker.kernels.attention_shared import attention_shared
from gpu_worker.kernels.decode_schedule import DecodeSchedule, Groups, allocate, schedule_decode
from gpu_worker.kernels.filter_logits import FilterSpace, filter_thresholds
from gpu_worker.kernels.gather_keys import GatherPlan, gather_keys, plan_gather
from gpu_worker.kernels.logprobs import logprobs
from gpu_worker.kernels.rms_norm import add_rms_norm, rms_norm
from gpu_worker.kernels.sample import DrawSpace, draw
from gpu_worker.kernels.silu_mul import silu_mul
from gpu_worker.slots import Slots, upload

__all__ = ["add_rms_norm", "attention", "rms_norm", "rope_and_store", "sample", "silu_mul"]


class Shape(NamedTuple):
    """Key of a decode schedule in Batch.memo: one serves all layers of the same heads and window."""

    q_heads: int
    kv_heads: int
    head_dim: int
    window: int


class Planned(NamedTuple):
    schedule: DecodeSchedule
    has_groups: bool  # the schedule has items for shared pages


def rope_and_store(
    qkv: Tensor,
    batch: Batch,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See Ops.rope_and_store."""
    _, kv_heads, _, head_dim = k_cache.shape
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    return rope.rope_and_store(
        qkv, batch.positions, batch.cells, cos_sin, k_cache, v_cache, q_heads, q_norm, k_norm, eps, kv_scales
    )


def attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    page_table: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """See Ops.attention: decode rows by the decode kernels, prefill rows by the prefill kernel."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    first = batch.first_decode_token
    if first:
        rows = batch.num_chunk + batch.num_last
        plan = _gather_plan(batch, rows) if not window else None
        copies = None if plan is None else (*gather_keys(k_cache, v_cache, page_table, plan, q.dtype, kv_scales), plan.starts)
        attention_prefill(
            q[:first], k_new[:first], v_new[:first], k_cache, v_cache, page_table, batch.row_slots[:rows],
            batch.query_starts[: rows + 1], batch.context_lens[:rows], scale, window, soft_cap, out=out[:first], copies=copies,
            kv_scales=kv_scales,
        )  # fmt: skip
    if batch.num_decode:
        q = q[first:]
        planned = _planned(batch, Shape(q.shape[1], k_cache.shape[1], q.shape[2], window), k_cache.shape[2])
        if planned.has_groups:
            row_slots = batch.row_slots[-batch.num_decode :]
            attention_shared(q, k_cache, v_cache, page_table, row_slots, planned.schedule, scale, soft_cap, kv_scales)
        attention_decode(q, k_cache, v_cache, page_table, planned.schedule, scale, soft_cap, kv_scales, out=out[first:])
    return out


def _gather_plan(batch: Batch, rows: int) -> GatherPlan | None:
    """Which prefill rows get their keys copied; made by the first layer that asks."""
    if GatherPlan not in batch.memo:
        device = batch.context_lens.device
        lens = (batch.host_row_slots[:rows], batch.host_query_lens[:rows], batch.host_context_lens[:rows])
        batch.memo[GatherPlan] = plan_gather(*lens, device)
    plan: GatherPlan | None = batch.memo[GatherPlan]
    return plan


def plan_decode(
    context_lens: Tensor,
    row_slots: Tensor,
    groups: Groups | None,
    shape: Shape,
    page_tokens: int,
    schedule: DecodeSchedule | None = None,
) -> Planned:
    """Fill a work list (a new one unless given) for decode rows. context_lens, row_slots: i32 [R]."""
    use_groups = groups if shape.window == 0 else None  # a window may hide shared pages
    if schedule is None:
        count = use_groups.starts.shape[0] if use_groups is not None else 0
        schedule = allocate(context_lens.shape[0], shape.q_heads, shape.kv_heads, shape.head_dim, context_lens.device, count)
    schedule_decode(schedule, context_lens, row_slots, page_tokens, shape.q_heads, shape.kv_heads, use_groups, shape.window)
    return Planned(schedule, use_groups is not None)


def _planned(batch: Batch, shape: Shape, page_tokens: int) -> Planned:
    """The step's work list; made by the first layer that asks."""
    planned: Planned | None = batch.memo.get(shape)
    if planned is None:
        decode = slice(batch.num_rows - batch.num_decode, None)
        planned = batch.memo[shape] = plan_decode(
            batch.context_lens[decode], batch.row_slots[decode], _groups(batch), shape, page_tokens
        )
    return planned


def _groups(batch: Batch) -> Groups | None:
    if not batch.groups:
        return None
    counts = np.array([(0, 0), *batch.groups], np.int32)
    starts = np.cumsum(counts[:, 0], dtype=np.int32) - counts[:, 0]
    row_groups = np.zeros(batch.num_decode, np.int32)
    row_groups[: counts[:, 0].sum()] = np.repeat(np.arange(len(counts), dtype=np.int32), counts[:, 0])
    device = batch.context_lens.device
    return Groups(*(upload(np.ascontiguousarray(each), device) for each in (row_groups, starts, counts[:, 0], counts[:, 1])))


# --- sampling -----------------------------------------------------------------------------------------------------------


@lru_cache
def draw_space(rows: int, device: torch.device) -> DrawSpace:
    return DrawSpace(rows, device)


@lru_cache
def _filter_space(rows: int, device: torch.device) -> FilterSpace:
    return FilterSpace(rows, device)


@lru_cache
def _penalty_space(vocabulary: int, device: torch.device) -> PenaltySpace:
    return PenaltySpace(vocabulary, device)


def sample(logits: Tensor, slots: Slots, row_slots: Tensor, positions: Tensor, needs: Needs) -> Sampled:
    """See Ops.sample. logits: [S, V], f32 or bf16."""
    raw = logits
    if needs.edits is not None or needs.penalized is not None:
        logits = logits.to(torch.float32, copy=True)
        _adjust(logits, slots, row_slots, positions, needs)
    thresholds = None
    size = triton.next_power_of_2(logits.shape[0])
    if needs.filtered is not None:
        thresholds = filter_thresholds(
            logits, needs.filtered, row_slots, slots.column_f32("temperature"), slots.column_i32("top_k"),
            slots.column_f32("top_p"), slots.column_f32("min_p"), _filter_space(size, logits.device),
        )  # fmt: skip
    tokens = draw(
        logits, row_slots, positions, slots.seeds, slots.column_f32("temperature"), draw_space(size, logits.device),
        thresholds, needs.noise,
    )  # fmt: skip
    if needs.scored is None:
        return Sampled(tokens, None, None, None)
    chosen, top_ids, top_values = logprobs(raw, needs.scored, tokens, needs.top_width)
    if not needs.top_width:
        return Sampled(tokens, chosen, None, None)
    beyond = torch.arange(needs.top_width, device=logits.device) >= slots.column_i32("logprobs")[row_slots.long()][:, None]
    return Sampled(tokens, chosen, top_ids.masked_fill_(beyond, 0), top_values.masked_fill_(beyond, -torch.inf))


def _adjust(logits: Tensor, slots: Slots, row_slots: Tensor, positions: Tensor, needs: Needs) -> None:
    if needs.edits is not None:
        apply_edits(logits, *needs.edits)
    if needs.penalized is not None:
        apply_penalties(
            logits, needs.penalized, row_slots, positions, slots.tokens, slots.column_i32("num_prompt"),
            slots.column_f32("presence_penalty"), slots.column_f32("frequency_penalty"),
            slots.column_f32("repetition_penalty"), _penalty_space(logits.shape[1], logits.device),
        )  # fmt: skip
