"""Quantized checkpoints into a Decoder: recognised from config.json, fused, refused when they contradict themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_worker import ops
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import Dummy, Safetensors, load_decoder, tensor_shapes
from gpu_worker.quant import export, scaling
from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.fitting import fit, gptq
from gpu_worker.quant.loading import planned_bytes
from gpu_worker.quant.weights import IntWeight
from shared import model_folder
from shared.model_folder import ModelError

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, wanted: str = "auto", dtype: torch.dtype = torch.float32) -> Decoder:
    config = model_folder.read_config(folder)
    spec, quant = read_spec(config), read_quantization(config, wanted)
    source = Safetensors(folder, spec, quant)
    return load_decoder(spec, source, ops.load(CPU), dtype=dtype, device=CPU, max_model_len=64, quant=quant)


def plain_tensors() -> dict[str, Tensor]:
    source = Dummy(read_spec(CONFIG))
    return {name: source.get(name) for name in source.names}


def gptq_folder(folder: Path) -> dict[str, Tensor]:
    """Writes one; the dequantized weights of its layers."""
    tensors, values = plain_tensors(), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        k = weight.shape[1]
        grid = fit(weight, torch.ones(k), bits=4, group=32, symmetric=False)
        codes = gptq(weight, torch.eye(k), grid)
        groups = torch.arange(k, dtype=torch.int32) // 32
        part = IntWeight(4, codes, grid.scales.half(), grid.zeros.to(torch.uint8), groups)
        values[name] = scaling.dequantize(codes.float(), grid)
        tensors |= {f"{name.removesuffix('weight')}{last}": tensor for last, tensor in export.gptq_tensors(part).items()}
    write(folder, CONFIG | {"quantization_config": export.gptq_config(4, 32, False)}, tensors)
    return values


def test_fused_matrices_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    values = gptq_folder(tmp_path)
    layer = load(tmp_path).layers[1]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    prefix = "model.layers.1."
    qkv = torch.cat([values[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([values[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    torch.testing.assert_close(layer.qkv(x), x @ qkv.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.gate_up(x), x @ gate_up.t(), rtol=1e-4, atol=1e-4)
    assert layer.qkv.num_bytes < qkv.nbytes / 2  # small sizes are filled up to whole blocks


def test_float8_at_load(tmp_path: Path) -> None:
    tensors = plain_tensors()
    write(tmp_path, CONFIG, tensors)
    made, plain = load(tmp_path, "fp8"), load(tmp_path)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    found, right = made.layers[0].qkv(x), plain.layers[0].qkv(x)
    error = float((found - right).norm() / right.norm())
    assert 0 < error < 0.06
    assert made.layers[0].qkv.num_bytes < plain.layers[0].qkv.num_bytes / 2
    torch.testing.assert_close(made.head(x), plain.head(x))  # the head stays as it is


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"), "no tensor scales"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 64)}),
            "holds model.layers.1.mlp.up_proj.weight",
        ),
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.qweight"), "lacks"),
        (lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.scales": torch.ones(3, 96)}), "up_proj"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    gptq_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    write(tmp_path, model_folder.read_config(tmp_path), tensors)
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


def test_packed_tensors_without_a_config_are_refused(tmp_path: Path) -> None:
    gptq_folder(tmp_path)
    config = model_folder.read_config(tmp_path)
    config["quantization_config"]["dynamic"] = {"-:.*up_proj": {}}
    write(tmp_path, config, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"says that model\.layers\.0\.mlp\.up_proj is not quantized"):
        load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        export.gptq_config(4, 32, True),
        export.awq_config(4, 32, False),
        export.fp8_config(["lm_head"]),
        export.gptq_config(8, 32, True),
    ],
)
def test_random_weights_in_quantized_form(config: dict[str, Any]) -> None:
    """What speed is measured with: the form and the size of the real thing, reasonable values, the same at every start."""
    spec, quant = read_spec(CONFIG), read_quantization({"quantization_config": config})
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))

    def made() -> Decoder:
        return load_decoder(spec, Dummy(spec), ops.load(CPU), dtype=torch.float32, device=CPU, max_model_len=64, quant=quant)

    first = made().layers[0]
    y = first.gate_up(x)
    assert 0.3 < float(y.std()) < 3
    assert torch.equal(y, made().layers[0].gate_up(x))
    assert planned_bytes(quant, tensor_shapes(spec), torch.float32) < planned_bytes(None, tensor_shapes(spec), torch.float32)
