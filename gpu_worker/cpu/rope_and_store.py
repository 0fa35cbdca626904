"""Per-head norms, rotation and the write of this step's keys and values, one token a task."""

import math

from numba import carray
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    broadcast,
    copy_element,
    fma,
    jit,
    load_part,
    multiply,
    next_task,
    read_int32,
    read_int64,
    size_of,
    store_part,
    subtract,
    sum_of,
    zeros,
)
from gpu_worker.cpu.team import Kernel


@jit
def _norm_head(element, head, width, weight, eps):
    size = size_of(element)
    squares = zeros()
    for i in range(0, width, 16):
        value = load_part(element, head + i * size, width - i)
        squares = fma(value, value, squares)
    scale = broadcast(1 / math.sqrt(sum_of(squares) / width + eps))
    for i in range(0, width, 16):
        value = multiply(load_part(element, head + i * size, width - i), scale)
        store_part(element, head + i * size, width - i, multiply(value, load_part(element, weight + i * size, width - i)))


@jit
def _rotate_head(element, head, angles, half):
    """head: two halves that are rotated, then the rest; angles: half cosines, then half sines, float32."""
    size = size_of(element)
    for i in range(0, half, 16):
        count, low, high = half - i, head + i * size, head + (half + i) * size
        first, second = load_part(element, low, count), load_part(element, high, count)
        cos, sin = load_part(FLOAT32, angles + i * 4, count), load_part(FLOAT32, angles + (half + i) * 4, count)
        store_part(element, low, count, subtract(multiply(first, cos), multiply(second, sin)))
        store_part(element, high, count, fma(second, cos, multiply(first, sin)))


@jit
def _tokens(args, element):
    a = carray(args, 1)[0]
    size, width = size_of(element), a.head_dim
    k_first, v_first = a.q_heads, a.q_heads + a.kv_heads
    token = next_task(args)
    while token < a.num_tasks:
        heads = a.qkv + token * a.qkv_stride
        angles = a.cos_sin + read_int32(a.positions + token * 4) * a.half * 8
        for head in range(v_first):
            weight = a.q_norm if head < k_first else a.k_norm
            if weight:
                _norm_head(element, heads + head * width * size, width, weight, a.eps)
            _rotate_head(element, heads + head * width * size, angles, a.half)
        cell = read_int64(a.cells + token * 8)
        page, offset = cell // a.page_tokens, cell % a.page_tokens
        for head in range(a.kv_heads):
            k = a.k_cache + page * a.k_page + head * a.k_head + offset * a.k_token
            v = a.v_cache + page * a.v_page + head * a.v_head + offset * a.v_token
            k_new, v_new = heads + (k_first + head) * width * size, heads + (v_first + head) * width * size
            for i in range(width):
                copy_element(element, k + i * a.k_dim, k_new + i * size)
            for i in range(0, width, 16):
                store_part(element, v + i * size, width - i, load_part(element, v_new + i * size, width - i))
        token = next_task(args)


def _tokens_float32(args):
    _tokens(args, FLOAT32)


def _tokens_bfloat16(args):
    _tokens(args, BFLOAT16)


_TOKENS = Kernel(
    _tokens_float32,
    _tokens_bfloat16,
    "qkv qkv_stride q_heads kv_heads head_dim half q_norm k_norm cos_sin positions cells page_tokens"
    " k_cache k_page k_head k_token k_dim v_cache v_page v_head v_token",
    "eps",
)


def rope_and_store(
    qkv: Tensor,
    batch: Batch,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: Tensor | None = None,  # None: pages of float8 have other operations: float8_pages.py
) -> tuple[Tensor, Tensor, Tensor]:
    """See Ops.rope_and_store."""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    tokens = qkv.shape[0]
    heads = qkv.view(tokens, -1, head_dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    size = qkv.itemsize
    _TOKENS(
        qkv.dtype, tokens, 4 * qkv.numel(),
        qkv.data_ptr(), qkv.stride(0) * size, q_heads, kv_heads, head_dim, cos_sin.shape[1] // 2,
        0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
        cos_sin.data_ptr(), batch.positions.data_ptr(), batch.cells.data_ptr(), page_tokens,
        k_cache.data_ptr(), *(stride * size for stride in k_cache.stride()),
        v_cache.data_ptr(), *(stride * size for stride in v_cache.stride()[:3]),
        eps,
    )  # fmt: skip
    return heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
