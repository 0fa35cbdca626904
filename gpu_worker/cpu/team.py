"""Compiled kernels on torch's own OpenMP threads: a second pool would fight with the products' threads for the cores.

A kernel is run once by every thread of the team and takes tasks from a shared counter until there are none, so a thread that
lost its core to another process holds up one task and no more.
"""

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from shared.config import Config

WORTH_A_TEAM = 50_000  # elements touched; below it waking another thread takes longer than the work

# void GOMP_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags): what GCC calls for
# "#pragma omp parallel"; libgomp and LLVM's libomp both have it.
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_ALONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SHORT = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # keeps the interpreter's lock: the work is shorter than handing it over


def _openmp() -> Any:
    """GOMP_parallel of the OpenMP runtime that torch has loaded; None where it has another one."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line} if maps.exists() else set()
    runtimes = [path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    for path in sorted(runtimes, key=lambda path: "torch" not in path):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            return _PARALLEL(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return None


_run_team = _openmp()
_kernels: list["Kernel"] = []


class Kernel:
    """One function per type of activations, of a pointer to two counters, num_tasks and the arguments named here."""

    def __init__(self, float32: Callable[..., None], bfloat16: Callable[..., None], integers: str, floats: str = "") -> None:
        """integers: names of int64 arguments (addresses, bytes, counts), floats: of float64 ones, which come after them."""
        names = ["next_task", "next_thread", "num_tasks", *integers.split()]
        fields = np.dtype([(name, np.int64) for name in names] + [(name, np.float64) for name in floats.split()])
        self._signature = numba.types.void(numba.types.CPointer(numba.from_dtype(fields)))
        self._pack = struct.Struct(f"={len(names)}q{len(floats.split())}d").pack
        self._functions = {torch.float32: float32, torch.bfloat16: bfloat16}
        self._compiled: dict[torch.dtype, _Code] = {}
        _kernels.append(self)

    def compiled(self, dtype: torch.dtype) -> "_Code":
        if dtype not in self._compiled:
            if not numba.config.CACHE_DIR:
                keep_compiled(Config().cache_dir)
            code = numba.cfunc(self._signature, cache=bool(numba.config.CACHE_DIR), error_model="numpy")(self._functions[dtype])
            self._compiled[dtype] = _Code(code, code.address, _ALONE(code.address), _SHORT(code.address))
        return self._compiled[dtype]

    def __call__(self, dtype: torch.dtype, num_tasks: int, num_elements: int, *arguments: float) -> None:
        """num_elements: what all tasks touch together."""
        block = ctypes.create_string_buffer(self._pack(0, 0, num_tasks, *arguments))
        code = self.compiled(dtype)
        if num_elements < WORTH_A_TEAM:
            code.short(ctypes.addressof(block))
        elif (threads := min(torch.get_num_threads(), num_tasks)) > 1 and _run_team:
            _run_team(code.address, ctypes.addressof(block), threads, 0)
        else:
            code.alone(ctypes.addressof(block))


class _Code(NamedTuple):
    owner: Any  # keeps it in memory
    address: int
    alone: Any  # as a function for one thread
    short: Any


def compile_all(dtype: torch.dtype) -> None:
    """So that no request waits for it."""
    for kernel in _kernels:
        kernel.compiled(dtype)


def keep_compiled(cache_dir: str) -> None:
    """Keep machine code below this folder, under a name that changes with the kernels' sources."""
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    folder = Path(cache_dir).expanduser() / "kernels" / f"numba-{sources.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        numba.config.CACHE_DIR = ""
    else:
        numba.config.CACHE_DIR = str(folder) if os.access(folder, os.W_OK) else ""
