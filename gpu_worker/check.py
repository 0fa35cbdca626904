"""python -m gpu_worker.check FLAGS: what makes a start useless, found in a moment: no torch, no weight is read.

The worker checks all of it again, and more. Ends with FATAL_EXIT and one line when there is a fault.
"""

import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpu_worker import limits
from gpu_worker.model.spec import ModelSpec, read_spec
from shared import gpus, model_folder
from shared.config import FATAL_EXIT, BadConfig, Config, parse_args
from shared.model_folder import ModelError


def main() -> int:
    config = parse_args("Checks settings and a model folder without loading the model.")
    try:
        check(config, on_cpu=config.device == "cpu" or (config.device == "auto" and not gpus.gpu_ids()))
    except (BadConfig, ModelError) as error:
        print(error, file=sys.stderr)
        return FATAL_EXIT
    return 0


def check(config: Config, *, on_cpu: bool) -> None:
    """BadConfig or ModelError, one line, when the folder config.model cannot be served so."""
    model = model_folder.read_config(config.model)
    spec = read_spec(model)
    limits.check_dtype(config, on_cpu=on_cpu)
    limits.check_division(spec, config.tensor_parallel_size)
    limits.check_length(config, spec.context_limit)
    if kv_bytes := config.kv_cache_bytes or (limits.CPU_KV_BYTES if on_cpu else 0):  # else a GPU's memory plan says
        ranks = min(config.tensor_parallel_size, spec.num_kv_heads)
        one_page_bytes = limits.bytes_of_page(spec, config.block_size, _least_item_bytes(config, spec, model)) // ranks
        limits.check_pages(config, one_page_bytes, kv_bytes)
    if not config.dummy_weights:
        for file in model_folder.weight_files(Path(config.model)):
            _check_file(file)


def _least_item_bytes(config: Config, spec: ModelSpec, model: dict[str, Any]) -> int:
    """The least that a key's number may take: which type it is depends on the device."""
    quantized = "quantization_config" in model or "compression_config" in model
    if config.kv_cache_dtype == "fp8" or (config.kv_cache_dtype == "auto" and quantized):
        return 1
    return 4 if config.dtype == "float32" or (config.dtype == "auto" and spec.dtype_name == "float32") else 2


def _check_file(file: Path) -> None:
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or no safetensors file: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
