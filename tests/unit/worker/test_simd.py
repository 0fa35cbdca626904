"""The CPU kernels' lanes: exp, rounding to bfloat16, parts of 16 elements; and a kernel's tasks on a team of threads."""

import math

import numpy as np
import pytest
import torch
from numba import carray, cfunc, types

from gpu_worker.cpu import simd, team
from gpu_worker.cpu.simd import BFLOAT16, FLOAT32

ADDRESSES = types.void(types.int64, types.int64, types.int64)


def test_exp_is_that_of_math_within_a_few_units() -> None:
    def kernel(source, target, count):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            simd.store(FLOAT32, target + i * 4, simd.exp(simd.load(FLOAT32, source + i * 4)))

    x = torch.linspace(-87.2, 88, 16_000)
    x[:5] = torch.tensor([0.0, -0.0, 88.0, -math.inf, math.nan])
    out = torch.empty_like(x)
    cfunc(ADDRESSES)(kernel).ctypes(x.data_ptr(), out.data_ptr(), len(x))
    assert out[:2].tolist() == [1, 1] and out[3] == 0 and out[4].isnan()
    expected = x[5:].double().exp()
    assert ((out[5:].double() - expected) / expected).abs().max() < 3e-7


def test_power_is_that_of_two_and_keeps_nan() -> None:
    def kernel(source, target, count):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            simd.store(FLOAT32, target + i * 4, simd.power(simd.load(FLOAT32, source + i * 4)))

    x = -torch.linspace(0, 126, 16_000)
    x[1:6] = torch.tensor([-math.inf, -1e30, -127.0, math.nan, -126.75])
    out = torch.empty_like(x)
    cfunc(ADDRESSES)(kernel).ctypes(x.data_ptr(), out.data_ptr(), len(x))
    assert out[:4].tolist() == [1, 0, 0, 0] and out[4].isnan() and 0 <= out[5] < 1.2e-38
    expected = x[6:].double().exp2()
    assert ((out[6:].double() - expected) / expected).abs().max() < 4e-7


@pytest.mark.parametrize("count", [5, 16, 40])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("in_one", [False, True])
def test_dots_of_pairs(number: int, count: int, in_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and bfloat16, the latter with the processor's own instruction where it has one, and without."""
    monkeypatch.setattr(simd, "HAS_BFLOAT16", in_one and simd.HAS_BFLOAT16)
    element, dtype, size = (FLOAT32, torch.float32, 4) if number == 1 else (BFLOAT16, torch.bfloat16, 2)

    def kernel(factors, rows, sums):  # type: ignore[no-untyped-def]
        total = simd.load_each((simd.zeros(), simd.zeros(), simd.zeros()), sums, 64)
        for i in range(0, 6, 2):
            at = rows + i * 16 * size
            total = simd.dot_each(element, total, factors + i * size, 6 * size, at, at + 16 * size, count)
        simd.store_each(total, sums, 64)

    factors, rows, sums = torch.randn(3, 6).to(dtype), torch.randn(6, 16).to(dtype), torch.randn(3, 16)
    expected = sums.double()
    expected[:, :count] += (factors.double() @ rows.double())[:, :count]
    cfunc(ADDRESSES)(kernel).ctypes(factors.data_ptr(), rows.data_ptr(), sums.data_ptr())
    assert (sums.double() - expected).abs().max() < 1e-5


def test_rounding_is_torchs() -> None:
    def kernel(source, target, count):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            simd.store_part(BFLOAT16, target + i * 2, count - i, simd.load_part(FLOAT32, source + i * 4, count - i))

    words = np.random.default_rng(0).integers(0, 2**32, 50_003, dtype=np.uint32)
    words[:7] = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x7FFFFFFF, 1]  # infinities, ties, NaN
    x = torch.from_numpy(words.view(np.float32))
    if simd.HAS_BFLOAT16:
        x[x.abs() < torch.finfo(torch.float32).tiny] = 0  # the processor's own instruction makes them zeros
    out = torch.full((len(x) + 1,), 7.0, dtype=torch.bfloat16)
    cfunc(ADDRESSES)(kernel).ctypes(x.data_ptr(), out.data_ptr(), len(x))
    expected = x.bfloat16()
    assert torch.equal(out[:-1].isnan(), expected.isnan()) and out[-1] == 7
    assert torch.equal(out[:-1].nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))


@simd.jit
def grow(address, step):  # type: ignore[no-untyped-def]
    simd.store_some(FLOAT32, address, 1, simd.add(simd.load_some(FLOAT32, address, 1), simd.broadcast(step)))


@pytest.mark.parametrize("tasks", [1, 2, 1000])
def test_every_task_is_done_once(tasks: int) -> None:
    def count(args):  # type: ignore[no-untyped-def]
        a = carray(args, 1)[0]
        grow(a.threads + simd.next_thread(args) * 4, 1.0)
        task = simd.next_task(args)
        while task < a.num_tasks:
            grow(a.done + task * 4, a.step)
            task = simd.next_task(args)

    kernel = team.Kernel(count, count, "done threads", "step")
    for elements in (0, 10**9):
        done, threads = torch.zeros(tasks), torch.zeros(64)
        kernel(torch.float32, tasks, elements, done.data_ptr(), threads.data_ptr(), 0.5)
        assert (done == 0.5).all()
        expected = min(torch.get_num_threads(), tasks) if elements else 1
        assert threads[:expected].eq(1).all() and threads[expected:].eq(0).all()
