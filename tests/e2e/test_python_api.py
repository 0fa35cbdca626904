"""The Python API on the real model: one and many prompts, streams, scores, refusals, and its processes gone at the end."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from quire import LLM, AsyncEngine, SamplingParams
from shared.config import BadConfig
from shared.model_folder import ModelError
from tests.e2e.serving import QUESTION, ROOT, alive, until

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PARIS = "The capital of France is Paris."
CHAT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> Iterator[LLM]:
    with LLM(dtype="float32", max_model_len=1024) as made:
        yield made


def printed_by(program: str) -> str:
    """What a program prints that can ask for its children(): process ids of the roles it has started."""
    ran = subprocess.run([sys.executable, "-c", CHILDREN + program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


CHILDREN = """
import os, subprocess
from quire import LLM
def children():
    listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if " -m " in line]
"""


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY)
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason, output.finished) == (PARIS, "stop", True)
    assert len(output.prompt_token_ids) == 40
    assert output.prompt and output.prompt.endswith("<|im_start|>assistant\n")
    assert [each.outputs[0].text for each in llm.chat([CHAT, CHAT], GREEDY)] == [PARIS, PARIS]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"{number}, {number + 1}, {number + 2}," for number in range(1, 13)]
    params = [SamplingParams(temperature=0, max_tokens=3 + number) for number in range(12)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(3, 15))
    assert all(output.outputs[0].text.startswith(f" {number + 3},") for number, output in enumerate(outputs[:6], start=1))


def test_ids_text_and_objects_are_the_same_prompt(llm: LLM) -> None:
    text = "The capital of France is"
    (first,) = llm.generate(text, GREEDY)
    ids = first.prompt_token_ids
    for prompt in (ids, {"prompt": text}, {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs[0].token_ids == first.outputs[0].token_ids


def test_scores(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("The capital of France is", params)
    (answer,) = output.outputs
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    best = [each[token] for token, each in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert "".join(each.decoded_token for each in best) == answer.text
    assert [each.rank for each in best] == [1] * 4
    assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in best))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_choices_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12)
    first, second = llm.generate(["Once", "Once"], params)
    texts = [answer.text for answer in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [answer.text for answer in second.outputs]


def test_s07_bad_words_of_one_and_of_several_tokens(llm: LLM) -> None:
    def say(*words: str) -> str:
        (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24, bad_words=words))
        return output.outputs[0].text

    assert "Paris" not in say("Paris")
    assert "of France" not in (said := say("of France")) and said.startswith("The capital of ")
    assert say("capital of Spain", "of Franc", "the moon and the stars") == PARIS


def test_stop_strings(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24, stop=" Par"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("The capital of France is", " Par")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(n=0), "n must"),
        (SamplingParams(top_p=0), "top_p"),
        (SamplingParams(max_tokens=5000), "5002 > 1024"),
        (SamplingParams(logit_bias={10**9: 1}), "logit_bias"),
    ],
)
def test_a_bad_request_is_a_value_error_and_harms_nobody(llm: LLM, params: SamplingParams, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.generate(["Hello there", "Hello there"], [GREEDY, params])
    assert llm.chat(CHAT, GREEDY)[0].outputs[0].text == PARIS


def test_other_mistakes(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(TypeError, match="'no_such_setting' is no setting"):
        LLM(no_such_setting=1)
    with pytest.raises(BadConfig, match="block_size"):
        LLM(block_size=17)
    with pytest.raises(ModelError, match="is no folder or file here"):
        LLM("/no/such/model")


async def test_the_engine_streams_and_an_iteration_that_is_left_ends() -> None:
    async with AsyncEngine() as engine:
        texts = [output.outputs[0].text async for output in engine.chat(CHAT, GREEDY, request_id="mine")]
        assert texts[-1] == PARIS
        assert len(texts) > 5
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        stream = engine.generate("Once upon a time", SamplingParams(max_tokens=3000, ignore_eos=True))
        async for output in stream:
            assert not output.finished
            break
        await stream.aclose()
        many = await asyncio.gather(*(engine.complete_chat(CHAT, GREEDY) for _ in range(8)))
        assert {output.outputs[0].text for output in many} == {PARIS}
    with pytest.raises(RuntimeError, match="not running"):
        await engine.complete("x")


def test_a_start_that_fails_says_why_and_leaves_nobody() -> None:
    program = """
try:
    LLM(kv_cache_bytes=1000, max_model_len=512)
except ValueError as error:
    print("AT ONCE", error)
try:
    LLM(quantization="gptq")
except RuntimeError as error:
    print("WHY", error)
print("LEFT", children())
"""
    printed = printed_by(program)
    assert "AT ONCE memory for less than one request: 512 tokens" in printed
    assert "WHY gpu_worker: quantization = gptq, but the checkpoint is not quantized" in printed
    assert "LEFT []" in printed


def test_processes_end_with_a_program_that_forgets_to_close() -> None:
    printed = printed_by("llm = LLM()\nprint('PIDS', *children())")
    pids = next(line.split()[1:] for line in printed.splitlines() if line.startswith("PIDS"))
    assert len(pids) == 2
    until(lambda: not any(alive(int(pid)) for pid in pids), 5)
