"""Which implementation of the operations runs: kernels/ (Triton) on a GPU, cpu/ (numba) elsewhere, name for name."""

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from gpu_worker.batch import Batch, Needs, Sampled
from gpu_worker.slots import Slots


class Ops(Protocol):
    """The operation table of ARCHITECTURE.md. x: activations, bf16, float16 or float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; the norm of it."""

    def rope_and_store(
        self,
        qkv: Tensor,  # [T, (hq + 2 * hkv) * d]
        batch: Batch,
        cos_sin: Tensor,  # f32[max_len, rope_dim]: cosines, then sines, rope_dim / 2 each
        k_cache: Tensor,  # [num_pages, hkv, page_tokens, d]
        v_cache: Tensor,
        q_norm: Tensor | None,  # [d]
        k_norm: Tensor | None,
        eps: float,
        kv_scales: Tensor | None = None,  # f32[2, hkv], of keys and of values: pages hold value / scale as float8
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, hq, d], k and v [T, hkv, d], views of qkv: q and k normed and rotated in place, k and v in batch.cells too.

        With pages of float8, k and v are afterwards what readers of the pages get: chunks change no key.
        """

    def attention(
        self,
        q: Tensor,  # [T, hq, d]
        k_new: Tensor,  # [T, hkv, d], this step's keys and values, already in the cache
        v_new: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        page_table: Tensor,  # i32[slots, max_pages]
        scale: float,
        window: int,  # keys a query sees, itself included; 0: all
        soft_cap: float,  # 0: none
        kv_scales: Tensor | None = None,
    ) -> Tensor: ...

    def silu_mul(self, x: Tensor) -> Tensor: ...

    def sample(self, logits: Tensor, slots: Slots, row_slots: Tensor, positions: Tensor, needs: Needs) -> Sampled: ...


def load(device: torch.device, *, float8_pages: bool = False) -> Ops:
    on_cpu = "gpu_worker.cpu.float8_pages" if float8_pages else "gpu_worker.cpu"
    return cast(Ops, importlib.import_module("gpu_worker.kernels.table" if device.type == "cuda" else on_cpu))
