"""config.json to ModelSpec: every architecture's rules, both spellings of the rotary keys, and clear refusals."""

from typing import Any

import pytest

from gpu_worker.model.spec import read_spec
from shared.model_folder import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


def test_defaults_of_a_short_config() -> None:
    spec = read_spec(LLAMA)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.windows) == (4, 16, 1e-6, (0, 0, 0))
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias or spec.qk_norm or spec.tied_head)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.dim) == ("default", 10_000.0, 16)
    assert spec.context_limit == 2048


@pytest.mark.parametrize(("changes", "expected"), [
    ({"architectures": ["MistralForCausalLM"]}, (4096,) * 3),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, (128,) * 3),
    ({"architectures": ["LlamaForCausalLM"], "sliding_window": 128}, (0, 0, 0)),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}, (0, 0, 0)),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True}, (0, 0, 0)),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1},
     (0, 128, 128)),
    ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "use_sliding_window": True,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, 0, 8)),
])  # fmt: skip
def test_windows(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert read_spec(LLAMA | changes).windows == expected


def test_biases_and_norms_follow_the_architecture() -> None:
    qwen2 = read_spec(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    qwen3 = read_spec(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32})
    assert not qwen3.qkv_bias and qwen3.qk_norm and qwen3.head_dim == 32 and qwen3.qkv_size == 3 * 4 * 32
    llama = read_spec(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias


def test_old_and_new_rotary_keys_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert read_spec(old).rope == read_spec(older).rope == read_spec(new).rope
    assert read_spec(new).rope.theta == 5e5


def test_context_limit_of_stretched_models() -> None:
    def limit(**scaling: Any) -> int:
        return read_spec(LLAMA | {"rope_scaling": scaling}).context_limit

    assert limit(rope_type="linear", factor=4.0) == 8192
    assert limit(rope_type="dynamic", factor=2.0) == 4096
    assert limit(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048) == 8192
    assert limit(rope_type="llama3", factor=8.0, original_max_position_embeddings=256) == 2048


@pytest.mark.parametrize(("changes", "words"), [
    ({"architectures": ["GPTBigCodeForCausalLM"]}, ["GPTBigCodeForCausalLM", "supported", "LlamaForCausalLM"]),
    ({"architectures": [], "model_type": "mamba"}, ["mamba", "supported"]),
    ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["spiral", "yarn"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ["longrope", "8"]),
    ({"hidden_size": None}, ["hidden_size", "None"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({"num_key_value_heads": 3}, ["4 heads", "3 KV heads"]),
    ({"torch_dtype": "float8"}, ["float8", "bfloat16"]),
    ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
     ["layer_types", "3"]),
])  # fmt: skip
def test_what_is_unknown_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refused:
        read_spec(LLAMA | changes)
    for word in words:
        assert word in str(refused.value)


def test_the_model_type_stands_in_for_a_missing_architecture() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert read_spec(config | {"model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"


def test_a_granite_says_its_factors_and_a_tied_head_is_freed_of_the_embeddings() -> None:
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 8.0}
    spec = read_spec(LLAMA | {"architectures": ["GraniteForCausalLM"]} | factors)
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "model.layers.2.mlp.down_proj.bias")
    assert [spec.weight_factor(name) for name in names] == [12.0, 0.5, 0.5]
    assert (spec.weight_factor("model.norm.weight"), spec.attention_scale) == (1 / 8, 0.25)
    tied = read_spec(LLAMA | {"architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True} | factors)
    assert tied.weight_factor("model.norm.weight") == 1 / 96
    llama = read_spec(LLAMA | factors)
    assert {llama.weight_factor(name) for name in (*names, "model.norm.weight")} == {1.0}
    with pytest.raises(ModelError, match="logits_scaling = 0, expected a positive number"):
        read_spec(LLAMA | {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0})
