"""Per-head norms, rotation and the write of this step's keys and values."""

import torch
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.reference.elementwise import rms_norm
from gpu_worker.reference.float8 import from_float8, to_float8


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
    """See Ops.rope_and_store. qkv is overwritten with the results."""
    num_kv_heads, page_tokens, head_dim = k_cache.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
    if k_norm is not None:
        k.copy_(rms_norm(k, k_norm, eps))
    _rotate(heads[:, : num_q_heads + num_kv_heads], batch, cos_sin)
    pages, offsets = _cells(batch, page_tokens)
    if kv_scales is None:
        k_cache[pages, :, offsets] = k
        v_cache[pages, :, offsets] = v
        return q, k, v
    for new, cache, scales in ((k, k_cache, kv_scales[0]), (v, v_cache, kv_scales[1])):
        rounded = to_float8(new, scales)
        cache.view(torch.uint8)[pages, :, offsets] = rounded.view(torch.uint8)
        new.copy_(from_float8(rounded, scales[:, None], new.dtype))
    return q, k, v


def _rotate(heads: Tensor, batch: Batch, cos_sin: Tensor) -> None:
    """heads [T, n, d], rotated in place: the first rope_dim dimensions in two halves."""
    cos, sin = _rows_of(batch, cos_sin, heads.dtype)
    rotated = heads[..., : cos.shape[-1]]
    swapped = rotated.roll(cos.shape[-1] // 2, dims=-1)  # halves exchanged; the sign is in sin
    rotated.mul_(cos).addcmul_(swapped, sin)


def _rows_of(batch: Batch, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, cos) and (-sin, sin) of the batch's positions: [T, 1, rope_dim] each, once per step."""
    key = ("rope", cos_sin.data_ptr(), dtype)
    rows: tuple[Tensor, Tensor] | None = batch.memo.get(key)
    if rows is None:
        cos, sin = cos_sin[batch.positions.long()].to(dtype).unsqueeze(1).chunk(2, dim=-1)
        rows = batch.memo[key] = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    return rows


def _cells(batch: Batch, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Page and offset of the batch's cells: i64[T] each, once per step."""
    key = ("cells", page_tokens)
    cells: tuple[Tensor, Tensor] | None = batch.memo.get(key)
    if cells is None:
        cells = batch.memo[key] = (batch.cells // page_tokens, batch.cells % page_tokens)
    return cells
