"""The memory plan: what weights, a worst step and KV pages take, and how long a sequence may therefore be."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.limits import CPU_KV_BYTES, bytes_of_page, check_length, check_pages
from gpu_worker.model.spec import ModelSpec
from shared.config import Config

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    weight_bytes: int
    step_bytes: int  # activations and logits of the largest step
    page_bytes: int
    page_dtype: torch.dtype
    num_pages: int  # page 0 included
    page_tokens: int
    max_model_len: int
    max_batched_tokens: int
    num_slots: int  # slot 0 included

    @property
    def text(self) -> str:
        held = f"{self.page_tokens} tokens ({str(self.page_dtype).removeprefix('torch.')})"
        return (
            f"weights {self.weight_bytes / MIB:,.0f} MiB, largest step {self.step_bytes / MIB:,.0f} MiB, "
            f"KV {self.num_pages} pages of {held} in {self.num_pages * self.page_bytes / MIB:,.0f} MiB; "
            f"a sequence may have {self.max_model_len} tokens, a step {self.max_batched_tokens}, {self.num_slots - 1} sequences"
        )


def plan_memory(
    config: Config,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    weight_bytes: int | None = None,
    page_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Divide the memory, weights not loaded yet. BadConfig with the numbers when not even one request would fit.

    dtype: of activations; weight_bytes: None: what all parameters take in it; page_dtype: of keys and values, None: the same.
    """
    on_cpu = device.type == "cpu"
    batched = config.max_num_batched_tokens or (1024 if on_cpu else 8192)
    weights = spec.num_parameters * dtype.itemsize if weight_bytes is None else weight_bytes
    step = _step_bytes(spec, dtype, batched, config.max_num_seqs, in_place=not on_cpu)
    page = bytes_of_page(spec, config.block_size, (page_dtype or dtype).itemsize)
    kv_bytes = config.kv_cache_bytes or (CPU_KV_BYTES if on_cpu else _free_bytes(config, device) - weights - step)
    check_length(config, spec.context_limit)
    check_pages(config, page, kv_bytes, f" (weights take {weights:,}, a step {step:,})")
    num_pages = kv_bytes // page
    return MemoryPlan(
        weight_bytes=weights,
        step_bytes=step,
        page_bytes=page,
        page_dtype=page_dtype or dtype,
        num_pages=num_pages,
        page_tokens=config.block_size,
        max_model_len=min(config.max_model_len or spec.context_limit, (num_pages - 1) * config.block_size),
        max_batched_tokens=batched,
        num_slots=config.max_num_seqs + 1,
    )


def _step_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int, *, in_place: bool) -> int:
    """Live tensors of the widest moment, and the logits, which stay.

    The widest moment is either residual, norm, gate and up (and their product, unless it overwrites the gates), or a float32
    copy of the logits beside the last hidden states.
    """
    width = 2 * spec.hidden_size + (2 if in_place else 3) * spec.intermediate_size
    logits = min(tokens, rows) * spec.vocab_size
    layers = tokens * width * dtype.itemsize
    head = tokens * spec.hidden_size * dtype.itemsize + 4 * logits
    return max(layers, head) + logits * dtype.itemsize


def _free_bytes(config: Config, device: torch.device) -> int:
    """What this worker may still take of a GPU: its share, less what others hold."""
    free, total = torch.cuda.mem_get_info(device)
    return min(free, int(total * config.gpu_memory_utilization) - (total - free))


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """(bytes used, bytes in all) of the device; on a CPU this process's own memory and the machine's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return resident * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes
