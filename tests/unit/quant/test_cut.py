"""Every format cut for tensor parallelism (B58): ranks hold exactly their part of the values that other tools wrote.

The cuts go through words, groups, blocks and tiles: 192 x 576 in 2 and 3 along either dimension, then by the layers of a model.
"""

from pathlib import Path

import pytest
import torch

from gpu_worker.model.spec import read_spec
from gpu_worker.parallel.shard import divide
from gpu_worker.quant.joining import Form, can_join, join
from gpu_worker.quant.linear import quantized_linear
from gpu_worker.quant.packed import PackedInts, pack
from gpu_worker.quant.weights import ByteWeight, IntWeight, Weight
from tests.unit.quant.test_formats import FILES, weight_of

CPU = torch.device("cpu")
every_format = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def rows_of(weight: Weight, ranks: int) -> list[Weight]:
    size = weight.shape[0] // ranks
    return [weight.rows(rank * size, (rank + 1) * size) for rank in range(ranks)]


def columns_of(weight: Weight, ranks: int) -> list[Weight]:
    size = weight.shape[1] // ranks
    return [weight.columns(rank * size, (rank + 1) * size) for rank in range(ranks)]


@every_format
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_have_the_whole_values(file: Path, ranks: int) -> None:
    weight = weight_of(file)
    whole = weight.dequantize()
    assert torch.equal(torch.cat([part.dequantize() for part in rows_of(weight, ranks)]), whole)
    assert torch.equal(torch.cat([part.dequantize() for part in columns_of(weight, ranks)], 1), whole)
    corners = [part.dequantize() for half in rows_of(weight, ranks) for part in columns_of(half, 2)]
    assert torch.equal(torch.cat([torch.cat(corners[i : i + 2], 1) for i in range(0, 2 * ranks, 2)]), whole)


@every_format
@pytest.mark.parametrize("ranks", [2, 3])
def test_products_of_parts_make_the_whole_product(file: Path, ranks: int) -> None:
    """Row-parallel ranks are summed, column-parallel ones stand side by side; two runs give the same bits."""
    weight = weight_of(file)
    n, k = weight.shape
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(1)) * 0.1

    def run(parts: list[Weight], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            quantized_linear([part], None, CPU, torch.float32)(each.contiguous())
            for part, each in zip(parts, inputs, strict=True)
        ]

    exact = x @ weight.dequantize().t()
    tolerance = 1e-5 if isinstance(weight, IntWeight) else 0.04  # the others round their inputs
    side_by_side = torch.cat(run(rows_of(weight, ranks), [x] * ranks), 1)
    summed = torch.stack(run(columns_of(weight, ranks), list(x.chunk(ranks, 1)))).sum(0)
    for found in (side_by_side, summed):
        assert found.shape == (5, n)
        assert float((found - exact).norm() / exact.norm()) < tolerance
    assert torch.equal(summed, torch.stack(run(columns_of(weight, ranks), list(x.chunk(ranks, 1)))).sum(0))


@every_format
def test_a_part_takes_its_share_of_memory(file: Path) -> None:
    weight = weight_of(file)
    whole = quantized_linear([weight], None, CPU, torch.float32).num_bytes
    for part in (rows_of(weight, 2)[0], columns_of(weight, 2)[1]):
        # Act-order: a rank keeps the scales of every group it names, and fills groups up to whole planes.
        allowed = 1.4 if isinstance(part, IntWeight) else 0.56
        assert quantized_linear([part], None, CPU, torch.float32).num_bytes < allowed * whole


@every_format
def test_shards_of_a_model(file: Path) -> None:
    """By the layers' names, as a rank's loader cuts them; parts of q, k and v still make one matrix."""
    weight = weight_of(file)
    n, k = weight.shape
    spec = read_spec(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": k, "intermediate_size": n, "num_hidden_layers": 1,
            "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": n // 12, "vocab_size": 100,
            "max_position_embeddings": 64,
        }
    )  # fmt: skip
    prefix, ranks = "model.layers.0.", 3
    outputs, inputs = [], []
    for rank in range(ranks):
        shard = divide(spec, rank, ranks)
        part = shard.cut_quantized(prefix + "self_attn.q_proj", weight)
        gate, up = (shard.cut_quantized(f"{prefix}mlp.{name}_proj", weight) for name in ("gate", "up"))
        forms: list[Form] = [pack(each) if isinstance(each, IntWeight) else each for each in (gate, up)]
        joined = join(forms)
        assert can_join(forms)
        assert (joined.num_rows if isinstance(joined, PackedInts) else joined.shape[0]) == 2 * n // ranks
        outputs.append(part.dequantize())
    assert torch.equal(torch.cat(outputs), weight.dequantize())
    narrow = read_spec(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": n, "intermediate_size": k, "num_hidden_layers": 1,
            "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": k // 9, "vocab_size": 100,
            "max_position_embeddings": 64,
        }
    )  # fmt: skip
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        inputs = [divide(narrow, rank, ranks).cut_quantized(prefix + name, weight).dequantize() for rank in range(ranks)]
        assert torch.equal(torch.cat(inputs, 1), weight.dequantize())


def test_a_cut_that_scale_blocks_do_not_allow_is_refused() -> None:
    block = next(weight for file in FILES if isinstance(weight := weight_of(file), ByteWeight) and 1 < weight.block < 576)
    with pytest.raises(Exception, match=r"inputs 8 to 16 of a layer cannot be cut out of scale blocks of 128 columns"):
        block.columns(8, 16)
