"""Device time of single steps of the engine, without scheduler or sockets: decode steps by rows and context, prefill steps.

usage: python benchmarks/engine_steps.py MODEL_FOLDER [--rows 1,16,64] [--context 640] [--profile ROWS]   (random weights)
"""

import argparse
import statistics
import time

import numpy as np
import torch

from gpu_worker.loading import load
from gpu_worker.runner import Runner
from shared.columns import i32
from shared.config import from_sources
from shared.messages import StepDone, StepPlan
from shared.sampling import Sampling
from tests.plan_driver import make_plan


class Rows:
    """Decode rows of one context length, opened at once; pages hold whatever lies there."""

    def __init__(self, runner: Runner, rows: int, context: int, output: int, shared: int = 0) -> None:
        self.runner = runner
        self.rows = rows
        page = runner.slots.page_tokens
        pages = -(-(context + output) // page)
        shared_pages = shared // page
        writes = []
        for row in range(rows):
            own = 1 + shared_pages + row * (pages - shared_pages)
            writes += [
                (row + 1, index, 1 + index if index < shared_pages else own + index - shared_pages) for index in range(pages)
            ]
        assert max(write[2] for write in writes) < runner.cache.num_pages, "too few pages for this"
        opens = b"".join(i32([row + 1, context]) + Sampling(seed=row, num_prompt=context).pack() for row in range(rows))
        self.first = make_plan(1, page_writes=i32(np.array(writes).reshape(-1).tolist()), opens=opens)
        self.slots = i32(range(1, rows + 1))
        self.groups = i32([rows, shared_pages]) if shared_pages else b""
        self.step = 1

    def plan(self) -> StepPlan:
        self.step += 1
        return make_plan(self.step, num_decode=self.rows, row_slots=self.slots, group_counts=self.groups)


def decode(runner: Runner, rows: int, context: int, shared: int, steps: int = 30) -> None:
    state = Rows(runner, rows, context, steps + 8, shared)
    runner.collect(runner.launch(state.first))
    for _ in range(5):
        runner.collect(runner.launch(state.plan()))
    in_flight, done, began = [], [], time.perf_counter()
    host = []
    for _ in range(steps):
        at = time.perf_counter()
        in_flight.append(runner.launch(state.plan()))
        host.append(time.perf_counter() - at)
        if len(in_flight) == 2:
            done.append(runner.collect(in_flight.pop(0)))
    done += [runner.collect(each) for each in in_flight]
    wall_ms = (time.perf_counter() - began) / steps * 1e3
    device_ms = statistics.median(each.step_us for each in done) / 1e3
    print(
        f"decode rows={rows} context={context} shared={shared}: device {device_ms:.3f} ms, wall {wall_ms:.3f} ms/step,", end=" "
    )
    print(f"launch on the host {statistics.median(host) * 1e3:.3f} ms, {rows / wall_ms * 1e3:,.0f} tok/s", flush=True)


def prefill(runner: Runner, rows: int, length: int) -> None:
    page = runner.slots.page_tokens
    pages = -(-length // page)
    rng = np.random.default_rng(0)
    times = []
    for repetition in range(3):
        writes = [(row + 1, index, 1 + row * pages + index) for row in range(rows) for index in range(pages)]
        opens = b"".join(i32([row + 1, 0]) + Sampling(num_prompt=length).pack() for row in range(rows))
        plan = make_plan(
            1000 + repetition, num_last=rows, row_slots=i32(range(1, rows + 1)), row_lens=i32([length] * rows),
            tokens=i32(rng.integers(1000, 30000, rows * length).tolist()),
            page_writes=i32(np.array(writes).reshape(-1).tolist()), opens=opens,
        )  # fmt: skip
        at = time.perf_counter()
        step = runner.launch(plan)
        host = time.perf_counter() - at
        done: StepDone = runner.collect(step)
        times.append((done.step_us / 1e3, host * 1e3))
    device_ms = min(each[0] for each in times)
    print(f"prefill rows={rows} length={length}: device {device_ms:.2f} ms, host {min(each[1] for each in times):.2f} ms, "
          f"{rows * length / device_ms * 1e3:,.0f} tok/s", flush=True)  # fmt: skip


def profile(runner: Runner, rows: int, context: int, shared: int) -> None:
    state = Rows(runner, rows, context, 40, shared)
    runner.collect(runner.launch(state.first))
    for _ in range(3):
        runner.collect(runner.launch(state.plan()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            runner.collect(runner.launch(state.plan()))
    print(f"--- kernels of 5 decode steps of {rows} rows")
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--prefill", default="16x512")
    parser.add_argument("--profile", default="")
    parser.add_argument("--max-num-seqs", default="256")
    arguments = parser.parse_args()
    at = time.perf_counter()
    settings = {"model": arguments.model, "dummy_weights": True, "max_num_seqs": arguments.max_num_seqs,
                "max_num_batched_tokens": "16384", "max_model_len": "20000"}  # fmt: skip
    loaded = load(from_sources(settings, {}))
    print(f"ready after {time.perf_counter() - at:.1f} s; {loaded.memory.text}", flush=True)
    with torch.inference_mode():
        for rows in filter(None, arguments.rows.split(",")):
            decode(loaded.runner, int(rows), arguments.context, arguments.shared)
        for shape in filter(None, arguments.prefill.split(",")):
            rows, length = shape.split("x")
            prefill(loaded.runner, int(rows), int(length))
        for rows in filter(None, arguments.profile.split(",")):
            profile(loaded.runner, int(rows), arguments.context, arguments.shared)


if __name__ == "__main__":
    main()
