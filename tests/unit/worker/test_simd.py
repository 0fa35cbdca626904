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


def test_rounding_is_torchs() -> None:
    def kernel(source, target, count):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            simd.store_part(BFLOAT16, target + i * 2, count - i, simd.load_part(FLOAT32, source + i * 4, count - i))

    words = np.random.default_rng(0).integers(0, 2**32, 50_003, dtype=np.uint32)
    words[:7] = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x7FFFFFFF, 1]  # infinities, ties, NaN
    x = torch.from_numpy(words.view(np.float32))
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
