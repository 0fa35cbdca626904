"""Tensor parallelism on GPUs: NCCL inside CUDA graphs with one rank; two ranks where there are two GPUs."""

import dataclasses
from pathlib import Path

import pytest
import torch

from gpu_worker.loading import load
from gpu_worker.runner import Runner
from tests import gateway_toys
from tests.chaos.test_real_model import answer
from tests.e2e.serving import Served, ended
from tests.integration.test_parallel_models import MODELS, on_ranks, write
from tests.plan_driver import GREEDY, Driver

pytestmark = pytest.mark.gpu


def outputs(runner: Runner) -> list[list[int]]:
    assert runner.graphs is not None
    driver = Driver(runner, chunk=50)
    sequences = [driver.add([(7 * number + at) % 101 for at in range(20 + number)], GREEDY) for number in range(5)]
    driver.generate(12)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("name", ["llama", "qwen 3"])
def test_nccl_in_graphs(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(write(tmp_path, MODELS[name]), device="cuda", kv_cache_bytes=2**24)
    assert on_ranks(config, 1, outputs) == [outputs(load(config).runner)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(600)
def test_two_gpus_say_what_one_says(tmp_path: Path) -> None:
    tokenizer = gateway_toys.byte_level()
    gateway_toys.write_model(tmp_path, tokenizer)
    write(tmp_path, MODELS["llama"] | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 2})
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = []
    for size in (1, 2):
        server = Served(f"--tensor-parallel-size={size}", "--device=cuda", "--dtype=float32", str(tmp_path))
        with ended(server):
            found.append(answer(server, "greedy", lambda _: None))
    assert found[0] == found[1]
