"""Kernels compile in processes without a device, into the cache where this process finds them.

test_compiling.py runs this as a process of its own: the interpreter is chosen at import, and processes fork.
"""

import os
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gpu_worker.kernels import compiling, few_rows_linear, rms_norm


class Device(compiling._Target):
    def get_current_stream(self, device: int) -> int:
        return 0


def made() -> int:
    return len(os.listdir(os.environ["TRITON_CACHE_DIR"])) if os.path.exists(os.environ["TRITON_CACHE_DIR"]) else 0


def main() -> None:
    compiling.start_processes()
    driver.set_active(Device(GPUTarget("cuda", 90, 32)))
    run = JITFunction.run

    def warm_up(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **named)

    JITFunction.run = warm_up
    for module in (few_rows_linear, rms_norm):
        vars(module)["overlapped"] = lambda _: {"PDL": True, "launch_pdl": True}
    x = torch.empty((16, 4096), dtype=torch.bfloat16)

    def ask_for_both() -> None:
        few_rows_linear.few_rows_linear(x, x)
        rms_norm.rms_norm(x, x[0], 1e-5)

    asked: list[compiling._Kernel] = []

    def ask(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        asked.append(compiling._Kernel(fn.module, fn.name, compile["specialization_data"], driver.active.get_current_target()))
        return True  # it is not compiled here

    knobs.runtime.jit_cache_hook = ask
    ask_for_both()
    assert len(asked) == 2 and made() == 0
    assert compiling._processes is not None
    list(compiling._processes.map(compiling._compile, asked))
    compiling.stop_processes()
    knobs.runtime.jit_cache_hook = None
    there = made()
    assert there >= 2
    ask_for_both()
    assert made() == there, "compiled again"


if __name__ == "__main__":
    main()
