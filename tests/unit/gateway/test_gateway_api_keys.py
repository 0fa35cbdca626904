"""Key files, keys and the buckets that limit a tenant."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway import api_keys
from gateway.api_keys import KeyRing, Tenant, hashed
from gateway.errors import ApiError
from gateway.handlers import error_response
from gateway.rate_limit import Bucket
from shared.config import BadConfig


def load(folder: Path, text: str) -> KeyRing:
    path = folder / "keys.toml"
    path.write_text(text)
    ring = api_keys.load(str(path))
    assert ring is not None
    return ring


def test_keys_lead_to_their_tenants(tmp_path: Path) -> None:
    text = f'[tenants.a]\nkeys = ["{hashed("one")}", "{hashed("two")}"]\nmax_concurrent = 3\nweight = 7\n'
    ring = load(tmp_path, text + f'[tenants."b c"]\nkeys = ["{hashed("three")}"]\nshared_cache = true\n')
    for key, name, salt in (("one", "a", "a"), ("two", "a", "a"), ("three", "b c", "")):
        tenant = ring.tenant(f"Bearer {key}")
        assert (tenant.name, tenant.salt) == (name, salt)
    assert (ring.tenant("Bearer one").weight, ring.tenant("Bearer three").weight) == (7, 1)
    assert ring.tenant("bearer one") is ring.tenant("Bearer two ")
    for wrong in (
        "",
        "one",
        "Bearer",
        "Bearer ",
        "Bearer One",
        "Basic one",
        "Bearer one two",
        f"Bearer {hashed('one')}",
        "Bearer \udcff",
    ):
        with pytest.raises(ApiError) as caught:
            ring.tenant(wrong)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key" if wrong else "missing_api_key")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold tables"),
        ("x = 1", "must hold tables"),
        ("[tenants.a]\n", "keys must be a list"),
        ('[tenants.a]\nkeys = ["secret"]', r"keys\[0\] must be sha256"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nheaviness = 2', "heaviness is no setting"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nweight = 0', "from 1 to 1000, got 0"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nweight = 1001', "from 1 to 1000, got 1001"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nweight = 1.5', "whole number"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nmax_concurrent = 0', "at least 1, got 0"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nmax_concurrent = true', "whole number"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nshared_cache = 1', "true or false"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\n[tenants.b]\nkeys = ["{hashed("k")}"]', "twice"),
        ("[", "keys.toml"),
    ],
)
def test_bad_files_say_what_is_wrong_and_no_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadConfig, match=says) as caught:
        load(tmp_path, text)
    assert "secret" not in str(caught.value)
    with pytest.raises(BadConfig, match="nowhere"):
        api_keys.load(str(tmp_path / "nowhere"))


def test_a_bucket_refills_evenly_and_may_owe() -> None:
    bucket = Bucket(60, "tokens")
    bucket.require(60, 100.0, "a")
    bucket.spend(50, 100.0)
    with pytest.raises(ApiError, match="20 needed, 10 left") as caught:
        bucket.require(20, 100.0, "a")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 10)
    assert error_response(caught.value).headers["Retry-After"] == "10"
    bucket.require(20, 110.0, "a")
    bucket.spend(80, 110.0)
    assert bucket.headers(110.0) == {
        "x-ratelimit-limit-tokens": "60", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "120.0s",
    }  # fmt: skip
    assert bucket.level(1000.0) == 60
    with pytest.raises(ApiError, match="needs 61 at once") as caught:
        bucket.require(61, 1000.0, "a")
    headers = error_response(caught.value).headers
    assert headers["X-Should-Retry"] == "false" and "Retry-After" not in headers


def test_requests_under_way_are_given_back() -> None:
    tenant = Tenant("a", max_concurrent=1)
    for _ in range(3):
        with tenant.request(0.0), pytest.raises(ApiError, match="1 requests under way, limit 1"), tenant.request(0.0):
            pass
    with pytest.raises(ValueError), tenant.request(0.0):
        raise ValueError
    assert tenant.running == 0


def test_a_new_key_and_its_line_fit(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "gateway.api_keys"], capture_output=True, text=True, check=True)
    key, line = (each.split(":", 1)[1].strip() for each in ran.stdout.splitlines())
    assert load(tmp_path, f"[tenants.a]\n{line}").tenant(f"Bearer {key}").name == "a"
