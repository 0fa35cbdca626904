"""quire bench: drive any OpenAI-compatible server with named workloads and report what its users feel.

With --engine the same workloads run on our engine without HTTP, so that the two can be compared.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from quire.engine import AsyncEngine
from quire.sampling_params import SamplingParams
from quire.workloads import WORKLOADS, Workload, prompts
from shared import config as settings

_LEAD_S = 0.2  # between building the requests and sending the first, so that all are ready


@dataclass(slots=True)
class Answer:
    """What one request's client saw. Times in seconds of time.perf_counter."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


def _body(model: str, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Read one event stream; only chunks that may carry usage are parsed, so that the client stays cheap."""
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if b'"error"' in line[:32]:
            answer.error = line.decode(errors="replace")[6:206]
            return
        if b'"choices":[]' in line or b'"choices": []' in line:
            usage = json.loads(line[6:]).get("usage") or {}
            answer.output_tokens = usage.get("completion_tokens", 0)
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            continue
        if answer.first:
            answer.gaps_s.append(now - answer.last)
        else:
            answer.first = now
        answer.last = now


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], start: float) -> Answer:
    await asyncio.sleep(max(0.0, start - time.perf_counter()))
    answer = Answer(sent=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status == 200:
                await _read(response, answer)
            else:
                answer.error = f"{response.status} {(await response.text())[:200]}"
    except aiohttp.ClientError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not answer.output_tokens:
        answer.error = "the stream ended without usage"
    return answer


def _starts(count: int, rate: float) -> list[float]:
    """Start times: all at once, or Poisson arrivals of rate requests/s (the same ones in every run)."""
    rng = random.Random(1)
    start = time.perf_counter() + _LEAD_S
    starts = []
    for _ in range(count):
        starts.append(start)
        start += rng.expovariate(rate) if rate else 0.0
    return starts


def percentile_ms(values_s: list[float], share: float) -> float | None:
    """The value below which share of values_s lies, in milliseconds; None of nothing."""
    if not values_s:
        return None
    return round(1e3 * sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))], 2)


def summary(name: str, rate: float, answers: list[Answer], seconds: float) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    gaps_s = [gap for answer in good for gap in answer.gaps_s]
    ttft_s = [answer.first - answer.sent for answer in good if answer.first]
    output_tokens = sum(answer.output_tokens for answer in good)
    prompt_tokens = len(good) * (WORKLOADS[name].shared_tokens + WORKLOADS[name].own_tokens)
    return {
        "workload": name,
        "rate": rate,
        "ok": len(good),
        "failed": len(answers) - len(good),
        "first_error": next((answer.error for answer in answers if answer.error), ""),
        "s": round(seconds, 3),
        "out_tok_s": round(output_tokens / seconds, 1),
        "total_tok_s": round((output_tokens + prompt_tokens) / seconds, 1),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "ttft_ms_p50": percentile_ms(ttft_s, 0.5),
        "ttft_ms_p99": percentile_ms(ttft_s, 0.99),
        "gap_ms_p50": percentile_ms(gaps_s, 0.5),
        "gap_ms_p99": percentile_ms(gaps_s, 0.99),
    }


async def measure(
    base_url: str, model: str, name: str, rate: float, vocab_size: int, seed: int, headers: Mapping[str, str]
) -> dict[str, Any]:
    """Run one workload once; returns its summary."""
    workload: Workload = WORKLOADS[name]
    bodies = [_body(model, prompt, workload.output_tokens) for prompt in prompts(name, vocab_size, seed)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20, headers=headers) as session:
        starts = _starts(len(bodies), rate)
        url = base_url.rstrip("/") + "/v1/completions"
        answers = await asyncio.gather(*(_one(session, url, body, start) for body, start in zip(bodies, starts, strict=True)))
        seconds = time.perf_counter() - starts[0]
    return summary(name, rate, answers, seconds)


async def measure_engine(engine: AsyncEngine, name: str, vocab_size: int, seed: int) -> dict[str, Any]:
    """Run one workload once on an engine in this process; there are no streams, so no gaps."""
    output_tokens = WORKLOADS[name].output_tokens
    params = SamplingParams(temperature=1.0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts(name, vocab_size, seed)))
    seconds = time.perf_counter() - start
    answers = [Answer(sent=start, output_tokens=len(output.outputs[0].token_ids)) for output in outputs]
    return summary(name, 0.0, answers, seconds)


async def _served_model(base_url: str, headers: Mapping[str, str]) -> str:
    async with aiohttp.ClientSession(headers=headers) as session, session.get(base_url.rstrip("/") + "/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def _parse_workload(word: str) -> tuple[str, float]:
    name, _, rate = word.partition(":")
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    try:
        return name, float(rate or 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"rate {rate!r} is no number of requests per second") from None


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="measure a server, or our engine without HTTP, with the standard workloads")
    parser.add_argument("workloads", nargs="+", type=_parse_workload, help=f"NAME or NAME:RATE of {', '.join(WORKLOADS)}")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="server to measure (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="bearer token (default: $OPENAI_API_KEY)")
    parser.add_argument("--model", default="", help="model name to ask for; empty: the first one the server lists")
    parser.add_argument(
        "--engine", metavar="FLAGS", help="measure our engine without HTTP; FLAGS: those of quire serve, as one word"
    )
    parser.add_argument("--vocab-size", type=int, default=32_000, help="ids are drawn below it (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, help="runs of each workload, with new ids (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first repetition (default: %(default)s)")
    parser.set_defaults(run=run)


Measure = Callable[[str, float, int], Awaitable[dict[str, Any]]]


async def _repeat(arguments: argparse.Namespace, run_once: Measure) -> int:
    """Every workload as often as asked, a JSON line each, then its median; 1 when a request failed."""
    failed = 0
    for name, rate in arguments.workloads:
        rates = []
        for repetition in range(arguments.repetitions):
            seen = await run_once(name, rate, arguments.first_seed + repetition)
            print(json.dumps(seen), flush=True)
            failed += seen["failed"]
            rates.append(seen["out_tok_s"])
        label = f"{name} at {rate:g} requests/s" if rate else name
        print(f"{label}: median {statistics.median(rates):.1f} output tok/s of {len(rates)} runs", flush=True)
    return 1 if failed else 0


async def _bench_server(arguments: argparse.Namespace) -> int:
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    try:
        model = arguments.model or await _served_model(arguments.base_url, headers)
    except (aiohttp.ClientError, OSError) as error:
        print(f"quire bench: error: no server answers at {arguments.base_url}: {error}", file=sys.stderr)
        return 1

    async def run_once(name: str, rate: float, seed: int) -> dict[str, Any]:
        return await measure(arguments.base_url, model, name, rate, arguments.vocab_size, seed, headers)

    return await _repeat(arguments, run_once)


async def _bench_engine(arguments: argparse.Namespace) -> int:
    if any(rate for _, rate in arguments.workloads):
        print("quire bench: error: a rate needs a server; with --engine all requests come at once", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="--engine")
    settings.add_flags(parser)
    options = {
        name: value for name, value in vars(parser.parse_args(shlex.split(arguments.engine))).items() if value is not None
    }
    async with AsyncEngine(options.pop("model", ""), **options) as engine:

        async def run_once(name: str, _rate: float, seed: int) -> dict[str, Any]:
            return await measure_engine(engine, name, arguments.vocab_size, seed)

        return await _repeat(arguments, run_once)


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the command: 0 when every request of every run succeeded."""
    return asyncio.run(_bench_server(arguments) if arguments.engine is None else _bench_engine(arguments))
