"""Tenants beside each other: no cache is shared (B50), also after deaths; what is computed is shared by weight."""

import asyncio
from collections import Counter
from pathlib import Path

from gateway.api_keys import hashed
from tests.chaos.cell import Cell, running, until

PROMPT = [20 + number % 100 for number in range(160)]  # ten pages
TENANTS = {"one": "", "two": "weight = 3", "pair": "shared_cache = true", "public": "shared_cache = true"}


def key_file(folder: Path) -> str:
    tables = [f'[tenants.{name}]\nkeys = ["{hashed(name)}"]\n{line}' for name, line in TENANTS.items()]
    path = folder / "keys.toml"
    path.write_text("\n".join(tables))
    return str(path)


async def ask(cell: Cell, tenant: str, prompt: list[int] = PROMPT) -> tuple[int, str]:
    """Cached tokens and text of the answer; asked again while no worker is there."""
    body = {"prompt": prompt, "max_tokens": 8, "seed": 1}
    headers = {"Authorization": f"Bearer {tenant}"}
    for _ in range(200):
        async with cell.client.post("/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
        if response.status == 200:
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]
        assert response.status == 503, answer
        await asyncio.sleep(0.05)
    raise AssertionError(answer)


async def test_b50_a_tenant_sees_nothing_of_another_ones_cache(toy_folder: Path, tmp_path: Path) -> None:
    async with running(toy_folder, api_key_file=key_file(tmp_path)) as cell:
        cell.client.headers["Authorization"] = "Bearer one"
        cold, text = await ask(cell, "one")
        assert cold == 0
        assert await ask(cell, "two") == (0, text)
        assert await ask(cell, "one") == await ask(cell, "two") == (144, text)
        assert await ask(cell, "pair") == (0, text)
        assert await ask(cell, "public") == (144, text), "both of them say that they share"
        await cell.restart("scheduler")
        await until(lambda: cell.roles["scheduler"].seen("replica ready"))
        await cell.ready()
        assert await ask(cell, "one") == await ask(cell, "public") == (144, text), "the worker told its pages"
        assert (await ask(cell, "two", [9, *PROMPT[1:]]))[0] == 0, "another first token, so no page is the same"
        await cell.restart("r0")
        await until(lambda: cell.roles["scheduler"].seen("replica dropped"))
        await cell.ready()
        assert await ask(cell, "two") == (0, text)
        assert await ask(cell, "one") == (0, text)
        assert await ask(cell, "two") == (144, text)


async def test_tenants_get_tokens_by_weight(toy_folder: Path, tmp_path: Path) -> None:
    """Each has three times as much under way as fits; one of them asks for little at a time."""
    async with running(toy_folder, "--delay-s=0.01", "--max-num-seqs=8", api_key_file=key_file(tmp_path)) as cell:
        cell.client.headers["Authorization"] = "Bearer one"
        used: Counter[str] = Counter()

        async def client(tenant: str, number: int, num_tokens: int) -> None:
            headers = {"Authorization": f"Bearer {tenant}"}
            body = {"prompt": [20 + number], "max_tokens": num_tokens, "ignore_eos": True, "seed": number}
            while used.total() < 3000:
                async with cell.client.post("/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                    total = (await response.json())["usage"]["total_tokens"]
                    if used.total() < 3000:  # what ends later had no rivals
                        used[tenant] += total

        clients = [client(tenant, number, count) for tenant, count in (("one", 8), ("two", 20)) for number in range(24)]
        await asyncio.gather(*clients)
        print(used)
        assert 0.9 < used["two"] / used["one"] / 3 < 1.1
