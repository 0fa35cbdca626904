"""One decoder for every architecture: what differs is data (ModelSpec) or absent (None). Knows no device and no kernel."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.model.embedding import Embedding
from gpu_worker.model.linear import Matmul, gated, multiply_into
from gpu_worker.model.spec import ModelSpec
from gpu_worker.ops import Ops


@dataclass(slots=True, kw_only=True)
class Layer:
    input_norm: Tensor  # [H]
    qkv: Matmul  # [(hq + 2 * hkv) * d, H]: all q heads, all k heads, all v heads
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None
    o: Matmul  # [H, hq * d]
    post_norm: Tensor  # [H]
    gate_up: Matmul  # [2 * I, H]: gate, then up
    down: Matmul  # [H, I]
    window: int  # keys a query sees, itself included; 0: all
    kv_scales: Tensor | None = None  # f32[2, hkv] of keys and of values, with pages of float8


@dataclass(slots=True, kw_only=True)
class Decoder:
    spec: ModelSpec
    ops: Ops
    embedding: Embedding
    layers: list[Layer]
    final_norm: Tensor  # [H]
    head: Matmul  # [V, H]
    cos_sin: Tensor  # f32[max_model_len, rope_dim]
    num_ids: int  # ids that the tokenizer knows: those above only pad the embedding, and are never sampled; 0: all

    def hidden(self, batch: Batch, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Normed hidden states [T, H] of the batch; its keys and values are in the cache afterwards."""
        ops, eps, scale = self.ops, self.spec.norm_eps, self.spec.attention_scale
        residual = self.embedding(batch.input_ids)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for layer, (k_cache, v_cache), next_norm in zip(self.layers, cache, self._next_norms(), strict=True):
            kv, norms, scales = (k_cache, v_cache), (layer.q_norm, layer.k_norm), layer.kv_scales
            q, k, v = ops.rope_and_store(layer.qkv(x), batch, self.cos_sin, *kv, *norms, eps, scales)
            x = ops.attention(q, k, v, *kv, batch, batch.page_table, scale, layer.window, 0.0, scales)
            x = ops.add_rms_norm(layer.o(x.flatten(1)), residual, layer.post_norm, eps)
            x = layer.down(gated(layer.gate_up, x, ops.silu_mul))
            x = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> f32[S, V]."""
        logits = self.head(hidden).float()
        self.hide_padding(logits)
        return logits

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """hidden [S, H] -> out [S, V], in out's dtype."""
        multiply_into(self.head, hidden, out)
        self.hide_padding(out)

    def hide_padding(self, logits: Tensor) -> None:
        """logits [S, V], in place."""
        if 0 < self.num_ids < logits.shape[1]:
            logits[:, self.num_ids :] = -torch.inf

    def _next_norms(self) -> Iterator[Tensor]:
        """The norm that follows each layer."""
        for layer in self.layers[1:]:
            yield layer.input_norm
        yield self.final_norm
