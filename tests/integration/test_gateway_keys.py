"""Keys over HTTP: no route without one but the probes, limits of a tenant, and caches that tenants do not share."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from gateway.api_keys import hashed
from gateway.app import OPEN, create_admin_app
from gateway.handlers import ROUTES
from quire.main import main
from shared.config import Config
from shared.messages import Submit
from shared.sampling import Sampling
from tests import gateway_toys
from tests.integration.gateway_bench import Bench, running
from tests.integration.stub_scheduler import Play

LIMITS = {
    "free": "",
    "few": "requests_per_minute = 2",
    "small": "tokens_per_minute = 40",
    "one": "max_concurrent = 1\nweight = 3",
    "shared": "shared_cache = true",
    "also": "shared_cache = true",
}


def head(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{name}"}


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = gateway_toys.write_model(tmp_path_factory.mktemp("toy"), gateway_toys.byte_level())
    tables = [f'[tenants.{name}]\nkeys = ["{hashed("key-" + name)}"]\n{limit}' for name, limit in LIMITS.items()]
    (folder / "keys.toml").write_text("\n".join(tables))
    return folder


@pytest.fixture
async def bench(toy_folder: Path) -> AsyncIterator[Bench]:
    async with running(toy_folder, api_key_file=str(toy_folder / "keys.toml")) as made:
        yield made
        made.client.headers.update(head("free"))  # for the canary


async def status(bench: Bench, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    url = URL(f"http://127.0.0.1:{bench.port}{path}", encoded=True)
    async with aiohttp.ClientSession() as client, client.request(method, url, headers=headers) as response:
        if response.status == 401:
            error = (await response.json())["error"]
            assert error["type"] == "authentication_error" and response.headers["WWW-Authenticate"] == "Bearer"
        return response.status


async def test_chat_and_bench_bring_a_key(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.stub.script = lambda submit, sampling: Play(bench.ids("ok"))

    async def quire(command: str, *words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, [command, f"--base-url=http://127.0.0.1:{bench.port}", *words])
        return int(str(ended.value.code))

    assert await quire("chat", "hi") == 1
    assert "401" in capsys.readouterr().err
    assert await quire("chat", "--api-key=key-free", "hi") == 0
    monkeypatch.setenv("OPENAI_API_KEY", "key-free")
    assert await quire("chat", "hi") == 0
    assert capsys.readouterr().out == "ok\nok\n"
    asked = bench.session.metrics.requests
    before = asked["/v1/models", "200"]
    assert await quire("bench", "cpu-1", "--repetitions=1") == 1  # with ids that the toy does not have
    assert (asked["/v1/models", "200"] - before, asked["/v1/completions", "400"], asked["/v1/completions", "401"]) == (1, 1, 0)
    monkeypatch.delenv("OPENAI_API_KEY")
    assert await quire("bench", "cpu-1", "--model=toy", "--repetitions=1") == 1
    assert asked["/v1/completions", "401"] == 1


async def test_b34_no_route_without_a_key(bench: Bench) -> None:
    paths = {route.path.replace("{name:.*}", "toy") for route in ROUTES} - set(OPEN)
    assert len(paths) >= 8
    tricks = [
        "//v1/models",
        "/v1/models/",
        "/V1/MODELS",
        "/v1/%2e%2e/metrics",
        "/v1/../metrics",
        "/health/../metrics",
        "/nope",
        "/",
    ]
    tricks += ["/health/", "/ready%2f", "/HEALTH", "//health"]
    for path in [*sorted(paths), *tricks]:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
            assert await status(bench, method, path) == 401, (method, path)
        assert await status(bench, "GET", path, {"Authorization": "Bearer wrong"}) == 401, path
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "a" * 24,
        }
        assert await status(bench, "GET", path, upgrade) == 401, path
    assert bench.stub.submits == []
    for path in OPEN:
        assert await status(bench, "GET", path) == 200
    for path in ("/v1/models", "/metrics", "/version"):
        assert await status(bench, "GET", path, head("free")) == 200


async def test_requests_of_a_minute(bench: Bench) -> None:
    for left in (1, 0):
        answer = await bench.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=head("few"))
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    answer = await bench.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=head("few"))
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert 25 <= int(answer.headers["Retry-After"]) <= 30
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await bench.post("/v1/completions", {"prompt": "x"}, headers=head("free"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_a_minute(bench: Bench, stream: bool) -> None:
    ids = bench.ids("y" * 20)
    bench.stub.script = lambda submit, sampling: Play(ids)
    body = {"prompt": "x" * 15, "max_tokens": 20, "stream": stream}
    assert (await bench.post("/v1/completions", body, headers=head("small"))).status == 200
    answer = await bench.post("/v1/completions", body, headers=head("small"))
    assert answer.status == 429 and "15 needed, 5 left" in answer.error["message"]
    answer = await bench.post("/v1/completions", {"prompt": "x" * 41, "max_tokens": 1}, headers=head("small"))
    assert answer.status == 429 and "Retry-After" not in answer.headers and "needs 41 at once" in answer.error["message"]


async def test_requests_under_way(bench: Bench) -> None:
    ids = bench.ids("ok")
    bench.stub.script = lambda submit, sampling: Play(ids, hold=True)
    body = {"prompt": "x", "max_tokens": 2}
    first = asyncio.create_task(bench.post("/v1/completions", body, headers=head("one")))
    async with asyncio.timeout(5):
        while not bench.stub.submits:  # noqa: ASYNC110 - the stub knows no event for it
            await asyncio.sleep(0.01)
    answer = await bench.post("/v1/completions", body, headers=head("one"))
    assert (answer.status, answer.error["code"]) == (429, "too_many_concurrent_requests")
    bench.stub.released.set()
    assert (await first).status == 200
    assert (await bench.post("/v1/completions", body, headers=head("one"))).status == 200


async def test_b50_tenants_share_cached_pages_only_where_both_say_so(bench: Bench) -> None:
    seen: list[tuple[str, bytes, bytes]] = []
    weights: dict[str, int] = {}

    def script(submit: Submit, sampling: Sampling) -> Play:
        weights[submit.tenant] = submit.weight
        seen.append((submit.tenant, submit.root_hash, submit.page_hashes))
        return Play(bench.ids("ok"))

    bench.stub.script = script
    names = ["free", "one", "shared", "also"]
    for name in names:
        for length in (40, 1500):
            body = {"prompt": [5] * length, "max_tokens": 2}
            assert (await bench.post("/v1/completions", body, headers=head(name))).status == 200
    assert [tenant for tenant, _, _ in seen] == [name for name in names for _ in range(2)]
    assert weights == {"free": 1, "one": 3, "shared": 1, "also": 1}
    for at in (0, 1):
        free, one, shared, also = (each[1:] for each in seen[at::2])
        assert free[0] != one[0] and free[1] != one[1] and one[1] != shared[1]
        assert shared == also


async def test_the_admin_listener_asks_for_no_key_and_generates_nothing(bench: Bench) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    async with TestClient(TestServer(create_admin_app(bench.session, Config()))) as client:
        for path, wanted in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 404), ("/tokenize", 404)):
            async with client.get(path) as response:
                assert response.status == wanted
