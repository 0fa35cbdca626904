"""Browsers: only pages of the configured origins may read answers, and their questions need no key."""

from pathlib import Path

import pytest

from gateway.api_keys import hashed
from gateway.cors import Origins
from shared.config import BadConfig
from tests import gateway_toys
from tests.integration.gateway_bench import running

PAGE = "https://page.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = gateway_toys.write_model(tmp_path_factory.mktemp("toy"), gateway_toys.byte_level())
    (folder / "keys.toml").write_text(f'[tenants.a]\nkeys = ["{hashed("key")}"]')
    return folder


async def test_only_configured_origins(toy_folder: Path) -> None:
    keys = str(toy_folder / "keys.toml")
    async with running(toy_folder, cors_origins=f"http://localhost:3000, {PAGE}", api_key_file=keys) as bench:
        async with bench.client.options("/v1/chat/completions", headers={"Origin": PAGE, **ASK}) as response:
            assert (response.status, await response.read()) == (204, b"")
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        async with bench.client.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **ASK}) as response:
            assert response.status == 401 and "Access-Control-Allow-Origin" not in response.headers
        for headers, wanted in (({}, 401), ({"Authorization": "Bearer key"}, 200)):
            async with bench.client.get("/v1/models", headers={"Origin": PAGE, **headers}) as response:
                assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (wanted, PAGE)
        bench.client.headers["Authorization"] = "Bearer key"
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        answer = await bench.post("/v1/completions", body, headers={"Origin": PAGE})
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == PAGE


async def test_no_origin_unless_configured(toy_folder: Path) -> None:
    async with running(toy_folder) as bench, bench.client.options("/v1/models", headers={"Origin": PAGE, **ASK}) as response:
        assert response.status == 405 and "Access-Control-Allow-Origin" not in response.headers
    async with (
        running(toy_folder, cors_origins="*") as bench,
        bench.client.get("/health", headers={"Origin": PAGE}) as response,
    ):
        assert response.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("setting", ["example.org", "https://a.example/path", "ftp://x", "https://"])
def test_what_is_no_origin_is_refused(setting: str) -> None:
    with pytest.raises(BadConfig, match="is no origin"):
        Origins(setting)
