"""Kernels over pages of float8, in the interpreter: every head with a scale of its own (B59), unused cells NaN."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.kernels.rope_and_store import rope_and_store
from gpu_worker.reference.float8 import to_float8
from gpu_worker.reference.rope_and_store import rope_and_store as twin
from tests import kernel_checks as checks
from tests.unit.worker.batches import make_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with numpy, which warns of infinities; the kernels mean them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
F16, F32 = torch.float16, torch.float32


@pytest.mark.parametrize(("q_heads", "kv_heads", "head"), [(6, 3, 80), (16, 1, 64)])
def test_decode(q_heads: int, kv_heads: int, head: int) -> None:
    checks.check_decode([1, 0, 16, 17, 3 * 64 + 5], q_heads, kv_heads, head, 16, F32, DEVICE, target=8, float8=True)


def test_decode_window_and_cap() -> None:
    checks.check_decode([70, 130, 33], 4, 2, 64, 16, F16, DEVICE, soft_cap=3.0, window=32, target=4, float8=True)


def test_decode_groups() -> None:
    lengths = [130, 145, 128 + 1, 70, 66, 20, 0]
    checks.check_decode(lengths, 4, 2, 64, 16, F32, DEVICE, groups=[(3, 8), (2, 4)], target=4, float8=True)


@pytest.mark.parametrize("window", [0, 20])
def test_prefill(window: int) -> None:
    """Earlier keys are float8 over their scales, this step's are plain: both in one softmax."""
    checks.check_prefill([(0, 37), (21, 1), (48, 40)], 6, 2, 80, 16, F32, DEVICE, window, float8=True)


def test_prefill_of_copied_keys() -> None:
    checks.check_prefill_of_copies([(0, 37), (70, 40), (50, 3), (33, 32)], 4, 2, 64, 16, F32, DEVICE, float8=True)


def _batch() -> Batch:
    return make_case([(5, 5), (3, 20)], [16, 17, 40], dtype=F32, head_dim=80).batch


def empty_pages() -> Tensor:
    return torch.zeros((60, 2, 16, 80), dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("rope_dim", [80, 32])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_store_equals_the_twin(norm: bool, rope_dim: int) -> None:
    """Every code and every value given back is the twin's, but for keys that rounding puts on the other side of a middle."""
    batch = _batch()
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn((batch.num_tokens, (4 + 2 * 2) * 80), generator=draw)
    angles = torch.randn((64, rope_dim), generator=draw)
    weights = (torch.rand(80, generator=draw) + 0.5, torch.rand(80, generator=draw) + 0.5) if norm else (None, None)
    scales = torch.tensor([[0.01, 0.02], [0.005, 0.03]])  # the first head of values saturates
    ours, theirs = qkv.clone(), qkv.clone()
    k, v, k_twin, v_twin = (empty_pages() for _ in range(4))
    got = rope_and_store(ours, batch.positions, batch.cells, angles, k, v, 4, weights[0], weights[1], kv_scales=scales)
    right = twin(theirs, batch, angles, k_twin, v_twin, weights[0], weights[1], 1e-6, scales)
    torch.testing.assert_close(got[0], right[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(v.view(torch.uint8), v_twin.view(torch.uint8)) and torch.equal(got[2], right[2])
    steps = (k.view(torch.uint8).int() - k_twin.view(torch.uint8).int()).abs()
    assert int(steps.max()) <= 1 and int((steps > 0).sum()) < 8
    torch.testing.assert_close(got[1], right[1], rtol=0.13, atol=1e-4)
    for new, cache, each in ((got[1], k, scales[0]), (got[2], v, scales[1])):
        stored = torch.stack([cache.view(torch.uint8)[cell // 16, :, cell % 16] for cell in batch.cells.tolist()])
        assert torch.equal(stored.view(torch.float8_e4m3fn).float() * each[:, None], new)


def test_extreme_values() -> None:
    """B59: zeros stay zeros, tiny ones are finite, large ones saturate at 448 * scale, NaN stays in its own head."""
    batch = _batch()
    rows = batch.num_tokens
    extremes = torch.tensor([0.0, -0.0, 1e-40, 6e4, torch.inf, -torch.inf, 447.0, 2.0**-9, 2.0**-10, 0.3])
    qkv = torch.randn((rows, 3 * 2, 80), generator=torch.Generator().manual_seed(1))
    qkv[:, 4, :10] = extremes
    qkv[0, 5, 3] = torch.nan
    flat = torch.cat((torch.ones(64, 40), torch.zeros(64, 40)), 1)  # no rotation
    scales = torch.tensor([[1.0, 1.0], [0.5, 2.0]])
    _, _, v = rope_and_store(
        qkv.view(rows, -1), batch.positions, batch.cells, flat, empty_pages(), empty_pages(), 2, kv_scales=scales
    )
    right = torch.tensor([0.0, -0.0, 0.0, 224.0, 224.0, -224.0, 224.0, 2.0**-9, 2.0**-10])
    assert torch.equal(v[:, 0, :9], right.expand(rows, 9))
    assert torch.equal(
        to_float8(qkv.new_tensor([[[0.3]]]), scales.new_tensor([0.5])).float() * 0.5, v[0, 0, 9].reshape(1, 1, 1)
    )
    assert np.flatnonzero(v.isnan().any(-1).numpy()).tolist() == [1]
    assert bool(v[0, 1].isnan().sum() == 1) and bool(v[1:].isfinite().all())
