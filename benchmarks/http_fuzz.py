"""Broken and odd requests to one gateway process, each followed by a good one whose answer must be the usual one.

    python -m benchmarks.http_fuzz --requests 20000 --schemathesis .venv-fuzz/bin/st       # make fuzz

Gateway, scheduler and stub worker are processes. First schemathesis goes through /openapi.json (tests/fuzz/checks.py says what
it looks at), then every field of every API gets every odd value (`ODD`, and the edges of its own range) in an otherwise good
body, then bodies are made at random, until so many requests were sent. Only 2xx and 4xx in OpenAI's error shape may come back,
each within 20 s. The gateway's memory is printed after every tenth. The good requests do not count.
"""

import argparse
import asyncio
import copy
import json
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from gateway.openapi import GENERATION
from tests import gateway_toys
from tests.chaos.cell import Cell, running

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 8
PATIENCE_S = 20
GROWTH = 0.10  # of the gateway's memory, from a third of the requests on
GOOD = {"prompt": "canary", "max_tokens": 4, "seed": 7, "ignore_eos": True, "temperature": 1}
REQUIRED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "hi", "tokens": [5, 6]}
CAPS = {"/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
ODD: list[Any] = [
    *(None, 0, -1, 1, 2, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, float("nan"), float("inf"), True, False),
    *("", "x", "\0", "y" * 5000, "\ud800", "\U0001f600"),
    *([], [[]], [None], [-1], ["x"], [3], [[3], [4]], [{}], ["\ud800"], {}, {"type": "text"}, {"5": 1}, {"a": {}}),
    *({"\ud800": 1}, {"type": "json_object"}, {"include_usage": True}, json.loads("[" * 40 + "]" * 40)),
]


CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": "\\u00e9"}'}}
TALK: list[Any] = [
    {"role": "system", "content": "s"},
    {"role": "developer", "content": [{"type": "text", "text": "x"}]},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
    {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "y", "annotations": []}],
        "id": "m",
        "status": "completed",
    },
    {"role": "user", "content": "z"},
]
DEEP: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2, "chat_template_kwargs": {"a": {"b": [1]}}, "stop": ["a"]},
    "/v1/completions": {"prompt": [[5, 6], [7]], "max_tokens": 2, "logit_bias": {"5": 1}, "stop": ["a", "b"], "logprobs": 1},
    "/v1/responses": {"input": ITEMS, "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}},
    "/tokenize": {"messages": TALK},
    "/detokenize": {"tokens": [5, 6]},
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy in which one thing, however deep, is odd, absent or too much."""
    made = copy.deepcopy(value)
    container, key = rng.choice(list(places(made)))
    odd = copy.deepcopy(rng.choice(ODD))
    match rng.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[rng.choice(["x", "type", "role", "content", "text", "name", "id", "\u00e9"])] = odd
        case _:
            container[key] = odd
    return made


def value_of(schema: dict[str, Any], rng: random.Random) -> Any:
    """A value that the schema admits, often at an edge."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kinds = schema.get("type", "string")
    match rng.choice(kinds) if isinstance(kinds, list) else kinds:
        case "integer":
            return rng.choice([schema.get("minimum", 0), min(schema.get("maximum", 9), 9), rng.randint(1, 5)])
        case "number":
            return rng.uniform(schema.get("minimum", schema.get("exclusiveMinimum", 0) + 0.001), schema["maximum"])
        case "boolean":
            return rng.random() < 0.5
        case "string":
            return rng.choice(["x", "toy", "some words"])
        case "array":
            return [value_of(schema.get("items", {"type": "string"}), rng) for _ in range(rng.randint(1, 3))]
        case "object":
            return {}
    return None


def body_of(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A body at random: some fields with good values, up to two with odd ones."""
    names = rng.sample(sorted(schema["properties"]), rng.randint(0, min(5, len(schema["properties"]))))
    body = {name: value_of(schema["properties"][name], rng) for name in names}
    body.pop("model", None)
    for cap in ("max_tokens", "max_output_tokens"):
        if cap in schema["properties"]:
            body[cap] = rng.randint(1, 4)
    for name in schema["required"]:
        body[name] = REQUIRED[name]
    if "prompt" in schema["required"]:
        body["prompt"] = rng.choice(["x", [5, 6], ["x", "y"]])
    for _ in range(rng.choice([0, 0, 1, 2])):
        body[rng.choice([*schema["properties"], "nonsense"])] = rng.choice(ODD)
    return body


def edges_of(schema: dict[str, Any]) -> list[Any]:
    """The ends of a number's range, and what lies beyond."""
    ends = [schema[name] for name in ("minimum", "exclusiveMinimum", "maximum") if name in schema]
    return [each for end in ends for each in (end - 1, end, end + 1, float(end))]


def every_field(paths: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """(path, body): every field absent, and with every odd value, in an otherwise good body."""
    for path, schema in paths.items():
        good: dict[str, Any] = {name: REQUIRED[name] for name in schema["required"]}
        if path in CAPS:
            good[CAPS[path]] = 2
        for name, field in schema["properties"].items():
            yield path, json.dumps({each: value for each, value in good.items() if each != name}).encode()
            for value in (*ODD, *edges_of(field)):
                body = json.dumps(good | {name: value})
                yield path, body.encode()
                if "\\ud800" in body:  # the same as bytes that are no UTF-8
                    yield path, body.encode().replace(b"\\ud800", b"\xed\xa0\x80")


def at_random(paths: dict[str, dict[str, Any]], rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """(path, body) without end; now and then a body is cut, or a byte of it changed."""
    while True:
        path = rng.choice(list(paths))
        made = body_of(paths[path], rng) if rng.random() < 0.5 else mutated(DEEP[path], rng)
        body = bytearray(json.dumps(made).encode())
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body))]
        elif rng.random() < 0.1:
            body[rng.randrange(len(body))] = rng.randrange(256)
        yield path, bytes(body)


class Asker:
    """Sends to the gateway g0 of a cell, and looks at every answer."""

    def __init__(self, cell: Cell) -> None:
        self._client, self._url = cell.client, cell.url("g0")
        self._timeout = aiohttp.ClientTimeout(PATIENCE_S)
        self.statuses: Counter[int] = Counter()
        self.text = ""  # of the good request

    async def good(self) -> str:
        async with self._client.post(f"{self._url}/v1/completions", json=GOOD, timeout=self._timeout) as response:
            answer = await response.json()
            assert response.status == 200, answer
        self.statuses[200] += 1
        text: str = answer["choices"][0]["text"]
        return text

    async def send(self, path: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._client.post(self._url + path, data=body, headers=headers, timeout=self._timeout) as response:
            raw = await response.read()
        self.statuses[response.status] += 1
        assert response.status == 200 or 400 <= response.status < 500, (response.status, path, body[:500], raw[:500])
        if response.status >= 400:
            error = json.loads(raw)["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], (path, body[:500], raw[:500])
            assert "Traceback" not in error["message"], raw
        text = await self.good()
        assert text == self.text, (path, body[:500], text, self.text)


def described(openapi: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Paths that take a body, and its schema."""
    posts = {path: openapi["paths"][path]["post"] for path in (*GENERATION, "/tokenize", "/detokenize")}
    return {path: post["requestBody"]["content"]["application/json"]["schema"] for path, post in posts.items()}


async def settled(cell: Cell) -> None:
    """Until the scheduler, which has just started, knows what it does not know: until then unknown streams are 503."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        async with cell.client.get(cell.url("g0") + "/v1/streams/nobody") as response:
            if response.status == 404:
                return
        await asyncio.sleep(0.2)
    raise SystemExit("an unknown stream is never 404")


async def served(cell: Cell) -> int:
    """Requests that the gateway says it answered."""
    async with cell.client.get(cell.url("g0") + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("quire_gateway_requests_total{")))


async def run_schemathesis(cell: Cell, program: Path, examples: int, text: str) -> int:
    """schemathesis with tests/fuzz/checks.py; how many requests came of it, without the good ones (one after each)."""
    before = await served(cell)
    flags = [f"--max-examples={examples}", "--phases=examples,coverage,fuzzing", "--checks=not_a_server_error,openai_shape"]
    flags += [f"--request-timeout={PATIENCE_S}", "--seed=7", "--no-shrink", "--warnings=off", "--continue-on-failure"]
    flags += ["--suppress-health-check=all", "--workers=1"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.fuzz.checks", "PYTHONPATH": str(ROOT), "FUZZ_TEXT": text}
    command = [str(program), "run", *flags, cell.url("g0") + "/openapi.json"]
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment, stdout=subprocess.PIPE)
        output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(output.decode()[-8000:] + f"\nschemathesis ended with {process.returncode}")
    return (await served(cell) - before) // 2


def report(cell: Cell, num_sent: int, memory: list[tuple[int, float]]) -> None:
    memory.append((num_sent, cell.roles["g0"].resident_bytes / 2**20))
    print(f"{num_sent} requests, memory of the gateway {memory[-1][1]:.1f} MiB", flush=True)


async def bodies(cell: Cell, asker: Asker, requests: int, num_before: int, memory: list[tuple[int, float]]) -> None:
    """Own bodies until so many requests were sent in all: every field first, then at random."""
    async with cell.client.get(cell.url("g0") + "/openapi.json") as response:
        paths = described(await response.json())
    rng = random.Random(7)
    every = list(every_field(paths))
    rng.shuffle(every)
    chance = at_random(paths, rng)
    print(f"{len(every)} bodies with one odd field each")
    num_sent, next_report = num_before, num_before
    while every or num_sent < requests:
        batch = [every.pop() if every else next(chance) for _ in range(AT_ONCE)]
        await asyncio.gather(*(asker.send(path, body) for path, body in batch))
        num_sent += AT_ONCE
        if num_sent >= next_report:
            report(cell, num_sent, memory)
            next_report += requests // 10
    report(cell, num_sent, memory)


async def run(requests: int, program: Path | None, examples: int) -> int:
    started, memory = time.monotonic(), list[tuple[int, float]]()
    with tempfile.TemporaryDirectory() as folder:
        gateway_toys.write_model(Path(folder), gateway_toys.byte_level())
        async with running(Path(folder), gateways=1, silence_s=5.0) as cell:
            await settled(cell)
            asker, num_before = Asker(cell), 0
            asker.text = await asker.good()
            assert asker.text
            report(cell, 1, memory)
            if program is not None:
                num_before = await run_schemathesis(cell, program, examples, asker.text)
                print(f"schemathesis: {num_before} requests, nothing found")
            await bodies(cell, asker, requests, num_before, memory)
            assert cell.roles["g0"].code is None
            total = await served(cell)
    print(f"{total} requests with the good ones in {time.monotonic() - started:.0f} s")
    print(f"own bodies and good requests by status: {dict(asker.statuses)}")
    warm = next(size for num_sent, size in memory if num_sent >= requests / 3)
    growth = memory[-1][1] / warm - 1
    print(f"memory from a third of the requests on: {100 * growth:+.1f} % (limit {100 * GROWTH:+.0f} %)")
    return growth > GROWTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--schemathesis", type=Path, help="its program st; absent: own bodies only")
    parser.add_argument("--examples", type=int, default=300, help="of schemathesis, per route")
    arguments = parser.parse_args()
    program = arguments.schemathesis and arguments.schemathesis.absolute()
    raise SystemExit(asyncio.run(run(arguments.requests, program, arguments.examples)))


if __name__ == "__main__":
    main()
