"""Quantized linears on a GPU beside the bf16 linear: correctness first, then time, GB/s and TFLOP/s by rows.

usage: python benchmarks/quant_kernels.py [--rows 1,16,64,256,1024,4096] [--shapes qkv,o,gate_up,down] [--tune]

The shapes are those of an 8B model. --tune times tile sizes, splits and variants of each kernel and prints the best; without it
the shipped choices are timed. A line "guide" says whether 4-bit weights take <= 0.4x (1-16 rows) and <= 1.15x (4096) of bf16.
"""

import argparse
import itertools
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from gpu_worker.kernels import fp8_linear, w4a16_linear
from gpu_worker.kernels.compiling import compiling_only
from gpu_worker.quant.formats.fp8 import quantize
from gpu_worker.quant.linear import ByteLinear
from gpu_worker.quant.packed import KernelInts, PackedInts, for_kernels
from gpu_worker.quant.scheme import Activations
from tests.quant_kernel_checks import check_byte_linear, check_int_linear, check_rounding, corner_rows, noise, random_ints

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BF16 = torch.bfloat16
COLD_BYTES = 3 * 2**27
PER_TOKEN = Activations(kind="float", granularity="token")


def check() -> bool:
    """Every variant on awkward and real sizes; all failures are shown, and what works is still timed."""
    failed = 0
    for name, run in checks():
        try:
            run()
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc(limit=4)}", flush=True)
    print("correct" if not failed else f"{failed} checks failed", flush=True)
    return not failed


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    sizes = [(1027, 1536, 64, 4), (4096, 4096, 128, 4), (960, 576, 32, 4), (512, 1000, 1000, 8)]
    for (n, k, group, bits), rows, zeros in itertools.product(sizes, (1, 16, 33, 64, 200), (False, True)):
        packed = random_ints(n, k, group, bits=bits, zeros=zeros, act_order=n == 960, device="cuda")

        def run(packed: PackedInts = packed, rows: int = rows, zeros: bool = zeros) -> None:
            check_int_linear(rows, packed, BF16, bias=zeros)
            check_int_linear(rows, packed, BF16, bias=zeros, unpacked=True)

        yield f"int {n}x{k} group {group} {bits} bits, {rows} rows, zeros {zeros}", run
    for (n, k, block), rows, kind in itertools.product(
        [(1027, 1531, 0), (4096, 4096, 0), (4096, 4096, 128), (192, 576, 128)], (1, 16, 64, 200), ("float", "int")
    ):
        if kind == "float" or not block:
            yield (
                f"{kind} {n}x{k} block {block}, {rows} rows",
                lambda n=n, k=k, block=block, rows=rows, kind=kind: check_byte_linear(  # type: ignore[misc]
                    rows, n, k, block, kind, BF16, bias=rows == 16, device="cuda"
                ),
            )
    yield "rounding", lambda: check_rounding(noise(77, 4096, device="cuda").to(BF16), PER_TOKEN)
    yield "rounding of corner rows", lambda: check_rounding(corner_rows(500, "cuda"), PER_TOKEN)


def microseconds(runs: list[Callable[[], object]]) -> float:
    """Device time of one run: median of nine replays of a graph of all of them, which read different weights."""
    with compiling_only():
        for run in runs[:1]:
            run()
    for run in runs:
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(10):
        started, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        started.record()
        graph.replay()
        done.record()
        done.synchronize()
        times.append(started.elapsed_time(done) * 1e3)
    return float(statistics.median(times[1:])) / len(runs)


def line(name: str, rows: int, n: int, k: int, us: float, weight_bytes: float, base: float) -> str:
    moved = weight_bytes + 2 * rows * (n + k)
    tflops = 2 * rows * n * k / us / 1e6
    return f"  {name:18} {us:8.1f} us  {moved / us / 1e3:6.0f} GB/s  {tflops:6.1f} TFLOP/s  {us / base:5.2f}x bf16"


def copies(num_bytes: int) -> int:
    """Weights of this size that together are far larger than the L2 cache."""
    return max(COLD_BYTES // num_bytes, 1)


def int_runs(x: Tensor, packed: list[KernelInts]) -> dict[str, list[Callable[[], object]]]:
    def run(**how: int) -> list[Callable[[], object]]:
        return [
            lambda each=each: w4a16_linear.w4a16_linear(  # type: ignore[misc]
                x, each, None, **how
            )
            for each in packed
        ]

    runs = {"w4a16": run()}
    if x.shape[0] > w4a16_linear.SKINNY_ROWS:
        runs["w4a16 fused"] = run(unpack_rows_from=10**9)
        runs["w4a16 unpacked"] = run(unpack_rows_from=0)
    return runs


def tune_ints(x: Tensor, packed: list[KernelInts]) -> str:
    """The fastest of many shapes of the fused kernel; each must equal the shipped one's result."""
    rows = x.shape[0]
    out = x.new_empty((rows, packed[0].words.shape[1]))
    right = w4a16_linear.w4a16_linear(x, packed[0]).float()
    narrow = max(16, min(triton.next_power_of_2(rows), 64))
    widths = (narrow,) if rows <= 64 else (64, 128, 256)
    shapes = [
        {"BM": bm, "BN": bn, "num_warps": warps, "STAGES": stages, "waves": waves}
        for bm, bn, warps, stages, waves in itertools.product(
            widths, (32, 64, 128), (4, 8), (3, 4, 6), (1, 2, 4, 8) if rows <= 64 else (1,)
        )
        if bm * bn <= 2**14 and (bn >= 64 or warps == 4)
    ]

    def runs(shape: dict[str, int]) -> list[Callable[[], object]]:
        return [
            lambda each=each: w4a16_linear._fused(  # type: ignore[misc]
                x, each, None, out, shape
            )
            for each in packed
        ]

    with compiling_only():
        for shape in shapes:
            runs(shape)[0]()
    found: list[tuple[float, str]] = []
    for shape in shapes:
        try:
            runs(shape)[0]()
            if float((out.float() - right).norm()) > 0.01 * float(right.norm()):
                print(f"  WRONG {shape}")
                continue
            found.append((microseconds(runs(shape)), str(shape)))
        except Exception as error:
            print(f"  {shape}: {type(error).__name__}")
    return "\n".join(f"    {us:7.1f} us  {text}" for us, text in sorted(found)[:4])


def measure(rows_list: list[int], tune: bool, names: list[str]) -> None:
    for name in names:
        n, k = SHAPES[name]
        dense = [(noise(n, k, device="cuda") / k**0.5).to(BF16) for _ in range(copies(2 * n * k))]
        packed = [
            for_kernels(random_ints(n, k, 128, bits=4, zeros=True, act_order=False, device="cuda"))
            for _ in range(copies(n * k // 2))
        ]
        how = Activations(kind="float", granularity="group", group=128)
        made: dict[str, list[ByteLinear]] = {"fp8 rows": [], "fp8 blocks": []}
        for _ in range(copies(n * k)):
            fp8 = quantize(dense[0])
            made["fp8 rows"].append(ByteLinear(fp8, None, dense[0].device))
            blocked = fp8.scales.expand(n, k // 128).contiguous()
            made["fp8 blocks"].append(ByteLinear(type(fp8)(fp8.values, blocked, 128, how), None, dense[0].device))
        for rows in rows_list:
            x = noise(rows, k, device="cuda").to(BF16)
            base = microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in dense])  # type: ignore[misc]  # noqa: B023
            print(f"{name} [{n}, {k}], {rows} rows\n{line('bf16', rows, n, k, base, 2 * n * k, base)}")
            for kind, runs in int_runs(x, packed).items():
                us = microseconds(runs)
                print(line(kind, rows, n, k, us, packed[0].num_bytes, base))
                if kind == "w4a16" and (rows <= 16 or rows == 4096):
                    limit = 0.4 if rows <= 16 else 1.15
                    print(f"  guide: {us / base:.2f} {'<=' if us / base <= limit else 'ABOVE'} {limit}")
            for kind, matmuls in made.items():
                us = microseconds([lambda m=m: m(x) for m in matmuls])  # type: ignore[misc]  # noqa: B023
                print(line(kind, rows, n, k, us, n * k, base))
            print(f"  rounding of x      {microseconds([lambda: fp8_linear.quantize_rows(x, PER_TOKEN)]):8.1f} us", flush=True)  # noqa: B023
            if tune and rows <= 1024:
                print(tune_ints(x, packed), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantized linears on a GPU.")
    parser.add_argument("--rows", default="1,16,64,256,1024,4096")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    good = check()
    measure([int(each) for each in args.rows.split(",")], args.tune, args.shapes.split(","))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
