"""Logs as text and as JSON with their ids, and metrics over HTTP."""

import json
import logging
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from quire.machine import free_ports
from shared.config import BadConfig, Config
from shared.observe import serve_metrics, setup_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def fail() -> None:
    raise RuntimeError("on purpose")


def log_one_of_each() -> None:
    log = logging.getLogger("quire.test")
    log.debug("too quiet")
    log.info("request %s", "accepted", extra={"request": "r-1", "tokens": 7})
    try:
        fail()
    except RuntimeError:
        log.exception("it failed", extra={"request": "r-2"})


def test_text_lines_end_with_their_ids(capfd: pytest.CaptureFixture[str]) -> None:
    output = setup_logging(Config())
    log_one_of_each()
    output.close()
    first, second, *trace = capfd.readouterr().err.splitlines()
    assert first[8:] == " quire.test info: request accepted request=r-1 tokens=7"
    assert second[8:] == " quire.test error: it failed request=r-2"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == "RuntimeError: on purpose"


def test_json_lines_are_one_object_each(capfd: pytest.CaptureFixture[str]) -> None:
    output = setup_logging(Config(log_json=True, log_level="debug"))
    log_one_of_each()
    output.close()
    quiet, first, second = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert quiet["level"] == "debug"
    assert (first["level"], first["logger"], first["msg"]) == ("info", "quire.test", "request accepted")
    assert (first["request"], first["tokens"]) == ("r-1", 7)
    assert first["ts"] > 1.6e9
    assert second["exception"].endswith("RuntimeError: on purpose")


def test_an_id_that_json_does_not_know_is_logged_as_text(capfd: pytest.CaptureFixture[str]) -> None:
    output = setup_logging(Config(log_json=True))
    logging.getLogger("quire.test").info("x", extra={"peer": b"\x00"})
    output.close()
    assert json.loads(capfd.readouterr().err)["peer"] == "b'\\x00'"


def test_levels_below_the_configured_one_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    output = setup_logging(Config(log_level="error"))
    log_one_of_each()
    output.close()
    assert "accepted" not in capfd.readouterr().err


def test_metrics_are_served_on_their_port() -> None:
    registry = CollectorRegistry()
    Counter("quire_test", "Things counted here.", registry=registry).inc(3)
    (port,) = free_ports(1)
    serve_metrics(registry, 0)  # not at all
    serve_metrics(registry, port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"quire_test_total 3.0" in answer.read()
    with pytest.raises(BadConfig, match=f"metrics_port = {port}: cannot listen on 127.0.0.1: Address already in use"):
        serve_metrics(registry, port)
