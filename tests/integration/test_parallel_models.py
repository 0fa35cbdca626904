"""Random tiny models divided among 2 and 4 ranks (threads with real gloo groups): tokens and logits of the whole model."""

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.loading import load
from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import tensor_shapes
from gpu_worker.parallel.group import HOST, GroupError, Seat
from gpu_worker.runner import Runner
from shared.config import BadConfig, Config
from shared.sampling import Edit
from tests.plan_driver import GREEDY, Driver

VOCAB = 101  # no multiple of the ranks
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen 2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen 3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 1},
    "gptq": {"architectures": ["LlamaForCausalLM"], "quantization_config": GPTQ},
    "gptq head": {"architectures": ["LlamaForCausalLM"], "quantization_config": GPTQ | {"lm_head": True}},
}


def write(folder: Path, changes: dict[str, Any]) -> Config:
    """A folder with random weights, large enough that attention, norms and biases matter (gptq: those of dummy_weights)."""
    model = SHAPE | changes
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "tokenizer.json").write_text("{}")
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in tensor_shapes(read_spec(model)).items():
        noise = torch.randn(shape, generator=draw) * (0.2 if len(shape) > 1 else 0.5)
        tensors[name] = noise + 1 if "norm" in name else noise
    save_file(tensors, folder / "model.safetensors")
    return Config(
        model=str(folder), dtype="float32", device="cpu", kv_cache_bytes=2**21, max_num_seqs=16, cpu_threads=1,
        dummy_weights="quantization_config" in changes,
    )  # fmt: skip


def on_ranks(config: Config, size: int, work: Callable[[Runner], Any]) -> list[Any]:
    """What every rank's work returns; each is a thread that loads its part and does the same."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(size) as threads:
        port, descriptor = listener.getsockname()[1], listener.detach()

        def run(rank: int) -> Any:
            loaded = load(config, Seat(rank, size, 1, port, descriptor if rank == 0 else -1))
            return work(loaded.runner)

        return list(threads.map(run, range(size)))


def generate(runner: Runner) -> list[tuple[Any, ...]]:
    """Chunks, mixed batches, a warm prefix, scored prompts, an edit in the last rank's part of the vocabulary, noise."""
    driver = Driver(runner, chunk=11)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(0, VOCAB, length).tolist() for length in (1, 16, 33, 40)]
    wide = GREEDY._replace(logprobs=VOCAB)
    sequences = [driver.add(prompt, wide._replace(score_width=0)) for prompt in prompts]
    driver.run_step()
    driver.generate(2)
    sequences.append(driver.add([*prompts[3], 7], wide, shared=sequences[3]))
    sequences.append(driver.add(prompts[1], wide, edits=[Edit(VOCAB - 1, 1e4)]))
    sequences.append(driver.add(prompts[2], wide._replace(temperature=0.9, seed=11)))
    driver.generate(8)
    assert sequences[5].output == [VOCAB - 1] * 8
    return [(each.output, each.top_ids, each.top_logprobs, each.prompt_logprobs) for each in sequences]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_the_whole_model(tmp_path: Path, name: str, size: int) -> None:
    config = write(tmp_path, MODELS[name])
    whole = generate(load(config).runner)
    ranks = on_ranks(config, size, generate)
    for rank in ranks[1:]:
        assert rank == ranks[0]  # to the last bit
    for (output, ids, logprobs, prompt), (right_output, right_ids, right_logprobs, right_prompt) in zip(
        ranks[0], whole, strict=True
    ):
        assert output == right_output
        for row, right_row, at, right_at in zip(logprobs, right_logprobs, ids, right_ids, strict=True):
            found = np.array(row)[np.argsort(at)] - np.array(right_row)[np.argsort(right_at)]
            assert np.abs(found).max() < 2e-3
        assert np.allclose(prompt, right_prompt, atol=2e-3)


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    config = write(tmp_path, MODELS["llama"] | {"num_key_value_heads": 4})
    whole = load(config)
    halves = on_ranks(config, 2, lambda runner: (runner.cache.storage.shape, runner.decoder.embedding.weight.shape[0]))
    shape = whole.runner.cache.storage.shape
    assert [kv[3] for kv, _ in halves] == [shape[3] // 2] * 2
    assert all(abs(kv[2] - 2 * shape[2]) <= 1 for kv, _ in halves)  # twice the pages in the same memory
    assert [rows for _, rows in halves] == [51, 50]


def test_what_the_model_cannot(tmp_path: Path) -> None:
    config = write(tmp_path, MODELS["llama"])
    with pytest.raises(BadConfig, match="tensor_parallel_size = 3: the model's 8 attention heads cannot be divided by 3"):
        load(config, Seat(0, 3, 1, 1, -1))


def test_ranks_that_never_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.parallel.group.JOIN_S", 0.3)
    config = write(tmp_path, MODELS["llama"])
    with socket.create_server((HOST, 0)) as listener:
        seat = Seat(0, 2, 1, listener.getsockname()[1], listener.detach())
    with pytest.raises(GroupError, match="rank 0 of 2 did not meet the others in 0 s"):
        load(config, seat)
