"""API keys: which tenant a key belongs to, and what each tenant may use. The file holds hashes, never keys.

python -m gateway.api_keys      # prints a new key, and the line that the file needs for it

[tenants.acme]                          # TOML; every limit may be left out, which means there is none
keys = ["sha256:<64 hex digits>"]
requests_per_minute = 60
tokens_per_minute = 100000              # prompt and generated tokens
max_concurrent = 8                      # requests under way at once
weight = 3                              # of its share while several tenants wait, 1 to 1000; default 1
shared_cache = true                     # prompts may be found in the cache by every tenant that says so; default false
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.errors import ApiError
from gateway.rate_limit import Bucket
from shared.config import BadConfig

MAX_KEYS = 10_000
MAX_NAME_CHARS = 64
MAX_WEIGHT = 1000
COUNTS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(eq=False)
class Tenant:
    """Limits of 0 are none."""

    name: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    weight: int = 1
    shared_cache: bool = False
    running: int = 0
    requests: Bucket = field(init=False)
    tokens: Bucket = field(init=False)

    def __post_init__(self) -> None:
        self.requests = Bucket(self.requests_per_minute, "requests")
        self.tokens = Bucket(self.tokens_per_minute, "tokens")

    @property
    def salt(self) -> str:
        """Of the page hashes: tenants of different salts never share a cached page."""
        return "" if self.shared_cache else self.name

    @contextmanager
    def request(self, now: float) -> Iterator[None]:
        """Around one request that generates; 429 when there are too many."""
        if self.max_concurrent and self.running >= self.max_concurrent:
            text = f"Tenant {self.name} has {self.running} requests under way, limit {self.max_concurrent}"
            raise ApiError(429, text, code="too_many_concurrent_requests", retry_after_s=1)
        self.requests.require(1, now, self.name)
        self.requests.spend(1, now)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def take_prompt(self, num_tokens: int, now: float) -> None:
        """429 unless the tokens of a prompt may be used now. What is generated is spent later, and may leave a debt."""
        self.tokens.require(num_tokens, now, self.name)
        self.tokens.spend(num_tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        return {**self.requests.headers(now), **self.tokens.headers(now)}


ANYBODY = Tenant()  # where there are no keys


class KeyRing:
    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = list(tenants.items())  # (sha256 of the key, its tenant)

    def tenant(self, authorization: str) -> Tenant:
        """Whose key the Authorization header holds; ApiError 401 if nobody's. Every key is compared, whichever it is."""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Tenant | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            text = "Incorrect API key provided" if authorization else "An API key is required: Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key" if authorization else "missing_api_key")
        return found


def load(path: str) -> KeyRing | None:
    """None without a file. BadConfig says what is wrong with it."""
    if not path:
        return None
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadConfig(f"api_key_file = {path!r}: {error}") from None
    found: dict[bytes, Tenant] = {}
    tenants = content.pop("tenants", None)
    if content or type(tenants) is not dict or not tenants:
        raise BadConfig(f"api_key_file = {path!r}: must hold tables [tenants.NAME] and nothing else, got {sorted(content)}")
    for name, table in tenants.items():
        tenant, digests = _tenant(path, name, table)
        for digest in digests:
            if digest in found:
                raise BadConfig(f"api_key_file = {path!r}: a key of tenant {name} is there twice")
            found[digest] = tenant
    if len(found) > MAX_KEYS:
        raise BadConfig(f"api_key_file = {path!r}: has {len(found)} keys, limit {MAX_KEYS}")
    return KeyRing(found)


def _tenant(path: str, name: str, table: Any) -> tuple[Tenant, list[bytes]]:
    def bad(what: str) -> BadConfig:
        return BadConfig(f"api_key_file = {path!r}: tenants.{name[:MAX_NAME_CHARS]}{what}")

    if not 1 <= len(name) <= MAX_NAME_CHARS or type(table) is not dict:
        raise bad(f" must be a table whose name has 1 to {MAX_NAME_CHARS} characters")
    settings = dict(table)
    keys = settings.pop("keys", None)
    if type(keys) is not list or not keys:
        raise bad(".keys must be a list of key hashes")
    for at, key in enumerate(keys):
        if type(key) is not str or not _HASH.fullmatch(key):
            raise bad(f".keys[{at}] must be sha256: and 64 hex digits, as python -m gateway.api_keys prints it")
    for setting, value in settings.items():
        if setting == "shared_cache":
            if type(value) is not bool:
                raise bad(f".shared_cache must be true or false, got {value!r}")
        elif setting == "weight":
            if type(value) is not int or not 1 <= value <= MAX_WEIGHT:
                raise bad(f".weight must be a whole number from 1 to {MAX_WEIGHT}, got {value!r}")
        elif setting not in COUNTS:
            raise bad(f".{setting} is no setting; there are keys, weight, shared_cache, {', '.join(COUNTS)}")
        elif type(value) is not int or not 1 <= value < 2**53:
            raise bad(f".{setting} must be a whole number of at least 1, got {value!r}")
    return Tenant(name, **settings), [bytes.fromhex(key.removeprefix("sha256:")) for key in keys]


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


if __name__ == "__main__":
    made = f"qk-{secrets.token_urlsafe(32)}"
    print(f'key:  {made}\nfile: keys = ["{hashed(made)}"]')
