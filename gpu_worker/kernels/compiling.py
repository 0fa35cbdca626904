"""Compile all kernels of a start side by side: in processes, because half of a compiler is Python, then load them in threads.

The processes fork before the parent touches the device; they compile for a target that they are told and never use the device
themselves. What they make lies in Triton's cache on disk, where the parent finds it.
"""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.cache import triton_key
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from shared.process import dies_with_parent, usable_cores

MOST_PROCESSES = 16
_processes: ProcessPoolExecutor | None = None


class _Kernel(NamedTuple):
    module: str
    name: str
    specialization: str  # Triton's own description of types, constants and options
    target: GPUTarget


class _Target:
    """Stands in for the driver in a process that has no device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def start_processes() -> None:
    """Fork them, in the main thread and before the device is used."""
    global _processes
    triton_key()  # hashes all of Triton: once, not in every process
    count = min(usable_cores(), MOST_PROCESSES)
    _processes = ProcessPoolExecutor(count, get_context("fork"), initializer=_begin, initargs=(dies_with_parent(),))
    _processes.submit(os.getpid).result()


def stop_processes() -> None:
    global _processes
    if _processes is not None:
        _processes.shutdown(cancel_futures=True)
        _processes = None


def _begin(die_with_parent: Callable[[], None]) -> None:
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process


def _compile(kernel: _Kernel) -> None:
    driver.set_active(_Target(kernel.target))
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    function.preload(kernel.specialization)


class _Loaders(ThreadPoolExecutor):
    """Runs what AsyncCompileMode submits: the compiler's work in a process where there are some, then the loading.

    Some versions of Triton compile a launcher with the system's C compiler when a kernel is loaded, half a second each.
    """

    asked: _Kernel | None = None  # by the submission that comes next, in the submitting thread

    def ask(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        """Triton's hook before it compiles."""
        target = driver.active.get_current_target()
        self.asked = _Kernel(fn.module, fn.name, compile["specialization_data"], target)

    def submit(self, take_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        kernel, self.asked = self.asked, None

        def compile_and_load() -> Any:
            if _processes is not None and kernel is not None:
                with suppress(Exception):  # whatever it is, compiling here says it
                    _processes.submit(_compile, kernel).result()
            loaded = take_kernel()
            with suppress(OutOfResources):  # said again where it is launched
                loaded._init_handles()
            return loaded

        return super().submit(compile_and_load)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, kernels are not launched: all that are asked for compile side by side and are ready at the end."""
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **named)

    device = torch.cuda.current_device()
    threads = _Loaders(2 * MOST_PROCESSES, initializer=torch.cuda.set_device, initargs=(device,))
    with threads, AsyncCompileMode(threads):
        JITFunction.run, knobs.runtime.jit_cache_hook = compile_only, threads.ask
        try:
            yield
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
