"""Prints API.md from the tables that requests are checked against: python -m gateway.api_doc > gateway/API.md"""

import dataclasses

from gateway.limits import Limits
from gateway.schema import CHAT, COMPLETION, RESPONSES, table

RULES = """\
# The HTTP API

Printed by `python -m gateway.api_doc`; do not edit. A field is *implemented*, accepted with *no effect* (for the reason given)
or *refused*: then 400 names it, unless its value asks for nothing. Fields that are not listed are refused. `null` is absence.

## Routes
`POST /v1/chat/completions`, `POST /v1/completions`, `POST /v1/responses` (text; nothing is stored), `GET /v1/streams/{id}`
(below), `GET /v1/models`, `GET /v1/models/{id}`, `POST /tokenize`, `POST /detokenize`, `GET /health` (this process lives),
`GET /ready` (requests can be computed; 503 with the reason if not), `GET /metrics` (Prometheus), `GET /version`,
`GET /openapi.json`, `GET /docs`. `POST /v1/embeddings` is refused: 400.

## Rules
- **Errors** are `{"error": {"message", "type", "param", "code"}}` on every route. What is wrong with a request is answered
  before a stream begins; a stream that fails later ends with an error event and no `[DONE]` (responses: `response.failed`).
- **Length.** prompt + max_tokens beyond the model's length is 400 with the numbers; a cap is never lowered in silence. Without
  a cap the answer gets what is left. A prompt is cut only where truncate_prompt_tokens asks for it, at its beginning.
- **Stop strings** are found in the text wherever tokens begin and end. The first to end wins, the longest of those that end
  together; `stop_reason` names it. The first min_tokens tokens are never part of one.
- **Text, token_ids and logprobs describe the same tokens**: a token is listed when its first character is in the text. The
  token that ended the answer, and tokens wholly inside the stop string, are not, unless include_stop_str_in_output. `usage`
  counts every generated token.
- **Incomplete characters** wait for their next token. What can never be a character becomes U+FFFD, as does an incomplete tail.
- **Log-probabilities** of minus infinity print as -9999.0; alternatives that were ruled out are left out. `bytes` are exact; a
  token that is no text by itself prints as `\\xe2\\x80` (completions: `bytes:\\xe2\\x80`).
- **Choice** j of prompt i has index i * n + j. Choice 0 of a seeded request equals the same request with n = 1.
- **cached_tokens** is what the prefix cache held before the request, each prompt counted once.
- **Empty prompts** are 400; a prompt that encodes to no token starts from the model's BOS token, or is 400 if it has none.
- **Defaults** of temperature, top_p, top_k, min_p and repetition_penalty are those of the model's generation_config.json.

## Streams that survive their connection
With `"resumable": true` beside `"stream": true` every event has an `id:` line, `STREAM:COUNTS`, and the answer a header
`X-Stream-Id: STREAM`. A client whose connection broke, or whose gateway died, asks **any** gateway of the cell for
`GET /v1/streams/STREAM` with the header `Last-Event-ID: ` and the last id it has read (none: from the first event), and gets
the events after it: the same text, token ids, log-probabilities and usage as if nothing had happened. While nobody reads,
nothing is computed. A stream is kept for `--resume-grace-s` after its client left and after its end; then, and for the keys of
another tenant, it is 404 `stream_not_found`. 503 with `Retry-After` is worth another try: the scheduler has just started.
Whoever comes takes the stream over: an older reader of it sees it end (`finish_reason` is `abort`, without an id). An error
event ends a stream for good, and `[DONE]` has no id. A resume counts as a request of its tenant; its prompt is not counted
again.

## Keys
With `--api-key-file` every route but `/health` and `/ready` wants `Authorization: Bearer KEY` (401). `gateway/api_keys.py`
shows the file and makes keys; it holds hashes only. A tenant may be limited in requests and tokens per minute and in requests
under way: 429 with `Retry-After` and `x-ratelimit-*`. Prompt tokens count when they are submitted, generated ones at the end
of the answer. While several tenants wait, each is computed in proportion to its `weight` (1, unless the file says more): what
counts are generated tokens and prompt tokens that no cache had, within one `priority`; a full queue takes a share of each.
Cached prompts belong to their tenant, except between tenants with `shared_cache`.

## Watching and running
`--metrics-port` (on `--metrics-host`, 127.0.0.1) serves `/health`, `/ready` and `/metrics` without a key and without TLS:
probes and Prometheus ask there. `--admin-port` does so on loopback, and takes `POST /drain/WORKER`, which `quire drain` uses:
the worker's sequences move to other workers at once (or wait for one), and its process ends.

## Browsers
`--cors-origins https://example.org,...` lets pages of these origins call; without it no answer has a CORS header.

## Headers
`X-Request-Id` of an answer is unique, and the logs of all roles know the request by it; a client's `X-Client-Request-Id` or
`X-Request-Id` comes back as `X-Client-Request-Id`. Where requests are traced, a W3C `traceparent` is continued.
`X-Request-Timeout: 30` is a deadline in seconds: 504 when it passes. 429 and 503 carry `Retry-After`;
a request that no waiting would help (more tokens than its tenant has in a minute) is 429 with `X-Should-Retry: false`.

## Connections
What is not HTTP/1.1 is 400 `invalid_http`, a header or first line that is too long 431, a compressed body 415. A body must
arrive within 60 s (408). Large bodies that arrive at once may hold 256 MiB together; then those that go on beyond 64 KiB
are 503 `too_many_large_bodies`. A stream without news gets a comment line every `--sse-comment-s` (10 s) from its
acceptance. Clients that do not read are dropped once `--write-buffer-bytes` wait for them, or after 60 s. Who closes its
sending side (half a connection) has left: its request is aborted. `Connection: close` is kept, streams included. A gateway
that was told to end closes idle connections, and the others with their answer, so that clients find another one; who comes
anew is told 503 `draining` until its streams have ended.
"""


def limits() -> str:
    rows = ["| limit | value |", "|---|---|"]
    for each in dataclasses.fields(Limits):
        if each.name.startswith("max_"):
            rows.append(f"| {each.name.removeprefix('max_').replace('_', ' ')} | {each.default} |")
    return "\n".join(rows)


def document() -> str:
    parts = [
        RULES,
        "## Limits of a request",
        limits(),
        "",
        "The body's size is `max_body_bytes` of the configuration (413).",
        "",
    ]
    parts += ["## Fields of /v1/chat/completions", table(CHAT), "", "## Fields of /v1/completions", table(COMPLETION), ""]
    parts += ["## Fields of /v1/responses", table(RESPONSES)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(document(), end="")
