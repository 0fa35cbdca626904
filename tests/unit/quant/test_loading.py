"""Quantized checkpoints into a Decoder: recognised from config.json, fused, refused when they contradict themselves."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_worker import ops
from gpu_worker.loading import _dtype
from gpu_worker.loading import load as start
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import Dummy, Safetensors, load_decoder, tensor_shapes
from gpu_worker.parallel.shard import divide
from gpu_worker.quant import export, scaling
from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.fitting import fit, gptq
from gpu_worker.quant.loading import QuantLoader, planned_bytes
from gpu_worker.quant.weights import IntWeight
from shared import model_folder
from shared.config import BadConfig, Config
from shared.model_folder import ModelError
from tests.plan_driver import GREEDY, Driver

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


def gptq_folder(folder: Path, ends: tuple[str, ...] = ("_proj.weight",)) -> dict[str, Tensor]:
    """Writes one whose matrices of these names are quantized; their dequantized weights."""
    tensors, values = plain_tensors(), {}
    for name in [name for name in tensors if name.endswith(ends)]:
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


def test_a_quantized_head_of_a_padded_vocabulary(tmp_path: Path) -> None:
    """120 tokens are no whole tile; ranks of a vocabulary that they cannot share evenly have 48, 48 and 24 of its rows."""
    values = gptq_folder(tmp_path, ("_proj.weight", "lm_head.weight"))
    config = model_folder.read_config(tmp_path)
    config["quantization_config"]["lm_head"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    exact = x @ values["lm_head.weight"].t()
    torch.testing.assert_close(load(tmp_path).head(x), exact, rtol=1e-4, atol=1e-4)
    spec, quant = read_spec(config), read_quantization(config)
    assert quant is not None and quant.scheme_of("lm_head") is not None
    get = Safetensors(tmp_path, spec, quant)
    shards = [dataclasses.replace(divide(spec, 0, 1), rank=rank, size=3) for rank in range(3)]
    parts = [QuantLoader(quant, get.get, get.names, CPU, torch.float32, shard.cut_quantized) for shard in shards]
    heads = [part.linear(["lm_head"], None) for part in parts]
    products = [head(x) for head in heads if head]
    assert [product.shape[1] for product in products] == [shard.vocabulary[1] - shard.vocabulary[0] for shard in shards]
    torch.testing.assert_close(torch.cat(products, 1), exact, rtol=1e-4, atol=1e-4)


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


UP = "model.layers.1.mlp.up_proj"


def put(last: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Changes one tensor of a layer."""
    return lambda tensors: tensors.update({f"{UP}.{last}": make(tensors[f"{UP}.{last}"])})


def without(*last: str) -> Callable[[dict[str, Tensor]], None]:
    """Takes these tensors out of all layers."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(last)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda tensors: tensors.pop(f"{UP}.scales"), {}, f"layer {UP} is quantized (gptq) but has no tensor scales"),
        (lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(96, 64)}), {}, f"the checkpoint holds {UP}.weight"),
        (lambda tensors: tensors.pop(f"{UP}.qweight"), {}, "lacks 1 tensors"),
        (lambda tensors: tensors.update({f"{UP}x.scales": torch.ones(2, 96)}), {}, f"the first is {UP}x.scales"),
        (put("scales", lambda x: torch.ones(3, 96)), {}, "scales of (96, 3) have zero points of (96, 2)"),
        (put("scales", lambda x: x[:, :-1].clone()), {}, "a weight of 96 x 64 has scales of (95, 2)"),
        (put("scales", lambda x: x.int()), {}, "scales are stored as torch.int32"),
        (put("scales", lambda x: x.index_fill(0, torch.tensor([1]), float("nan"))), {}, "of 192 scales 96 are NaN or infinite"),
        (put("scales", lambda x: x * float("inf")), {}, "of 192 scales 192 are NaN or infinite"),
        (put("qzeros", lambda x: x[:1].clone()), {}, "scales of (96, 2) have zero points of (96, 1)"),
        (put("qweight", lambda x: x[:-1].clone()), {}, "has shape (96, 56), config.json says (96, 64)"),
        (put("qweight", lambda x: x.long()), {}, "packed words are stored as torch.int64"),
        (put("qzeros", lambda x: x.float()), {}, "packed words are stored as torch.float32"),
        (put("g_idx", lambda x: x + 1), {}, "columns name groups 1 to 2, there are scales of 2"),
        (put("g_idx", lambda x: x - 1), {}, "columns name groups -1 to 0, there are scales of 2"),
        (put("g_idx", lambda x: x + 0.5), {}, "group numbers are stored as torch.float32"),
        (put("g_idx", lambda x: x[:8].clone()), {}, "(8,) group numbers"),
        (without("g_idx"), {"desc_act": True}, "the config says desc_act and the checkpoint has no g_idx"),
        (without("g_idx"), {"group_size": 64}, "64 columns in groups of 64 need 1 scales a row, it has 2"),
        (without("g_idx"), {"group_size": -1}, "64 columns in groups of 64 need 1 scales a row, it has 2"),
        (without(), {"group_size": 64}, "64 columns in groups of 64 need 1 scales a row, it has 2"),
        (without("g_idx"), {"group_size": 16}, "columns name groups 0 to 3, there are scales of 2"),
        (without(), {"bits": 8}, "has shape (64, 32), config.json says (64, 64)"),
        (without(), {"lm_head": True}, "lm_head is quantized (gptq), but the checkpoint holds lm_head.weight"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, change: Any, config: dict[str, Any], said: str) -> None:
    gptq_folder(tmp_path)
    tensors, whole = load_file(tmp_path / "model.safetensors"), model_folder.read_config(tmp_path)
    change(tensors)
    whole["quantization_config"] |= config
    write(tmp_path, whole, tensors)
    with pytest.raises(ModelError, match=re.escape(said)) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def cut_in_two(folder: Path, *, twice: int = 0, index: Callable[[str, str], Any] = lambda name, file: file) -> None:
    """The folder's weights in two files, so many tensors in both, with an index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    weight_map: dict[str, Any] = {}
    names = sorted(tensors)
    middle = len(names) // 2
    for number, part in enumerate((names[: middle + twice], names[middle:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= {name: index(name, file) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_two_files(tmp_path: Path) -> None:
    gptq_folder(tmp_path)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    right = load(tmp_path).layers[1].qkv(x)
    cut_in_two(tmp_path)
    assert torch.equal(load(tmp_path).layers[1].qkv(x), right)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: cut_in_two(folder, twice=3), "is in another file of"),
        (lambda folder: cut_in_two(folder, index=lambda name, file: 5), "weight_map names 5, expected a file's name"),
        (lambda folder: cut_in_two(folder, index=lambda name, file: "../x"), "weight_map names '../x'"),
        (lambda folder: cut_in_two(folder, index=lambda name, file: "model-00001-of-00002.safetensors"), "lacks 10 tensors"),
        (lambda folder: cut_in_two(folder, index=lambda name, file: f"{file}.gone"), "which its index names"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors is empty"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100), "is damaged or no safetensors file"),
        (lambda folder: os.truncate(folder / "model.safetensors", 40_000), "is damaged or no safetensors file"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "holds list instead of an object"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, damage: Any, said: str) -> None:
    gptq_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=re.escape(said)) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_groups_in_order_need_no_g_idx(tmp_path: Path) -> None:
    values = gptq_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    without("g_idx")(tensors)
    write(tmp_path, model_folder.read_config(tmp_path), tensors)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    exact = x @ values["model.layers.0.mlp.down_proj.weight"].t()
    torch.testing.assert_close(load(tmp_path).layers[0].down(x), exact, rtol=1e-4, atol=1e-4)


def test_a_folder_that_says_float16(tmp_path: Path) -> None:
    """Many quantized folders do: a CPU, which has no float16, answers in another type without a flag; a GPU does as it says."""
    gptq_folder(tmp_path)
    config = model_folder.read_config(tmp_path)
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    base = Config(model=str(tmp_path), device="cpu", kv_cache_bytes=2**20, max_num_seqs=2, cpu_threads=1)
    driver = Driver(start(base).runner)
    sequence = driver.add([5, 6, 7], GREEDY._replace(logprobs=0))
    driver.generate(3)
    assert len(sequence.output) == 3 and all(math.isfinite(value) for value in sequence.logprobs)
    with pytest.raises(BadConfig, match="float16"):
        start(dataclasses.replace(base, dtype="float16"))
    assert _dtype(base, torch.float16, torch.device("cuda"), quantized=True) == torch.float16
    assert _dtype(base, torch.float16, CPU, quantized=True) in (torch.bfloat16, torch.float32)


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
