"""Native FP8 checkpoints: float8_e4m3fn weights with a scale per tensor, or per block of (usually) 128 x 128 elements.

Tensors of a layer [N, K]: weight f8[N, K]; weight_scale_inv [ceil(N / 128), ceil(K / 128)] (to be multiplied with, despite its
name) with blocks, else weight_scale, and input_scale with static activations.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.quant.kv_scales import says_scales
from gpu_worker.quant.scheme import (
    Activations,
    Json,
    QuantSpec,
    Scheme,
    choose,
    everything,
    path_part,
    refuse,
    texts,
    two_numbers,
)
from gpu_worker.quant.weights import ByteWeight
from shared.model_folder import ModelError

AT_LOAD = "fp8 at load"  # the method of a checkpoint that is not quantized
LARGEST = 448.0  # of float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny  # smallest scale: a smaller one would overflow its inverse
NAMES = ("weight", "weight_scale_inv", "weight_scale", "input_scale")
_PER_TOKEN = Activations(kind="float", granularity="token")


def read_config(config: Json) -> QuantSpec:
    if "fmt" in config:
        choose(config, "fmt", ("e4m3", "float8_e4m3fn"))
    how = choose(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    if block is not None:
        block = two_numbers("weight_block_size", block)
    if block and how == "static":
        raise refuse("weight_block_size and static activations contradict each other")
    if block:
        activations = Activations(kind="float", granularity="group", group=block[1])
    else:
        activations = _PER_TOKEN if how == "dynamic" else Activations(kind="float", granularity="tensor", dynamic=False)
    scheme = Scheme(
        layout="plain",
        kind="float",
        bits=8,
        granularity="block" if block else "tensor",
        block=block or (0, 0),
        activations=activations,
    )
    skipped = texts(config, "modules_to_not_convert") or texts(config, "ignored_layers")
    rules = [(path_part([*skipped, "lm_head"]), None), (everything, scheme)]
    return QuantSpec("fp8", tuple(rules), kv_scales=says_scales(config))


def at_load() -> QuantSpec:
    """What `quantize` makes: a scale per row of a weight, a scale per row of its input."""
    scheme = Scheme(layout="plain", kind="float", bits=8, granularity="channel", activations=_PER_TOKEN)
    return QuantSpec(AT_LOAD, ((path_part(["lm_head"]), None), (everything, scheme)))


def read_weight(scheme: Scheme, tensors: Mapping[str, Tensor]) -> ByteWeight:
    scale = tensors.get("weight_scale_inv" if scheme.granularity == "block" else "weight_scale")
    if scale is None:
        scale = tensors.get("weight_scale")
    if scale is None:
        raise ModelError("a weight of float8 has neither weight_scale nor weight_scale_inv")
    return float_weight(scheme, tensors["weight"], scale, tensors.get("input_scale"))


def float_weight(scheme: Scheme, values: Tensor, scale: Tensor, input_scale: Tensor | None) -> ByteWeight:
    """scale: per tensor, row or block, whatever its shape -> one a row and block of columns."""
    if values.dtype != torch.float8_e4m3fn:
        raise ModelError(f"a weight of float8 is stored as {values.dtype}")
    n, k = values.shape
    scales, columns = scale.float(), k
    if scheme.granularity == "block":
        rows, columns = scheme.block
        if tuple(scales.shape) != (-(-n // rows), -(-k // columns)):
            raise ModelError(f"a weight of {n} x {k} in blocks of {rows} x {columns} has scales of {tuple(scales.shape)}")
        scales = scales.repeat_interleave(rows, 0)[:n].contiguous()
    elif scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1).contiguous()
    else:
        scales = scales.reshape(n, -1)
        columns = -(-k // scales.shape[1])
    static = scheme.activations is not None and not scheme.activations.dynamic
    inputs = input_scale.float().reshape(-1)[:1] if static and input_scale is not None else None
    return ByteWeight(values, scales, columns, scheme.activations, inputs).checked()


def quantize(weight: Tensor) -> ByteWeight:
    """A bf16 or float32 weight [N, K] -> float8 with a scale per row: the largest of the row becomes 448.

    Scales are bfloat16 numbers, because libraries that read our folders turn them into the model's type.
    """
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).div(LARGEST).clamp(min=TINY).to(torch.bfloat16).float()
    values = (weight / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return ByteWeight(values, scales, weight.shape[1], _PER_TOKEN).checked()
