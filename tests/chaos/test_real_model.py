"""The embedded model behind the real command, its roles killed: text, ids and usage as if they had not been."""

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
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


def answer(server: Served, kind: str, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Text, ids and end of every choice, and the usage."""
    body = {"prompt": f"A {kind} story of a river:", "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | KINDS[kind]
    request = urllib.request.Request(
        f"{server.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    with urllib.request.urlopen(request, timeout=100) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                found = choices.setdefault(part["index"], {"text": "", "ids": [], "end": None})
                found["text"] += part["text"]
                found["ids"] += part.get("token_ids") or []
                found["end"] = part["finish_reason"] or found["end"]
                on_progress(kind)
    return {"choices": choices, "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}


async def answers(server: Served, on_progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    found = await asyncio.gather(*(asyncio.to_thread(answer, server, kind, on_progress) for kind in KINDS))
    return dict(zip(KINDS, found, strict=True))


async def check(server: Served, role: str, positions: tuple[int, ...]) -> None:
    expected = await answers(server, lambda _: None)
    for position in positions:
        counts = dict.fromkeys(KINDS, 0)
        killed = threading.Lock()

        def on_progress(kind: str, counts: dict[str, int] = counts, lock: Any = killed, position: int = position) -> None:
            counts[kind] += 1
            if counts["greedy"] >= position and lock.acquire(blocking=False):
                os.kill(server.children()[role], signal.SIGKILL)

        got = await answers(server, on_progress)
        assert killed.locked(), position
        for kind in KINDS:
            assert got[kind] == expected[kind], (kind, position)
        await asyncio.to_thread(until, lambda: role in server.children(), 30)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["gpu_worker", "scheduler"])
async def test_killed(smollm2_folder: Path, role: str) -> None:
    server = await asyncio.to_thread(Served, "--silence-s=2", "--dtype=float32")
    with ended(server):
        await check(server, role, (1, 6, 12, 18, 24, 30))
