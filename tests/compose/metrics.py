"""Questions to a Prometheus: metrics.py URL targets N, dashboard FILE, exemplars, firing ALERT S, quiet ALERT S or picture."""

import json
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

SHOWN = {
    "tokens a second": "quire:generated_tokens:rate1m",
    "running": "sum(quire_running_sequences)",
    "waiting": "sum(quire_queued_sequences)",
    "gap, 99 %": "quire:token_gap_seconds:p99",
    "first token, 99 %": "quire:first_token_seconds:p99",
}


def get(base: str, path: str, **values: str) -> Any:
    with urllib.request.urlopen(f"{base}/api/v1/{path}?{urllib.parse.urlencode(values)}", timeout=10) as answer:
        return json.load(answer)["data"]


def series(base: str, expression: str) -> list[Any]:
    found: list[Any] = get(base, "query", query=expression)["result"]
    return found


def targets(base: str, number: str) -> bool:
    up = {each["metric"]["instance"]: each["value"][1] for each in series(base, "up")}
    print(f"        {len(up)} targets, {sum(value == '1' for value in up.values())} up")
    return len(up) >= int(number) and set(up.values()) == {"1"}


def dashboard(base: str, file: str) -> bool:
    """A worker that has just come back is in what rules record after the next look of theirs: waits for it."""
    expressions = [
        target["expr"] for panel in json.loads(Path(file).read_text())["panels"] for target in panel.get("targets", ())
    ]
    for _ in range(30):
        empty = [expression for expression in expressions if not series(base, expression)]
        if not empty:
            break
        time.sleep(2)
    print(f"        {len(expressions)} expressions, {len(empty)} without data {empty or ''}")
    return not empty


def exemplars(base: str) -> bool:
    """Print the newest request that a latency histogram names."""
    now = time.time()
    found = get(base, "query_exemplars", query="quire_gateway_request_seconds_bucket", start=str(now - 900), end=str(now))
    named = [each["labels"]["request_id"] for entry in found for each in entry["exemplars"]]
    print(named[-1] if named else "")
    return bool(named)


def waited(base: str, wanted: bool, alert: str, limit_s: str) -> bool:
    started = time.monotonic()
    while time.monotonic() - started < float(limit_s):
        if bool(series(base, f'ALERTS{{alertname="{alert}", alertstate="firing"}}')) == wanted:
            print(f"        after {time.monotonic() - started:.0f} s", file=sys.stderr)
            return True
        time.sleep(2)
    return False


def picture(base: str) -> None:
    """The last minutes as JSON: name -> [(seconds, value)]."""
    now = time.time()
    drawn = {}
    for name, expression in SHOWN.items():
        result = get(base, "query_range", query=expression, start=str(now - 900), end=str(now), step="5")["result"]
        drawn[name] = [(float(at) - now, float(value)) for at, value in (result[0]["values"] if result else ())]
    print(json.dumps(drawn))


def main(base: str, question: str, *more: str) -> int:
    match question:
        case "targets":
            return not targets(base, *more)
        case "dashboard":
            return not dashboard(base, *more)
        case "exemplars":
            return not exemplars(base)
        case "firing":
            return not waited(base, True, *more)
        case "quiet":
            return not waited(base, False, *more)
        case "picture":
            picture(base)
            return 0
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
