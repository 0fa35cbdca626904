"""The operations of a CPU whose pages hold float8: what touches pages is torch's (gpu_worker/reference/), the rest as usual."""

from gpu_worker.cpu import add_rms_norm, rms_norm, sample, silu_mul
from gpu_worker.reference import attention, rope_and_store

__all__ = ["add_rms_norm", "attention", "rms_norm", "rope_and_store", "sample", "silu_mul"]
