"""SmolLM2 in float32 says token for token what transformers' generate says: alone, batched, in chunks, on warm pages."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_worker.loading import load
from gpu_worker.runner import Runner
from shared.config import Config
from tests.plan_driver import GREEDY, Driver, Running

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NEW = 8  # output tokens of every prompt
ROUNDING = 1e-3  # log-probabilities closer than this may swap
TEXTS = [
    "The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n    ", "1, 1, 2, 3, 5, 8,",
    "你好世界。今天天气", "北京是中国的首都", "日本の首都は", "Emoji are fun: 😀😃😄", "👩‍👩‍👧‍👦 families and 🏳️‍🌈 flags",
    "import numpy as np\n\nx = np.", "SELECT name FROM users WHERE", "<html>\n<body>\n  <h1>", "Dear Sir or Madam,\n\nI write",
    "A", "\n\n\n", "Wie heißt die Hauptstadt von Österreich?", "Привет, как дела?", "مرحبا بالعالم", "∀x: x² ≥ 0, because",
    'fn main() {\n    println!("', "Q: What is 17 * 23?\nA:", "The quick brown fox jumps over the lazy dog. " * 3,
]  # fmt: skip
LONG = "In the year 1500 the river rose and the people of the valley moved to the hills; number {} was counted twice. "


@dataclass
class Expected:
    prompt: list[int]
    output: list[int]
    logprobs: list[float]  # of the output tokens
    margins: list[float]  # best minus second best


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path) -> list[Expected]:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder)
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    prompts.append(tokenizer("".join(LONG.format(number) for number in range(80))).input_ids[:1500])
    assert len(prompts[-1]) == 1500 and len(prompts) >= 21
    results = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        rows = torch.log_softmax(torch.cat(out.logits).double(), dim=-1)
        tokens = out.sequences[0, len(prompt) :].tolist()
        best = rows.topk(2).values
        results.append(Expected(prompt, tokens, rows[range(NEW), tokens].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return results


@pytest.fixture(scope="module")
def runner(smollm2_folder: Path) -> Runner:
    return load(Config(model=str(smollm2_folder), dtype="float32", device="cpu", max_num_seqs=40)).runner


def check(sequence: Running, expected: Expected) -> int:
    """Tokens compared, until one differs by rounding (its log-probability is compared all the same)."""
    assert sequence.known[: sequence.num_prompt] == expected.prompt
    for index, (token, wanted) in enumerate(zip(sequence.output, expected.output, strict=False)):
        assert abs(sequence.logprobs[index] - expected.logprobs[index]) < ROUNDING
        if token != wanted:
            assert expected.margins[index] < ROUNDING, f"token {index} is {token}, not {wanted}: {expected.margins[index] = }"
            return index
    return NEW


def run(runner: Runner, expected: list[Expected], act: Callable[[Driver, list[Running]], None], **driver_options: Any) -> None:
    runner.reset()
    driver = Driver(runner, **driver_options)
    sequences = [driver.add(each.prompt, GREEDY._replace(logprobs=0)) for each in expected]
    act(driver, sequences)
    compared = [check(sequence, each) for sequence, each in zip(sequences, expected, strict=True)]
    assert sum(compared) > 0.97 * NEW * len(expected)


def test_alone(runner: Runner, expected: list[Expected]) -> None:
    for each in expected:
        run(runner, [each], lambda driver, _: driver.generate(NEW))


def test_in_batches_of_16(runner: Runner, expected: list[Expected]) -> None:
    run(runner, expected[:16], lambda driver, _: driver.generate(NEW))
    run(runner, expected[-16:], lambda driver, _: driver.generate(NEW))


def test_in_chunks_of_16_while_others_decode(runner: Runner, expected: list[Expected]) -> None:
    run(runner, expected, lambda driver, _: driver.generate(NEW), chunk=16)


def test_on_warm_pages_and_shared_prefixes(runner: Runner, expected: list[Expected]) -> None:
    long = expected[-1]
    runner.reset()
    driver = Driver(runner)
    driver.use_groups = True
    sampling = GREEDY._replace(logprobs=0)
    first = driver.add(long.prompt, sampling)
    driver.run_step()
    others = [driver.add(long.prompt, sampling, shared=first) for _ in range(3)]
    assert all(other.computed == 1488 for other in others)  # the last token is recomputed into a page of its own
    driver.generate(NEW)
    for sequence in [first, *others]:
        assert check(sequence, long) == NEW


def test_after_preemption(runner: Runner, expected: list[Expected]) -> None:
    """Half of the output, then again from nothing with what is known: prompt and output as one prefill."""
    for each in expected[:6]:
        runner.reset()
        driver = Driver(runner)
        resumed = driver.add([*each.prompt, *each.output[: NEW // 2]], GREEDY._replace(logprobs=0), num_prompt=len(each.prompt))
        driver.generate(NEW)
        resumed.logprobs[:0] = each.logprobs[: NEW // 2]
        assert check(resumed, each) == NEW
