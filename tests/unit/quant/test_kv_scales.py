"""Pages of float8: when a worker has them, which scales it reads, and what they change in a whole model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.loading import Loaded, load
from gpu_worker.memory import plan_memory
from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.kv_scales import FLOAT8, page_dtype, read
from gpu_worker.quant.scheme import QuantSpec
from shared.config import BadConfig, Config
from shared.model_folder import ModelError
from tests.plan_driver import GREEDY, Driver

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32
LAYER = "model.layers.1.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def spec(scheme: Any) -> QuantSpec:
    found = read_quantization({"quantization_config": {**FP8, "kv_cache_scheme": scheme}})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("wanted", "scheme", "capability", "right"),
    [
        ("auto", None, (9, 0), F32),
        ("auto", SCHEME, (9, 0), FLOAT8),
        ("auto", "static", (8, 9), FLOAT8),
        ("auto", SCHEME, (8, 0), F32),
        ("none", SCHEME, (9, 0), F32),
        ("fp8", None, (8, 9), FLOAT8),
    ],
)
def test_when(
    monkeypatch: pytest.MonkeyPatch, wanted: str, scheme: Any, capability: tuple[int, int], right: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert page_dtype(wanted, spec(scheme), F32, CUDA) == right


def test_an_old_gpu_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BadConfig, match=r"kv_cache_dtype = 'fp8': this GPU has compute capability 8\.0, float8 needs 8\.9"):
        page_dtype("fp8", None, F32, CUDA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_bits": 4}, "num_bits = 4"),
        ({"type": "int"}, "type = 'int'"),
        ({"dynamic": True}, "dynamic = True"),
        ({"strategy": "token"}, "strategy = 'token'"),
    ],
)
def test_other_schemes_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        spec({**SCHEME, **change})


def scales(*, required: bool = True, **tensors: Any) -> Tensor:
    stored = {f"{LAYER}.{name.replace('__', '.')}": torch.tensor(value) for name, value in tensors.items()}
    return read(stored.__getitem__, stored.keys(), LAYER, 2, required=required)


def test_scales_are_found_under_every_name() -> None:
    right = torch.tensor([[0.5, 0.5], [2.0, 2.0]])
    assert torch.equal(scales(k_scale=0.5, v_scale=[2.0]), right)
    assert torch.equal(scales(k_proj__output_scale=[0.5], v_proj__output_scale=2.0), right)
    assert torch.equal(scales(k_proj__k_scale=0.5, v_proj__v_scale=2.0), right)
    assert torch.equal(scales(k_scale=[[[0.5]], [[0.25]]], v_scale=2.0), torch.tensor([[0.5, 0.25], [2.0, 2.0]]))
    assert torch.equal(scales(required=False), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, r"no model\.layers\.1\.self_attn\.k_scale"),
        ({"k_scale": 1.0}, "no .*v_scale"),
        ({"v_scale": 1.0}, "no .*k_scale"),
        ({"k_scale": [1.0, 1.0, 1.0], "v_scale": 1.0}, "3 values, expected 1 or 2"),
        ({"k_scale": 0.0, "v_scale": 1.0}, r"k_scale = 0\.0"),
        ({"k_scale": 1.0, "v_scale": [1.0, -1.0]}, r"v_scale = -1\.0"),
        ({"k_scale": 1.0, "v_scale": torch.nan}, "v_scale = nan"),
    ],
)
def test_bad_scales_are_refused(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        scales(**tensors)


# --- a whole model ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model")
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256,
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.dim() == 1 else 0.0))
    made.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def start(folder: Path, **settings: Any) -> Loaded:
    base = Config(model=str(folder), dtype="float32", device="cpu", kv_cache_bytes=2**22, max_num_seqs=8, cpu_threads=1)
    return load(dataclasses.replace(base, **settings))


def scored(loaded: Loaded, chunk: int = 10**9) -> Tensor:
    """Log-probabilities of a prompt and of what is generated after it, in one column."""
    driver = Driver(loaded.runner, chunk=chunk)
    prompt = [int(token) for token in torch.randint(0, 120, (70,), generator=torch.Generator().manual_seed(5))]
    sequence = driver.add(prompt, GREEDY._replace(logprobs=0, score_width=0))
    driver.generate(20)
    return torch.tensor([*sequence.prompt_logprobs, *sequence.logprobs])


def test_twice_the_tokens(folder: Path) -> None:
    float8 = start(folder, kv_cache_dtype="fp8")
    assert float8.runner.cache.storage.dtype == FLOAT8 and "float8_e4m3fn" in float8.memory.text
    config = Config(kv_cache_bytes=2**22)
    model, bf16 = float8.runner.decoder.spec, torch.bfloat16
    pages = [plan_memory(config, model, bf16, CPU, page_dtype=each).num_pages for each in (None, FLOAT8)]
    assert float8.memory.num_pages == pages[1] == 2 * pages[0]


def test_a_little_is_lost_and_chunks_change_nothing(folder: Path) -> None:
    """Attention reads rounded keys everywhere, so where a prompt is cut does not show."""
    plain, whole = scored(start(folder)), scored(start(folder, kv_cache_dtype="fp8"))
    assert 1e-3 < float((whole[:69] - plain[:69]).abs().mean()) < 0.3
    cut = scored(start(folder, kv_cache_dtype="fp8"), chunk=16)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)


def with_scales(folder: Path, target: Path, values: dict[str, float]) -> Path:
    """A copy whose layers have these scales, and whose config promises them."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name, value in values.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([value])
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:.*"], "kv_cache_scheme": SCHEME,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text("{}")
    return target


def test_scales_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Recognised without a flag. Scales that are powers of two round as 1 does; a large one loses nearly everything."""
    whole = scored(start(folder, kv_cache_dtype="fp8"))
    loaded = start(with_scales(folder, tmp_path / "two", {"k_scale": 0.25, "v_scale": 0.25}))
    assert loaded.runner.cache.storage.dtype == FLOAT8
    torch.testing.assert_close(scored(loaded)[:69], whole[:69], rtol=0.02, atol=0.02)
    coarse = scored(start(with_scales(folder, tmp_path / "large", {"k_scale": 1e4, "v_scale": 1e4})))
    assert float((coarse[:69] - whole[:69]).abs().mean()) > 0.5
    ignored = scored(start(tmp_path / "large", kv_cache_dtype="none"))
    torch.testing.assert_close(ignored[:69], scored(start(folder))[:69])


def test_scales_are_read_after_loading(folder: Path) -> None:
    """B59: they are memory that every step reads, not numbers that were built in."""
    loaded = start(folder, kv_cache_dtype="fp8")
    before = scored(loaded)
    with torch.inference_mode():
        for layer in loaded.runner.decoder.layers:
            assert layer.kv_scales is not None
            layer.kv_scales.fill_(1e4)
    assert float((scored(loaded)[:69] - before[:69]).abs().mean()) > 0.5


def test_promised_scales_that_are_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="kv_cache_scheme, but the checkpoint has no"):
        start(with_scales(folder, tmp_path / "none", {}))
