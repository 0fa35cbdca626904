"""quire quantize: run the worker's quantizer in a process of its own (it needs torch, this one does not)."""

import argparse
import subprocess
import sys


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "quantize a model folder (gptq, awq, fp8)"
    parser = commands.add_parser("quantize", help=text, add_help=False, prefix_chars="\0")  # all flags are the worker's
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    return subprocess.call([sys.executable, "-m", "gpu_worker.quantize", *parsed.arguments])
