"""Every kernel passes the compiler's front end for an H200, which is stricter than the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

KERNELS = {
    "_add", "_apply_plan", "_attention_decode", "_attention_prefill", "_attention_shared", "_draw", "_embed", "_extremes",
    "_few_rows_linear", "_finish", "_forbid", "_gather_keys", "_keep", "_logprobs", "_merge", "_penalize", "_restore",
    "_rms_norm", "_rope_and_store", "_round", "_schedule", "_silu_mul", "_skinny_linear",
}  # fmt: skip


def test_kernels_compile() -> None:
    script = Path(__file__).with_name("lower_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(script.parents[3])
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == KERNELS
