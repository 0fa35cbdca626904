"""Rotary tables of every scaling equal transformers' at short, middle and long positions."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpu_worker.model.rope import cos_sin_table, inverse_frequencies
from gpu_worker.model.spec import read_spec

LENGTH = 61_000  # the longest sequence; scalings that depend on it are those of a sequence of this length
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 10,
}  # fmt: skip
SCALINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (65_536, {}),
    "linear": (8192, {"rope_type": "linear", "factor": 8.0}),
    "dynamic": (4096, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic unscaled": (65_536, {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": (65_536, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}),
    "yarn tuned": (65_536, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0,
                            "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}),
    "yarn attention factor": (65_536, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                                       "attention_factor": 1.5}),
    "llama3": (131_072, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}),
    "longrope": (65_536, {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 16.0,
                          "short_factor": [1.0 + n / 100 for n in range(32)], "long_factor": [1.0 + n / 3 for n in range(32)]}),
}  # fmt: skip


@pytest.mark.parametrize("old_keys", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str, old_keys: bool) -> None:
    limit, scaling = SCALINGS[name]
    scaling = copy.deepcopy(scaling)
    parameters = {"rope_type": "default", **scaling, "rope_theta": 500_000.0}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**SHAPE, max_position_embeddings=limit, rope_parameters=copy.deepcopy(parameters))
    )
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": limit, **SHAPE}
    if old_keys:
        config |= {"rope_theta": 500_000.0, "rope_scaling": scaling or None}
    else:
        config |= {"rope_parameters": parameters}
    table = cos_sin_table(read_spec(config).rope, LENGTH)
    positions = torch.tensor([0, 1, 8000, 8192, 60_000, LENGTH - 1])
    cos, sin = theirs(torch.zeros(1, 1, 1), positions[None])  # the last position is what makes the scaling long
    ours = table[positions]
    assert table.dtype == torch.float32 and table.shape == (LENGTH, 64)
    # Their dynamic base is a float32 power of the length, ours a float64 one: 1e-7 of it is 1e-2 of an angle of 60,000.
    atol = 2e-2 if name == "dynamic" else 2e-6
    assert torch.allclose(ours[:, :32], cos[0, :, :32], atol=atol)
    assert torch.allclose(ours[:, 32:], sin[0, :, :32], atol=atol)


def test_dynamic_frequencies_equal_transformers_exactly() -> None:
    limit, scaling = SCALINGS["dynamic"]
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](
        LlamaConfig(**SHAPE, max_position_embeddings=limit, rope_parameters={**scaling, "rope_theta": 5e5}),
        "cpu",
        seq_len=LENGTH,
    )
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": limit, **SHAPE, "rope_theta": 5e5}
    ours = inverse_frequencies(read_spec(config | {"rope_scaling": scaling}).rope, LENGTH)
    assert torch.allclose(ours, theirs, rtol=1e-7, atol=0)


def test_longrope_is_short_for_a_server_of_short_sequences() -> None:
    limit, scaling = SCALINGS["longrope"]
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": limit, **SHAPE, "rope_scaling": scaling}
    rope = read_spec(config).rope
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**SHAPE, max_position_embeddings=limit, rope_parameters={**copy.deepcopy(scaling), "rope_theta": 1e4})
    )
    cos, _ = theirs(torch.zeros(1, 1, 1), torch.tensor([[4000]]))
    assert torch.allclose(cos_sin_table(rope, 4096)[4000, :32], cos[0, 0, :32], atol=2e-6)
    assert not torch.allclose(cos_sin_table(rope, 4097)[4000, :32], cos[0, 0, :32], atol=1e-3)
