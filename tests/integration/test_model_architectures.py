"""Random tiny models of every architecture, made and judged by transformers: whole, in chunks, decoding, in mixed batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from gpu_worker.loading import load
from gpu_worker.runner import Runner
from shared.config import Config
from tests.plan_driver import GREEDY, Driver, Running

VOCAB = 120
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "factor": 1.0,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0], "long_factor": [2.0] * 6}  # fmt: skip
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.22, "logits_scaling": 5.0}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama 2": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama 3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "hidden_size": 72, "num_attention_heads": 6}),
    "llama biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 18}),
    "mistral no window": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen 2": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": YARN}),
    "qwen 2 window": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 17,
                                                         "max_window_layers": 1}),
    "qwen 3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen 3 layer types": (Qwen3Config, Qwen3ForCausalLM, {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 16, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "llama linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR, "attention_bias": True}),
    "mistral head size": (MistralConfig, MistralForCausalLM, {"head_dim": 32, "sliding_window": None}),
    "ministral": (MinistralConfig, MinistralForCausalLM, {"head_dim": 16, "sliding_window": 16, "layer_types":
                                                             ["full_attention", "sliding_attention", "sliding_attention"]}),
    "phi 3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 20, "pad_token_id": 0}),
    "phi 4 mini": (Phi3Config, Phi3ForCausalLM, {"rope_parameters": LONGROPE, "num_key_value_heads": 1, "pad_token_id": 0,
                                                    "original_max_position_embeddings": 512, "tie_word_embeddings": True}),
    "granite": (GraniteConfig, GraniteForCausalLM, GRANITE),
    "granite tied": (GraniteConfig, GraniteForCausalLM, GRANITE | {"tie_word_embeddings": True, "attention_bias": True}),
    "seed oss": (SeedOssConfig, SeedOssForCausalLM, {"head_dim": 24, "attention_bias": True, "attention_out_bias": False}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Runner]:
    """The same random model in transformers and in a runner, float32."""
    config_kind, model_kind, changes = MODELS[request.param]
    torch.manual_seed(3)
    theirs: PreTrainedModel = model_kind(config_kind(**(SHAPE | changes))).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():  # large enough that attention, norms and biases matter
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.5) + (1.0 if "norm" in name else 0.0))
    folder: Path = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert json.loads((folder / "config.json").read_text())["architectures"] == [model_kind.__name__]
    config = Config(model=str(folder), dtype="float32", device="cpu", kv_cache_bytes=2**22, max_num_seqs=16, cpu_threads=1)
    return theirs, load(config).runner


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def reference(theirs: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Log-probabilities [tokens, V] of what follows each token."""
    with torch.no_grad():
        return torch.log_softmax(theirs(torch.tensor([tokens])).logits[0].double(), dim=-1)


def check(theirs: PreTrainedModel, sequence: Running) -> None:
    """Every distribution of the output, whole, and every prompt token's log-probability."""
    expected = reference(theirs, sequence.known)
    for index, (ids, logprobs) in enumerate(zip(sequence.top_ids, sequence.top_logprobs, strict=True)):
        row = expected[sequence.num_prompt + index - 1]
        assert sorted(ids) == list(range(VOCAB))
        assert (torch.tensor(logprobs) - row[ids]).abs().max() < 2e-3
    for position, logprob in enumerate(sequence.prompt_logprobs, start=1):
        assert abs(logprob - float(expected[position - 1, sequence.known[position]])) < 2e-3


ALL = GREEDY._replace(logprobs=VOCAB, score_width=0)


@pytest.mark.parametrize("chunk", [10_000, 16, 5, 1])
def test_prompts_whole_and_in_chunks(pair: tuple[PreTrainedModel, Runner], chunk: int) -> None:
    theirs, runner = pair
    runner.reset()
    driver = Driver(runner, chunk=chunk)
    sequences = [driver.add(prompt(length, length), ALL) for length in (1, 15, 16, 17, 50)]
    driver.generate(3)
    for sequence in sequences:
        assert len(sequence.prompt_logprobs) == sequence.num_prompt - 1
        check(theirs, sequence)


def test_mixed_batches_while_sequences_come_and_go(pair: tuple[PreTrainedModel, Runner]) -> None:
    theirs, runner = pair
    runner.reset()
    runner.cache.storage.fill_(torch.nan)  # whatever is read must have been written first
    driver = Driver(runner, chunk=7, pages=range(1, 64))
    rng = np.random.default_rng(0)
    for step in range(40):
        if step % 3 == 0:
            driver.add(prompt(int(rng.integers(1, 45)), step), ALL)
        driver.run_step()
        for sequence in list(driver.sequences):
            if len(sequence.output) >= 9:
                check(theirs, sequence)
                driver.finish(sequence)
    for sequence in driver.sequences:
        check(theirs, sequence)


def test_warm_prefix_pages_and_groups(pair: tuple[PreTrainedModel, Runner]) -> None:
    theirs, runner = pair
    runner.reset()
    driver = Driver(runner)
    driver.use_groups = True
    shared = prompt(40, 7)
    first = driver.add([*shared, 5], GREEDY._replace(logprobs=VOCAB))
    driver.run_step()
    others = [
        driver.add([*shared, *prompt(length, length)], GREEDY._replace(logprobs=VOCAB), shared=first) for length in (1, 9, 20)
    ]
    assert all(other.computed == 32 for other in others)
    driver.add(prompt(33, 1), GREEDY._replace(logprobs=VOCAB))
    driver.generate(12)
    for sequence in driver.sequences:
        check(theirs, sequence)
