"""Tokens a second on a CPU beside transformers' generate: same model, same prompts, taking turns in one run.

usage: python -m benchmarks.cpu_serving [--model FOLDER] [--cases 1,8,32,prefix] [--rounds 2] [--dtype bfloat16] [--no-http]

Each round runs every case three ways: our runner alone (plans made by a small driver, no sockets), our server over HTTP (one
`quire serve`, streams opened at once), and transformers (one static batch, left padded, as long as its longest output).
Prompts are 64 to 128 random ids, outputs 64 to 128 ids; in "prefix" 16 prompts share 512 leading ids. Rates count the
requested output tokens only. The medians over rounds are printed, and the ratio to transformers.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As in gpu_worker.__main__, for all three: see there. Before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from gpu_worker.loading import load
from gpu_worker.runner import Runner
from quire.machine import free_ports
from shared import model_store
from shared.config import Config
from tests.plan_driver import GREEDY, Driver

STEP_TOKENS = 1024
PREFIX = 512


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output: int


def requests(case: str, vocabulary: int, seed: int) -> list[Request]:
    """The case's requests, other ones in every round: a prefix cache must not know them from the round before."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, vocabulary) for _ in range(PREFIX if case == "prefix" else 0)]
    count = 16 if case == "prefix" else int(case)
    made = []
    for _ in range(count):
        own = [rng.randrange(100, vocabulary) for _ in range(rng.randint(64, 128))]
        made.append(Request(shared + own, rng.randint(64, 128)))
    return made


def run_runner(runner: Runner, case: str, work: list[Request]) -> float:
    """Seconds for all requests, started together; prompts enter steps of at most STEP_TOKENS tokens."""
    runner.reset()
    driver = Driver(runner)
    driver.use_groups = case == "prefix"
    started = time.perf_counter()
    first = driver.add(work[0].prompt)
    if case == "prefix":
        driver.run_step()
    for request in work[1:]:
        driver.add(request.prompt, GREEDY, shared=first if case == "prefix" else None)
    wanted = {sequence.slot: request.output for sequence, request in zip(driver.sequences, work, strict=True)}
    while driver.sequences:
        left, members = STEP_TOKENS, []
        for sequence in sorted(driver.sequences, key=lambda each: not each.output):  # decode rows first
            missing = len(sequence.known) - sequence.computed
            if missing <= left:
                members.append(sequence)
                left -= missing
        driver.run_step(members)
        for sequence in list(driver.sequences):
            if len(sequence.output) >= wanted[sequence.slot]:
                driver.finish(sequence)
    return time.perf_counter() - started


def run_transformers(model: Any, work: list[Request]) -> float:
    longest = max(len(request.prompt) for request in work)
    ids = torch.tensor([[0] * (longest - len(request.prompt)) + request.prompt for request in work])
    mask = torch.tensor([[0] * (longest - len(request.prompt)) + [1] * len(request.prompt) for request in work])
    new = max(request.output for request in work)
    started = time.perf_counter()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    assert out.shape[1] == longest + new
    return time.perf_counter() - started


async def _stream(session: aiohttp.ClientSession, url: str, model: str, request: Request) -> None:
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.output, "min_tokens": request.output,
        "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage = b""
    async with session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if b'"completion_tokens"' in line:
                usage = line
    assert f'"completion_tokens":{request.output}'.encode() in usage.replace(b" ", b""), usage


async def _run_http(url: str, case: str, work: list[Request]) -> float:
    timeout = aiohttp.ClientTimeout(total=1200)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(url + "/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        started = time.perf_counter()
        await asyncio.gather(*(_stream(session, url, model, request) for request in work))
        return time.perf_counter() - started


async def _wait_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    async with aiohttp.ClientSession() as session:
        while server.poll() is None:
            try:
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"the server ended with {server.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder; empty: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--cases", default="1,8,32,prefix")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-http", action="store_true")
    options = parser.parse_args()
    folder: Path = model_store.resolve(options.model, Config().cache_dir)
    cases = options.cases.split(",")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    runner = load(Config(model=str(folder), dtype=options.dtype, device="cpu")).runner
    vocabulary = theirs.config.vocab_size
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    flags = ["--model", str(folder), "--dtype", options.dtype, "--device", "cpu", "--port", str(port), "--log-level", "warning"]
    server = None if options.no_http else subprocess.Popen([sys.executable, "-m", "quire.main", "serve", *flags])
    rates: dict[tuple[str, str], list[float]] = {}
    try:
        if server is not None:
            asyncio.run(_wait_ready(url, server))
        for round_number in range(options.rounds + 1):  # the first one warms up and does not count
            for case in cases:
                work = requests(case, vocabulary, seed=round_number * 100 + len(case))
                if round_number == 0:
                    work = [Request(request.prompt, 8) for request in work]
                tokens = sum(request.output for request in work)
                seconds = {"runner": run_runner(runner, case, work)}
                if server is not None:
                    seconds["http"] = asyncio.run(_run_http(url, case, work))
                seconds["transformers"] = run_transformers(theirs, work)
                if round_number:
                    for way, took in seconds.items():
                        rates.setdefault((case, way), []).append(tokens / took)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    _report(cases, rates)


def _report(cases: list[str], rates: dict[tuple[str, str], list[float]]) -> None:
    print(f"{'case':>8} {'way':>13} {'tok/s':>8} {'of transformers':>16}  rounds")
    for case in cases:
        base = statistics.median(rates[case, "transformers"])
        for way in ("runner", "http", "transformers"):
            if (case, way) in rates:
                values = rates[case, way]
                rate = statistics.median(values)
                print(f"{case:>8} {way:>13} {rate:8.0f} {rate / base:15.2f}x  {' '.join(f'{value:.0f}' for value in values)}")


if __name__ == "__main__":
    main()
