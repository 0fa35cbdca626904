"""One request of every kind that must survive a hand-over, and what of its answer must be as if nothing had happened."""

import asyncio
from typing import Any

from tests.chaos.cell import Cell
from tests.integration.gateway_bench import Answer

NUM_TOKENS = 32
STOPS = list(range(20, 120))  # of 132 ids: some would end an answer early, if min_tokens let them

# Every prompt is its own, so no answer is another's prefix hit.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 5},
    "three": {"temperature": 1, "seed": 6, "n": 3},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "penalties": {"temperature": 1, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logit bias": {"temperature": 0, "logit_bias": {"65": 5, "70": -100}},
    "min tokens": {"temperature": 1, "seed": 8, "min_tokens": 24, "stop_token_ids": STOPS, "ignore_eos": False},
    "whole": {"temperature": 1, "seed": 9, "stream": False, "logprobs": 1},
}


def bodies(num_tokens: int = NUM_TOKENS) -> dict[str, dict[str, Any]]:
    common: dict[str, Any] = {"seed": 4}  # the stub draws by it at any temperature
    common |= {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    common["stream_options"] = {"include_usage": True}
    made = {}
    for number, (name, fields) in enumerate(KINDS.items()):
        made[name] = common | {"prompt": [150 + number] * (20 + 7 * number)} | fields
        if not made[name]["stream"]:
            del made[name]["stream_options"]
    return made


def essence(answer: Answer) -> dict[str, Any]:
    """Text, ids, log-probabilities and ends of every choice, and the usage; all independent of how a stream was cut."""
    parts: dict[int, dict[str, Any]] = {}
    for event in answer.events[:-1] or [answer.body]:
        for choice in event["choices"]:
            found = parts.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "end": None})
            found["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found["ids"] += choice.get("token_ids") or []
            scores = choice.get("logprobs") or {}
            found["logprobs"] += list(zip(scores.get("tokens", ()), scores.get("token_logprobs", ()), strict=True))
            found["logprobs"] += [(entry["token"], entry["logprob"]) for entry in scores.get("content", ())]
            found["end"] = choice["finish_reason"] or found["end"]
    usage = {name: answer.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": parts, "usage": usage}


async def ask_all(cell: Cell, asked: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    answers = await asyncio.gather(*(cell.complete(body) for body in asked.values()))
    return {name: essence(answer) for name, answer in zip(asked, answers, strict=True)}


async def with_stop_string(cell: Cell, asked: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same requests, and one more that ends at a text which its undisturbed answer is known to hold near its end."""
    text = (await ask_all(cell, {"greedy": asked["greedy"]}))["greedy"]["choices"][0]["text"]
    return asked | {"stop string": asked["greedy"] | {"stop": [text[-6:-2]]}}
