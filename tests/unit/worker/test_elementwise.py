"""Norms, activation, rotation and the write of keys and values, against float64."""

import pytest
import torch
from torch import Tensor

from gpu_worker import cpu, ops, reference
from tests import kernel_reference
from tests.unit.worker.batches import make_case

DTYPES = [torch.float32, torch.bfloat16]
both = pytest.mark.parametrize("table", [reference, cpu], ids=["twin", "compiled"])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 96), (200, 1000), (3, 9)])
def test_norms(table: ops.Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(shape[1], dtype=dtype, seed=2)
    tolerance = kernel_reference.tolerance(dtype)
    assert kernel_reference.error(table.rms_norm(x, weight, 1e-5), kernel_reference.rms_norm(x, weight, 1e-5)) < tolerance
    total = x.double() + residual.double()
    out = table.add_rms_norm(x, residual, weight, 1e-5)
    assert kernel_reference.error(residual, total) < tolerance
    assert kernel_reference.error(out, kernel_reference.rms_norm(total, weight, 1e-5)) < tolerance


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(table: ops.Ops, dtype: torch.dtype) -> None:
    x = randn(50, 3000, dtype=dtype) * 4
    x[:, 7] = -200  # e^200 is infinity
    gate, up = x.double().chunk(2, dim=-1)
    assert kernel_reference.error(table.silu_mul(x), gate * torch.sigmoid(gate) * up) < kernel_reference.tolerance(dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("ratio", "rope_dim"), [(1, 16), (3, 16), (3, 8)])
def test_rope_and_store(table: ops.Ops, dtype: torch.dtype, norms: bool, ratio: int, rope_dim: int) -> None:
    kv_heads, head_dim = 2, 16
    case = make_case([(5, 5), (3, 20)], [16, 17, 40], dtype=dtype, head_dim=head_dim)
    tokens, heads = case.batch.num_tokens, ratio * kv_heads
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos_sin = randn(64, rope_dim, dtype=torch.float32)
    q_norm, k_norm = (randn(head_dim, dtype=dtype, seed=7 + n) if norms else None for n in (0, 1))
    q, k, v = qkv.clone().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)  # type: ignore[no-untyped-call]
    expected_q = kernel_reference.rms_norm(q, q_norm, 1e-6) if q_norm is not None else q
    expected_k = kernel_reference.rms_norm(k, k_norm, 1e-6) if k_norm is not None else k
    expected_q = kernel_reference.rope(expected_q, case.batch.positions, cos_sin)
    expected_k = kernel_reference.rope(expected_k, case.batch.positions, cos_sin)
    if table.rope_and_store is cpu.rope_and_store:
        case.k_cache, case.v_cache = case.on_cpu()
    before = case.k_cache.clone(), case.v_cache.clone()
    out = table.rope_and_store(qkv, case.batch, cos_sin, case.k_cache, case.v_cache, q_norm, k_norm, 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 1.2e-2
    for got, expected in zip(out, (expected_q, expected_k, v), strict=True):
        assert kernel_reference.error(got, expected) < tolerance
    # Every other byte of the pool is unchanged (compare the whole pool, not the expected cells only).
    page_tokens = case.k_cache.shape[2]
    for cache, old, new in zip((case.k_cache, case.v_cache), before, out[1:], strict=True):
        for token, cell in enumerate(case.batch.cells.tolist()):
            old[cell // page_tokens, :, cell % page_tokens] = new[token]
        assert torch.equal(cache.nan_to_num(9), old.nan_to_num(9))
