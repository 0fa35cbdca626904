"""The description of the API is that of the tables, and bodies made from it, or broken on purpose, get 2xx or a clean 4xx."""

import asyncio
import random

import pytest

from benchmarks.http_fuzz import at_random, described, every_field
from gateway.handlers import ROUTES
from gateway.openapi import GENERATION
from gateway.schema import FIELDS
from tests.integration.gateway_bench import Bench
from tests.integration.stub_scheduler import Play


async def test_the_description_names_every_route_and_field(bench: Bench) -> None:
    async with bench.client.get("/openapi.json") as response:
        described = await response.json()
    paths = {route.path for route in ROUTES}
    assert paths - set(described["paths"]) == {"/v1/models/{name:.*}", "/v1/embeddings", "/docs"}
    assert [each["name"] for each in described["paths"]["/v1/streams/{id}"]["get"]["parameters"]] == ["id", "Last-Event-ID"]
    for path, (api, _) in GENERATION.items():
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == set(FIELDS[api])
        undescribed = [name for name, each in schema["properties"].items() if not {"type", "enum"} & set(each)]
        assert undescribed in ([], ["metadata"])
        assert schema["properties"]["temperature"]["maximum"] == 2
        assert api == "responses" or schema["properties"]["n"]["maximum"] == 512
    async with bench.client.get("/docs") as response:
        page = await response.text()
        assert response.content_type == "text/html" and "repetition_penalty" in page


async def test_embeddings_are_refused_by_name(bench: Bench) -> None:
    answer = await bench.post("/v1/embeddings", {"model": "toy", "input": "x"})
    assert (answer.status, answer.error["param"]) == (400, "model") and "toy" in answer.error["message"]


@pytest.mark.parametrize("num_each", [3000, pytest.param(12_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_odd_bodies_get_an_answer_or_a_clean_refusal(bench: Bench, num_each: int) -> None:
    """As `make fuzz` sends them, without a process: so many with one odd field, so many at random."""
    rng = random.Random(11)
    ids = bench.ids("ok")
    bench.stub.script = lambda submit, sampling: Play(ids)
    paths = described(await (await bench.client.get("/openapi.json")).json())
    every, chance = list(every_field(paths)), at_random(paths, rng)
    odd = rng.sample(every, min(num_each, len(every))) + [next(chance) for _ in range(num_each)]
    seen = {2: 0, 4: 0}

    async def one(path: str, sent: bytes) -> None:
        async with asyncio.timeout(30):
            answer = await bench.post(path, sent)
        assert answer.status // 100 in seen, (path, sent[:500], answer.body)
        seen[answer.status // 100] += 1
        if answer.status >= 400:
            assert answer.error["message"], sent[:500]

    for start in range(0, len(odd), 20):
        await asyncio.gather(*(one(path, sent) for path, sent in odd[start : start + 20]))
    assert min(seen.values()) > len(odd) // 20, seen
