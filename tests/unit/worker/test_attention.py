"""The CPU's attention and the twin against a float64 reference: head ratios, windows, page edges, prefixes, poisoned cells."""

import random

import pytest
import torch

from gpu_worker import cpu, reference
from tests import kernel_reference
from tests.unit.worker.batches import Case, make_case, new_tokens


def check(case: Case, q_heads: int, *, window: int = 0, soft_cap: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
    batch = case.batch
    head_dim = case.k_cache.shape[-1]
    q = torch.randn(batch.num_tokens, q_heads, head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    k_new, v_new = new_tokens(case)
    scale = head_dim**-0.5
    before = case.k_cache.clone()
    out = reference.attention(
        q, k_new, v_new, case.k_cache, case.v_cache, batch, batch.page_table, scale, window, soft_cap
    )  # fmt: skip
    assert torch.equal(case.k_cache.nan_to_num(7), before.nan_to_num(7))
    batch.memo.clear()
    compiled = cpu.attention(q, k_new, v_new, *case.on_cpu(), batch, batch.page_table, scale, window, soft_cap)
    assert out.shape == compiled.shape == q.shape and out.dtype == compiled.dtype == dtype
    start = 0
    for row, query_len in enumerate(batch.host_query_lens.tolist()):
        k, v = case.context(row)
        rows = slice(start, start + query_len)
        expected = kernel_reference.attention(q[rows], k, v, scale, window, soft_cap)
        tolerance = 2e-6 if dtype == torch.float32 else 1.5e-2
        assert kernel_reference.error(out[rows], expected) < tolerance, f"row {row}"
        assert kernel_reference.error(compiled[rows], expected) < tolerance, f"row {row} compiled"
        start += query_len


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_ratio_of_query_to_key_heads(ratio: int, kv_heads: int) -> None:
    check(make_case([(5, 5), (3, 20)], [1, 16, 17, 40], kv_heads=kv_heads), ratio * kv_heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_every_head_size(head_dim: int) -> None:
    check(make_case([(7, 7), (4, 21)], [3, 33], head_dim=head_dim), 4)


@pytest.mark.parametrize("window", [1, 15, 16, 17])
@pytest.mark.parametrize("away", [-1, 0, 1, 16, 33])
def test_window_at_its_edges_and_page_edges(window: int, away: int) -> None:
    length = max(1, window + away)
    check(make_case([(length, length), (1, length), (min(3, length), length + 2)], [length, length + 1]), 4, window=window)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_page_edges(page_tokens: int) -> None:
    lengths = [1, page_tokens - 1, page_tokens, page_tokens + 1, 3 * page_tokens + 5]
    check(make_case([(length, length) for length in lengths], lengths, page_tokens=page_tokens), 4)
    check(make_case([(min(length, 17), length + page_tokens) for length in lengths], lengths, page_tokens=page_tokens), 4)


def test_rows_of_very_different_length_are_split_and_put_back_in_order() -> None:
    check(make_case([(100, 100), (2, 300), (90, 90), (3, 3)], [3000, 5, 2000, 7, 2900, 1]), 4)


@pytest.mark.parametrize(("groups", "decode"), [
    ([(4, 2)], [40, 33, 48, 64]),
    ([(2, 1), (3, 3)], [17, 30, 50, 49, 61, 12, 9]),
    ([(1, 2), (2, 0)], [40, 50, 60]),
])  # fmt: skip
def test_shared_leading_pages(groups: list[tuple[int, int]], decode: list[int]) -> None:
    case = make_case([(4, 9)], decode, groups=groups)
    check(case, 6)
    check(make_case([(4, 9)], decode, groups=groups), 6, window=20)


def test_soft_cap() -> None:
    check(make_case([(9, 9), (4, 30)], [20, 3]), 4, soft_cap=2.0)


def test_bfloat16() -> None:
    check(make_case([(30, 30), (4, 30)], [200, 3, 90], dtype=torch.bfloat16, head_dim=64), 6, dtype=torch.bfloat16)


def test_cache_in_another_memory_order() -> None:
    case = make_case([(5, 5), (3, 20)], [1, 16, 17, 40])
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    case.v_cache = case.v_cache.transpose(0, 2).contiguous().transpose(0, 2)
    check(case, 4)


def test_random_batches() -> None:
    rng = random.Random(1)
    for seed in range(40):
        page_tokens, kv_heads = rng.choice([16, 32]), rng.choice([1, 2, 3])
        prefill = []
        for _ in range(rng.randrange(4)):
            query_len = rng.choice([1, 2, 17, 40])
            prefill.append((query_len, query_len + rng.choice([0, 0, 1, 16, 45])))
        decode = [
            rng.choice([1, page_tokens - 1, page_tokens, page_tokens + 1, 3 * page_tokens + 5]) for _ in range(rng.randrange(6))
        ]
        if not prefill and not decode:
            continue
        case = make_case(prefill, decode, kv_heads=kv_heads, head_dim=rng.choice([16, 80]), page_tokens=page_tokens, seed=seed)
        window = rng.choice([0, 1, page_tokens, page_tokens + 1])
        check(case, kv_heads * rng.choice([1, 3, 4]), window=window, soft_cap=rng.choice([0.0, 0.0, 3.0]))
