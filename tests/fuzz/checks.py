"""What schemathesis looks at, beside its own checks, when benchmarks/http_fuzz.py runs it (in an environment of its own)."""

import json
import os
from typing import Any

import requests
import schemathesis

GOOD: dict[str, Any] = {"prompt": "canary", "max_tokens": 4, "seed": 7, "ignore_eos": True, "temperature": 1}
SESSION = requests.Session()


@schemathesis.check  # type: ignore[untyped-decorator]
def openai_shape(ctx: Any, response: Any, case: Any) -> None:
    """A refusal is an error as OpenAI sends it, and a good request afterwards gets its usual answer."""
    if response.status_code >= 400 and case.method.upper() != "HEAD":
        found = json.loads(response.content)
        assert set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}, found
        assert found["error"]["message"] and "Traceback" not in found["error"]["message"], found
    answer = SESSION.post(case.operation.base_url.rstrip("/") + "/v1/completions", json=GOOD, timeout=20)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == os.environ["FUZZ_TEXT"], answer.text
