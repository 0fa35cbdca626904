"""Time every kernel at the shapes of an 8B model, after checking it against its reference, and print a Markdown table.

    python benchmarks/kernels.py [name ...]      names: attention shared prefill elementwise sample linear step

Times are medians over replays of a CUDA graph that rotates over enough copies of the data to leave the L2 cache cold. The
ceilings (a device copy, a large bf16 product) are measured in the same run.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from gpu_worker.kernels import apply_plan, decode_schedule, filter_logits
from gpu_worker.kernels import sample as sampling
from gpu_worker.kernels.attention_decode import attention_decode
from gpu_worker.kernels.attention_prefill import attention_prefill
from gpu_worker.kernels.attention_shared import attention_shared
from gpu_worker.kernels.decode_schedule import DecodeSchedule, Groups
from gpu_worker.kernels.embed import embed
from gpu_worker.kernels.logprobs import logprobs
from gpu_worker.kernels.rms_norm import add_rms_norm, rms_norm
from gpu_worker.kernels.rope_and_store import rope_and_store
from gpu_worker.kernels.silu_mul import silu_mul
from gpu_worker.kernels.skinny_linear import skinny_linear
from tests import kernel_checks as checks
from tests import kernel_reference as reference
from tests.kernel_reference import Paged, error

BF16, I32 = torch.bfloat16, torch.int32
DEVICE = "cuda"
HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD, PAGE, VOCABULARY, LAYERS = 4096, 14336, 32, 8, 128, 16, 128256, 32
LINEARS = {
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCABULARY, HIDDEN),
}
Call: TypeAlias = Callable[[], Any]
COLD_BYTES = 4e8  # several times the L2


def time_us(calls: Sequence[Call]) -> float:
    """Median microseconds per call of a graph that runs the calls in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    calls[0]()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(200, int(6 / max(begin.elapsed_time(end), 0.01))) // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(9):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return sorted(times)[len(times) // 2]


class Table:
    def __init__(self) -> None:
        source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        # Not in a graph: a copy node of a graph runs at two thirds of this.
        copy_ms: float = triton.testing.do_bench(partial(target.copy_, source), return_mode="median")
        self.copy_rate = 2 * source.numel() / copy_ms * 1e3
        a, b = (torch.randn((8192, 8192), device=DEVICE, dtype=BF16) for _ in range(2))
        self.matrix_rate = 2 * 8192**3 / time_us([partial(torch.matmul, a, b)]) * 1e6
        print(f"ceilings: copy {self.copy_rate / 1e12:.2f} TB/s, bf16 product {self.matrix_rate / 1e12:.0f} TFLOP/s")
        print("\n| kernel | shape | us | rate | of the ceiling |\n|---|---|---|---|---|")

    def row(self, kernel: str, shape: str, calls: Sequence[Call], moved: float = 0, operations: float = 0) -> float:
        us = time_us(calls)
        rate, share = "", ""
        if operations:
            rate, share = f"{operations / us / 1e6:.0f} TFLOP/s", f"{100 * operations / us * 1e6 / self.matrix_rate:.0f} %"
        elif moved:
            rate, share = f"{moved / us / 1e6:.2f} TB/s", f"{100 * moved / us * 1e6 / self.copy_rate:.0f} %"
        print(f"| {kernel} | {shape} | {us:.1f} | {rate} | {share} |", flush=True)
        return us


def cold_copies(size: float) -> int:
    return max(1, min(40, int(COLD_BYTES / size)))


def caches(rows: int, context: int) -> tuple[list[Paged], Tensor]:
    """Copies of a batch in caches of their own, and queries."""
    size = rows * context * KV_HEADS * HEAD * 4
    one = reference.paged([context] * rows, KV_HEADS, HEAD, PAGE, BF16, DEVICE, poison=False)
    batches = [one]
    for _ in range(cold_copies(size) - 1):
        batches.append(Paged(torch.randn_like(one.k_cache), torch.randn_like(one.v_cache), *list(vars(one).values())[2:]))
    return batches, torch.randn((rows, Q_HEADS, HEAD), device=DEVICE, dtype=BF16)


def scheduled(case: Paged, groups: Groups | None = None) -> DecodeSchedule:
    rows = len(case.row_slots)
    count = groups.starts.shape[0] if groups else 0
    schedule = decode_schedule.allocate(rows, Q_HEADS, KV_HEADS, HEAD, DEVICE, count)
    decode_schedule.schedule_decode(schedule, case.context_lens, case.row_slots, PAGE, Q_HEADS, KV_HEADS, groups)
    return schedule


def check_rows(case: Paged, q: Tensor, out: Tensor) -> None:
    for row in {0, len(q) // 2, len(q) - 1}:
        expected = reference.attention(q[row : row + 1], *case.context(row), HEAD**-0.5)
        assert (found := error(out[row : row + 1], expected)) < 8e-3, f"{row = } {found = }"


def decode(q: Tensor, case: Paged, schedule: DecodeSchedule) -> Tensor:
    return attention_decode(q, case.k_cache, case.v_cache, case.page_table, schedule, HEAD**-0.5)


def reschedule(case: Paged, schedule: DecodeSchedule) -> None:
    decode_schedule.schedule_decode(schedule, case.context_lens, case.row_slots, PAGE, Q_HEADS, KV_HEADS)


def attention(table: Table) -> None:
    for rows, context in ((1, 640), (16, 640), (64, 640), (64, 1024), (4, 4096), (1, 16384), (16, 16384), (1024, 640)):
        batches, q = caches(rows, context)
        schedule = scheduled(batches[0])
        check_rows(batches[0], q, decode(q, batches[0], schedule))
        calls = [partial(decode, q, case, schedule) for case in batches]
        table.row("attention, decode", f"{rows} x {context}", calls, moved=rows * context * KV_HEADS * HEAD * 4)
        if rows in (1, 1024):
            table.row("decode schedule, once a step", f"{rows} rows", [partial(reschedule, batches[0], schedule)])


def prefix_part(q: Tensor, case: Paged, schedule: DecodeSchedule) -> None:
    attention_shared(q, case.k_cache, case.v_cache, case.page_table, case.row_slots, schedule, HEAD**-0.5)


def both_parts(q: Tensor, case: Paged, schedule: DecodeSchedule) -> Tensor:
    prefix_part(q, case, schedule)
    return decode(q, case, schedule)


def shared(table: Table) -> None:
    for rows, prefix, own in ((512, 2048, 192), (256, 8192, 192)):
        group = [(rows, prefix // PAGE)]
        case = reference.paged([prefix + own] * rows, KV_HEADS, HEAD, PAGE, BF16, DEVICE, group, poison=False)
        q = torch.randn((rows, Q_HEADS, HEAD), device=DEVICE, dtype=BF16)
        grouped, alone = scheduled(case, checks.device_groups(case)), scheduled(case)
        check_rows(case, q, both_parts(q, case, grouped))
        operations = 4 * rows * prefix * Q_HEADS * HEAD
        shape = f"{rows} rows, {prefix} shared"
        table.row("attention, shared prefix", shape, [partial(prefix_part, q, case, grouped)], operations=operations)
        moved = rows * own * KV_HEADS * HEAD * 4
        table.row("attention, private part and merge", f"{rows} x {own}", [partial(decode, q, case, grouped)], moved=moved)
        table.row("both", f"{rows} x ({prefix} + {own})", [partial(both_parts, q, case, grouped)])
        table.row("the same without groups", f"{rows} x {prefix + own}", [partial(decode, q, case, alone)])


def prefill(table: Table) -> None:
    for rows, prefix, new in ((16, 0, 512), (1, 0, 2048), (1, 0, 16384), (1, 14336, 2048), (1, 8192, 64)):
        case = reference.paged([max(prefix, 1)] * rows, KV_HEADS, HEAD, PAGE, BF16, DEVICE, poison=False)
        q, k, v = reference.heads(torch.randn((rows * new, 6144), device=DEVICE, dtype=BF16), Q_HEADS, KV_HEADS, HEAD)
        starts = torch.arange(0, rows * new + 1, new, dtype=I32, device=DEVICE)
        lens = torch.full((rows,), prefix + new, dtype=I32, device=DEVICE)
        call = partial(
            attention_prefill, q, k, v, case.k_cache, case.v_cache, case.page_table, case.row_slots, starts, lens, HEAD**-0.5
        )
        last = slice((rows - 1) * new, rows * new)
        few = slice(rows * new - 20, rows * new)
        old_k, old_v = (x[:prefix] for x in case.context(rows - 1))
        keys, values = torch.cat((old_k, k[last].double())), torch.cat((old_v, v[last].double()))
        found = error(call()[few], reference.attention(q[few], keys, values, HEAD**-0.5))
        assert found < 8e-3, f"{rows = } {prefix = } {new = } {found = }"
        operations = 4 * rows * new * (prefix + new / 2) * Q_HEADS * HEAD
        shape = f"{rows} x {new}" + (f" after {prefix} cached" if prefix else "")
        table.row("attention, prefill", shape, [call], operations=operations)


def elementwise(table: Table) -> None:
    checks.check_norms(100, HIDDEN, BF16, DEVICE)
    checks.check_silu_mul(100, INNER, BF16, DEVICE)
    checks.check_embed(100, HIDDEN, BF16, DEVICE)
    checks.check_rope(100, Q_HEADS, KV_HEADS, HEAD, HEAD, PAGE, False, BF16, DEVICE)
    checks.check_apply_plan(DEVICE)
    gain = torch.randn(HIDDEN, device=DEVICE, dtype=BF16)
    weight = torch.randn((VOCABULARY, HIDDEN), device=DEVICE, dtype=BF16)
    angles = torch.randn((16384, HEAD), device=DEVICE)
    cache = [torch.randn((1024, KV_HEADS, PAGE, HEAD), device=DEVICE, dtype=BF16) for _ in range(2)]
    for tokens in (1, 64, 1024, 8192):
        copies = 6 if tokens >= 1024 else 1
        x, residual = ([torch.randn((tokens, HIDDEN), device=DEVICE, dtype=BF16) for _ in range(copies)] for _ in range(2))
        row = tokens * HIDDEN * 2
        table.row("rms_norm", f"{tokens}", [partial(rms_norm, a, gain, 1e-5) for a in x], moved=2 * row)
        pairs = [partial(add_rms_norm, a, b, gain, 1e-5) for a, b in zip(x, residual, strict=True)]
        table.row("add_rms_norm", f"{tokens}", pairs, moved=4 * row)
        wide = [torch.randn((tokens, 2 * INNER), device=DEVICE, dtype=BF16) for _ in range(copies)]
        table.row("silu_mul", f"{tokens}", [partial(silu_mul, a) for a in wide], moved=tokens * INNER * 6)
        qkv = [torch.randn((tokens, 6144), device=DEVICE, dtype=BF16) for _ in range(copies)]
        ids, cells = torch.arange(tokens, dtype=I32, device=DEVICE), torch.arange(16, tokens + 16, device=DEVICE)
        turns = [partial(rope_and_store, a, ids, cells, angles, cache[0], cache[1], Q_HEADS) for a in qkv]
        table.row("rope_and_store", f"{tokens}", turns, moved=tokens * (5120 * 4 + 1024 * 6))
        table.row("embed", f"{tokens}", [partial(embed, ids, weight)], moved=2 * row)
    for rows in (64, 1024):
        inputs = apply_plan.allocate(rows, 8, DEVICE)
        staged = torch.zeros(8192, dtype=I32, device=DEVICE)
        staged[1], staged[3] = rows // 16, rows
        zeros = torch.zeros((1025, 512), dtype=I32, device=DEVICE)
        state = (zeros.clone(), zeros.clone(), zeros.clone(), zeros[:, 0].contiguous())
        table.row("apply_plan", f"{rows} rows", [partial(apply_plan.apply_plan, staged, *state, inputs, PAGE)])


def sample(table: Table) -> None:
    records = torch.zeros((1025, apply_plan.RECORD_WORDS), dtype=I32, device=DEVICE)
    floats = records.view(torch.float32)
    records[:, 0] = torch.arange(1025)
    floats[:, 2:4] = 1.0
    checks.check_logprobs(4, VOCABULARY, 5, BF16, DEVICE)
    for rows in (1, 64, 1024):
        slots = torch.arange(1, rows + 1, dtype=I32, device=DEVICE)
        every = torch.arange(rows, device=DEVICE)
        spaces = sampling.DrawSpace(rows, DEVICE), filter_logits.FilterSpace(rows, DEVICE)
        for dtype in (BF16, torch.float32):
            logits = (torch.randn((rows, VOCABULARY), device=DEVICE) * 2).to(dtype)
            size = logits.numel() * logits.element_size()
            shape = f"{rows} x {VOCABULARY} {'bf16' if dtype == BF16 else 'f32'}"
            draw = partial(sampling.draw, logits, slots, slots, records[:, :2], floats[:, 2], spaces[0])
            floats[:, 2] = 0.0
            assert torch.equal(logits.gather(1, draw().long()[:, None])[:, 0], logits.amax(-1))
            floats[:, 2] = 1.0
            table.row("draw", shape, [draw], moved=size)
            out = torch.empty(rows, device=DEVICE)
            for label, top_k, top_p in (("top_p 0.9", 0, 0.9), ("top_k 50", 50, 1.0), ("top_k 50, top_p 0.9", 50, 0.9)):
                records[:, 8], floats[:, 3] = top_k, top_p

                search = partial(
                    filter_logits.filter_thresholds, logits, every, slots,
                    floats[:, 2], records[:, 8], floats[:, 3], floats[:, 4], spaces[1], out,
                )  # fmt: skip
                kept = logits[0].double() >= search()[0].double()
                expected = reference.keep(logits[0], 1.0, top_k, top_p, 0.0)
                assert (kept.cpu() != expected).sum() <= 1e-4 * expected.sum(), f"{label} {kept.sum()} {expected.sum()}"
                table.row(f"threshold, {label}", shape, [search])
            table.row("logprobs, 5 alternatives", shape, [partial(logprobs, logits, every, slots, 5)])


def fused(name: str, x: Tensor, weight: Tensor, gain: Tensor, residual: Tensor) -> Tensor:
    """The product of one row as a decode step runs it."""
    if name in ("o", "down"):
        return skinny_linear(x, weight, residual=residual)
    return skinny_linear(x, weight, gain, 1e-5, silu=name == "gate_up")


def linear(table: Table) -> None:
    checks.check_skinny(6144, HIDDEN, BF16, DEVICE)
    checks.check_skinny(HIDDEN, INNER, BF16, DEVICE)
    for name, (outputs, inputs) in LINEARS.items():
        weights = [torch.randn((outputs, inputs), device=DEVICE, dtype=BF16) for _ in range(cold_copies(outputs * inputs * 2))]
        gain, residual = torch.randn(inputs, device=DEVICE, dtype=BF16), torch.randn((1, outputs), device=DEVICE, dtype=BF16)
        for rows in (1, 16, 64, 256, 1024):
            x = torch.randn((rows, inputs), device=DEVICE, dtype=BF16)
            size, operations = outputs * inputs * 2, 2.0 * rows * outputs * inputs
            calls = [partial(F.linear, x, w) for w in weights]
            table.row(f"cuBLAS {name}", f"{rows} rows", calls, moved=size, operations=operations if rows >= 256 else 0)
            if rows == 1:
                ours = [partial(fused, name, x, w, gain, residual) for w in weights]
                table.row(f"skinny_linear {name}, with its neighbours", "1 row", ours, moved=size)


class Model:
    """Random weights of the 8B shape and one decode step over them, to see what the pieces cost together."""

    def __init__(self) -> None:
        def weight(*shape: int) -> Tensor:
            values: Tensor = torch.randn(shape, device=DEVICE, dtype=BF16) / shape[-1] ** 0.5
            return values

        self.layers = [[weight(*LINEARS[name]) for name in ("qkv", "o", "gate_up", "down")] for _ in range(LAYERS)]
        self.head, self.gain = weight(VOCABULARY, HIDDEN), torch.ones(HIDDEN, device=DEVICE, dtype=BF16)
        self.angles = torch.randn((16384, HEAD), device=DEVICE)

    def steps(self, rows: int, context: int) -> dict[str, Callable[[], Any]]:
        gain = self.gain
        case = reference.paged([context] * rows, KV_HEADS, HEAD, PAGE, BF16, DEVICE, poison=False)
        caches = [(torch.randn_like(case.k_cache), torch.randn_like(case.v_cache)) for _ in range(LAYERS)]
        inputs = apply_plan.allocate(rows, 1, DEVICE)
        slots = case.page_table.shape[0]
        records = torch.zeros((slots, apply_plan.RECORD_WORDS), dtype=I32, device=DEVICE)
        records.view(torch.float32)[:, 2:4] = 1.0
        last = torch.randint(0, VOCABULARY, (slots,), dtype=I32, device=DEVICE)
        lines = torch.stack((case.row_slots, case.context_lens - 1, torch.zeros_like(case.row_slots)), 1).flatten()
        staged = torch.cat((torch.tensor([0, 0, 0, rows, 1, 0, 0, 0], dtype=I32, device=DEVICE), lines, lines[:3] * 0))
        schedule, space = scheduled(case), sampling.DrawSpace(rows, DEVICE)
        tokens = torch.empty(rows, dtype=I32, device=DEVICE)

        def begin() -> Tensor:
            apply_plan.apply_plan(staged, records, case.page_table, records, last, inputs, PAGE)
            decode_schedule.schedule_decode(schedule, inputs.context_lens, inputs.row_slots, PAGE, Q_HEADS, KV_HEADS)
            return embed(inputs.input_ids, self.head)

        def attend(qkv: Tensor, layer: int) -> Tensor:
            q, _, _ = rope_and_store(qkv, inputs.positions, inputs.cells, self.angles, *caches[layer], Q_HEADS)
            return attention_decode(q, *caches[layer], case.page_table, schedule, HEAD**-0.5).view(rows, HIDDEN)

        def end(logits: Tensor) -> Tensor:
            temperatures = records.view(torch.float32)[:, 2]
            return sampling.draw(
                logits, inputs.row_slots, inputs.sample_positions, records[:, :2], temperatures, space, out=tokens
            )

        def cublas() -> Tensor:
            residual = begin()
            h = rms_norm(residual, gain, 1e-5)
            for layer, (qkv, o, gate_up, down) in enumerate(self.layers):
                h = add_rms_norm(F.linear(attend(F.linear(h, qkv), layer), o), residual, gain, 1e-5)
                h = add_rms_norm(F.linear(silu_mul(F.linear(h, gate_up)), down), residual, gain, 1e-5)
            return end(F.linear(h, self.head))

        def skinny() -> Tensor:
            x = begin()
            for layer, (qkv, o, gate_up, down) in enumerate(self.layers):
                skinny_linear(attend(skinny_linear(x, qkv, gain, 1e-5), layer), o, residual=x, out=x)
                skinny_linear(skinny_linear(x, gate_up, gain, 1e-5, silu=True), down, residual=x, out=x)
            return end(skinny_linear(x, self.head, gain, 1e-5))

        return {"cuBLAS": cublas} | ({"skinny_linear": skinny} if rows == 1 else {})


def step(table: Table) -> None:
    model = Model()
    for rows, context in ((1, 384), (16, 640), (64, 640), (1024, 640)):
        moved = (
            2.0 * sum(w.numel() for layer in model.layers for w in layer)
            + 2 * model.head.numel()
            + rows * context * 4096 * LAYERS
        )
        for label, call in model.steps(rows, context).items():
            us = table.row(f"whole decode step, {label}", f"{rows} x {context}", [call], moved=moved)
            print(f"|  | = {rows / us * 1e6:,.0f} tok/s |  |  |  |")


SECTIONS = [attention, shared, prefill, elementwise, sample, linear, step]


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}, triton {triton.__version__}")
    torch.manual_seed(1)
    table = Table()
    for section in SECTIONS:
        if len(sys.argv) == 1 or section.__name__ in sys.argv[1:]:
            section(table)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
