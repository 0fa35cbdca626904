"""The kernels for quantized weights in Triton's interpreter (float16 and float32: it has no bf16 arithmetic)."""

import pytest
import torch

from gpu_worker.kernels import fp8_linear, w4a16_linear
from gpu_worker.quant.formats.fp8 import quantize
from gpu_worker.quant.linear import ByteLinear
from gpu_worker.quant.packed import for_kernels
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

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with numpy, which warns of overflow to infinity; the kernels mean it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
STATIC = Activations(kind="float", granularity="tensor", dynamic=False)


@pytest.mark.parametrize(
    ("n", "k", "group", "bits", "zeros", "act_order"),
    [
        (64, 256, 32, 4, True, False),
        (40, 384, 128, 4, False, False),
        (30, 250, 64, 4, True, False),  # neither size is a multiple of the tile
        (48, 192, 48, 4, True, False),  # groups that are no whole planes
        (32, 256, 64, 4, False, True),
        (16, 200, 200, 8, False, False),
        (33, 256, 32, 8, True, True),
        (32, 480, 96, 4, True, False),  # groups of three planes
        (32, 96, 96, 4, True, False),
        (32, 480, 160, 8, True, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_int_linear(n: int, k: int, group: int, bits: int, zeros: bool, act_order: bool, rows: int) -> None:
    packed = random_ints(n, k, group, bits=bits, zeros=zeros, act_order=act_order, device=DEVICE)
    check_int_linear(rows, packed, torch.float16, bias=rows == 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_int_linear_unpacked(dtype: torch.dtype, bias: bool) -> None:
    packed = random_ints(48, 250, 64, bits=4, zeros=True, act_order=False, device=DEVICE)
    check_int_linear(5, packed, dtype, bias=bias, unpacked=True)
    check_int_linear(5, packed, dtype, bias=bias)


def test_float8_of_one_row() -> None:
    weight = quantize(noise(38, 1024, device=DEVICE))
    check_one_row(ByteLinear(weight, None, torch.device(DEVICE)), weight.dequantize().double(), torch.float32)


def test_no_rows() -> None:
    check_int_linear(
        0, random_ints(32, 128, 32, bits=4, zeros=False, act_order=False, device=DEVICE), torch.float16, bias=False
    )
    check_byte_linear(0, 32, 128, 0, "float", torch.float16, bias=False, device=DEVICE)


def test_split_product_is_finished_by_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing would be split: pretend there are many processors, and leave the counters at zero."""
    from gpu_worker.kernels import split_k

    monkeypatch.setattr(split_k, "num_processors", lambda device: 4)
    assert split_k.choose_split(1, 16, torch.device(DEVICE)) == 4
    check_int_linear(
        3, random_ints(64, 2048, 128, bits=4, zeros=True, act_order=False, device=DEVICE), torch.float16, bias=True
    )
    check_byte_linear(3, 64, 4096, 0, "float", torch.float32, bias=True, device=DEVICE)
    assert not bool(split_k.counters(torch.device(DEVICE)).any())


@pytest.mark.parametrize(("n", "k", "block"), [(40, 200, 0), (64, 256, 0), (192, 320, 128), (96, 192, 64)])
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_float8_linear(n: int, k: int, block: int, rows: int) -> None:
    check_byte_linear(rows, n, k, block, "float", torch.float32, bias=rows == 20, device=DEVICE)


@pytest.mark.parametrize("rows", [1, 70])
def test_int8_linear(rows: int) -> None:
    check_byte_linear(rows, 40, 200, 0, "int", torch.float32, bias=True, device=DEVICE)


@pytest.mark.parametrize("kind", ["float", "int"])
def test_rounding_of_corner_rows(kind: str) -> None:
    how = Activations(kind="float" if kind == "float" else "int", granularity="token")
    check_rounding(corner_rows(200, DEVICE), how)
    check_rounding(corner_rows(200, DEVICE).to(torch.float32)[:0], how)


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("rows", [6, 70])
def test_corner_rows_spoil_no_others(kind: str, rows: int) -> None:
    """B59: zeros stay zeros, tiny and huge rows are finite, NaN (row 4) and what overflows in the product (3) stay alone."""
    how = Activations(kind="float" if kind == "float" else "int", granularity="token")
    x = noise(rows, 200, device=DEVICE)
    x[:6] = corner_rows(200, DEVICE)
    values = noise(70, 200, device=DEVICE, seed=1) * 50
    values = values.to(torch.float8_e4m3fn) if kind == "float" else values.clamp(-127, 127).to(torch.int8)
    scales = torch.rand(1, 70, generator=torch.Generator().manual_seed(2)).to(DEVICE) / 1000
    scales[0, 7], values[9] = 0, torch.zeros(200).to(values.dtype)
    rounded, x_scales = fp8_linear.quantize_rows(x, how, None)
    y = fp8_linear.byte_linear(rounded, x_scales, values, scales, 200, None, torch.float32)
    others = [row for row in range(rows) if row not in (3, 4)]
    assert bool((y[0] == 0).all()) and bool(y[4].isnan().all())
    assert bool(y[others].isfinite().all()) and bool((y[others][:, [7, 9]] == 0).all())
    right = x[5:].double() @ (values.double() * scales.double().t()).t()
    assert relative_error(y[5:], right) < 0.05


@pytest.mark.parametrize("rows", [6, 70])
def test_corner_rows_of_integer_weights(rows: int) -> None:
    packed = random_ints(40, 250, 64, bits=4, zeros=True, act_order=False, device=DEVICE)
    x = noise(rows, 250, device=DEVICE)
    x[:6] = corner_rows(250, DEVICE)
    x[3] = 1e30
    y = w4a16_linear.w4a16_linear(x, for_kernels(packed))
    others = [row for row in range(rows) if row not in (0, 4)]
    assert bool((y[0] == 0).all()) and bool(y[4].isnan().all()) and bool(y[others].isfinite().all())
    exact = x[others].double() @ packed.dequantize(0, 40).double()[:, :250].t()
    errors = (y[others].double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert bool((errors < 1e-5).logical_or(exact.norm(dim=1) < 1e-35).all())


def test_rounding_in_groups_and_with_one_scale() -> None:
    exact = torch.linspace(-448, 448, 320).to(torch.float8_e4m3fn).float().to(DEVICE).repeat(3, 1)
    exact[:, ::64] = 448
    check_rounding(exact, Activations(kind="float", granularity="group", group=64))
    check_rounding(exact, STATIC, torch.full((1,), 1.0, device=DEVICE))
    check_rounding(exact * 4, STATIC, torch.full((1,), 2.0, device=DEVICE))
