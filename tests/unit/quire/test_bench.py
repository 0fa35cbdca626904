"""The load client: its workloads, its arithmetic, and a run against a small server of our own."""

import argparse
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer

from quire import bench
from quire.workloads import WORKLOADS, Workload, prompts


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_command(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    first, second = prompts("prefix-512", seed=1)[:2]
    assert len(first) == 2048 + 128
    assert first[:2048] == second[:2048] and first[2048:] != second[2048:]
    assert prompts("prefix-512", seed=1)[0] == first
    assert prompts("prefix-512", seed=2)[0] != first
    assert all(1000 <= token < 31_000 for token in first)


def test_percentiles_in_milliseconds() -> None:
    values = [number / 1000 for number in range(1, 101)]
    assert bench.percentile_ms(values, 0.5) == pytest.approx(51)
    assert bench.percentile_ms(values, 0.99) == pytest.approx(100)


@pytest.mark.parametrize("word", ["nosuch", "chat-64:fast"])
def test_unknown_workloads_are_refused(word: str) -> None:
    with pytest.raises(SystemExit):
        _arguments(word)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BaseTestServer]:
    """Answers three tokens a request and refuses every third one."""
    monkeypatch.setitem(WORKLOADS, "tiny", Workload(6, 4, 2, 3))
    asked = []

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body)
        assert body["model"] == "served" and body["max_tokens"] == body["min_tokens"] == 3 and len(body["prompt"]) == 6
        if len(asked) % 3 == 0:
            return web.json_response({"error": {"message": "busy"}}, status=429)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
        usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as running:
        yield running


async def test_a_run_counts_what_it_saw(server: BaseTestServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = await bench._bench_server(_arguments("tiny", "--base-url", str(server.make_url("")), "--repetitions", "1"))
    seen = json.loads(capsys.readouterr().out.splitlines()[0])
    assert code == 1, "requests failed, and the exit code says so"
    assert (seen["ok"], seen["failed"]) == (4, 2)
    assert seen["first_error"].startswith("429")
    assert seen["cached_tokens"] == 16
    assert seen["out_tok_s"] > 0 and seen["ttft_ms_p50"] > 0 and seen["gap_ms_p50"] is not None


async def test_no_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench._bench_server(_arguments("single", "--base-url", "http://127.0.0.1:9")) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
