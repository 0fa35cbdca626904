"""What quantized weights take: the plan of an 8B model, and that the plan says what the layers really take."""

from typing import Any

import pytest
import torch

from gpu_worker import memory
from gpu_worker.memory import plan_memory
from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import tensor_shapes
from gpu_worker.quant import export
from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.linear import ByteLinear, quantized_linear
from gpu_worker.quant.loading import planned_bytes, random_weight
from gpu_worker.quant.packed import for_kernels, pack
from gpu_worker.quant.weights import ByteWeight
from shared.config import Config

BF16, CUDA = torch.bfloat16, torch.device("cuda")
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def weights(quantization: dict[str, Any] | None) -> int:
    spec = read_spec(LLAMA_8B)
    quant = read_quantization({"quantization_config": quantization} if quantization else {})
    return planned_bytes(quant, tensor_shapes(spec), BF16)


def test_an_8b_model_in_four_bits() -> None:
    """6.98e9 parameters at 4 bits, for every 128 a word of 4 bytes for scale and zero point; embedding and head in bf16."""
    in_layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    others = 2 * 128256 * 4096 + 65 * 4096
    assert weights(None) == 2 * (in_layers + others)
    assert weights(AWQ) == in_layers // 2 + in_layers // 128 * 4 + 2 * others
    assert weights(AWQ) <= 6.0e9
    assert weights(export.fp8_config(["lm_head"])) < 9.1e9


def test_pages_grow_by_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda config, device: 24 * 10**9)
    spec = read_spec(LLAMA_8B)
    plain, awq = (
        plan_memory(Config(max_model_len=8192), spec, BF16, CUDA, weights(quantization)) for quantization in (None, AWQ)
    )
    saved = weights(None) - weights(AWQ)
    assert saved > 10.2e9
    assert 0 <= (awq.num_pages - plain.num_pages) * plain.page_bytes - saved + plain.page_bytes <= 2 * plain.page_bytes
    float8 = plan_memory(Config(max_model_len=8192), spec, BF16, CUDA, weights(AWQ), torch.float8_e4m3fn)
    assert float8.num_pages // awq.num_pages == 2 and float8.page_bytes * 2 == awq.page_bytes


@pytest.mark.parametrize(
    "config",
    [
        AWQ,
        {**AWQ, "zero_point": False},
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ],
)
def test_the_plan_is_what_a_layer_takes(config: dict[str, Any]) -> None:
    """Of one matrix in the layout that a GPU holds, within 2 %."""
    quant = read_quantization({"quantization_config": config})
    assert quant is not None
    name, shape = "model.layers.0.mlp.up_proj", (256, 4096)
    scheme = quant.scheme_of(name)
    assert scheme is not None
    weight = random_weight(scheme, shape, seed=1)
    planned = planned_bytes(quant, {f"{name}.weight": shape}, BF16)
    if isinstance(weight, ByteWeight):
        made = quantized_linear([weight], None, torch.device("cpu"), BF16)
        assert isinstance(made, ByteLinear)
        taken = made.num_bytes
    else:
        taken = for_kernels(pack(weight)).num_bytes
    assert abs(taken - planned) < 0.02 * planned
