"""A request that kills the real worker: refused after exactly two deaths, and those beside it see no more than a pause."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quire.machine import free_ports
from tests.e2e.serving import Process, ended, until

POISON = 4321
NUM_TOKENS = 400


def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Asking(threading.Thread):
    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self.status, self.answer = 0, dict[str, Any]()
        self.start()

    def run(self) -> None:
        self.status, self.answer = ask(self._url, self._body)

    @property
    def essence(self) -> Any:
        return self.status, self.answer["choices"], self.answer["usage"]["completion_tokens"]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(300)
def test_poison_is_refused_after_exactly_two_deaths_of_the_real_worker(smollm2_folder: Path, tmp_path: Path) -> None:
    port, gateways, workers = free_ports(3)
    links = [f"--gateway-link=tcp://127.0.0.1:{gateways}", f"--worker-link=tcp://127.0.0.1:{workers}", "--silence-s=2"]
    flags = [*links, f"--model={smollm2_folder}"]
    url = f"http://127.0.0.1:{port}/v1"
    scheduler = Process("scheduler", *links, f"--hash-key-file={tmp_path / 'key'}")
    gateway = Process("gateway", *flags, f"--port={port}")
    worker_words = ["tests.poisoned_worker", str(POISON), *flags, "--device=cpu", "--dtype=float32", "--name=w"]
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    bodies = [common | {"prompt": f"A story of {what}:"} for what in ("a river", "a hill", "the sea")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended(scheduler))
        stack.enter_context(ended(gateway))
        gateway.wait_for("connected to the scheduler")
        worker = Process(*worker_words)
        stack.callback(lambda: worker.end())
        scheduler.wait_for("replica ready")
        until(lambda: ask(url, {"prompt": "x", "max_tokens": 1})[0] == 200)
        calm = [Asking(url, body) for body in bodies]
        for each in calm:
            each.join(120)
        expected = [each.essence for each in calm]
        beside = [Asking(url, body) for body in bodies]
        time.sleep(0.5)
        poison = Asking(url, {"prompt": [100, POISON, 101], "max_tokens": 5})
        deaths = 0
        while poison.is_alive() or any(each.is_alive() for each in beside):
            if worker.code is not None:
                assert worker.code == 139
                deaths += 1
                worker.end()
                worker = Process(*worker_words)
            time.sleep(0.05)
        assert (poison.status, deaths) == (500, 2), poison.answer
        print(poison.answer)
        assert [each.essence for each in beside] == expected
