"""Logs and metrics of one process: one line per event with ids, as text or as JSON; metrics and readiness over HTTP."""

import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from shared.config import BadConfig, Config
from shared.output import STDERR, Output

_PLAIN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _PLAIN}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        ids = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{clock} {record.name} {record.levelname.lower()}: {record.getMessage()}{ids}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(config: Config) -> Output:
    """Send this process's logs to stderr in the configured form. Ids go into extra={...}."""
    output = Output(STDERR)
    handler = logging.StreamHandler(output)
    handler.setFormatter(_Json() if config.log_json else _Text())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    return output


def serve_metrics(
    registry: CollectorRegistry, port: int, host: str = "127.0.0.1", unready: Callable[[], str] | None = None
) -> None:
    """Serve /metrics of a scheduler or worker from a thread of its own; port 0: not at all. BadConfig when it cannot.

    unready: why this role cannot do its work now, or nothing; /ready then answers 503 with the reason, or 200.
    """
    if not port:
        return
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadConfig(f"metrics_port = {port}: cannot listen on {host}: {error.strerror}") from None
    metrics = server.get_app()
    if unready is None or metrics is None:
        return

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/ready":
            return metrics(environ, start_response)
        reason = unready()
        start_response("503 Service Unavailable" if reason else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return [(reason or "ready").encode() + b"\n"]

    server.set_app(app)
