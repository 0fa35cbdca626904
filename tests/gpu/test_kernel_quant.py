"""The kernels for quantized weights on a GPU, at the sizes of real models and at awkward ones."""

import pytest
import torch

from gpu_worker.kernels import one_row
from gpu_worker.quant.formats.fp8 import quantize
from gpu_worker.quant.linear import ByteLinear, IntLinear, quantized_linear
from gpu_worker.quant.scheme import Activations
from tests.quant_kernel_checks import (
    check_byte_linear,
    check_int_linear,
    check_one_row,
    check_rounding,
    corner_rows,
    noise,
    random_ints,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16 = torch.bfloat16
ROWS = [0, 1, 16, 17, 64, 65, 300]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "group", "bits", "zeros", "act_order"),
    [
        (4096, 4096, 128, 4, True, False),
        (1027, 1536, 64, 4, False, False),
        (960, 576, 32, 4, True, False),
        (2048, 4096, 128, 4, False, True),
        (640, 1000, 1000, 8, False, False),
        (512, 2048, 128, 8, True, False),
    ],
)
def test_int_linear(n: int, k: int, group: int, bits: int, zeros: bool, act_order: bool, dtype: torch.dtype) -> None:
    packed = random_ints(n, k, group, bits=bits, zeros=zeros, act_order=act_order, device="cuda")
    for rows in ROWS:
        check_int_linear(rows, packed, dtype, bias=rows % 2 == 1)
    check_int_linear(300, packed, dtype, bias=True, unpacked=True)
    check_int_linear(7, packed, torch.float32, bias=False)


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1027, 1531), (192, 576)])
def test_row_scales(n: int, k: int, kind: str) -> None:
    for rows in ROWS:
        check_byte_linear(rows, n, k, 0, kind, BF16, bias=rows % 2 == 1, device="cuda")


@pytest.mark.parametrize(("n", "k", "block"), [(4096, 4096, 128), (192, 576, 128), (320, 1536, 64)])
def test_block_scales(n: int, k: int, block: int) -> None:
    for rows in ROWS:
        check_byte_linear(rows, n, k, block, "float", BF16, bias=rows % 2 == 1, device="cuda")


@pytest.mark.parametrize("kind", ["float", "int"])
def test_rounding(kind: str) -> None:
    how = Activations(kind="float" if kind == "float" else "int", granularity="token")
    check_rounding(corner_rows(500, "cuda"), how)
    check_rounding(noise(77, 4096, device="cuda").to(BF16), how)
    if kind == "float":
        check_rounding(noise(9, 1000, device="cuda"), Activations(kind="float", granularity="group", group=128))


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (194, 1024)])
def test_float8_of_one_row(n: int, k: int) -> None:
    weight = quantize(noise(n, k, device="cuda"))
    matrix = ByteLinear(weight, None, torch.device("cuda"))
    assert one_row.known(matrix)
    check_one_row(matrix, weight.dequantize().double(), BF16)


def test_zero_rows_and_bystanders() -> None:
    """B59: in one product, a NaN row spoils no other, zeros stay zeros, an infinite row is finite."""
    weight = quantize(noise(256, 500, device="cuda"))
    made = quantized_linear([weight], None, torch.device("cuda"), BF16)
    x = corner_rows(500, "cuda").to(BF16)
    y = made(x)
    assert bool((y[0] == 0).all()) and bool(y[[1, 2, 5]].isfinite().all()) and bool(y[4].isnan().all())
    assert relative_error(y[5:], x[5:].double() @ weight.dequantize().double().t()) < 0.05


def test_inside_a_cuda_graph() -> None:
    packed = random_ints(1024, 1024, 128, bits=4, zeros=True, act_order=False, device="cuda")
    weight = quantize(noise(1024, 1024, device="cuda"))
    first, second = IntLinear(packed, None), quantized_linear([weight], None, torch.device("cuda"), BF16)
    x = noise(4, 1024, device="cuda").to(BF16)
    eager = second(first(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = second(first(x))
    x.copy_(noise(4, 1024, device="cuda", seed=5).to(BF16))
    graph.replay()
    assert torch.equal(y, second(first(x))) and not torch.equal(y, eager)
