"""compressed-tensors checkpoints: groups of layers, each with a scheme of weights and of activations.

Tensors of a layer [N, K]: pack-quantized: weight_packed i32[N, K / w] (value + 2^(b-1), low bits first), weight_scale [N, G],
weight_zero_point i32[N / w, G] (packed along N), weight_shape i64[2], weight_g_idx i32[K]. Otherwise: weight i8 or f8[N, K],
weight_scale ([1], [N, 1], [N, G] or one a block), weight_zero_point i8, input_scale [1].
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gpu_worker.quant.formats.fp8 import float_weight
from gpu_worker.quant.formats.words import in_order_groups, unpack
from gpu_worker.quant.kv_scales import says_scales
from gpu_worker.quant.scheme import (
    Activations,
    Json,
    QuantSpec,
    Scheme,
    an_object,
    choose,
    everything,
    flag,
    group_size,
    pattern,
    refuse,
    texts,
    two_numbers,
)
from gpu_worker.quant.weights import ByteWeight, IntWeight, Weight
from shared.model_folder import ModelError

PACKED_NAMES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
PLAIN_NAMES = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
_ORDERS = ("group", "dynamic", "weight", "static", True, False)  # the first two scatter the columns of a group
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def read_config(config: Json) -> QuantSpec:
    if config.get("sparsity_config"):
        raise refuse(f"sparsity_config {config['sparsity_config']!r} is not supported")
    status = choose(config, "quantization_status", ("compressed", "frozen"), "compressed")
    if status == "frozen":
        raise refuse("quantization_status 'frozen': the weights are not stored compressed")
    overall = choose(config, "format", _FORMATS, "mixed-precision")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refuse(f"config_groups = {groups!r}, expected at least one group")
    rules: list[tuple[Callable[[str], bool], Scheme | None]] = []
    rules.append((_matcher(texts(config, "ignore"), "ignore"), None))
    for name, group in groups.items():
        scheme = _scheme(name, an_object(name, group), overall)
        rules.append((_matcher(texts(group, "targets"), f"{name}.targets"), scheme))
    return QuantSpec("compressed-tensors", tuple(rules), kv_scales=says_scales(config))


def _matcher(targets: list[str], found_in: str) -> Callable[[str], bool]:
    """targets: class names (Linear is all we have), "re:" and a regular expression, or layer names."""
    if "Linear" in targets:
        return everything
    patterns = [pattern(each[3:], found_in) for each in targets if each.startswith("re:")]
    names = {each for each in targets if not each.startswith("re:")}
    return lambda layer: layer in names or any(each.match(layer) for each in patterns)


def _scheme(name: str, group: Json, overall: str) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise refuse(f"{name} has no weights scheme")
    if group.get("output_activations"):
        raise refuse(f"{name} rounds output_activations, which is not supported")
    layout = choose(group, "format", _FORMATS, overall)
    kind = choose(weights, "type", ("int", "float"), "int")
    bits = choose(weights, "num_bits", (4, 8) if kind == "int" else (8,))
    usual = "group" if weights.get("group_size") else "tensor"
    strategy = choose(weights, "strategy", ("tensor", "channel", "group", "block"), usual)
    if weights.get("dynamic"):
        raise refuse(f"{name}.weights.dynamic = {weights['dynamic']!r}: weights cannot be rounded at run time")
    fits = {"pack-quantized": kind == "int", "int-quantized": kind == "int", "float-quantized": kind == "float"}
    if not fits.get(layout, True):
        raise refuse(f"format {layout!r} and weights of type {kind!r} contradict each other")
    inputs = group.get("input_activations")
    activations = _activations(name, an_object(f"{name}.input_activations", inputs), kind) if inputs else None
    packed = layout == "pack-quantized" or (layout == "mixed-precision" and kind == "int" and activations is None)
    if (packed and activations) or (kind == "int" and bits == 4 and activations):
        raise refuse(f"{name}: {bits}-bit {layout} weights with rounded activations are not supported")
    return Scheme(
        layout="packed" if packed else "plain",
        kind=kind,
        bits=bits,
        granularity=strategy,
        group=max(group_size(weights, 0), 0) if strategy == "group" else 0,
        block=two_numbers("block_structure", weights.get("block_structure")) if strategy == "block" else (0, 0),
        symmetric=flag(weights, "symmetric", True),
        act_order=choose(weights, "actorder", _ORDERS, False) in ("group", "dynamic", True),
        activations=activations,
    )


def _activations(name: str, inputs: Json, kind: str) -> Activations:
    choose(inputs, "num_bits", (8,))
    choose(inputs, "type", (kind,), "int")
    if not flag(inputs, "symmetric", True):
        raise refuse(f"{name}.input_activations.symmetric = False is not supported")
    strategy = choose(inputs, "strategy", ("tensor", "token", "group"), "tensor")
    dynamic = bool(choose(inputs, "dynamic", (True, False), False))
    if not dynamic and strategy != "tensor":
        raise refuse(f"{name}.input_activations: static scales per {strategy} are not supported")
    group = group_size(inputs, 0) if strategy == "group" else 0
    return Activations(kind="float" if kind == "float" else "int", granularity=strategy, group=group, dynamic=dynamic)


def read_weight(scheme: Scheme, tensors: Mapping[str, Tensor]) -> Weight:
    if scheme.layout == "packed":
        return _packed(scheme, tensors)
    if scheme.kind == "float":
        return float_weight(scheme, tensors["weight"], tensors["weight_scale"], tensors.get("input_scale"))
    return _plain_ints(scheme, tensors)


def _packed(scheme: Scheme, tensors: Mapping[str, Tensor]) -> IntWeight:
    n, k = (int(each) for each in tensors["weight_shape"])
    codes = unpack(tensors["weight_packed"], scheme.bits)[:n, :k]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = unpack(zeros.t().contiguous(), scheme.bits)[:, :n].t().contiguous()
    elif not scheme.symmetric:
        raise ModelError("the config says asymmetric weights and the checkpoint has no weight_zero_point")
    return IntWeight(scheme.bits, codes, _row_scales(tensors, n), zeros, _groups(scheme, tensors, k)).checked()


def _plain_ints(scheme: Scheme, tensors: Mapping[str, Tensor]) -> Weight:
    values = tensors["weight"]
    n, k = values.shape
    scales, zeros = _row_scales(tensors, n), tensors.get("weight_zero_point")
    if values.dtype != torch.int8:
        raise ModelError(f"a weight of integers is stored as {values.dtype}")
    if scheme.activations is None:
        middle = 2 ** (scheme.bits - 1)
        codes = (values.to(torch.int16) + middle).to(torch.uint8)
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + middle).to(torch.uint8).reshape(-1, scales.shape[1]).expand(scales.shape)
        return IntWeight(scheme.bits, codes, scales, zeros, _groups(scheme, tensors, k)).checked()
    if (zeros is not None and bool(zeros.any())) or scales.shape[1] != 1:
        raise ModelError("8-bit weights with rounded activations need symmetric weights with one scale a row")
    return ByteWeight(values, scales.float(), k, scheme.activations, tensors.get("input_scale")).checked()


def _row_scales(tensors: Mapping[str, Tensor], n: int) -> Tensor:
    """[N, G] of a scale per tensor, channel or group."""
    scales = tensors["weight_scale"]
    return scales.reshape(1, 1).expand(n, 1).contiguous() if scales.numel() == 1 else scales.reshape(n, -1)


def _groups(scheme: Scheme, tensors: Mapping[str, Tensor], k: int) -> Tensor:
    groups = tensors.get("weight_g_idx")
    if groups is not None and bool((groups >= 0).all()):
        return groups
    if scheme.act_order:
        raise ModelError("the config says actorder and the checkpoint has no weight_g_idx")
    return in_order_groups(k, scheme.group or k)
