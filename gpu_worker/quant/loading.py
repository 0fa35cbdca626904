"""From the tensors of a checkpoint to quantized linears: which tensors a layer has, and what they become."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.quant.formats import awq, compressed, fp8, gptq
from gpu_worker.quant.linear import Matmul, quantized_linear
from gpu_worker.quant.scheme import QuantSpec, Scheme
from gpu_worker.quant.weights import Weight
from shared.model_folder import ModelError

Shape = tuple[int, ...]
# Scales of an fp8 KV cache, beside the layers they belong to.
KV_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_WEIGHTS = (".qweight", ".weight_packed", ".weight")


@dataclass(frozen=True)
class QuantLoader:
    """The quantized layers of one checkpoint. get: a tensor by its name; names: all tensors of the checkpoint."""

    spec: QuantSpec
    get: Callable[[str], Tensor]
    names: frozenset[str]
    device: torch.device
    dtype: torch.dtype

    def linear(self, layers: Iterable[str], bias: Tensor | None) -> Matmul | None:
        """One matrix of these layers, one under the other; None when none of them is quantized."""
        layers = list(layers)
        schemes = [self.spec.scheme_of(layer) for layer in layers]
        if not any(schemes):
            return None
        if not all(schemes):
            raise ModelError(f"of {', '.join(layers)}, which make one matrix, only some are quantized")
        parts = [self._weight(layer, scheme) for layer, scheme in zip(layers, schemes, strict=True) if scheme]
        return quantized_linear(parts, bias, self.device, self.dtype)

    def _weight(self, layer: str, scheme: Scheme) -> Weight:
        if self.spec.method == fp8.AT_LOAD:
            return fp8.quantize(self.get(f"{layer}.weight"))
        tensors = {name: self.get(f"{layer}.{name}") for name in tensor_names(scheme) if f"{layer}.{name}" in self.names}
        try:
            return read_weight(scheme, tensors)
        except KeyError as error:
            raise ModelError(f"layer {layer} is quantized ({self.spec.method}) but has no tensor {error.args[0]}") from None
        except ModelError as error:
            raise ModelError(f"layer {layer}: {error}") from None


def read_weight(scheme: Scheme, tensors: Mapping[str, Tensor]) -> Weight:
    """The tensors of one layer, by their last names -> its weight. KeyError names one that is missing."""
    if scheme.layout in ("gptq", "gptq_v2"):
        return gptq.read_weight(scheme, tensors)
    if scheme.layout == "awq":
        return awq.read_weight(scheme, tensors)
    if "weight_scale_inv" in tensors:
        return fp8.read_weight(scheme, tensors)
    return compressed.read_weight(scheme, tensors)


def tensor_names(scheme: Scheme) -> tuple[str, ...]:
    """The last names a layer's tensors may have, the bias left out."""
    if scheme.layout in ("gptq", "gptq_v2"):
        return gptq.NAMES
    if scheme.layout == "awq":
        return awq.NAMES
    return compressed.PACKED_NAMES if scheme.layout == "packed" else (*compressed.PLAIN_NAMES, "weight_scale_inv")


def plain_shapes(spec: QuantSpec, found: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes an unquantized checkpoint would have: each layer's packed tensors become its weight [N, K].

    A layer that the config calls quantized and that holds a plain weight (or the other way round) is a contradiction.
    """
    shapes = dict(found)
    if spec.method == fp8.AT_LOAD:
        return shapes
    for name in found:
        layer, dot, last = name.rpartition(".")
        scheme = spec.scheme_of(layer)
        if last in ("qweight", "weight_packed") and scheme is None:
            raise ModelError(f"tensor {name} is packed, but config.json says that {layer} is not quantized")
        if not dot or f".{last}" not in _WEIGHTS or scheme is None or len(found[name]) != 2:
            continue
        if f".{last}" != _weight_name(scheme):
            raise ModelError(f"config.json says that {layer} is quantized ({spec.method}), but the checkpoint holds {name}")
        shape = _shape(scheme, found[name])
        for each in tensor_names(scheme):
            shapes.pop(f"{layer}.{each}", None)
        shapes[f"{layer}.weight"] = shape
    return {name: shape for name, shape in shapes.items() if not name.endswith(KV_SCALES)}


def _weight_name(scheme: Scheme) -> str:
    if scheme.layout == "plain":
        return ".weight"
    return ".weight_packed" if scheme.layout == "packed" else ".qweight"


def _shape(scheme: Scheme, stored: Shape) -> Shape:
    per_word = 32 // scheme.bits
    if scheme.layout in ("gptq", "gptq_v2"):
        return stored[1], stored[0] * per_word
    if scheme.layout == "awq":
        return stored[1] * per_word, stored[0]
    return (stored[0], stored[1] * per_word) if scheme.layout == "packed" else stored
