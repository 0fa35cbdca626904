"""The parts of all ranks make the whole; what cannot be divided is refused with both numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import tensor_shapes
from gpu_worker.parallel.shard import Shard, divide
from gpu_worker.quant.weights import ByteWeight
from shared.config import BadConfig
from shared.model_folder import ModelError
from tests.unit.quant.test_linear import ints
from tests.unit.worker.test_spec import LLAMA

SPEC = replace(read_spec(LLAMA), num_heads=8, num_kv_heads=2, head_dim=4, intermediate_size=24, vocab_size=101, mlp_bias=True)


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in tensor_shapes(SPEC).items()}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_make_the_whole(size: int) -> None:
    shards = [divide(SPEC, rank, size) for rank in range(size)]
    for name, whole in tensors().items():
        parts = [shard.cut(name, whole) for shard in shards]
        assert [tuple(part.shape) for part in parts] == [tensor_shapes(shard.held)[name] for shard in shards], name
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(parts, 1), whole)
        elif name.endswith("down_proj.bias"):  # added once
            assert torch.equal(sum(parts), whole)  # type: ignore[arg-type]
        elif "norm" in name:
            assert all(torch.equal(part, whole) for part in parts)
        elif "k_proj" in name or "v_proj" in name:  # rank r's query heads read the KV head that they always read
            heads = whole.view(SPEC.num_kv_heads, -1)
            for shard, part in zip(shards, parts, strict=True):
                first_query = shard.rank * shard.spec.num_heads
                first = first_query * SPEC.num_kv_heads // SPEC.num_heads
                assert torch.equal(part.reshape(shard.spec.num_kv_heads, -1), heads[first : first + shard.spec.num_kv_heads])
        else:
            assert torch.equal(torch.cat(parts), whole), name


@pytest.mark.parametrize(
    ("spec", "size", "said"),
    [
        (SPEC, 3, "8 attention heads cannot be divided by 3"),
        (replace(SPEC, num_heads=12, num_kv_heads=6), 4, "6 KV heads be divided by 4 nor 4 by them"),
        (replace(SPEC, intermediate_size=27), 2, "intermediate_size of 27 cannot be divided by 2"),
        (replace(SPEC, num_kv_heads=4, vocab_size=5), 4, "a vocabulary of 5 tokens"),
    ],
)
def test_what_cannot_be_divided(spec: object, size: int, said: str) -> None:
    with pytest.raises(BadConfig, match=f"tensor_parallel_size = {size}: .*{said}"):
        divide(spec, 0, size)  # type: ignore[arg-type]


def test_quantized_parts() -> None:
    shard = Shard(SPEC, 1, 2)  # of 24 inner columns the last 12
    weight = ints(32, 24, 8)
    assert torch.equal(shard.cut_quantized("a.down_proj", weight).dequantize(), weight.dequantize()[:, 12:])
    tall = ints(24, 32, 16)
    assert torch.equal(shard.cut_quantized("a.up_proj", tall).dequantize(), tall.dequantize()[12:])


def test_scale_blocks_that_cannot_be_cut() -> None:
    weight = ByteWeight(torch.zeros(8, 24, dtype=torch.int8), torch.ones(8, 2), 16, None)
    said = r"tensor_parallel_size = 2, rank 1: layer a.down_proj: inputs 12 to 24 .* blocks of 16"
    with pytest.raises(ModelError, match=said):
        Shard(SPEC, 1, 2).cut_quantized("a.down_proj", weight)
