"""Roles that come, go and are killed: streams go on, restarts are seen, and nobody is left behind."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from quire.machine import free_ports
from tests.e2e.serving import QUESTION, Process, Served, alive, ended, until

PROMPT = "Write a long story about a river."
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def lasting(smollm2_folder: Path) -> Iterator[Served]:
    """One server that outlives the death of each of its roles, in turn."""
    server = Served("--silence-s=2")
    with ended(server):
        yield server


@pytest.fixture
def served(smollm2_folder: Path) -> Iterator[Served]:
    """A server of one's own, to be ended."""
    server = Served()
    with ended(server):
        yield server


def ask(url: str) -> str:
    """The answer to our question, or the error as text."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.loads(answer.read())["choices"][0]["message"]["content"]
        return text


class Stream:
    """A long greedy answer, read in a thread."""

    def __init__(self, server: Served, num_tokens: int) -> None:
        self.ids: list[int] = []
        self.finish = ""
        self.fault: Exception | None = None
        self._server, self._num_tokens = server, num_tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        options: Any = {"extra_body": {"ignore_eos": True, "return_token_ids": True}, "stream": True}
        try:
            with OpenAI(base_url=self._server.url, api_key="none", max_retries=0, timeout=100) as client:
                stream = client.completions.create(
                    model=self._server.model, prompt=PROMPT, max_tokens=self._num_tokens, temperature=0, **options
                )
                for chunk in stream:
                    self.ids += getattr(chunk.choices[0], "token_ids", None) or []
                    self.finish = chunk.choices[0].finish_reason or self.finish
        except Exception as error:
            self.fault = error

    def wait(self, timeout_s: float = 100.0) -> "Stream":
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream hangs after {len(self.ids)} tokens"
        return self


def test_roles_that_are_killed_come_back_and_streams_go_on(lasting: Served) -> None:
    expected = Stream(lasting, 60).wait()
    assert (len(expected.ids), expected.finish) == (60, "length")
    for role in ("gpu_worker", "scheduler"):
        so_far = len(lasting.lines)
        victim = lasting.children()[role]
        stream = Stream(lasting, 60)
        until(lambda stream=stream: len(stream.ids) > 10)  # type: ignore[misc]
        os.kill(victim, signal.SIGKILL)
        stream.wait()
        assert stream.fault is None
        assert (len(stream.ids), stream.finish) == (60, "length")
        assert stream.ids[:10] == expected.ids[:10]
        lasting.wait_for(rf"quire: {role} ended \(killed by SIGKILL\), starting it again", since=so_far)
        assert lasting.children()[role] != victim
        assert ask(lasting.url) == PARIS


def test_a_gateway_that_is_killed_comes_back(lasting: Served) -> None:
    so_far = len(lasting.lines)
    stream = Stream(lasting, 2000)
    until(lambda: len(stream.ids) > 5)
    os.kill(lasting.children()["gateway"], signal.SIGKILL)
    stream.wait()
    assert stream.fault is not None  # its connection broke: only the client can ask again
    lasting.wait_for("quire: ready again", since=so_far)
    assert ask(lasting.url) == PARIS
    until(lambda: lasting.metric("quire_pages", state="held") == 0)  # what nobody reads any more is given up


def test_ctrl_c_lets_streams_end_and_takes_nothing_new(served: Served) -> None:
    children = served.children()
    assert set(children) == {"scheduler", "gpu_worker", "gateway"}
    stream = Stream(served, 80)
    until(lambda: len(stream.ids) > 5)
    served.signal(signal.SIGINT)
    served.wait_for("quire: draining")
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        while True:  # until the listening socket is closed
            ask(served.url)
    stream.wait()
    assert (stream.fault, len(stream.ids), stream.finish) == (None, 80, "length")
    assert served.wait() == 0
    assert not any(alive(pid) for pid in children.values())


def test_a_second_ctrl_c_ends_at_once(served: Served) -> None:
    children = served.children()
    stream = Stream(served, 4000)
    until(lambda: len(stream.ids) > 5)
    served.signal(signal.SIGINT)
    served.wait_for("quire: draining")
    served.signal(signal.SIGINT)
    assert served.wait() == 128 + signal.SIGINT
    assert stream.wait().finish != "length"  # nobody waited for its 4000 tokens
    assert not any(alive(pid) for pid in children.values())


def test_sigterm_ends_an_idle_server_quickly(served: Served) -> None:
    started = time.monotonic()
    served.signal(signal.SIGTERM)
    assert served.wait() == 0
    assert time.monotonic() - started < 5


def test_nobody_outlives_quire_itself(served: Served) -> None:
    children = served.children()
    served.signal(signal.SIGKILL)
    served.wait()
    until(lambda: not any(alive(pid) for pid in children.values()), 5)


def status_of(url: str) -> tuple[int, str]:
    """HTTP status of our question, and its Retry-After."""
    try:
        ask(url)
        return 200, ""
    except urllib.error.HTTPError as error:
        assert "error" in json.loads(error.read())
        return error.code, error.headers.get("Retry-After") or ""


def test_a_gateway_without_a_scheduler_says_503_and_comes_back_by_itself(smollm2_folder: Path, tmp_path: Path) -> None:
    port, gateways, workers = free_ports(3)
    links = [f"--gateway-link=tcp://127.0.0.1:{gateways}", f"--worker-link=tcp://127.0.0.1:{workers}"]
    flags = [*links, f"--cache-dir={tmp_path}", f"--model={smollm2_folder}"]
    url = f"http://127.0.0.1:{port}/v1"
    gateway = Process("gateway", *flags, f"--port={port}")
    with ended(gateway):
        gateway.wait_for("listening")
        status, retry_after = status_of(url)
        assert status == 503
        assert int(retry_after) >= 1
        scheduler = Process("scheduler", *flags)
        with ended(scheduler):
            gateway.wait_for("connected to the scheduler")
            status, retry_after = status_of(url)  # a scheduler, but no worker yet
            assert status == 503
            assert int(retry_after) >= 1
            worker = Process("gpu_worker", *flags, "--device=cpu")
            with ended(worker):
                scheduler.wait_for("replica ready")
                until(lambda: status_of(url)[0] == 200)
                assert ask(url) == PARIS
                so_far = len(gateway.lines)
            gateway.wait_for("no worker is connected", since=so_far)
            assert status_of(url)[0] == 503
        until(lambda: status_of(url) == (503, "2"))
