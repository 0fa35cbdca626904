"""Causal attention of every row over its pages, batched over rows of similar length.

Every cell of page 0 and of the rows' own pages must be finite here (not in the kernels): a masked key has weight 0, and
0 * NaN would be NaN. Cells of all other pages are never read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.reference.attention_layout import Decode, Geometry, Layout, Pages, Prefill, make_layout
from gpu_worker.reference.float8 import from_float8

Pool = tuple[Tensor, Tensor | None]  # keys or values [places, page_tokens * d] of all pages; of float8: their scales f32[hkv]


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
    """See Ops.attention."""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    geometry = Geometry(kv_heads, page_tokens, head_dim, window, q.dtype, k_cache.dtype)
    layout: Layout | None = batch.memo.get(geometry)
    if layout is None:
        layout = batch.memo[geometry] = make_layout(batch, page_table.numpy(), geometry)
    shape = (-1, page_tokens * head_dim)  # a row: one head of one page
    k_scales, v_scales = (None, None) if kv_scales is None else kv_scales.unbind()
    keys, values = (k_cache.reshape(shape), k_scales), (v_cache.reshape(shape), v_scales)
    q = q.view(q.shape[0], kv_heads, -1, head_dim)
    if not layout.prefill and len(layout.decode) == 1 and isinstance(layout.decode[0].tokens, slice):
        return _decode(layout.decode[0], q, keys, values, scale, soft_cap).flatten(1, 2)
    out = torch.empty(q.shape, dtype=q.dtype)
    for part in layout.prefill:
        _put(out, part.out, _prefill(part, q, k_new, v_new, keys, values, scale, soft_cap))
    for rows in layout.decode:
        _put(out, rows.tokens, _decode(rows, q, keys, values, scale, soft_cap))
    return out.flatten(1, 2)


def _take(x: Tensor, tokens: slice | Tensor) -> Tensor:
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)


def _put(out: Tensor, tokens: slice | Tensor, values: Tensor) -> None:
    if isinstance(tokens, slice):
        out[tokens] = values
    else:
        out.index_copy_(0, tokens, values)


def _gather(pool: Pool, pages: Pages, kv_heads: int, out: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, kv_heads, keys, d] in dtype."""
    stored, scales = pool
    if scales is None:
        torch.index_select(stored, 0, pages.places, out=out)
        return out.view(pages.num_rows, kv_heads, pages.num_keys, -1)
    torch.index_select(stored.view(torch.uint8), 0, pages.places, out=out.view(torch.uint8))
    return from_float8(out.view(pages.num_rows, kv_heads, pages.num_keys, -1), scales[:, None, None], dtype)


def _capped(scores: Tensor, soft_cap: float) -> Tensor:
    return scores.div_(soft_cap).tanh_().mul_(soft_cap) if soft_cap else scores


def _decode(rows: Decode, q: Tensor, keys: Pool, values: Pool, scale: float, soft_cap: float) -> Tensor:
    """[rows, kv_heads, group, d]. The query heads of one KV head are its query rows."""
    kv_heads, group, head_dim = q.shape[1:]
    num_rows = rows.num_rows
    q = _take(q, rows.tokens) * scale
    private = _gather(keys, rows.private, kv_heads, rows.private.keys, q.dtype).flatten(0, 1)
    scores = torch.bmm(q.reshape(-1, group, head_dim), private.transpose(1, 2)).view(num_rows, kv_heads, group, -1)
    if rows.shared is not None:
        shared_keys = _gather(keys, rows.shared, kv_heads, rows.shared.keys, q.dtype)[0]
        stacked = q.transpose(0, 1).reshape(kv_heads, num_rows * group, head_dim)
        shared = torch.bmm(stacked, shared_keys.transpose(1, 2)).view(kv_heads, num_rows, group, -1)
        scores = torch.cat((shared.transpose(0, 1), scores), dim=-1)
    weights = torch.softmax(_capped(scores, soft_cap).add_(rows.mask), dim=-1)
    num_shared = rows.shared.num_keys if rows.shared is not None else 0
    own = weights[..., num_shared:].reshape(num_rows * kv_heads, group, -1)
    out = torch.bmm(own, _gather(values, rows.private, kv_heads, rows.private.values, q.dtype).flatten(0, 1)).view(
        num_rows, kv_heads, group, head_dim
    )
    if rows.shared is None:
        return out
    shared_values = _gather(values, rows.shared, kv_heads, rows.shared.values, q.dtype)[0]
    common = weights[..., :num_shared].transpose(0, 1).reshape(kv_heads, num_rows * group, num_shared)
    return out.add_(torch.bmm(common, shared_values).view(kv_heads, num_rows, group, head_dim).transpose(0, 1))


def _prefill(
    part: Prefill, q: Tensor, k_new: Tensor, v_new: Tensor, keys: Pool, values: Pool, scale: float, soft_cap: float
) -> Tensor:
    """[real tokens, kv_heads, group, d]."""
    kv_heads, group, head_dim = q.shape[1:]
    shape = (part.num_rows, part.query_len, -1, head_dim)
    queries = _take(q.flatten(1, 2), part.tokens).view(shape).transpose(1, 2)
    if part.pages is None:
        k = _take(k_new, part.tokens).view(shape).transpose(1, 2)
        v = _take(v_new, part.tokens).view(shape).transpose(1, 2)
    else:
        k = _gather(keys, part.pages, kv_heads, part.pages.keys, q.dtype)
        v = _gather(values, part.pages, kv_heads, part.pages.values, q.dtype)
    if soft_cap:
        attended = _explicit(queries, k, v, part.mask, scale, soft_cap)
    else:
        causal = part.mask is None
        attended = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=part.mask, is_causal=causal, scale=scale, enable_gqa=group > 1
        )
    out = attended.transpose(1, 2).reshape(-1, kv_heads, group, head_dim)
    return out if part.unpadded is None else out.index_select(0, part.unpadded)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float) -> Tensor:
    """The same with capped scores, which SDPA cannot do."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = _capped(torch.matmul(q.float() * scale, k.float().transpose(2, 3)), soft_cap)
    if mask is None:
        mask = torch.full(scores.shape[2:], -torch.inf).triu_(1)
    return torch.matmul(torch.softmax(scores.add_(mask), dim=-1), v.float()).to(q.dtype)
