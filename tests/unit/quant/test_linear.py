"""Quantized linears: cut for tensor parallelism (B58), joined, 8-bit corner cases (B59), few bits in memory."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpu_worker.quant.formats.fp8 import float_weight, quantize
from gpu_worker.quant.formats.words import in_order_groups
from gpu_worker.quant.joining import can_join, join
from gpu_worker.quant.linear import BLOCK_ELEMENTS, FusedInt4Linear, quantized_linear
from gpu_worker.quant.packed import PackedInts, pack
from gpu_worker.quant.rounding import float8_to_bf16, quantize_rows
from gpu_worker.quant.scheme import Activations, Scheme
from gpu_worker.quant.weights import ByteWeight, IntWeight, Weight
from shared.model_folder import ModelError

CPU = torch.device("cpu")
FLOAT = Activations(kind="float", granularity="token")
INT = Activations(kind="int", granularity="token")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(n: int, k: int, group: int, *, bits: int = 4, zeros: bool = True, act_order: bool = False, seed: int = 0) -> IntWeight:
    draw = torch.Generator().manual_seed(seed)
    groups = in_order_groups(k, group)
    if act_order:
        groups = groups[torch.randperm(k, generator=draw)]
    count = -(-k // group)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=draw)
    zero = torch.randint(0, 2**bits, (n, count), dtype=torch.uint8, generator=draw) if zeros else None
    scales = (torch.rand(n, count, generator=draw) + 0.1).half()
    return IntWeight(bits, codes, scales, zero, groups).checked()


def linear(weight: Weight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return quantized_linear([weight], bias, CPU, x.dtype)(x)


def close(found: Tensor, right: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found.float() - right.float()).norm() <= tolerance * right.float().norm())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "group", "bits"),
    [
        (64, 256, 32, 4),
        (48, 250, 64, 4),
        (30, 96, 48, 4),
        (16, 576, 576, 4),
        (32, 256, 64, 8),
        (5, 40, 16, 8),
        (1, 32, 32, 4),
        (9, 192, 96, 4),
        (9, 480, 160, 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_group(n: int, k: int, group: int, bits: int, act_order: bool, dtype: torch.dtype) -> None:
    weight = ints(n, k, group, bits=bits, act_order=act_order)
    bias = noise(n, seed=5).to(dtype)
    for rows in (0, 1, 33):
        x = noise(rows, k, seed=rows).to(dtype)
        exact = x.float() @ weight.dequantize().t() + bias.float()
        assert close(linear(weight, x, bias), exact, 1e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("act_order", [False, True])
def test_tensor_parallel_equals_one_rank(act_order: bool) -> None:
    """B58: 256 x 64, groups of 32, a random g_idx; rows and columns cut in two; the same bits in two runs."""
    weight, x = ints(256, 64, 32, act_order=act_order), noise(9, 64)
    whole = linear(weight, x)
    by_rows = torch.cat([linear(weight.rows(start, start + 128), x) for start in (0, 128)], 1)
    by_columns = linear(weight.columns(0, 32), x[:, :32]) + linear(weight.columns(32, 64), x[:, 32:])
    assert torch.equal(by_rows, whole)
    assert close(by_columns, whole)
    assert torch.equal(linear(weight, x), whole)
    if act_order:  # a rank needs the scales of every group that one of its columns names
        assert weight.columns(0, 32).scales.shape[1] == 2
        assert pack(weight.columns(0, 32)).num_columns % 128 == 0


@pytest.mark.parametrize("block", [128, 64])
def test_block_scales_cut_inside_a_block(block: int) -> None:
    """192 columns are no whole number of 128-blocks: a rank's cut at 192 goes through one."""
    scheme = Scheme(
        layout="plain", kind="float", bits=8, granularity="block", block=(block, block),
        activations=Activations(kind="float", granularity="group", group=block),
    )  # fmt: skip
    values = (noise(320, 384) * 40).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-320 // block), -(-384 // block), generator=torch.Generator().manual_seed(3))
    weight = float_weight(scheme, values, scales, None)
    exact = weight.dequantize()
    assert torch.equal(exact[200, 300], values.float()[200, 300] * scales[200 // block, 300 // block])
    parts = [weight.columns(0, 192), weight.columns(192, 384)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), exact)
    assert torch.equal(weight.rows(64, 192).dequantize(), exact[64:192])
    x = noise(5, 384)
    halves = linear(parts[0], x[:, :192]) + linear(parts[1], x[:, 192:])
    assert close(halves, linear(weight, x), 0.03)
    with pytest.raises(ModelError, match="cannot be cut"):
        weight.columns(3, 384)


def test_parts_joined_into_one() -> None:
    parts = [ints(32, 128, 32, seed=1), ints(16, 128, 32, zeros=False, seed=2), ints(48, 128, 32, seed=3)]
    x, bias = noise(4, 128), noise(96, seed=7)
    packed = [pack(part) for part in parts]
    assert can_join(packed)
    exact = torch.cat([x @ part.dequantize().t() for part in parts], 1) + bias
    joined = join(packed)
    assert isinstance(joined, PackedInts)
    assert torch.equal(joined.dequantize(0, 96), torch.cat([part.dequantize() for part in parts]))
    assert close(quantized_linear(parts, bias, CPU, torch.float32)(x), exact)


def test_parts_that_cannot_be_one_stay_beside_each_other() -> None:
    parts = [ints(32, 128, 32, act_order=True, seed=1), ints(16, 128, 32, act_order=True, seed=2), ints(8, 128, 64, bits=8)]
    x, bias = noise(4, 128), noise(56, seed=7)
    packed = [pack(part) for part in parts]
    assert not can_join(packed) and not can_join([packed[0], packed[2]]) and can_join(packed[:1])
    made = quantized_linear(parts, bias, CPU, torch.float32)
    assert close(made(x), torch.cat([x @ part.dequantize().t() for part in parts], 1) + bias)
    assert made.num_bytes > 0


def test_one_part_lies_unpacked_at_a_time() -> None:
    """What a reader of a large checkpoint holds besides its packed layers: a weak reference to each part's codes tells."""
    seen: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[Weight]:
        for seed in range(3):
            assert not any(codes() is not None for codes in seen)
            weight = ints(32, 128, 32, seed=seed)
            seen.append(weakref.ref(weight.codes))
            yield weight
            del weight

    made, x = quantized_linear(parts(), None, CPU, torch.float32), noise(4, 128)
    assert len(seen) == 3 and close(made(x), torch.cat([x @ ints(32, 128, 32, seed=i).dequantize().t() for i in range(3)], 1))


def test_static_scales_join_to_the_largest() -> None:
    static = Activations(kind="float", granularity="tensor", dynamic=False)
    values = (noise(8, 32) * 40).to(torch.float8_e4m3fn)
    parts = [ByteWeight(values, torch.ones(8, 1), 32, static, torch.tensor([scale])) for scale in (0.5, 2.0)]
    joined = join(parts)
    assert isinstance(joined, ByteWeight) and joined.input_scale is not None and joined.input_scale.item() == 2.0


def test_four_bits_stay_four_bits_in_memory() -> None:
    weight = ints(1024, 1024, 128, zeros=False)
    for dtype in (torch.bfloat16, torch.float32):
        made = quantized_linear([weight], None, CPU, dtype)
        assert made.num_bytes < 1024 * 1024 * 0.6
    assert quantized_linear([quantize(noise(64, 512))], None, CPU, torch.bfloat16).num_bytes < 64 * 512 * 1.1


def test_unpacking_goes_by_blocks_of_rows() -> None:
    """A matrix of several blocks equals its dequantized product; the last block is smaller."""
    rows = 3 * BLOCK_ELEMENTS // 4096 // 2 + 5
    weight, x = ints(rows, 4096, 128), noise(2, 4096)
    assert close(linear(weight, x), x @ weight.dequantize().t())
    fused = ints(rows // 16 * 16, 4096, 128)
    made = quantized_linear([fused], None, CPU, torch.bfloat16)
    assert isinstance(made, FusedInt4Linear)
    assert close(made(x.bfloat16()), x.bfloat16().float() @ fused.dequantize().t(), 0.02)


def test_every_float8_value_converts_exactly() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = ~values.float().isnan()
    assert int(finite.sum()) == 254
    assert torch.equal(float8_to_bf16(values)[finite].float(), values.float()[finite])


@pytest.mark.parametrize("how", [FLOAT, INT, Activations(kind="float", granularity="group", group=64)], ids=str)
def test_corner_rows(how: Activations) -> None:
    """B59: zeros stay exact zeros, a tiny row is finite, a huge one keeps its size, infinities saturate, NaN stays alone."""
    x = noise(6, 192)
    x[0], x[1, :], x[2, 5] = 0, 0, 6e4
    x[1, 7] = 1e-40
    x[3, 9], x[4, 100] = float("inf"), float("nan")
    values, scales = quantize_rows(x, how)
    spread = scales.repeat_interleave(-(-192 // scales.shape[1]), 1)[:, :192]
    back = values.float() * spread
    assert bool((back[0] == 0).all())
    assert bool(back[1].isfinite().all()) and abs(float(back[1, 7])) < 1e-37
    assert abs(float(back[2, 5]) - 6e4) < 6e4 * 0.04
    assert bool(back[3].isfinite().all()) and float(back[3, 9]) > 1e38
    assert bool(back[4].isnan().any())
    assert bool(back[[0, 1, 2, 3, 5]].isfinite().all())
    weight = quantize(noise(48, 192)) if how.kind == "float" else ByteWeight(
        torch.randint(-127, 128, (48, 192), dtype=torch.int8), torch.rand(48, 1), 192, INT
    )  # fmt: skip
    if how.granularity == "group":
        weight = ByteWeight(weight.values, weight.scales.expand(48, 3).contiguous(), 64, how)
    y = linear(weight, x)
    assert bool((y[0] == 0).all()) and bool(y[[0, 1, 2, 5]].isfinite().all()) and bool(y[4].isnan().all())
    assert close(y[5], x[5] @ weight.dequantize().t(), 0.05)


def test_weights_with_zero_rows_and_zero_scales() -> None:
    weight = noise(4, 64)
    weight[1], weight[2] = 0, 1e-41
    made = quantize(weight)
    assert bool(made.scales.isfinite().all()) and bool((made.scales > 0).all())
    assert bool((made.dequantize()[1] == 0).all()) and bool(made.dequantize().isfinite().all())
    y = linear(ByteWeight(made.values, torch.zeros(4, 1), 64, FLOAT), noise(3, 64))
    assert bool((y == 0).all())


def test_static_scale_of_zero_is_finite() -> None:
    static = Activations(kind="float", granularity="tensor", dynamic=False)
    values, scales = quantize_rows(noise(2, 8), static, torch.zeros(1))
    assert bool(values.float().isfinite().all()) and bool(scales.isfinite().all()) and bool((scales > 0).all())


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (lambda: IntWeight(4, torch.zeros(4, 8, dtype=torch.uint8), torch.ones(3, 1), None, torch.zeros(8).int()), "scales of"),
        (
            lambda: IntWeight(4, torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1), None, torch.ones(8).int()),
            "groups 1 to 1",
        ),
        (lambda: ByteWeight(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2), 8, None), "scales of"),
        (
            lambda: ByteWeight(
                torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1), 8, Activations("int", "tensor", dynamic=False)
            ),
            "input_scale",
        ),
    ],
)
def test_tensors_that_do_not_fit_together(weight: object, said: str) -> None:
    assert callable(weight)
    with pytest.raises(ModelError, match=said):
        weight().checked()
