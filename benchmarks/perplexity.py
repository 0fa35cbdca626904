"""Perplexity of model folders on texts, computed by our own worker: how much a quantized model lost.

usage: python benchmarks/perplexity.py FOLDER [FOLDER ...] [--text FILE ...] [--window 512] [--quantization fp8]

Each text is cut into windows that are scored one by one; the first token of a window is not scored. The default texts are ours:
written.txt was written for this, generated.txt is what SmolLM2-135M-Instruct answered to prompts of no calibration sample.
"""

import argparse
import dataclasses
import math
from pathlib import Path

from tokenizers import Tokenizer

from gpu_worker.loading import load
from shared import model_store
from shared.config import Config
from shared.sampling import Sampling
from tests.plan_driver import Driver

TEXTS = Path(__file__).parents[1] / "tests" / "fixtures" / "quant"


def windows(folder: Path, text: str, window: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()  # some folders' files say to cut whatever is longer than a calibration sample
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [part for start in range(0, len(ids), window) if len(part := ids[start : start + window]) > 1]


def negative_log_likelihoods(driver: Driver, parts: list[list[int]]) -> list[float]:
    values: list[float] = []
    for part in parts:
        sequence = driver.add(part, Sampling(temperature=0.0, score_width=0), num_prompt=len(part))
        driver.run_step()
        values += [-value for value in sequence.prompt_logprobs]
        driver.finish(sequence)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of model folders.")
    parser.add_argument("models", nargs="+", help="model folders; '' for the embedded model")
    parser.add_argument("--text", nargs="+", type=Path, default=[TEXTS / "written.txt", TEXTS / "generated.txt"])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    base = Config(max_num_seqs=1, max_model_len=args.window + 16, max_num_batched_tokens=args.window, cpu_threads=args.threads)
    for model in args.models:
        config = dataclasses.replace(base, model=model, quantization=args.quantization, dtype=args.dtype)
        driver = Driver(load(config).runner)
        folder = model_store.resolve(model, config.cache_dir)
        cells = []
        for text in args.text:
            values = negative_log_likelihoods(driver, windows(folder, text.read_text("utf-8"), args.window))
            cells.append(f"{text.stem} {math.exp(sum(values) / len(values)):.3f} ({len(values)} tokens)")
        print(f"{model or 'embedded'}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
