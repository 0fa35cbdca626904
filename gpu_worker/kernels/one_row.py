"""The decoder for a single decode row: every product reads its weights at memory speed, with its neighbours fused in.

Three launches fewer a layer than the general decoder: norms ride in the products after them, SiLU and the residual in those
before. Same weights, same cache, same result up to rounding.
"""

from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.kernels.embed import embed
from gpu_worker.kernels.skinny_linear import skinny_linear
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.linear import Linear


def fits(decoder: Decoder) -> bool:
    """Whether all matrices are plain and without bias."""
    matrices = [matrix for layer in decoder.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return all(isinstance(matrix, Linear) and matrix.bias is None for matrix in [*matrices, decoder.head])


def logits(decoder: Decoder, batch: Batch, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[1, V] of a batch of one decode row; its key and value are in the cache afterwards."""
    ops, eps, scale = decoder.ops, decoder.spec.norm_eps, decoder.spec.head_dim**-0.5
    x = embed(batch.input_ids, decoder.embedding)
    for layer, (k_cache, v_cache) in zip(decoder.layers, cache, strict=True):
        qkv = skinny_linear(x, _weight(layer.qkv), layer.input_norm, eps)
        q, k, v = ops.rope_and_store(qkv, batch, decoder.cos_sin, k_cache, v_cache, layer.q_norm, layer.k_norm, eps)
        attended = ops.attention(q, k, v, k_cache, v_cache, batch, batch.page_table, scale, layer.window, 0.0)
        skinny_linear(attended.flatten(1), _weight(layer.o), residual=x, out=x)
        product = skinny_linear(x, _weight(layer.gate_up), layer.post_norm, eps, silu=True)
        skinny_linear(product, _weight(layer.down), residual=x, out=x)
    return skinny_linear(x, _weight(decoder.head), decoder.final_norm, eps)


def _weight(matrix: object) -> Tensor:
    assert isinstance(matrix, Linear)
    return matrix.weight
