"""The embedded model behind the real command, its roles killed or frozen at every token: the answers stay as they were."""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Served, ended, until

# All at once; every answer must be the undisturbed one. Float32: a recomputed key differs in its last bits only.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "three": {"temperature": 0.8, "seed": 6, "n": 3},
    "logprobs": {"temperature": 0, "logprobs": 1},
    "penalties": {"temperature": 0.8, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "logit bias": {"temperature": 0, "logit_bias": {"28": -100}},
    "min tokens": {"temperature": 0, "min_tokens": 28, "ignore_eos": False},
    "stop string": {"temperature": 0, "stop": ["\n\n\n"]},
}
NUM_TOKENS = 32
SILENCE_S = 2.0

Harm = Callable[[Served, str], None]


def accepted(request: urllib.request.Request) -> Any:
    """The answer's stream. One that comes while no scheduler is there gets 503, and is asked again as clients do."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(request, timeout=100)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def answer(server: Served, kind: str, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Text, ids, tokens with log-probabilities and end of every choice, and the usage."""
    body = {"prompt": f"A {kind} story of a river:", "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | KINDS[kind]
    request = urllib.request.Request(
        f"{server.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    with accepted(request) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                found = choices.setdefault(part["index"], {"text": "", "ids": [], "scored": [], "end": None})
                found["text"] += part["text"]
                found["ids"] += part.get("token_ids") or []
                found["scored"] += (part.get("logprobs") or {}).get("tokens", [])
                found["end"] = part["finish_reason"] or found["end"]
                on_progress(kind)
    return {"choices": choices, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}


async def answers(server: Served, on_progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    found = await asyncio.gather(*(asyncio.to_thread(answer, server, kind, on_progress) for kind in KINDS))
    return dict(zip(KINDS, found, strict=True))


def kill(server: Served, role: str) -> None:
    os.kill(server.children()[role], signal.SIGKILL)


def freeze(server: Served, role: str) -> None:
    """Long enough to be given up; then the zombie wakes, with all it had to say before."""
    pid = server.children()[role]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENCE_S + 0.5)
    os.kill(pid, signal.SIGCONT)


def ready(server: Served) -> bool:
    try:
        with urllib.request.urlopen(f"{server.root_url}/ready", timeout=10):
            return True
    except OSError:
        return False


async def check(server: Served, role: str, harm: Harm, positions: Iterable[int]) -> None:
    """Harm is done when the greedy answer has so many tokens (0: just before its first, as the prompts are computed)."""
    expected = await answers(server, lambda _: None)
    for position in positions:
        counts = dict.fromkeys(KINDS, 0)
        due = threading.Event()

        def on_progress(
            kind: str, counts: dict[str, int] = counts, due: threading.Event = due, position: int = position
        ) -> None:
            counts[kind] += 1
            if position and counts["greedy"] >= position:
                due.set()

        asking = asyncio.create_task(answers(server, on_progress))
        await asyncio.to_thread(due.wait, 60 if position else 0.1)
        await asyncio.to_thread(harm, server, role)
        got = await asking
        for kind in KINDS:
            assert got[kind] == expected[kind], (kind, position)
        await asyncio.to_thread(until, lambda: role in server.children() and ready(server), 60)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("harm", [kill, freeze])
@pytest.mark.parametrize("role", ["gpu_worker", "scheduler"])
async def test_every_position(smollm2_folder: Path, role: str, harm: Harm) -> None:
    server = await asyncio.to_thread(Served, f"--silence-s={SILENCE_S}", "--dtype=float32")
    with ended(server):
        await check(server, role, harm, range(NUM_TOKENS))


def long_answer(server: Served, number: int) -> dict[str, Any]:
    """The answer to a prompt of its own of about two thousand tokens, more than one step computes."""
    body = {"prompt": f"Story {number}: " + "the river ran down to the sea, and " * 220, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "n": 2}
    request = urllib.request.Request(
        f"{server.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        found: dict[str, Any] = json.load(answer)
    usage = [found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]]
    return {"texts": [choice["text"] for choice in found["choices"]], "usage": usage}


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["gpu_worker", "scheduler"])
async def test_in_the_middle_of_a_long_prefill(smollm2_folder: Path, role: str) -> None:
    server = await asyncio.to_thread(
        Served, f"--silence-s={SILENCE_S}", "--dtype=float32", "--max-num-batched-tokens=256", "--max-model-len=4096"
    )
    with ended(server):
        for number, delay_s in enumerate((0.2, 0.5, 0.9, 1.4)):
            asking = asyncio.create_task(asyncio.to_thread(long_answer, server, number))
            await asyncio.sleep(delay_s)
            assert not asking.done()
            kill(server, role)
            got = await asking
            assert 1500 < got["usage"][0] < 3000, got["usage"]
            assert got == await asyncio.to_thread(long_answer, server, number), delay_s
            await asyncio.to_thread(until, lambda: role in server.children() and ready(server), 60)
