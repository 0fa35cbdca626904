"""Very many short requests of every kind: what each process holds in memory as they go by.

    python -m benchmarks.soak --requests 100000

Two gateways with API keys of 200 tenants, a scheduler and two stub workers as processes. Requests: plain, streamed, resumable,
with a deadline, refused (400, 401, 404), and left by their client; the prompts are all different. Nothing may grow with their
number: from a fifth of the requests on (caches and pages are full by then) no process may grow by more than a tenth.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gateway.api_keys import hashed
from tests import gateway_toys
from tests.chaos.cell import Cell, running

NUM_TENANTS = 200
NUM_CLIENTS = 32
GROWTH = 0.10


def key_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    tenants = [f'[tenants.t{each}]\nkeys = ["{hashed(f"key-{each}")}"]\nweight = {1 + each % 3}' for each in range(NUM_TENANTS)]
    path.write_text("\n".join(tenants))
    return path


async def request(cell: Cell, number: int, source: random.Random) -> int:
    """One of them; its status, 0 when the client left."""
    prompt = [20 + source.randrange(100) for _ in range(source.randrange(4, 40))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "seed": number}
    headers = {"Authorization": f"Bearer key-{source.randrange(NUM_TENANTS)}", "X-Request-Id": f"client-{number}"}
    url = f"{cell.url(source.choice(('g0', 'g1')))}/v1/completions"
    match number % 10:
        case 0:
            body |= {"stream": True}
        case 1:
            body |= {"stream": True, "resumable": True}
        case 2:
            headers["X-Request-Timeout"] = "3600"
        case 3 if number % 30 == 3:
            body |= {"temperature": -number}
        case 3 if number % 30 == 13:
            headers["Authorization"] = f"Bearer wrong-{number}"
        case 3:
            url += f"/nowhere/{number}"
        case 4:
            body |= {"max_tokens": 400}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05), cell.client.post(url, json=body, headers=headers) as response:
                    await response.read()
            return 0
        case _:
            body |= {"priority": number % 3}
    async with cell.client.post(url, json=body, headers=headers) as response:
        await response.read()
        return response.status


def memory_mib(cell: Cell) -> dict[str, float]:
    return {name: role.resident_bytes / 2**20 for name, role in sorted(cell.roles.items())}


async def soak(cell: Cell, count: int) -> tuple[Counter[int], list[dict[str, float]]]:
    """Statuses, and the memory of the roles at each fifth."""
    statuses: Counter[int] = Counter()
    numbers = iter(range(count))
    looks = [memory_mib(cell)]

    async def client(seed: int) -> None:
        source = random.Random(seed)
        for number in numbers:
            statuses[await request(cell, number, source)] += 1
            if (number + 1) % (count // 5) == 0:
                looks.append(memory_mib(cell))
                print(
                    f"{number + 1:>8} requests: " + ", ".join(f"{name} {mib:.1f}" for name, mib in looks[-1].items()),
                    flush=True,
                )

    await asyncio.gather(*(client(seed) for seed in range(NUM_CLIENTS)))
    return statuses, looks


async def run(count: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = gateway_toys.write_model(Path(name), gateway_toys.byte_level())
        settings: dict[str, Any] = {"api_key_file": str(key_file(folder)), "resume_grace_s": 5.0}
        async with running(folder, workers=2, gateways=2, **settings) as cell:
            started = time.monotonic()
            statuses, looks = await soak(cell, count)
            took_s = time.monotonic() - started
            await asyncio.sleep(cell.config.resume_grace_s + 1)
            found = await cell.check_clean()
            print(f"{count} requests in {took_s:.0f} s, by status (0: left) {dict(sorted(statuses.items()))}")
            print(f"kept streams afterwards {found['quire_kept_streams']:.0f}")
            growth = {name: looks[-1][name] / looks[1][name] - 1 for name in looks[0]}
            print("growth from a fifth to the end: " + ", ".join(f"{name} {share:+.1%}" for name, share in growth.items()))
            cell.client.headers["Authorization"] = "Bearer key-0"  # for the last look
            bad = set(statuses) - {0, 200, 400, 401, 404} or found["quire_kept_streams"] or max(growth.values()) > GROWTH
            return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory of all roles under very many short requests.")
    parser.add_argument("--requests", type=int, default=100_000)
    return asyncio.run(run(parser.parse_args().requests))


if __name__ == "__main__":
    raise SystemExit(main())
