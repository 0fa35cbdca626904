"""What the processes of a start compile is what the worker looks for."""

import os
import subprocess
import sys
from pathlib import Path


def test_processes_fill_the_cache(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_in_processes.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(script.parents[3]), "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
