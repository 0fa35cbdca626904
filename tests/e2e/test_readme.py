"""The examples in README.md run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.serving import ROOT, Served, ended

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


def printed_by(block: str) -> str:
    ran = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_openai_example(smollm2_folder: Path) -> None:
    served = Served()
    with ended(served):
        (block,) = (block for block in BLOCKS if "openai" in block)
        assert "http://127.0.0.1:8000/v1" in block
        assert printed_by(block.replace("http://127.0.0.1:8000/v1", served.url)) == "The capital of France is Paris.\n"


def test_the_python_example(smollm2_folder: Path) -> None:
    (block,) = (block for block in BLOCKS if "LLM(" in block)
    printed = printed_by(block)
    assert "The capital of France is  Paris" in printed
    assert "1, 2, 3,  4, 5" in printed
