"""Every kernel on small shapes against its float64 reference, in Triton's interpreter where there is no GPU."""

import pytest
import torch

from shared.sampling import Sampling
from tests import kernel_checks as checks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with numpy, which warns of overflow to infinity; the kernels mean it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16  # the interpreter has no bf16 dot


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms(dtype: torch.dtype) -> None:
    checks.check_norms(3, 96, dtype, DEVICE)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_silu_mul(dtype: torch.dtype) -> None:
    checks.check_silu_mul(3, 1100, dtype, DEVICE)


def test_embed() -> None:
    checks.check_embed(5, 100, BF16, DEVICE)


@pytest.mark.parametrize(("head", "rope_dim", "norm"), [(64, 64, False), (80, 80, True), (64, 32, True), (96, 24, False)])
def test_rope_and_store(head: int, rope_dim: int, norm: bool) -> None:
    checks.check_rope(5, 6, 2, head, rope_dim, 16, norm, F32, DEVICE)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head", "page"), [(4, 1, 64, 16), (6, 2, 80, 32), (2, 2, 112, 16), (16, 1, 64, 64)]
)
def test_decode(q_heads: int, kv_heads: int, head: int, page: int) -> None:
    checks.check_decode([1, 0, page, page + 1, 3 * 64 + 5], q_heads, kv_heads, head, page, F32, DEVICE, target=8)


@pytest.mark.parametrize("length", [31, 32, 33, 100])
def test_decode_window(length: int) -> None:
    checks.check_decode([length, 5], 4, 2, 64, 16, F32, DEVICE, window=32)


def test_decode_soft_cap_f16() -> None:
    checks.check_decode([70, 130], 4, 2, 64, 16, F16, DEVICE, soft_cap=3.0, target=4)


def test_decode_groups() -> None:
    lengths = [130, 145, 128 + 1, 70, 66, 20, 0]
    checks.check_decode(lengths, 4, 2, 64, 16, F32, DEVICE, groups=[(3, 8), (2, 4)], target=4)


def test_decode_group_of_many_rows() -> None:
    checks.check_decode([67] * 40, 4, 1, 64, 16, F32, DEVICE, groups=[(37, 4)], target=1)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head"), [(4, 1, 64), (3, 1, 80), (2, 2, 64)])
def test_prefill(q_heads: int, kv_heads: int, head: int, window: int) -> None:
    checks.check_prefill([(0, 37), (21, 1), (48, 40)], q_heads, kv_heads, head, 16, F32, DEVICE, window)


@pytest.mark.parametrize(("q_heads", "kv_heads", "head"), [(4, 2, 64), (3, 1, 80)])
def test_prefill_of_copied_keys(q_heads: int, kv_heads: int, head: int) -> None:
    checks.check_prefill_of_copies([(0, 37), (70, 40), (50, 3), (33, 32)], q_heads, kv_heads, head, 16, F32, DEVICE)


def test_prefill_soft_cap_f16() -> None:
    checks.check_prefill([(33, 70)], 4, 2, 64, 16, F16, DEVICE, soft_cap=3.0)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sample(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (torch.randn((12, 3000)) * 3).to(dtype).to(DEVICE)
    logits[8] = float("-inf")
    logits[9, 7] = float("nan")
    logits[10, 100:] = float("-inf")
    samplings = [
        Sampling(temperature=0.0),
        Sampling(seed=2**63 + 12345),
        Sampling(seed=3, temperature=0.7, top_k=5),
        Sampling(seed=4, temperature=1.5, top_p=0.9),
        Sampling(seed=5, min_p=0.1),
        Sampling(seed=6, temperature=0.8, top_k=50, top_p=0.5, min_p=0.01),
        Sampling(seed=7, top_k=1),
        Sampling(seed=8, top_p=1e-6),
        Sampling(seed=9, top_k=3),
        Sampling(seed=10),
        Sampling(seed=11, top_k=500, top_p=0.99),
        Sampling(seed=12, temperature=0.01),
    ]
    checks.check_sample(logits, samplings, [5, 6, 7, 100, 9, 10, 11, 12, 13, 14, 15, 16])
    checks.check_sample(logits[:2], samplings[:2], [1, 2], filters=False)


def test_adjust_logits() -> None:
    checks.check_adjust(5, 200, DEVICE)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_logprobs(dtype: torch.dtype) -> None:
    checks.check_logprobs(4, 700, 5, dtype, DEVICE)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_skinny_linear(dtype: torch.dtype) -> None:
    checks.check_skinny(36, 200, dtype, DEVICE)


@pytest.mark.parametrize("dtype", [F32, torch.float16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 64, 128), (5, 70, 200), (33, 128, 256), (64, 20, 72)])
def test_few_rows_linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    checks.check_few_rows(rows, outputs, inputs, dtype, DEVICE, small=True)


def test_apply_plan() -> None:
    checks.check_apply_plan(DEVICE)
