"""The memory plan: what is asked for, what follows, and refusals with numbers."""

import dataclasses
from typing import Any

import pytest
import torch

from gpu_worker.memory import memory_in_use, plan_memory
from gpu_worker.model.spec import read_spec
from shared.config import BadConfig, Config
from tests.unit.worker.batches import CPU
from tests.unit.worker.test_spec import LLAMA

SPEC = read_spec(LLAMA)
PAGE_BYTES = 2 * 3 * 4 * 16 * 16 * 4  # k and v, layers, heads, tokens, head size, bytes


def plan(**settings: Any) -> Any:
    return plan_memory(dataclasses.replace(Config(), **settings), SPEC, torch.float32, CPU)


def test_defaults_on_a_cpu() -> None:
    memory = plan()
    assert (memory.page_bytes, memory.num_pages) == (PAGE_BYTES, 512 * 2**20 // PAGE_BYTES)
    assert (memory.max_model_len, memory.max_batched_tokens, memory.num_slots) == (2048, 1024, 257)
    assert str(memory.num_pages) in memory.text and "2048 tokens" in memory.text


def test_few_pages_shorten_the_longest_sequence() -> None:
    assert plan(kv_cache_bytes=11 * PAGE_BYTES).max_model_len == 160
    assert plan(kv_cache_bytes=11 * PAGE_BYTES, max_model_len=100).max_model_len == 100
    assert plan(kv_cache_bytes=11 * PAGE_BYTES, block_size=32).num_pages == 5


@pytest.mark.parametrize(("settings", "words"), [
    ({"kv_cache_bytes": PAGE_BYTES}, ["less than one request", f"{2 * PAGE_BYTES:,}", f"{PAGE_BYTES:,}"]),
    ({"kv_cache_bytes": 11 * PAGE_BYTES, "max_model_len": 161}, ["161 tokens", "12 pages", f"{12 * PAGE_BYTES:,}"]),
    ({"max_model_len": 2049}, ["max_model_len = 2049", "2048"]),
])  # fmt: skip
def test_what_cannot_fit_is_refused_with_numbers(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadConfig) as refused:
        plan(**settings)
    for word in words:
        assert word in str(refused.value)


def test_memory_in_use_is_this_process() -> None:
    used, total = memory_in_use(CPU)
    assert 50 * 2**20 < used < total
