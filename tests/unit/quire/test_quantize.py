"""quire quantize hands everything to the worker's quantizer, and its exit code back."""

import subprocess
import sys


def quire(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "quire.main", *arguments], capture_output=True, text=True)


def test_flags_reach_the_quantizer() -> None:
    done = quire("quantize", "--help")
    assert done.returncode == 0 and "--method" in done.stdout and "--group-size" in done.stdout


def test_a_missing_model_is_one_line() -> None:
    done = quire("quantize", "/nowhere/at/all", "--method", "fp8", "--out", "/nowhere/out")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("quantize: error: model '/nowhere/at/all'")
