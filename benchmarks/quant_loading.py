"""Memory and time of loading a quantized folder on a CPU: layers in the shape of an 8B Llama, written with random words first.

usage: python benchmarks/quant_loading.py [--layers 6] [--format awq|gptq] [--dtype bfloat16] [--folder EMPTY_OR_EARLIER_FOLDER]

Private memory (what no file backs) is sampled every 5 ms; the file's own pages, which the kernel may drop, are not counted.
"""

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker import ops
from gpu_worker.loading import DTYPES, set_threads
from gpu_worker.model.spec import read_spec
from gpu_worker.model.weights import Safetensors, load_decoder, tensor_shapes
from gpu_worker.quant import export
from gpu_worker.quant.config import read_quantization
from shared import model_folder
from shared.config import Config

MIB = 2**20
GROUP = 128
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, layers: int, layout: str) -> None:
    """Words of four bits are valid whatever they are; scales and zero points are those of any checkpoint."""
    make = export.awq_config if layout == "awq" else export.gptq_config
    config = MODEL | {"num_hidden_layers": layers, "quantization_config": make(4, GROUP, False)}
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(read_spec(config)).items():
        if name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + last: each for last, each in packed(shape[0], shape[1], layout).items()}
        else:
            tensors[name] = torch.randn(shape, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def packed(n: int, k: int, layout: str) -> dict[str, Tensor]:
    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    scales = (torch.rand(k // GROUP, n) * 0.01).half()
    qweight = words(k, n // 8) if layout == "awq" else words(k // 8, n)
    return {"qweight": qweight, "qzeros": words(k // GROUP, n // 8), "scales": scales}


def private_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon"))


class Watch:
    """The largest private memory since start."""

    def __init__(self) -> None:
        self.peak_mib, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self.peak_mib = max(self.peak_mib, private_mib())

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self.peak_mib


def measure(folder: Path, dtype: torch.dtype) -> None:
    config = model_folder.read_config(folder)
    spec, quant = read_spec(config), read_quantization(config)
    set_threads(Config())
    table, device = ops.load(torch.device("cpu")), torch.device("cpu")
    before, cpu, start = private_mib(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    watch = Watch()
    source = Safetensors(folder, spec, quant)
    decoder = load_decoder(spec, source, table, dtype=dtype, device=device, max_model_len=512, quant=quant)
    wall, peak, after = time.perf_counter() - start, watch.end(), resource.getrusage(resource.RUSAGE_SELF)
    used = f"{after.ru_utime - cpu.ru_utime:.1f} + {after.ru_stime - cpu.ru_stime:.1f}"
    size = sum(each.num_bytes for layer in decoder.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down))
    file = os.path.getsize(folder / "model.safetensors") / MIB
    print(
        f"file {file:.0f} MiB, layers {size / MIB:.0f} MiB; private MiB: {before:.0f} before, {peak:.0f} at most, "
        f"{private_mib():.0f} after; {wall:.1f} s, of CPU {used} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of loading a quantized folder on a CPU.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--format", choices=("awq", "gptq"), default="awq")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--folder", type=Path, help="kept, and read instead of written when it holds a model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        folder = args.folder or Path(temp)
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            write(folder, args.layers, args.format)
        measure(folder, DTYPES[args.dtype])


if __name__ == "__main__":
    main()
