"""The other kernels on a GPU, at the sizes of real models."""

import pytest
import torch

from shared.sampling import Sampling
from tests import kernel_checks as checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16 = torch.bfloat16
DTYPES = [BF16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4096), (333, 5120), (2000, 896), (7, 8192)])
def test_elementwise(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    checks.check_norms(tokens, hidden, dtype, "cuda")
    checks.check_silu_mul(tokens, hidden + 96, dtype, "cuda")
    checks.check_embed(tokens, hidden, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head", "rope_dim", "norm"),
    [(32, 8, 128, 128, False), (14, 2, 64, 64, False), (5, 1, 80, 80, True), (4, 4, 96, 48, True), (8, 1, 256, 64, False)],
)
def test_rope(q_heads: int, kv_heads: int, head: int, rope_dim: int, norm: bool, dtype: torch.dtype) -> None:
    for tokens in (2, 600):
        checks.check_rope(tokens, q_heads, kv_heads, head, rope_dim, 16, norm, dtype, "cuda")


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=2**64 - 1),
    Sampling(seed=3, temperature=0.7, top_k=5),
    Sampling(seed=4, temperature=1.5, top_p=0.9),
    Sampling(seed=5, min_p=0.1),
    Sampling(seed=6, temperature=0.8, top_k=50, top_p=0.5, min_p=0.01),
    Sampling(seed=7, top_k=1),
    Sampling(seed=8, top_p=1e-6),
    Sampling(seed=10),
    Sampling(seed=11, top_k=5000, top_p=0.99),
    Sampling(seed=12, temperature=0.01),
    Sampling(seed=13, temperature=5.0, top_p=0.999),
    Sampling(seed=14, temperature=3.0, top_k=20000, top_p=0.9),
    Sampling(seed=15, temperature=50.0, top_k=100000, top_p=0.9),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "copies"), [(1000, 6), (128256, 1), (151936, 1)])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_sample(spread: float, vocabulary: int, copies: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    samplings = SAMPLINGS * copies
    logits = (torch.randn((len(samplings), vocabulary), device="cuda") * spread).to(dtype)
    positions = list(range(7, 7 + len(samplings)))
    checks.check_sample(logits, samplings, positions)
    checks.check_sample(logits[:1], samplings[:1], positions[:1], filters=False)
    logits[1] = float("-inf")
    logits[8, 5] = float("nan")
    logits[3, 40:] = float("-inf")
    logits[4, 9:] = logits[4, 9]  # many ties
    logits[5] = logits[5].clamp(max=1.0)
    checks.check_sample(logits[:9], samplings[:9], positions[:9])


def test_adjust_logits() -> None:
    checks.check_adjust(9, 128256, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs(dtype: torch.dtype) -> None:
    checks.check_logprobs(6, 128256, 20, dtype, "cuda")


@pytest.mark.parametrize("rows", [2, 16, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (28672, 4096), (1538, 576), (70, 200)])
def test_few_rows_linear(rows: int, outputs: int, inputs: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        checks.check_few_rows(rows, outputs, inputs, dtype, "cuda", small=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 896), (514, 200)])
def test_skinny_linear(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    checks.check_skinny(outputs, inputs, dtype, "cuda")


def test_apply_plan() -> None:
    checks.check_apply_plan("cuda")
