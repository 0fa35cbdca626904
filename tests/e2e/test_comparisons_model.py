"""The eight comparisons of tests/integration/test_eight_comparisons.py on the real model.

Its sums depend in their last bits on what is computed beside a row, so a token may differ where two were as good as equal. That
is no difference, but it is proven each time: the raw log-probabilities of both tokens are asked for and their noise is added.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from gpu_worker.reference.noise import add_gumbel
from shared.sampling import choice_seed
from tests.e2e.serving import Served, ended
from tests.integration.test_eight_comparisons import Asker, cached, make_request

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

NUM_REQUESTS = 150  # asked about ten times each
TIE = 1e-3  # of log-probability with noise; float32 sums of other orders differ by some 1e-5
FEW_PAGES = "--kv-cache-bytes=12533760"  # 17 pages of 16 tokens: one sequence of the greatest length
VOCABULARY = 49152
LEN = ("--dtype=float32", "--max-model-len=256")


class Model(Asker):
    """Compares answers of one served model; ties are counted."""

    def __init__(self, client: aiohttp.ClientSession, served: Served) -> None:
        super().__init__(client)
        self.served = served

    async def ids(self, text: str) -> list[int]:
        async with self.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}) as response:
            found: list[int] = (await response.json())["tokens"]
            return found

    async def score(self, body: dict[str, Any], known: list[int], output: list[int], token: int, seed: int) -> float:
        """What the sampler compares: log-probability, presence penalty and noise of a token after the known ones."""
        asked = {"prompt": known, "max_tokens": 1, "allowed_token_ids": [token], "logprobs": 0, "temperature": 0}
        async with self.client.post("/v1/completions", json=asked) as response:
            answer = await response.json()
        raw: float = answer["choices"][0]["logprobs"]["token_logprobs"][0]
        noise, halves = torch.zeros(1, VOCABULARY), [seed & 0xFFFFFFFF, seed >> 32]
        seeds = torch.tensor([[half - 2**32 if half >= 2**31 else half for half in halves]], dtype=torch.int32)
        add_gumbel(noise, torch.tensor([body["temperature"]]), seeds, torch.tensor([len(known)], dtype=torch.int32))
        penalty: float = body.get("presence_penalty", 0.0)
        return raw + float(noise[0, token]) - penalty * (token in output)

    async def is_tie(self, body: dict[str, Any], left: dict[str, Any], right: dict[str, Any], index: int) -> bool:
        """Two choices that differ do so from a token on that was as good as the other one."""
        one, other = left["ids"], right["ids"]
        at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
        if at < 0:
            return False
        known = await self.ids(body["prompt"]) + one[:at]
        seed = choice_seed(body["seed"], index)
        scores = [await self.score(body, known, one[:at], ids[at], seed) for ids in (one, other)]
        return abs(scores[0] - scores[1]) < TIE


async def check_scores(judge: Model, bodies: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """A sampled token beats the likeliest one by its score, and is no tie with it: the proof proves something."""
    num_checked = 0
    for body, answer in zip(bodies, answers, strict=True):
        choice = answer["choices"][0]
        bare = {"prompt": body["prompt"], "add_special_tokens": False, "max_tokens": 1, "temperature": 0}
        bare |= {"ignore_eos": True, "return_token_ids": True}
        likeliest = (await judge.ask(bare))["choices"][0]["ids"][0]
        if choice["ids"][0] != likeliest and not {"bad_words", "min_tokens"} & set(body):
            known, seed = await judge.ids(body["prompt"]), choice_seed(body["seed"], 0)
            sampled, other = [await judge.score(body, known, [], token, seed) for token in (choice["ids"][0], likeliest)]
            assert sampled > other - TIE, body
            assert await judge.is_tie(body, choice, {"ids": [likeliest]}, 0) == (sampled - other < TIE)
            num_checked += 1
    assert num_checked >= 3


async def same(
    judge: Model, kind: str, bodies: list[dict[str, Any]], one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> None:
    num_ties = 0
    for body, left, right in zip(bodies, one, other, strict=True):
        assert left["usage"]["prompt_tokens"] == right["usage"]["prompt_tokens"], (kind, body)
        for index, pair in enumerate(zip(left["choices"], right["choices"], strict=True)):
            if pair[0] != pair[1]:
                assert await judge.is_tie(body, *pair, index), (kind, body, pair)
                num_ties += 1
        if left["choices"] == right["choices"]:
            assert left["usage"]["completion_tokens"] == right["usage"]["completion_tokens"], (kind, body)
    print(f"{kind}: {len(bodies)} requests, {num_ties} choices excluded as ties")
    assert num_ties <= max(2, len(bodies) // 50), kind


@asynccontextmanager
async def model(*flags: str) -> AsyncIterator[Model]:
    served = await asyncio.to_thread(Served, *LEN, *flags)
    with ended(served):
        async with aiohttp.ClientSession(served.root_url, timeout=aiohttp.ClientTimeout(600)) as client:
            yield Model(client, served)


def request(rng: random.Random) -> dict[str, Any]:
    """As for the stub, with all that decides a token in the body, and ids that end with what ended the answer."""
    body = {"temperature": 1, **make_request(rng), "include_stop_str_in_output": True, "top_p": 1, "top_k": 0}
    caps = {name: min(body[name], 24) for name in ("max_tokens", "min_tokens") if name in body}
    return body | caps


async def test_eight_ways_to_ask_the_real_model_agree(smollm2_folder: Path) -> None:
    rng = random.Random(2026)
    bodies = [request(rng) for _ in range(NUM_REQUESTS)]
    async with model() as first:
        cold = await first.ask_all(bodies)
        assert {choice["end"][0] for answer in cold for choice in answer["choices"]} == {"stop", "length"}
        await check_scores(first, bodies[:30], cold[:30])
        warm = await first.ask_all(bodies)
        assert cached(warm) > cached(cold)
        await same(first, "warm = cold", bodies, warm, cold)
        await same(first, "batch = alone", bodies, [await first.ask(body) for body in bodies], cold)
        streams = [{**body, "stream": True, "stream_options": {"include_usage": True}} for body in bodies]
        await same(first, "stream = non-stream", bodies, await first.ask_all(streams), cold)
        by_ids = [{**body, "prompt": await first.ids(body["prompt"])} for body in bodies]
        await same(first, "tokens in = text in", bodies, await first.ask_all(by_ids), cold)
        for body, answer in zip(bodies, cold, strict=True):
            singles = [{**body, "n": 1, "seed": choice_seed(body["seed"], choice)} for choice in range(body["n"])]
            for single, alone, choice in zip(singles, await first.ask_all(singles), answer["choices"], strict=True):
                if alone["choices"][0] != choice:
                    assert await first.is_tie(single, alone["choices"][0], choice, 0), ("n = n singles", body)
    kinds = {
        "chunked = whole": ("--max-num-batched-tokens=24", "--max-num-seqs=16"),
        "credits 1 = 2": ("--credits=1",),
        "preempted = not": (FEW_PAGES,),
    }
    for kind, flags in kinds.items():
        async with model(*flags) as other:
            await same(other, kind, bodies, await other.ask_all(bodies), cold)
            assert kind != "preempted = not" or other.served.metric("quire_preemptions_total") > len(bodies) / 10
