"""Torch twins of the kernels: the same names and signatures, plain enough to believe. A CPU samples with this `sample`."""

from gpu_worker.reference.attention import attention
from gpu_worker.reference.elementwise import add_rms_norm, rms_norm, silu_mul
from gpu_worker.reference.rope_and_store import rope_and_store
from gpu_worker.reference.sample import sample

__all__ = ["add_rms_norm", "attention", "rms_norm", "rope_and_store", "sample", "silu_mul"]
