"""The decoder for a single decode row: every product reads its weights at memory speed, with its neighbours fused in.

Three launches fewer a layer than the general decoder: norms ride in the products after them, SiLU and the residual in those
before. Same weights, same cache, same result up to rounding; weights of float8 meet inputs that are not rounded to float8.
"""

from typing import Any

import torch
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.kernels.embed import embed
from gpu_worker.kernels.skinny_linear import skinny_linear
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.linear import Linear, Matmul
from gpu_worker.parallel.layers import DividedEmbedding, Joined, Summed
from gpu_worker.quant.linear import ByteLinear

TILE = 512  # columns of float8 weights come in whole tiles


def fits(decoder: Decoder) -> bool:
    """Whether these kernels know all matrices."""
    return all(known(matrix) for layer in decoder.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)) and (
        known(decoder.head)
    )


def known(matrix: Matmul) -> bool:
    """Whether `product` can compute it."""
    if isinstance(matrix, Summed | Joined):
        return known(matrix.matrix)
    if isinstance(matrix, ByteLinear):
        float8 = matrix.values.dtype == torch.float8_e4m3fn
        return matrix.bias is None and float8 and len(matrix.scales) == 1 and matrix.values.shape[1] % TILE == 0
    return isinstance(matrix, Linear) and matrix.bias is None


def logits(decoder: Decoder, batch: Batch, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[1, V] of a batch of one decode row; its key and value are in the cache afterwards."""
    ops, eps, scale = decoder.ops, decoder.spec.norm_eps, decoder.spec.attention_scale
    divided = isinstance(decoder.embedding, DividedEmbedding)
    x = decoder.embedding(batch.input_ids) if divided else embed(batch.input_ids, decoder.embedding.weight)
    for layer, (k_cache, v_cache) in zip(decoder.layers, cache, strict=True):
        qkv = product(layer.qkv, x, gain=layer.input_norm, eps=eps)
        kv, norms, scales = (k_cache, v_cache), (layer.q_norm, layer.k_norm), layer.kv_scales
        q, k, v = ops.rope_and_store(qkv, batch, decoder.cos_sin, *kv, *norms, eps, scales)
        attended = ops.attention(q, k, v, *kv, batch, batch.page_table, scale, layer.window, 0.0, scales)
        product(layer.o, attended.flatten(1), residual=x, out=x)
        gated = product(layer.gate_up, x, gain=layer.post_norm, eps=eps, silu=True)
        product(layer.down, gated, residual=x, out=x)
    return product(decoder.head, x, gain=decoder.final_norm, eps=eps)


def product(matrix: Matmul, x: Tensor, **neighbours: Any) -> Tensor:
    """[1, N]; neighbours: see skinny_linear. Of several ranks the first adds the residual, and the sum has it."""
    if isinstance(matrix, Summed):
        if matrix.group.rank:
            neighbours.pop("residual", None)
        return matrix.group.sum_into(product(matrix.matrix, x, **neighbours))
    if isinstance(matrix, Joined):
        return matrix.join(product(matrix.matrix, x, **neighbours))
    if isinstance(matrix, ByteLinear):
        return skinny_linear(x, matrix.values, row_scales=matrix.scales[0], **neighbours)
    assert isinstance(matrix, Linear)
    return skinny_linear(x, matrix.weight, **neighbours)
