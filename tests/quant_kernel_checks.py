"""Checks of the kernels for quantized weights against float64 products: the interpreter runs the small ones, a GPU all."""

import torch
from torch import Tensor

from gpu_worker import reference
from gpu_worker.kernels import fp8_linear, one_row, w4a16_linear
from gpu_worker.quant.formats.words import in_order_groups
from gpu_worker.quant.linear import ByteLinear
from gpu_worker.quant.packed import PackedInts, for_kernels, pack
from gpu_worker.quant.rounding import quantize_rows
from gpu_worker.quant.scheme import Activations
from gpu_worker.quant.weights import IntWeight

# Largest relative error of a whole product: rounding of the result and, for the unpacked variant, of the weights.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def noise(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def random_ints(n: int, k: int, group: int, *, bits: int, zeros: bool, act_order: bool, device: str) -> PackedInts:
    draw = torch.Generator().manual_seed(n + k)
    groups = in_order_groups(k, group)
    if act_order:
        groups = groups[torch.randperm(k, generator=draw)]
    count = -(-k // group)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=draw)
    zero = torch.randint(0, 2**bits, (n, count), dtype=torch.uint8, generator=draw) if zeros else None
    scales = ((torch.rand(n, count, generator=draw) + 0.1) / 2**bits).half()
    return pack(IntWeight(bits, codes, scales, zero, groups).checked()).to(torch.device(device))


def relative_error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def check_int_linear(rows: int, packed: PackedInts, dtype: torch.dtype, *, bias: bool, unpacked: bool = False) -> None:
    device, n = packed.words.device.type, packed.num_rows
    x = packed.arrange(noise(rows, packed.in_features, device=device, seed=rows).to(dtype))
    added = noise(n, device=device, seed=9).to(dtype) if bias else None
    weight = packed.dequantize(0, n).double()[:, : x.shape[1]]
    exact = x.double() @ weight.t() + (0 if added is None else added.double())
    how = (for_kernels(packed), added)
    y = w4a16_linear.w4a16_linear(x, *how, unpack_rows_from=0 if unpacked else 10**9)
    assert y.dtype == dtype and y.shape == (rows, n)
    if rows:
        assert relative_error(y, exact) < TOLERANCE[dtype]
        again = w4a16_linear.w4a16_linear(x, *how, unpack_rows_from=0 if unpacked else 10**9)
        assert torch.equal(y, again)  # the parts of a split product are added in a fixed order


def check_byte_linear(rows: int, n: int, k: int, block: int, kind: str, dtype: torch.dtype, *, bias: bool, device: str) -> None:
    """block 0: one scale a row of each operand."""
    how = Activations(kind="float" if kind == "float" else "int", granularity="group" if block else "token", group=block)
    x, x_scales = quantize_rows(noise(rows, k, device=device, seed=rows), how)
    values = noise(n, k, device=device, seed=n) * 50
    values = values.to(torch.float8_e4m3fn) if kind == "float" else values.clamp(-127, 127).to(torch.int8)
    columns = block or k
    scales = torch.rand(-(-k // columns), n, generator=torch.Generator().manual_seed(k)).to(device)
    added = noise(n, device=device, seed=9).to(dtype) if bias else None
    left = x.double() * x_scales.double().repeat_interleave(columns, 1)[:, :k]
    right = values.double() * scales.double().t().repeat_interleave(columns, 1)[:, :k]
    exact = left @ right.t() + (0 if added is None else added.double())
    y = fp8_linear.byte_linear(x, x_scales, values, scales, columns, added, dtype)
    assert y.dtype == dtype and y.shape == (rows, n)
    if rows:
        # A matrix unit keeps fewer than 24 bits of its float8 sums.
        assert relative_error(y, exact) < max(TOLERANCE[dtype], 0 if device == "cpu" else 2e-3)


def check_rounding(x: Tensor, how: Activations, input_scale: Tensor | None = None) -> None:
    """Same codes and scales as the torch twin on a CPU (on a GPU torch divides by a product), NaN in the same rows."""
    values, scales = (each.cpu() for each in fp8_linear.quantize_rows(x, how, input_scale))
    right, right_scales = quantize_rows(x.cpu(), how, None if input_scale is None else input_scale.cpu())
    assert values.dtype == right.dtype and scales.shape == right_scales.shape
    assert torch.equal(scales.isnan(), right_scales.isnan())
    good = ~right_scales.isnan()
    assert torch.equal(scales[good], right_scales[good])
    group = how.group if how.granularity == "group" else x.shape[1]
    whole = good.repeat_interleave(group, 1)[:, : x.shape[1]] if x.shape[1] else right.bool()
    assert torch.equal(values.float()[whole], right.float()[whole])


def corner_rows(k: int, device: str) -> Tensor:
    """B59: zeros, one tiny, one large, one infinite, one NaN, and a plain row whose values float8 holds exactly."""
    x = torch.zeros(6, k)
    x[1, 1], x[2, 2], x[3, 3], x[4, 4] = 1e-40, 6e4, float("inf"), float("nan")
    x[5] = torch.linspace(-448, 448, k).to(torch.float8_e4m3fn).float()
    return x.to(device)


def check_one_row(matrix: ByteLinear, weight: Tensor, dtype: torch.dtype) -> None:
    """The products of one_row with their neighbours. weight f64[N, K]: what the matrix stands for."""
    device = weight.device.type
    outputs, inputs = weight.shape
    x, residual = (noise(1, size, device=device, seed=size).to(dtype) for size in (inputs, outputs))
    gain = noise(inputs, device=device, seed=3).to(dtype)
    product = x.double() @ weight.T
    normed = reference.rms_norm(x.float(), gain.float(), 1e-5).double() @ weight.T
    gate, up = normed.chunk(2, -1)
    assert relative_error(one_row.product(matrix, x), product) < TOLERANCE[dtype]
    assert relative_error(one_row.product(matrix, x, gain=gain, eps=1e-5), normed) < TOLERANCE[dtype]
    fused = one_row.product(matrix, x, gain=gain, eps=1e-5, silu=True)
    assert relative_error(fused, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]
    expected = product + residual.double()
    assert one_row.product(matrix, x, residual=residual, out=residual) is residual
    assert relative_error(residual, expected) < TOLERANCE[dtype]
