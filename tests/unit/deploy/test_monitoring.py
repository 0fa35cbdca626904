"""Rules, alerts and dashboard: their tests pass, every metric they name is really served, generated files are fresh."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from gateway import app as gateway_app
from gateway.metrics import Metrics as GatewayMetrics
from gpu_worker.service import Metrics as WorkerMetrics
from scheduler.metrics import CellCollector
from tests.unit.scheduler.cells import SmallCell

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "monitoring"
METRIC = re.compile(r"\bquire_[a-z0-9_]+")
RECORDED = re.compile(r"\bquire:[a-z0-9_]+:[a-z0-9]+")
LABELS_OF_PROMETHEUS = {"job", "instance", "namespace", "service", "pod", "le", "alertname", "alertstate"}


def served() -> dict[str, set[str]]:
    """Series name -> its labels, from the three registries."""
    small = SmallCell()
    small.join()
    small.cell.counters.rejected["queue_full"] += 1
    small.cell.counters.finished["stop"] += 1
    scheduler = CollectorRegistry()
    scheduler.register(CellCollector(small.cell))
    gateway = GatewayMetrics()
    gateway.requests["/v1/completions", "200"] += 1
    gateway.finished["stop"] += 1
    gateway.tenant_tokens["a", "prompt"] += 1
    for name in re.findall(r'gauge\("(\w+)"', Path(gateway_app.__file__).read_text()):
        gateway.gauge(name, "", lambda: 0.0)
    text = generate_latest(scheduler) + generate_latest(WorkerMetrics().registry) + gateway.render()[0]
    found: dict[str, set[str]] = {}
    for line in text.decode().splitlines():
        if match := re.match(r"(\w+)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((MONITORING / "rules/quire.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    loaded = json.loads((MONITORING / "grafana/quire.json").read_text())
    return [panel for panel in loaded["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    adapter = yaml.safe_load((MONITORING / "prometheus-adapter.yaml").read_text())
    scaled = (ROOT / "k8s/base/worker.yaml").read_text() + (ROOT / "k8s/base/gateway.yaml").read_text()
    return [
        *(rule["expr"] for rule in rules()),
        *(target["expr"] for panel in panels() for target in panel["targets"]),
        *(rule["seriesQuery"] for rule in adapter["rules"]["custom"]),
        *re.findall(r"metric: \{name: (\w+)\}", scaled),
    ]


def faults(expression: str, series: dict[str, set[str]], recorded: set[str]) -> list[str]:
    names = METRIC.findall(expression)
    wrong = [f"no /metrics serves {name}" for name in names if name not in series]
    wrong += [f"no rule records {name}" for name in RECORDED.findall(expression) if name not in recorded]
    for name, matchers in re.findall(r"\b(quire_\w+)\{([^}]*)\}", expression):
        known = series.get(name, set()) | LABELS_OF_PROMETHEUS
        wrong += [f"{name} has no label {label}" for label in re.findall(r"(\w+)\s*[=!]", matchers) if label not in known]
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    known = set().union(*(series.get(name, set()) for name in names), LABELS_OF_PROMETHEUS)
    wrong += [f"{label} is a label of nothing in it" for group in grouped for label in group.split(", ") if label not in known]
    return wrong


def test_every_expression_asks_for_what_is_served() -> None:
    series, recorded = served(), {rule["record"] for rule in rules() if "record" in rule}
    assert len(series) > 40 and len(expressions()) > 50
    assert [(each, wrong) for each in expressions() if (wrong := faults(each, series, recorded))] == []


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("rate(quire_generated_tokens[1m])", "no /metrics serves quire_generated_tokens"),
        ("quire:token_gap:p99 > 1", "no rule records quire:token_gap:p99"),
        ('quire_pages{status="held"}', "quire_pages has no label status"),
        ("sum by (worker) (quire_pages)", "worker is a label of nothing in it"),
    ],
)
def test_a_mistake_is_noticed(expression: str, expected: str) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert expected in faults(expression, served(), recorded)


def test_generated_files_are_fresh() -> None:
    spec = importlib.util.spec_from_file_location("generate", MONITORING / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.files().items():
        assert path.read_text() == text, f"{path.name}: run python monitoring/generate.py"


def test_dashboard_shows_what_was_asked_for() -> None:
    shown = " ".join(panel["title"] for panel in panels())
    for wanted in ("Requests", "first token", "Gap", "Tokens", "Pages held", "cache", "Busy", "memory", "why", "failovers"):
        assert wanted in shown
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) and all(panel["targets"] for panel in panels())


def test_alerts_say_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"] and rule["annotations"]["todo"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (of Prometheus)")
def test_promtool() -> None:
    commands: tuple[list[str | Path], ...] = (
        ["check", "rules", MONITORING / "rules/quire.yml"],
        ["check", "config", "--syntax-only", MONITORING / "prometheus.yml"],
        ["test", "rules", MONITORING / "tests/rules_test.yml"],
    )
    for command in commands:
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried() -> None:
    text = (MONITORING / "tests/rules_test.yml").read_text()
    fired = {name for block in text.split("- name:")[2:] for name in re.findall(r"Quire\w+", block)}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == fired
