"""Our own quantizer: it loses less than rounding does, AWQ's scaling changes nothing, and its folders are read back exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import Safetensors, tensor_shapes
from gpu_worker.quant import export, scaling
from gpu_worker.quant.calibration import Inputs
from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.fitting import fit, gptq, output_error
from gpu_worker.quant.loading import planned_bytes, read_weight, tensor_names
from gpu_worker.quant.quantizer import TOGETHER, Options, _Work, quantize
from gpu_worker.quant.weights import IntWeight
from shared import model_folder
from shared.model_folder import ModelError

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 120, "max_position_embeddings": 128,
}  # fmt: skip


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated_moment(k: int) -> Tensor:
    """Of inputs with a few strong channels, as real activations have."""
    x = noise(500, k, seed=3) @ (torch.eye(k) + 0.3 * noise(k, k, seed=4) / k**0.5)
    x[:, :3] *= 20
    moment: Tensor = x.t() @ x / len(x)
    return moment


def tiny(kind: Any = LlamaForCausalLM, config: Any = LlamaConfig, **more: Any) -> Any:
    torch.manual_seed(1)
    model = kind(config(**SIZES, **more)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data = 1 + 0.5 * noise(*parameter.shape, seed=len(name)).abs()
        if name.endswith("bias"):
            parameter.data = noise(*parameter.shape, seed=len(name))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    tiny(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(path)
    letters = {chr(33 + number): number for number in range(94)} | {"[UNK]": 94}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(path)
    (path.parent / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


def test_gptq_loses_less_than_rounding() -> None:
    weight, moment = noise(48, 128), correlated_moment(128)
    for symmetric in (False, True):
        grid = fit(weight, moment.diagonal(), bits=4, group=32, symmetric=symmetric)
        rounded = output_error(weight, scaling.nearest(weight, grid), moment)
        better = output_error(weight, scaling.dequantize(gptq(weight, moment, grid).float(), grid), moment)
        assert better < 0.8 * rounded


def test_fitted_ranges_lose_less_than_extremes() -> None:
    weight = noise(48, 128)
    weight[:, ::32] *= 6  # one outlier in each group
    moment = torch.eye(128)
    moment.diagonal()[::32] = 0.01  # whose input hardly matters
    fitted = fit(weight, moment.diagonal(), bits=4, group=32, symmetric=True)
    extreme = fit(weight, moment.diagonal(), bits=4, group=32, symmetric=True, ranges=(1.0,))
    errors = [output_error(weight, scaling.nearest(weight, grid), moment) for grid in (fitted, extreme)]
    assert errors[0] < 0.8 * errors[1]


def test_an_input_that_is_never_used_is_no_trouble() -> None:
    moment = correlated_moment(64)
    moment[5], moment[:, 5] = 0, 0
    weight = noise(8, 64)
    grid = fit(weight, moment.diagonal(), bits=4, group=32, symmetric=False)
    values = scaling.dequantize(gptq(weight, moment, grid).float(), grid)
    assert bool((values[:, 5] == 0).all()) and bool(values.isfinite().all())


@pytest.mark.parametrize("make", [lambda: tiny(), lambda: tiny(Qwen2ForCausalLM, Qwen2Config)], ids=["llama", "qwen2"])
@torch.inference_mode()
def test_awq_scaling_changes_no_output(make: Any) -> None:
    model = make()
    layer, x = model.model.layers[0], torch.randint(0, 120, (1, 40), generator=torch.Generator().manual_seed(2))
    before = model(x).logits
    gains = layer.input_layernorm.weight.clone()
    moments = Inputs(model, [x], torch.device("cpu")).covariances(layer, tuple(names[0] for names in TOGETHER))
    scaled = dict(moments)
    _Work("awq", 4, 32, False)._scale(layer, scaled)
    assert not torch.equal(gains, layer.input_layernorm.weight)
    torch.testing.assert_close(model(x).logits, before, rtol=1e-3, atol=1e-4)
    again = Inputs(model, [x], torch.device("cpu")).covariances(layer, tuple(names[0] for names in TOGETHER))
    for name, moment in again.items():  # what was derived is what the scaled layer really sees
        torch.testing.assert_close(scaled[name], moment, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("symmetric", [False, True])
def test_written_tensors_are_read_back(symmetric: bool) -> None:
    weight = noise(16, 64)
    grid = fit(weight, torch.ones(64), bits=4, group=32, symmetric=symmetric)
    codes = gptq(weight, torch.eye(64), grid)
    groups = torch.arange(64, dtype=torch.int32) // 32
    made = IntWeight(4, codes, grid.scales.half(), grid.zeros.to(torch.uint8), groups)
    assert bool((grid.zeros >= 1).all())  # version 1 of the GPTQ format: a stored -1 would be read in two ways
    for config, tensors in (
        (export.gptq_config(4, 32, symmetric), export.gptq_tensors(made)),
        (export.awq_config(4, 32, symmetric), export.awq_tensors(made)),
    ):
        spec = read_quantization({"quantization_config": config})
        assert spec is not None
        scheme = spec.scheme_of("model.layers.0.mlp.up_proj")
        assert scheme is not None
        assert torch.equal(read_weight(scheme, tensors).dequantize(), scaling.dequantize(codes.float(), grid))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_whole_folder(folder: Path, tmp_path: Path, method: str) -> None:
    """The written folder passes the worker's checks, and its weights give nearly the outputs of the original."""
    out = tmp_path / "out"
    quantize(folder, out, Options(method=method, calibration=folder.parent / "text.txt", tokens=64, samples=8))
    config = model_folder.read_config(out)
    spec, quant = read_spec(config), read_quantization(config)
    assert quant is not None
    Safetensors(out, spec, quant)
    assert {"tokenizer.json", "model.safetensors"} <= {file.name for file in out.iterdir()}
    stored = load_file(out / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name in tensor_shapes(spec):
        layer = name.removesuffix(".weight")
        scheme = quant.scheme_of(layer)
        if scheme is None or "norm" in name or "embed" in name:
            state[name] = stored[name].float()
            continue
        present = {last: stored[f"{layer}.{last}"] for last in tensor_names(scheme) if f"{layer}.{last}" in stored}
        state[name] = read_weight(scheme, present).dequantize()
    original: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made.load_state_dict(state, strict=False)
    x = torch.randint(0, 94, (1, 60), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        right, found = original(x).logits, made(x).logits
    error = float((found - right).norm() / right.norm())
    assert 0 < error < (0.05 if method == "fp8" else 0.3)
    assert planned_bytes(quant, tensor_shapes(spec), torch.bfloat16) < planned_bytes(None, tensor_shapes(spec), torch.bfloat16)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        quantize(folder, tmp_path, Options(method="fp8"))
    out = tmp_path / "fp8"
    quantize(folder, out, Options(method="fp8"))
    with pytest.raises(ModelError, match="quantized already"):
        quantize(out, tmp_path / "twice", Options(method="gptq"))
    with pytest.raises(ModelError, match="'int2'"):
        quantize(folder, tmp_path / "none", Options(method="int2"))
    assert not list(tmp_path.glob("*tmp*"))
