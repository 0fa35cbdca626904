"""How long the scheduler's core takes for one step: commit of 256 results and the plan after it. No sockets, no device.

    python -m benchmarks.scheduler_core [--rows 256] [--steps 400] [--repeats 5]

steady   every row decodes, nobody comes or goes; every 16th step of a row takes and indexes a page
churn    as steady, but about one sequence in 200 steps of a row ends and another one starts
grouped  as churn, all prompts share 32 pages, so decode rows are arranged in a group
"""

import argparse
import logging
import random
import statistics
import time

from scheduler.cell import Cell
from scheduler.commit import Out
from scheduler.core import Core
from shared.codec import Codec, encode
from shared.columns import i32
from shared.messages import PROTOCOL, WORKER_TO_SCHEDULER, GatewayHello, StepDone, StepPlan, Submit, WorkerHello
from shared.pages import page_hashes, root_hash
from shared.sampling import Sampling

KEY = bytes(32)
PAGE_TOKENS = 16
PROMPT_TOKENS = 640
STOP = 2


class Bench:
    def __init__(self, rows: int, *, churn: float, shared: bool) -> None:
        self.random = random.Random(1)
        self.churn, self.shared = churn, shared
        cell = Cell(page_tokens=PAGE_TOKENS, hash_key=KEY, epoch=1, credits=2, max_queued=9999, step_timeout_s=1e9)
        self.core = Core(cell)
        self.now = 1.0
        self.last_id = 0
        self.prefix = [self.random.randrange(10, 30000) for _ in range(512)]
        self.core.on_gateway("g/a/1", GatewayHello(PROTOCOL, "a", "m"), self.now)
        pages = rows * (PROMPT_TOKENS + 4096) // PAGE_TOKENS
        hello = WorkerHello(PROTOCOL, "r", 0, 1, 0, "m", PAGE_TOKENS, pages, rows + 1, 8192, 32768, b"")
        self.core.on_worker("w/r/0/1", hello, self.now)
        self.plans: list[StepPlan] = []
        for _ in range(rows):
            self.submit()
        self.take(self.core.pump(self.now))
        while self.core.cell.waiting or any(replica.prefilling for replica in cell.replicas.values()):
            self.step()

    def submit(self) -> None:
        self.last_id += 1
        head = self.prefix if self.shared else []
        prompt = i32(head + [self.random.randrange(10, 30000) for _ in range(PROMPT_TOKENS - len(head))])
        root = root_hash(KEY, "")
        hashes = page_hashes(KEY, root, prompt, PAGE_TOKENS)
        sampling = Sampling(num_prompt=PROMPT_TOKENS).pack()
        fields = (self.last_id, prompt, PROMPT_TOKENS, 20000, 0, i32([STOP]), sampling, b"", root, hashes, 0, "", 0.0, 0.0)
        self.core.on_gateway("g/a/1", Submit(*fields), self.now)

    def take(self, out: list[Out]) -> None:
        self.plans += [message for _, message in out if isinstance(message, StepPlan)]

    def done(self, plan: StepPlan) -> StepDone:
        sampled = plan.num_last + plan.num_decode
        tokens = [STOP if self.random.random() < self.churn else self.random.randrange(10, 30000) for _ in range(sampled)]
        return StepDone(plan.step, i32(tokens), b"", 0, b"", b"", b"", 0, b"", b"", 5000)

    def step(self) -> tuple[float, float]:
        """Seconds in the core, and in the core with its codec."""
        frame = encode(self.done(self.plans.pop(0)))
        self.now += 0.01
        running = self.core.cell.num_running
        start = time.perf_counter()
        message = CODEC.decode(frame)
        decoded = time.perf_counter()
        out = self.core.on_worker("w/r/0/1", message, self.now)
        out += self.core.pump(self.now)
        planned = time.perf_counter()
        for _, each in out:
            encode(each)
        end = time.perf_counter()
        self.take(out)
        for _ in range(running - self.core.cell.num_running):
            self.submit()
        return planned - decoded, end - start


CODEC = Codec(WORKER_TO_SCHEDULER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{args.rows} rows, {args.steps} steps, {args.repeats} repeats; microseconds per step")
    print(f"{'case':10} {'median':>8} {'best':>8} {'p99':>8} {'with codec':>12}")
    for name, churn, shared in (("steady", 0.0, False), ("churn", 1 / 200, False), ("grouped", 1 / 200, True)):
        medians, tails, whole = [], [], []
        for _ in range(args.repeats):
            bench = Bench(args.rows, churn=churn, shared=shared)
            times = [bench.step() for _ in range(args.steps)]
            core = sorted(time_s * 1e6 for time_s, _ in times)
            medians.append(statistics.median(core))
            tails.append(core[int(len(core) * 0.99)])
            whole.append(statistics.median(time_s * 1e6 for _, time_s in times))
        middle = statistics.median
        print(f"{name:10} {middle(medians):8.0f} {min(medians):8.0f} {middle(tails):8.0f} {middle(whole):12.0f}")


if __name__ == "__main__":
    main()
