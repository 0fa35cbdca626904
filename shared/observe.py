"""Logs and metrics of one process: one line per event with ids, as text or as JSON; metrics over loopback HTTP."""

import json
import logging
import time
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


def serve_metrics(registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> None:
    """Serve /metrics of a scheduler or worker from a thread of its own; port 0: not at all. BadConfig when it cannot."""
    if not port:
        return
    try:
        start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadConfig(f"metrics_port = {port}: cannot listen on {host}: {error.strerror}") from None
