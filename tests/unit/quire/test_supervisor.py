"""Processes kept alive: restarted, given up with a reason, ended in order, and never left behind."""

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quire import supervisor as supervision
from quire.supervisor import MAX_BACKOFF_S, MAX_QUICK, QUICK_S, GaveUp, Lines, Role, Supervisor, next_start
from shared.config import FATAL_EXIT

ROOT = Path(__file__).resolve().parents[3]


def role(name: str = "worker", code: str = "") -> Role:
    return Role(name, [sys.executable, "-u", "-c", textwrap.dedent(code)], dict(os.environ))


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what is awaited happens in other processes
            await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(*roles: Role) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    said: list[str] = []
    supervisor = Supervisor(roles, say=said.append)
    try:
        yield supervisor, said
    finally:
        await supervisor.close()


def pid_of(each: Role) -> int:
    return each.process.pid if each.process is not None else 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


# --- decisions ------------------------------------------------------------------------------------------------------


def test_a_fatal_end_before_the_server_was_ready_is_final() -> None:
    each = Role("worker", [], {}, last_words="worker: no model there")
    with pytest.raises(GaveUp, match=r"^worker: no model there$"):
        next_start(each, FATAL_EXIT, 100.0, was_ready=False)


def test_quick_ends_are_tried_again_more_and_more_slowly_and_then_given_up() -> None:
    for was_ready, code in ((False, 1), (False, -9), (True, FATAL_EXIT)):
        each = Role("worker", [], {})
        delays = [next_start(each, code, 1.0, was_ready) for _ in range(MAX_QUICK - 1)]
        assert delays == sorted(delays)
        assert 0 < delays[0] < delays[-1] <= MAX_BACKOFF_S
        with pytest.raises(GaveUp, match=f"worker ended {MAX_QUICK} times in a row"):
            next_start(each, code, 1.0, was_ready)


def test_what_crashes_while_streams_wait_for_it_is_started_again_for_ever() -> None:
    """Requests that kill the worker one after the other, each as soon as it is ready, must not end the server."""
    each = Role("worker", [], {})
    delays = [next_start(each, -9, 1.0, was_ready=True) for _ in range(2000)]
    assert delays == sorted(delays) and delays[-1] == MAX_BACKOFF_S


def test_a_long_life_is_forgiven() -> None:
    each = Role("worker", [], {})
    for _ in range(100):
        assert next_start(each, -9, QUICK_S + 1, was_ready=True) < 1


def test_lines_are_cut_wherever_the_chunks_end() -> None:
    text = "one\ntwo\r\n\nhalf ünd half\nrest".encode()
    for size in range(1, len(text)):
        lines = Lines(terminal=False)
        out = [each for at in range(0, len(text), size) for each in lines.feed(text[at : at + size], 0.0)]
        assert out == [("one", "\n"), ("two", "\n"), ("half ünd half", "\n")]


def test_a_progress_bar_is_redrawn_on_a_terminal_and_thinned_out_in_a_log() -> None:
    bar = b"".join(f"\r{percent}%".encode() for percent in range(100))
    assert Lines(terminal=True).feed(bar + b"\rdone\n", 0.0)[-2:] == [("99%", "\x1b[K\r"), ("done", "\n")]
    log = Lines(terminal=False)
    assert log.feed(bar, 0.0) == [("0%", "\n")]
    assert log.feed(bar, 0.5) == []
    assert log.feed(bar + b"\rdone\n", 1.5) == [("99%", "\n"), ("done", "\n")]


# --- processes ------------------------------------------------------------------------------------------------------


async def test_a_role_that_is_killed_comes_back() -> None:
    each = role(code="import time; print('up'); time.sleep(60)")
    async with supervised(each) as (supervisor, said):
        await until(lambda: pid_of(each))
        supervisor.mark_ready()
        first = pid_of(each)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(each) != first)
        assert said == ["worker ended (killed by SIGKILL), starting it again in 0.2 s"]
        assert not supervisor.failed.done()


async def test_a_server_that_gets_ready_each_time_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "SETTLED_S", 0.0)
    each = role(code="import time; time.sleep(60)")
    async with supervised(each) as (supervisor, _):
        for _ in range(MAX_QUICK + 2):
            before = pid_of(each)
            await until(lambda before=before: pid_of(each) not in (0, before))  # type: ignore[misc]
            supervisor.mark_ready()
            os.kill(pid_of(each), signal.SIGKILL)
        assert not supervisor.failed.done()


async def test_last_words_become_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import sys; print('loading'); print('worker: error: port = 1: in use', file=sys.stderr); sys.exit({FATAL_EXIT})"
    async with supervised(role("worker-0", code)) as (supervisor, _):
        assert await asyncio.wait_for(supervisor.failed, 20) == "worker: port = 1: in use"
    assert capfd.readouterr().err == "worker-0 | loading\n"


async def test_stop_asks_first_and_kills_who_does_not_listen() -> None:
    polite = role("polite", "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up'); time.sleep(60)")
    deaf = role("deaf", "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)")
    async with supervised(polite, deaf) as (supervisor, said):
        await until(lambda: pid_of(polite) and pid_of(deaf))
        await asyncio.sleep(0.5)  # until both have set their handlers
        started = time.monotonic()
        await supervisor.stop(["polite", "deaf"], grace_s=1.0)
        assert 0.9 < time.monotonic() - started < 5
        assert polite.process is not None and deaf.process is not None
        assert (polite.process.returncode, deaf.process.returncode) == (0, -signal.SIGKILL)
        assert len(said) == 1 and "1 of polite, deaf did not end" in said[0]


async def test_close_leaves_nobody() -> None:
    roles = [role(f"r{number}", "import time; time.sleep(60)") for number in range(3)]
    async with supervised(*roles):
        await until(lambda: all(pid_of(each) for each in roles))
        pids = [pid_of(each) for each in roles]
    assert not any(alive(pid) for pid in pids)


async def test_nobody_waits_for_a_helper_that_holds_a_killed_roles_pipe(tmp_path: Path) -> None:
    """A rank, or a template's process: it inherited the pipe that is read to its end, and ends with its role."""
    code = f"""
        import subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        open({str(tmp_path / "pid")!r}, "w").write(f"{{helper.pid}}.")
        time.sleep(300)
    """
    pid = tmp_path / "pid"
    async with supervised(role("a", code)), asyncio.timeout(60):
        await until(lambda: pid.exists() and pid.read_text().endswith("."))
    await until(lambda: not alive(int(pid.read_text()[:-1])))


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """And so do those that a child started with dies_with_parent, as the worker does with its helpers."""
    code = f"""
        import asyncio, os, subprocess, sys
        sys.path.insert(0, {str(ROOT)!r})
        from quire.supervisor import Role, Supervisor
        child = '''
        import os, subprocess, sys, time
        from shared.process import dies_with_parent
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=dies_with_parent())
        open(sys.argv[1], "w").write(f"{{os.getpid()}} {{helper.pid}}")
        time.sleep(60)
        '''
        import textwrap
        async def main():
            command = [sys.executable, "-c", textwrap.dedent(child), {str(tmp_path / "pids")!r}]
            Supervisor([Role("child", command, {{**os.environ, "PYTHONPATH": {str(ROOT)!r}}})], say=print)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code))
    pids = tmp_path / "pids"
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    child, helper = (int(pid) for pid in pids.read_text().split())
    assert alive(child) and alive(helper)
    process.kill()
    await process.wait()
    await until(lambda: not alive(child) and not alive(helper), 5)
