"""The whole engine on a GPU: random models of each architecture against transformers, and graphs against eager steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.loading import load
from gpu_worker.runner import Runner
from shared.config import from_sources
from shared.sampling import Sampling
from tests.plan_driver import Driver

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 1031,
    "hidden_size": 256,
    "intermediate_size": 608,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _save(kind: str, folder: Path) -> Any:
    """A random model of that architecture, saved in float32."""
    import transformers

    torch.manual_seed(7)
    extra = {"sliding_window": 100} if kind == "Mistral" else {"head_dim": 64} if kind == "Qwen3" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():  # logits that differ by more than rounding
        if parameter.dim() > 1:
            parameter.data.normal_(std=2.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model.cuda()


def _runner(folder: Path, dtype: str, **settings: str) -> Runner:
    values = {"model": str(folder), "dtype": dtype, "kv_cache_bytes": str(64 * 2**20), "max_num_seqs": "24", **settings}
    return load(from_sources({**values, "max_num_batched_tokens": "2048"}, {})).runner


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 1000, (5 + 29 * number % 331,), generator=generator).tolist() for number in range(count)]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_float32_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = _save(kind, tmp_path)
    driver = Driver(_runner(tmp_path, "float32"), chunk=64)
    greedy = Sampling(temperature=0.0)
    running = [driver.add(prompt, greedy) for prompt in _prompts(7)]
    driver.generate(24)
    for each in running:
        ids = torch.tensor([each.known[: each.num_prompt]], device="cuda")
        with torch.no_grad():
            logits = model(torch.tensor([each.known], device="cuda")).logits[0].float()
        for place, token in enumerate(each.output):
            row = logits[ids.shape[1] - 1 + place]
            assert row[token] >= row.max() - 1e-3, (kind, place, token, int(row.argmax()))


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_graph_equals_eager_in_every_bucket(kind: str, tmp_path: Path) -> None:
    """Falling and rising batch sizes, so that stale rows would show (B55)."""
    _save(kind, tmp_path)
    runner = _runner(tmp_path, "float32")  # rounding must not choose tokens
    assert runner.graphs is not None
    while runner.idle():
        pass

    def play(use_graphs: bool) -> list[list[int]]:
        runner.reset()
        graphs = runner.graphs
        if not use_graphs:
            runner.graphs = None
        driver = Driver(runner)
        running = [driver.add(prompt, Sampling(seed=number, temperature=0.9)) for number, prompt in enumerate(_prompts(24))]
        driver.run_step()
        for count in [*range(24, 0, -1), *range(1, 25)]:
            driver.run_step(running[:count])
        runner.graphs = graphs
        return [each.known for each in running]

    assert play(True) == play(False)
