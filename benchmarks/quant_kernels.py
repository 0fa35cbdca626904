"""Quantized linears on a GPU beside the bf16 linear: correctness first, then time, GB/s and TFLOP/s by rows.

usage: python benchmarks/quant_kernels.py [--rows 1,16,64,256,1024,4096] [--shapes qkv,o,gate_up,down] [--tune]

The shapes are those of an 8B model. --tune times tile sizes, splits and variants of each kernel and prints the best; without it
the shipped choices are timed. A line "guide" says whether 4-bit weights take <= 0.4x (1-16 rows) and <= 1.15x (4096) of bf16.
"""

import argparse
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from gpu_worker.kernels import fp8_linear, w4a16_linear
from gpu_worker.quant.formats.fp8 import quantize
from gpu_worker.quant.linear import ByteLinear
from gpu_worker.quant.packed import PackedInts
from gpu_worker.quant.scheme import Activations
from tests.quant_kernel_checks import check_byte_linear, check_int_linear, check_rounding, corner_rows, noise, random_ints

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BF16 = torch.bfloat16
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


def microseconds(run: Callable[[], object]) -> float:
    """Median of device time with the cache cleared between runs, inside a CUDA graph's stream order."""
    return float(triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")) * 1e3


def line(name: str, rows: int, n: int, k: int, us: float, weight_bytes: float, base: float) -> str:
    moved = weight_bytes + 2 * rows * (n + k)
    tflops = 2 * rows * n * k / us / 1e6
    return f"  {name:18} {us:8.1f} us  {moved / us / 1e3:6.0f} GB/s  {tflops:6.1f} TFLOP/s  {us / base:5.2f}x bf16"


def int_runs(x: Tensor, packed: PackedInts) -> dict[str, Callable[[], object]]:
    how = (packed.words, packed.scales, packed.zeros, packed.group, packed.bits, None)
    runs: dict[str, Callable[[], object]] = {"w4a16": lambda: w4a16_linear.w4a16_linear(x, *how)}
    if x.shape[0] > w4a16_linear.SKINNY_ROWS:
        runs["w4a16 fused"] = lambda: w4a16_linear.w4a16_linear(x, *how, unpack_rows_from=10**9)
        runs["w4a16 unpacked"] = lambda: w4a16_linear.w4a16_linear(x, *how, unpack_rows_from=0)
    return runs


def tune_ints(x: Tensor, packed: PackedInts) -> str:
    """The fastest of many shapes of the fused kernel; each must equal the shipped one's result."""
    rows = x.shape[0]
    out = x.new_empty((rows, packed.num_rows))
    right = w4a16_linear.w4a16_linear(x, packed.words, packed.scales, packed.zeros, packed.group, packed.bits).float()
    narrow = max(16, min(triton.next_power_of_2(rows), 64))
    widths = (narrow,) if rows <= 64 else (64, 128, 256)
    found: list[tuple[float, str]] = []
    for bm, bn, warps, stages, waves, asm in itertools.product(
        widths, (32, 64, 128), (4, 8), (2, 3, 4, 6), (1, 2, 4, 8) if rows <= 64 else (1,), (True, False)
    ):
        if bm * bn > 2**14 or (bn < 64 and warps == 8) or (not asm and stages != 3):
            continue
        shape = {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}

        def run(shape: dict[str, int] = shape, asm: bool = asm, waves: int = waves) -> None:
            w4a16_linear._fused(x, packed.words, packed.scales, packed.zeros, packed.group, packed.bits, None, out, shape, asm)

        try:
            run()
            if float((out.float() - right).norm()) > 0.01 * float(right.norm()):
                print(f"  WRONG {shape} waves {waves} asm {asm}")
                continue
            found.append((microseconds(run), f"BM {bm} BN {bn} warps {warps} stages {stages} waves {waves} asm {asm}"))
        except Exception as error:
            print(f"  {shape}: {type(error).__name__}")
    best = sorted(found)[:4]
    return "\n".join(f"    {us:7.1f} us  {text}" for us, text in best)


def measure(rows_list: list[int], tune: bool, names: list[str]) -> None:
    for name in names:
        n, k = SHAPES[name]
        dense = (noise(n, k, device="cuda") / k**0.5).to(BF16)
        packed = random_ints(n, k, 128, bits=4, zeros=True, act_order=False, device="cuda")
        fp8 = quantize(dense)
        how = Activations(kind="float", granularity="group", group=128)
        blocked = fp8.scales.expand(n, k // 128).contiguous()
        made: dict[str, Any] = {"fp8 rows": ByteLinear(fp8, None, dense.device)}
        made["fp8 blocks"] = ByteLinear(type(fp8)(fp8.values, blocked, 128, how), None, dense.device)
        for rows in rows_list:
            x = noise(rows, k, device="cuda").to(BF16)
            base = microseconds(lambda x=x, dense=dense: torch.nn.functional.linear(x, dense))  # type: ignore[misc]
            print(f"{name} [{n}, {k}], {rows} rows\n{line('bf16', rows, n, k, base, 2 * n * k, base)}")
            for kind, run in int_runs(x, packed).items():
                us = microseconds(run)
                print(line(kind, rows, n, k, us, packed.num_bytes, base))
                if kind == "w4a16" and (rows <= 16 or rows == 4096):
                    limit = 0.4 if rows <= 16 else 1.15
                    print(f"  guide: {us / base:.2f} {'<=' if us / base <= limit else 'ABOVE'} {limit}")
            for kind, matmul in made.items():
                print(line(kind, rows, n, k, microseconds(lambda m=matmul, x=x: m(x)), n * k, base))  # type: ignore[misc]
            us = microseconds(lambda x=x: fp8_linear.quantize_rows(x, PER_TOKEN))  # type: ignore[misc]
            print(f"  rounding of x      {us:8.1f} us", flush=True)
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
