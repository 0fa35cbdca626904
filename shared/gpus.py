"""Which GPUs this machine offers, without loading a GPU library."""

import os
import shutil
import subprocess


def gpu_ids() -> list[str]:
    """Ids of the GPUs this process may use, as CUDA_VISIBLE_DEVICES takes them; empty without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    try:
        listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    installed = [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
    if listed.returncode or not installed:
        return []
    return [each.strip() for each in visible.split(",")] if visible else installed
