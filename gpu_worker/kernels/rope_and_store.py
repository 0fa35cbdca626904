"""Head norm, rotary embedding and the store of new keys and values into their pages, in one pass over qkv."""

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.launch import begin_short_kernel, overlapped
from gpu_worker.kernels.pages import codes, float8_code, float8_value


@triton.jit
def _as_stored(x, scale, is_query):
    """float32 [heads, d] -> float8 codes, and what a reader of the pages gets; queries stay as they are."""
    code = float8_code(tl.div_rn(x, scale))
    return code, tl.where(is_query, x, float8_value(code) * scale)


@triton.jit
def _rope_and_store(
    qkv,
    positions,
    cells,
    cos_sin,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    kv_scales,
    eps,
    qkv_stride,
    page_stride,
    head_stride,
    token_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: HEADS heads of one token. Heads 0 .. Q-1 are queries, then keys, then values.
    # A head is [first HALF | second HALF | REST]; rotation pairs first[i] with second[i], so a thread that holds both
    # may write in place.
    begin_short_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offset = tl.arange(0, HALF_PAD)
    half_mask = offset < HALF
    exists = head < Q_HEADS + 2 * KV_HEADS
    is_value = head >= Q_HEADS + KV_HEADS
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    mask = exists[:, None] & half_mask[None, :]
    source = qkv + token * qkv_stride + head[:, None] * HEAD + offset[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)

    rest_offset = tl.arange(0, REST_PAD)
    rest_mask = exists[:, None] & (rest_offset < REST)[None, :]
    rest_source = qkv + token * qkv_stride + head[:, None] * HEAD + 2 * HALF + rest_offset[None, :]
    rest = tl.zeros([HEADS, REST_PAD], tl.float32)
    if REST > 0:
        rest = tl.load(rest_source, mask=rest_mask, other=0.0).to(tl.float32)

    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD + eps))[:, None]
        q_first = tl.load(q_norm + offset, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + HALF + offset, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + offset, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + HALF + offset, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        first *= scale * tl.where(is_value[:, None], 1.0, tl.where(is_key[:, None], k_first, q_first))
        second *= scale * tl.where(is_value[:, None], 1.0, tl.where(is_key[:, None], k_second, q_second))
        if REST > 0:
            inside = rest_offset < REST
            q_rest = tl.load(q_norm + 2 * HALF + rest_offset, mask=inside, other=0.0).to(tl.float32)[None, :]
            k_rest = tl.load(k_norm + 2 * HALF + rest_offset, mask=inside, other=0.0).to(tl.float32)[None, :]
            rest *= scale * tl.where(is_value[:, None], 1.0, tl.where(is_key[:, None], k_rest, q_rest))

    position = tl.load(positions + token).to(tl.int64)
    angle = cos_sin + position * (2 * HALF) + offset
    cos = tl.load(angle, mask=half_mask, other=1.0)[None, :]
    sin = tl.load(angle + HALF, mask=half_mask, other=0.0)[None, :]
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    first, second = tl.where(is_value[:, None], first, turned_first), tl.where(is_value[:, None], second, turned_second)

    # What lies in the pages: activations as they are, or float8 codes, and then readers of qkv get what readers of pages do.
    dtype = qkv.dtype.element_ty
    turned = mask & (head < Q_HEADS + KV_HEADS)[:, None]
    stored_first, stored_second, stored_rest = first.to(dtype), second.to(dtype), rest.to(dtype)
    FLOAT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    if FLOAT8:
        is_query = (head < Q_HEADS)[:, None]
        scale = tl.load(kv_scales + head - Q_HEADS, mask=exists & (head >= Q_HEADS), other=1.0)[:, None]
        stored_first, first = _as_stored(first.to(dtype).to(tl.float32), scale, is_query)
        stored_second, second = _as_stored(second.to(dtype).to(tl.float32), scale, is_query)
        stored_rest, rest = _as_stored(rest.to(dtype).to(tl.float32), scale, is_query)
        turned = mask
    tl.store(source, first.to(dtype), mask=turned)
    tl.store(source + HALF, second.to(dtype), mask=turned)

    # Cell c is token c % PAGE of page c // PAGE; 64-bit before multiplying by the page stride.
    cell = tl.load(cells + token)
    place = (cell // PAGE) * page_stride + (cell % PAGE) * token_stride
    k_target = k_cache + place + (head - Q_HEADS)[:, None] * head_stride + offset[None, :]
    v_target = v_cache + place + (head - Q_HEADS - KV_HEADS)[:, None] * head_stride + offset[None, :]
    tl.store(k_target, stored_first, mask=mask & is_key[:, None])
    tl.store(k_target + HALF, stored_second, mask=mask & is_key[:, None])
    tl.store(v_target, stored_first, mask=mask & is_value[:, None])
    tl.store(v_target + HALF, stored_second, mask=mask & is_value[:, None])
    if REST > 0:
        k_rest_target = k_cache + place + (head - Q_HEADS)[:, None] * head_stride + 2 * HALF + rest_offset[None, :]
        v_rest_target = v_cache + place + (head - Q_HEADS - KV_HEADS)[:, None] * head_stride + 2 * HALF + rest_offset[None, :]
        if NORM or FLOAT8:
            changed = rest_mask if FLOAT8 else rest_mask & (head < Q_HEADS + KV_HEADS)[:, None]
            tl.store(rest_source, rest.to(dtype), mask=changed)
        tl.store(k_rest_target, stored_rest, mask=rest_mask & is_key[:, None])
        tl.store(v_rest_target, stored_rest, mask=rest_mask & is_value[:, None])


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cells: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k of qkv in place (half-split layout), store k and v at cells; the results are views of qkv.

    qkv: [T, (hq + 2 * hkv) * d], last dimension contiguous; positions: i32 [T]; cells: i64 [T];
    cos_sin: f32 [max_len, rope_dim], a row is [cos | sin] of rope_dim / 2 angles, rope_dim <= d;
    k_cache, v_cache: [pages, hkv, page_tokens, d]; q_norm, k_norm: [d] (both or neither);
    kv_scales: f32 [2, hkv], with pages of float8, and then k and v are what the pages hold
    -> q [T, hq, d], k [T, hkv, d], v [T, hkv, d].
    """
    tokens = qkv.shape[0]
    _, kv_heads, page_tokens, head = k_cache.shape
    half = cos_sin.shape[1] // 2
    rest = head - 2 * half
    heads = q_heads + 2 * kv_heads
    per_program = 8 if tokens < 512 else 16
    if tokens:
        _rope_and_store[(tokens, triton.cdiv(heads, per_program))](
            qkv,
            positions,
            cells,
            cos_sin,
            codes(k_cache),
            codes(v_cache),
            q_norm if q_norm is not None else qkv,
            k_norm if k_norm is not None else qkv,
            qkv if kv_scales is None else kv_scales,
            eps,
            qkv.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD=head,
            HALF=half,
            HALF_PAD=triton.next_power_of_2(half),
            REST=rest,
            REST_PAD=triton.next_power_of_2(max(rest, 1)),
            PAGE=page_tokens,
            HEADS=per_program,
            NORM=q_norm is not None,
            num_warps=4,
            **overlapped(qkv),
        )
    q = qkv[:, : q_heads * head].unflatten(1, (q_heads, head))
    k = qkv[:, q_heads * head : (q_heads + kv_heads) * head].unflatten(1, (kv_heads, head))
    v = qkv[:, (q_heads + kv_heads) * head :].unflatten(1, (kv_heads, head))
    return q, k, v
