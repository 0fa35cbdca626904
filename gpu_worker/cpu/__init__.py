"""The operations of a CPU: kernels that numba compiles for this machine. Same names and signatures as kernels/table.py."""

import torch

from gpu_worker.cpu.attention import attention
from gpu_worker.cpu.elementwise import add_rms_norm, rms_norm, silu_mul
from gpu_worker.cpu.rope_and_store import rope_and_store
from gpu_worker.cpu.team import compile_all, keep_compiled
from gpu_worker.reference.sample import sample

__all__ = ["add_rms_norm", "attention", "prepare", "rms_norm", "rope_and_store", "sample", "silu_mul"]


def prepare(dtype: torch.dtype, cache_dir: str) -> None:
    """Compile all kernels for this type of activations, so that no request waits for it; machine code is kept in cache_dir."""
    keep_compiled(cache_dir)
    compile_all(dtype)
