"""Pods are told apart by what their caches hold, against an API server of our own."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from scheduler.metrics import CellCollector
from shared import deletion_cost
from tests.unit.scheduler.cells import SmallCell


class Api(ThreadingHTTPServer):
    metrics = b""
    seen: dict[str, str]
    heads: list[str]


class _Answer(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self._answer(200, self.server.metrics)

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pod = self.path.removeprefix("/api/v1/namespaces/quire/pods/")
        self.server.heads.append(f"{self.headers['Authorization']} {self.headers['Content-Type']}")
        if pod == "gone":
            self._answer(404, b"{}")
            return
        self.server.seen[pod] = body["metadata"]["annotations"][deletion_cost.ANNOTATION]
        self._answer(200, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api(("127.0.0.1", 0), _Answer)
    server.seen, server.heads = {}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_coldest_pod_costs_least(api: Api, tmp_path: Path) -> None:
    small = SmallCell()
    for name in ("warm", "cold", "gone"):
        small.join(name)
    small.submit(1, list(range(20)), max_new=2)
    small.run()
    registry = CollectorRegistry()
    registry.register(CellCollector(small.cell))
    api.metrics = generate_latest(registry)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("quire")
    base = f"http://127.0.0.1:{api.server_address[1]}"
    failed = deletion_cost.run(f"{base}/metrics", base, tmp_path)
    assert failed == ["gone: 404 Not Found"]
    assert sorted(api.seen) == ["cold", "warm"]
    assert sorted(int(cost) for cost in api.seen.values())[0] == 0 < max(int(cost) for cost in api.seen.values())
    assert set(api.heads) == {"Bearer secret application/merge-patch+json"}


def test_no_scheduler_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert deletion_cost.main(["http://127.0.0.1:1/metrics"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert deletion_cost.main([]) == 2
