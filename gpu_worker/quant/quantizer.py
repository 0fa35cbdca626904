"""Quantize a model folder: GPTQ, AWQ or FP8, in formats that transformers, vLLM and we read."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.quant import export, scaling
from gpu_worker.quant.calibration import BUILT_IN, Inputs, read_texts
from gpu_worker.quant.fitting import fit, gptq
from gpu_worker.quant.formats import fp8
from gpu_worker.quant.weights import IntWeight
from shared import model_folder
from shared.model_folder import ModelError

log = logging.getLogger("quire.quantize")

METHODS = ("gptq", "awq", "fp8")
# Linear layers of a decoder layer that see the same input, in the order in which they run.
TOGETHER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    method: str
    bits: int = 4
    group: int = 0  # 0: the largest of 128, 64, 32 that divides every layer's inputs
    symmetric: bool | None = None  # None: as is usual for the method
    calibration: Path = BUILT_IN
    samples: int = 112
    tokens: int = 512  # of one sample, at most


@torch.inference_mode()
def quantize(folder: Path, out: Path, options: Options, progress: Callable[[str], None] = log.info) -> None:
    """Write the quantized model of a model folder into out, which must not exist."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = model_folder.read_config(folder)
    if config.get("quantization_config"):
        raise ModelError(f"{folder} is quantized already ({config['quantization_config'].get('quant_method')})")
    if out.exists():
        raise ModelError(f"{out} exists already")
    if options.method not in METHODS:
        raise ModelError(f"method {options.method!r} is not supported (supported: {', '.join(METHODS)})")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = model.to(device).eval()
    layers = model.model.layers
    if options.method == "fp8":
        tensors = _fp8(layers)
        export.write(folder, out, model, tensors, export.fp8_config(["lm_head"]))
        return
    group = options.group or _group(layers)
    symmetric = options.method == "gptq" if options.symmetric is None else options.symmetric
    if options.method == "awq" and options.bits != 4:
        raise ModelError(f"bits = {options.bits}: the AWQ format has 4")
    samples = read_texts(options.calibration, AutoTokenizer.from_pretrained(folder), options.samples, options.tokens)
    work = _Work(options.method, options.bits, group, symmetric)
    inputs = Inputs(model, samples, device)
    tensors = {}
    for number, layer in enumerate(layers):
        kept = next(layer.parameters()).dtype
        tensors |= work.layer(layer.float(), inputs, f"model.layers.{number}.")
        layer.to(kept)
        progress(f"layer {number + 1} of {len(layers)}")
    export.write(folder, out, model, tensors, work.config())


def _linears(layer: nn.Module) -> list[str]:
    return [name for names in TOGETHER for name in names]


def _group(layers: Any) -> int:
    inputs = {layer.get_submodule(name).weight.shape[1] for layer in layers for name in _linears(layer)}
    for group in (128, 64, 32):
        if not any(k % group for k in inputs):
            return group
    raise ModelError(f"layers with {', '.join(map(str, sorted(inputs)))} inputs cannot be divided into groups of 32 or more")


def _fp8(layers: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        for name in _linears(layer):
            made = fp8.quantize(layer.get_submodule(name).weight)
            prefix = f"model.layers.{number}.{name}."
            tensors |= {f"{prefix}weight": made.values, f"{prefix}weight_scale": made.scales.to(torch.bfloat16)}
    return tensors


class _Work:
    """One method with its settings, layer after layer."""

    def __init__(self, method: str, bits: int, group: int, symmetric: bool) -> None:
        self._method = method
        self._how = {"bits": bits, "group": group, "symmetric": symmetric}

    def config(self) -> dict[str, Any]:
        make = export.awq_config if self._method == "awq" else export.gptq_config
        return make(int(self._how["bits"]), int(self._how["group"]), bool(self._how["symmetric"]))

    def layer(self, layer: Any, inputs: Inputs, prefix: str) -> dict[str, Tensor]:
        """Quantize a float32 decoder layer in place, pass the inputs through it; its tensors, by their names."""
        moments = inputs.covariances(layer, tuple(names[0] for names in TOGETHER))
        if self._method == "awq":
            self._scale(layer, moments)
        tensors: dict[str, Tensor] = {}
        for names in TOGETHER:
            tensors |= self._round(layer, names, moments[names[0]], prefix)
        inputs.advance(layer)
        return tensors

    def _round(self, layer: Any, names: tuple[str, ...], moment: Tensor, prefix: str) -> dict[str, Tensor]:
        linears = [layer.get_submodule(name) for name in names]
        weight = torch.cat([linear.weight for linear in linears])
        grid = fit(weight, moment.diagonal(), **self._how)  # type: ignore[arg-type]
        codes = gptq(weight, moment, grid)
        values = scaling.dequantize(codes.float(), grid)
        tensors: dict[str, Tensor] = {}
        start = 0
        for name, linear in zip(names, linears, strict=True):
            rows = slice(start, start + linear.weight.shape[0])
            linear.weight.copy_(values[rows])
            groups = torch.arange(codes.shape[1], dtype=torch.int32, device=codes.device) // grid.group
            scales, zeros = grid.scales[rows].to(torch.float16), grid.zeros[rows].to(torch.uint8)
            part = IntWeight(grid.bits, codes[rows], scales, zeros, groups)
            write = export.awq_tensors if self._method == "awq" else export.gptq_tensors
            tensors |= {f"{prefix}{name}.{last}": tensor for last, tensor in write(part).items()}
            start = rows.stop
        return tensors

    def _scale(self, layer: Any, moments: dict[str, Tensor]) -> None:
        """Find and apply AWQ's factors; moments become those of the scaled inputs."""
        attention, mlp = layer.self_attn, layer.mlp
        v, o = attention.v_proj, attention.o_proj
        width = attention.head_dim
        shared = o.weight.shape[1] // v.weight.shape[0]
        for names in TOGETHER:
            moment = moments[names[0]]
            weight = torch.cat([layer.get_submodule(name).weight for name in names])
            runs = {"shared": shared, "width": width} if names == TOGETHER[1] else {}
            factors = scaling.search(weight, moment, **runs, **self._how)  # type: ignore[arg-type]
            for name in names:
                layer.get_submodule(name).weight.mul_(factors)
            moments[names[0]] = moment / factors[:, None] / factors
            if names == TOGETHER[0]:
                layer.input_layernorm.weight.div_(factors)
            elif names == TOGETHER[1]:
                _divide_rows(v, factors.view(-1, shared, width)[:, 0].flatten())
            elif names == TOGETHER[2]:
                layer.post_attention_layernorm.weight.div_(factors)
            else:
                _divide_rows(mlp.up_proj, factors)


def _divide_rows(linear: Any, factors: Tensor) -> None:
    linear.weight.div_(factors[:, None])
    if linear.bias is not None:
        linear.bias.div_(factors)
