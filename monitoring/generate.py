"""Writes what is made from other files: grafana/quire.json (the dashboard) and k8s-rules.yaml (rules/quire.yml as an object).

python monitoring/generate.py. A test fails when the files and this disagree, or when an expression names no real metric.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 8, 8  # of a panel, in Grafana's 24 columns
SOURCE = {"type": "prometheus", "uid": "${source}"}
BY_WORKER = "{{replica}}"

# (row, [(title, unit, [(expression, legend)])]); the text of a panel is its title
Panel = tuple[str, str, list[tuple[str, str]]]
ROWS: list[tuple[str, list[Panel]]] = [
    (
        "What clients see",
        [
            ("Requests per second", "reqps", [("quire:requests:rate1m", "{{route}} {{status}}")]),
            (
                "Time to first token",
                "s",
                [
                    ("quire:first_token_seconds:p50", "median"),
                    ("histogram_quantile(0.99, sum by (le) (rate(quire_gateway_first_token_seconds_bucket[5m])))", "99 %"),
                ],
            ),
            (
                "Gap between tokens",
                "s",
                [
                    ("quire:token_gap_seconds:p50", "median"),
                    ("histogram_quantile(0.99, sum by (le) (rate(quire_gateway_token_gap_seconds_bucket[5m])))", "99 %"),
                ],
            ),
            (
                "Tokens per second",
                "none",
                [("quire:prompt_tokens:rate1m", "prompt"), ("quire:generated_tokens:rate1m", "generated")],
            ),
            (
                "Request time",
                "s",
                [
                    ("histogram_quantile(0.5, sum by (le) (rate(quire_gateway_request_seconds_bucket[5m])))", "median"),
                    ("histogram_quantile(0.99, sum by (le) (rate(quire_gateway_request_seconds_bucket[5m])))", "99 %"),
                ],
            ),
            (
                "Tokens per second, by tenant",
                "none",
                [("sum by (tenant, kind) (rate(quire_gateway_tenant_tokens_total[1m]))", "{{tenant}} {{kind}}")],
            ),
            (
                "Streams per gateway",
                "none",
                [("quire_gateway_live_sequences", "{{instance}}"), ("sum(quire_gateway_live_sequences)", "all")],
            ),
        ],
    ),
    (
        "Queue and cache",
        [
            ("Waiting, by why", "none", [("sum by (reason) (quire_queued_sequences)", "{{reason}}")]),
            ("Running", "none", [("quire_running_sequences", BY_WORKER), ("sum(quire_running_sequences)", "all")]),
            ("Work seconds", "s", [("quire_work_seconds", "of one full replica")]),
            ("Prompt tokens from the cache", "percentunit", [("quire:prefix_hits:ratio5m", "of those looked up")]),
            (
                "Pages, all workers",
                "none",
                [("sum by (state) (quire_pages)", "{{state}}")],
            ),
            ("Pages held, per worker", "percentunit", [('quire:pages:ratio{state="held"}', BY_WORKER)]),
        ],
    ),
    (
        "Workers",
        [
            ("Busy share", "percentunit", [("quire:worker_busy:ratio1m", "{{instance}}")]),
            ("GPU utilisation", "percentunit", [("quire_worker_utilization_ratio", "{{instance}}")]),
            (
                "Device memory",
                "bytes",
                [("quire_memory_used_bytes", BY_WORKER), ("quire_memory_total_bytes", BY_WORKER + " in all")],
            ),
            (
                "Step time, 99 %",
                "s",
                [
                    (
                        "histogram_quantile(0.99, sum by (le, instance) (rate(quire_worker_step_seconds_bucket[5m])))",
                        "{{instance}}",
                    )
                ],
            ),
            ("Tokens sampled per second", "none", [("rate(quire_worker_sampled_tokens_total[1m])", "{{instance}}")]),
            ("Steps per second", "none", [("rate(quire_worker_steps_total[1m])", "{{instance}}")]),
            ("Plans in flight", "none", [("quire_plans_in_flight", BY_WORKER)]),
        ],
    ),
    (
        "What went wrong",
        [
            (
                "Alerts that fire",
                "none",
                [('count by (alertname) (ALERTS{alertname=~"Quire.*", alertstate="firing"}) or vector(0)', "{{alertname}}")],
            ),
            (
                "Preemptions, failovers, resubmitted streams",
                "none",
                [
                    ("increase(quire_preemptions_total[5m])", "preemptions"),
                    ("increase(quire_failovers_total[5m])", "failovers"),
                    ("sum(increase(quire_gateway_resubmitted_sequences[5m]))", "resubmitted"),
                ],
            ),
            (
                "Tokens computed again",
                "none",
                [("rate(quire_recomputed_tokens_total[5m])", "per second"), ("rate(quire_stale_rows_total[5m])", "stale rows")],
            ),
            ("Refused", "none", [("sum by (code) (increase(quire_rejected_sequences_total[5m])) or vector(0)", "{{code}}")]),
            ("Ended, by why", "none", [("sum by (reason) (rate(quire_finished_sequences_total[5m]))", "{{reason}}")]),
            (
                "Faults: all must stay 0",
                "none",
                [
                    ("quire_audit_violations_total", "audit violations"),
                    ("quire_placement_false_credit_tokens_total", "false cache credit"),
                    ("quire_internal_errors_total", "internal errors"),
                    ("sum(quire_worker_faults_total)", "failed steps"),
                ],
            ),
            (
                "Clients that left or did not read",
                "none",
                [
                    ("sum(increase(quire_gateway_aborted_total[5m]))", "left"),
                    ("sum(increase(quire_gateway_slow_readers_total[5m]))", "did not read"),
                ],
            ),
        ],
    ),
]


def panel(number: int, place: tuple[int, int], described: Panel) -> dict[str, Any]:
    title, unit, targets = described
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": place[0], "y": place[1], "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(65 + place),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "exemplar": "quire_gateway" in expression and "_bucket" in expression,  # points that name a request
            }
            for place, (expression, legend) in enumerate(targets)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, described in ROWS:
        grid = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        y += 1
        for count, each in enumerate(described):
            panels.append(panel(len(panels) + 1, (count % 3 * WIDTH, y + count // 3 * HEIGHT), each))
        y += -(-len(described) // 3) * HEIGHT
    return {
        "uid": "quire",
        "title": "Quire",
        "tags": ["quire"],
        "timezone": "browser",
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def kubernetes_rules() -> str:
    rules = (HERE / "rules" / "quire.yml").read_text()
    indented = "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))
    return (
        "# Made by monitoring/generate.py from rules/quire.yml.\n"
        "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: quire\n"
        "  labels: {app.kubernetes.io/part-of: quire}\nspec:\n" + indented
    )


def files() -> dict[Path, str]:
    """Path -> the text that belongs there."""
    return {
        HERE / "grafana" / "quire.json": json.dumps(dashboard(), indent=1) + "\n",
        HERE / "k8s-rules.yaml": kubernetes_rules(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
