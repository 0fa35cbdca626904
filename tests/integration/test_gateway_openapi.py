"""The description of the API is that of the tables, and bodies made from it, or broken on purpose, get 2xx or a clean 4xx."""

import asyncio
import json
import random
from typing import Any

import pytest

from gateway.handlers import ROUTES
from gateway.openapi import GENERATION
from gateway.schema import FIELDS
from tests.integration.gateway_bench import Bench
from tests.integration.stub_scheduler import Play

ODD: list[Any] = [
    *(None, 0, -1, 1, 2, 2**31, 2**63, 1e308, 0.5, float("nan"), float("inf"), True, False),
    *("", "x", "\0", "y" * 5000, "\ud800"),
    *([], [[]], [None], [-1], ["x"], [3], [[3], [4]], {}, {"type": "text"}, {"5": 1}, {"a": {}}),
]


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
    names = rng.sample(sorted(schema["properties"]), rng.randint(0, min(5, len(schema["properties"]))))
    body = {name: value_of(schema["properties"][name], rng) for name in names}
    body.pop("model", None)
    body["max_output_tokens" if "input" in schema["required"] else "max_tokens"] = rng.randint(1, 4)
    if "messages" in schema["required"]:
        body["messages"] = [{"role": "user", "content": "hi"}]
    elif "input" in schema["required"]:
        body["input"] = "x"
    elif "prompt" in schema["required"]:
        body["prompt"] = rng.choice(["x", [5, 6], ["x", "y"]])
    for _ in range(rng.choice([0, 0, 1, 2])):
        body[rng.choice([*schema["properties"], "nonsense"])] = rng.choice(ODD)
    return body


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


@pytest.mark.parametrize("num_bodies", [1200, pytest.param(12_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_bodies_from_the_description_and_broken_ones(bench: Bench, num_bodies: int) -> None:
    rng = random.Random(11)
    ids = bench.ids("ok")
    bench.stub.script = lambda submit, sampling: Play(ids)
    async with bench.client.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    seen = {2: 0, 4: 0}

    async def one() -> None:
        path = rng.choice([*GENERATION, *GENERATION, "/tokenize", "/detokenize"])
        body = body_of(paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"], rng)
        if path in ("/tokenize", "/detokenize"):
            del body["max_tokens"]
        sent = json.dumps(body).encode()
        async with asyncio.timeout(10):
            answer = await bench.post(path, sent)
        assert answer.status // 100 in seen, (path, sent[:500], answer.body)
        seen[answer.status // 100] += 1
        if answer.status >= 400:
            assert answer.error["message"], sent[:500]

    for _ in range(num_bodies // 20):
        await asyncio.gather(*(one() for _ in range(20)))
    assert min(seen.values()) > num_bodies // 20, seen
