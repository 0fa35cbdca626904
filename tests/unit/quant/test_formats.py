"""Layers of checkpoints that other tools wrote: our values equal the tools' own, bit for bit.

tests/fixtures/quant holds k_proj of the first layer of SmolLM2 as gptqmodel and llmcompressor wrote it, with the tool's own
dequantized weight: its first rows, and the SHA-256 of all of it.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.formats import awq, words
from gpu_worker.quant.linear import quantized_linear
from gpu_worker.quant.loading import read_weight
from gpu_worker.quant.packed import pack
from gpu_worker.quant.scheme import Scheme
from gpu_worker.quant.weights import ByteWeight, IntWeight, Weight

FILES = sorted((Path(__file__).parents[2] / "fixtures" / "quant").glob("*.safetensors"))
LAYER = "model.layers.0.self_attn.k_proj"


def read(file: Path) -> tuple[Scheme, dict[str, Tensor], dict[str, Any]]:
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        said = opened.metadata()
    spec = read_quantization({"quantization_config": json.loads(said["config"])})
    assert spec is not None
    scheme = spec.scheme_of(LAYER)
    assert scheme is not None
    assert spec.scheme_of("lm_head") is None
    return scheme, tensors, said


def weight_of(file: Path) -> Weight:
    scheme, tensors, _ = read(file)
    return read_weight(scheme, tensors)


def test_all_formats_have_a_fixture() -> None:
    assert {read(file)[0].layout for file in FILES} == {"gptq", "gptq_v2", "awq", "packed", "plain"}
    assert sum(file.stat().st_size for file in FILES) < 3_000_000


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_dequantized_weights_equal_the_tools(file: Path) -> None:
    scheme, tensors, said = read(file)
    weight = read_weight(scheme, tensors)
    if isinstance(weight, IntWeight):  # the tool held its scales in this type when it multiplied
        weight = dataclasses.replace(weight, scales=weight.scales.to(getattr(torch, said["scales"])))
    ours = weight.dequantize(getattr(torch, said["dtype"]))
    rows = tensors["dequantized_rows"]
    assert torch.equal(ours[: len(rows)], rows)
    assert hashlib.sha256(ours.contiguous().view(torch.int16).numpy().tobytes()).hexdigest() == said["sha256"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_linear_multiplies_with_these_weights(file: Path) -> None:
    weight = weight_of(file)
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(1))
    if isinstance(weight, ByteWeight) and weight.input_scale is not None:
        x = x.clamp(-448 * weight.input_scale, 448 * weight.input_scale)  # beyond it, static activations saturate
    y = quantized_linear([weight], None, torch.device("cpu"), torch.float32)(x)
    exact = x @ weight.dequantize().t()
    error = (y - exact).norm() / exact.norm()
    assert error < (1e-5 if isinstance(weight, IntWeight) else 0.04)  # the others round their inputs


@pytest.mark.parametrize("file", [file for file in FILES if isinstance(weight_of(file), IntWeight)], ids=lambda file: file.stem)
def test_packed_layout_keeps_every_value(file: Path) -> None:
    weight = weight_of(file)
    assert isinstance(weight, IntWeight)
    packed = pack(weight)
    x = torch.eye(weight.shape[1])
    columns = packed.arrange(x)
    back = columns @ packed.dequantize(0, weight.shape[0])[:, : columns.shape[1]].t()
    assert torch.equal(back.t(), weight.dequantize())


def test_act_order_is_in_the_fixture() -> None:
    weight = weight_of(next(file for file in FILES if "act_order" in file.name))
    assert isinstance(weight, IntWeight)
    assert not torch.equal(weight.groups, weight.groups.sort().values)
    assert pack(weight).columns is not None


def test_words_round_trip() -> None:
    codes = torch.randint(0, 16, (5, 19), dtype=torch.uint8)
    assert torch.equal(words.unpack(words.pack(codes, 4), 4)[:, :19], codes)
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    assert torch.equal(awq._turned(awq.write_words(codes)), codes.t())


def test_gptq_v1_zero_wraps_to_zero() -> None:
    """Version 1 stores zero - 1: a stored 15 is zero point 0, not 16."""
    spec = read_quantization({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}})
    assert spec is not None
    scheme = spec.scheme_of(LAYER)
    assert scheme is not None
    codes = torch.full((8, 8), 5, dtype=torch.uint8)
    zeros = words.pack(torch.full((1, 8), 15, dtype=torch.uint8), 4)
    tensors = {"qweight": words.pack(codes, 4).t().contiguous(), "qzeros": zeros, "scales": torch.ones(1, 8)}
    assert bool((read_weight(scheme, tensors).dequantize() == 5).all())
    v2 = dataclasses.replace(scheme, layout="gptq_v2")
    assert bool((read_weight(v2, tensors).dequantize() == -10).all())
