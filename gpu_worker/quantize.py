"""Quantize a model folder once: python -m gpu_worker.quantize MODEL --method awq --out DIR."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.config import FATAL_EXIT, Config


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model folder, GGUF file or hub id; '' for the embedded model")
    parser.add_argument("--method", required=True, choices=("gptq", "awq", "fp8"))
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8), help="of gptq (default: 4)")
    parser.add_argument(
        "--group-size", type=int, default=0, help="inputs per scale (default: the largest of 128, 64, 32 that fits)"
    )
    parser.add_argument("--symmetric", action=argparse.BooleanOptionalAction, help="no zero points (default: gptq yes, awq no)")
    parser.add_argument("--calibration", type=Path, help="text file, or .jsonl of prompt and text (default: built in)")
    parser.add_argument("--samples", type=int, default=112, help="calibration samples (default: 112)")
    parser.add_argument("--cache-dir", default=Config().cache_dir, help="where converted models are kept")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU (default: all)")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="quire quantize", description="Quantize a model folder.")
    add_flags(parser)
    args = parser.parse_args(argv)
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch

    from gpu_worker.quant.calibration import BUILT_IN
    from gpu_worker.quant.quantizer import Options, quantize
    from shared import model_store

    if args.threads:
        torch.set_num_threads(args.threads)
    options = Options(
        method=args.method,
        bits=args.bits,
        group=args.group_size,
        symmetric=args.symmetric,
        calibration=args.calibration or BUILT_IN,
        samples=args.samples,
    )
    started = time.monotonic()
    try:
        folder = Path(model_store.resolve(args.model, args.cache_dir))
        quantize(folder, args.out, options, lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, OSError) as error:  # ModelError is a ValueError
        parser.exit(FATAL_EXIT, f"quantize: error: {error}\n")
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(f"{args.out}: {size / 1e6:,.0f} MB in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
