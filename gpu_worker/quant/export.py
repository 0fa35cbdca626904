"""Quantized model folders on the disk: packed tensors, quantization_config, and everything else as it was."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.quant.formats import awq
from gpu_worker.quant.formats.words import pack
from gpu_worker.quant.weights import IntWeight
from shared import model_folder

SHARD_BYTES = 4 * 10**9


def gptq_tensors(weight: IntWeight) -> dict[str, Tensor]:
    """Version 1 of the format: the zero point minus 1."""
    zeros = weight.explicit_zeros()
    return {
        "qweight": pack(weight.codes, weight.bits).t().contiguous(),
        "qzeros": pack((zeros - 1).t().contiguous(), weight.bits),
        "scales": weight.scales.t().contiguous(),
        "g_idx": weight.groups,
    }


def awq_tensors(weight: IntWeight) -> dict[str, Tensor]:
    return {
        "qweight": awq.write_words(weight.codes.t().contiguous()),
        "qzeros": awq.write_words(weight.explicit_zeros().t().contiguous()),
        "scales": weight.scales.t().contiguous(),
    }


def gptq_config(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "static_groups": True,
        "true_sequential": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }


def awq_config(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": bits,
        "group_size": group,
        "zero_point": not symmetric,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }


def fp8_config(ignore: list[str]) -> dict[str, Any]:
    """As compressed-tensors writes FP8_DYNAMIC: a scale per row of a weight, a scale per token of its input."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
        "output_activations": None,
        "format": "float-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def write(folder: Path, out: Path, model: Any, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """out: the folder's files but for its weights and config.json. tensors: of quantized layers; the rest is the model's."""
    temp = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    temp.mkdir(parents=True)
    try:
        for file in folder.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".gguf") and ".index." not in file.name:
                shutil.copyfile(file, temp / file.name)
        whole = model_folder.read_config(folder) | {"quantization_config": config}
        (temp / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
        if config["quant_method"] == "gptq":  # where older tools look
            (temp / "quantize_config.json").write_text(json.dumps(config, indent=2) + "\n")
        _save(temp, _complete(model, tensors))
        temp.rename(out)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _complete(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the tensors of all other layers; a head that is the embedding is not written."""
    quantized = {name.rpartition(".")[0] + ".weight" for name in tensors}
    tied = bool(model.config.tie_word_embeddings)
    rest = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in quantized and not (tied and name == "lm_head.weight")
    }
    return {name: tensor.contiguous().cpu() for name, tensor in (rest | tensors).items()}


def _save(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
