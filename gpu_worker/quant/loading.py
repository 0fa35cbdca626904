"""From the tensors of a checkpoint to quantized linears: which tensors a layer has, and what they become."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.quant import kv_scales
from gpu_worker.quant.formats import awq, compressed, fp8, gptq
from gpu_worker.quant.formats.words import in_order_groups
from gpu_worker.quant.linear import Matmul, quantized_linear
from gpu_worker.quant.scheme import QuantSpec, Scheme
from gpu_worker.quant.weights import ByteWeight, IntWeight, Weight
from shared.model_folder import ModelError

Shape = tuple[int, ...]
_WEIGHTS = (".qweight", ".weight_packed", ".weight")


@dataclass(frozen=True)
class QuantLoader:
    """The quantized layers of one checkpoint. get: a tensor by its name; names: all tensors of the checkpoint."""

    spec: QuantSpec
    get: Callable[[str], Tensor]
    names: frozenset[str]
    device: torch.device
    dtype: torch.dtype
    cut: Callable[[str, Weight], Weight]  # a layer's name and weight -> the part that is wanted
    random_shapes: Mapping[str, Shape] | None = None  # of the plain weights, when there is no checkpoint: random values

    def linear(self, layers: Iterable[str], bias: Tensor | None) -> Matmul | None:
        """One matrix of these layers, one under the other; None when none of them is quantized."""
        layers = list(layers)
        schemes = [self.spec.scheme_of(layer) for layer in layers]
        if not any(schemes):
            return None
        if not all(schemes):
            raise ModelError(f"of {', '.join(layers)}, which make one matrix, only some are quantized")
        with self.device:  # where new tensors appear: a GPU unpacks and packs much faster than the host
            parts = (self.cut(layer, self._weight(layer, each)) for layer, each in zip(layers, schemes, strict=True) if each)
            return quantized_linear(parts, bias, self.device, self.dtype)

    def _weight(self, layer: str, scheme: Scheme) -> Weight:
        if self.random_shapes is not None:
            return random_weight(scheme, self.random_shapes[f"{layer}.weight"], seed=zlib.crc32(layer.encode()))
        if self.spec.method == fp8.AT_LOAD:
            return fp8.quantize(self.get(f"{layer}.weight").to(self.device))
        present = [name for name in tensor_names(scheme) if f"{layer}.{name}" in self.names]
        tensors = {name: self.get(f"{layer}.{name}").to(self.device) for name in present}
        try:
            return read_weight(scheme, tensors)
        except KeyError as error:
            raise ModelError(f"layer {layer} is quantized ({self.spec.method}) but has no tensor {error.args[0]}") from None
        except ModelError as error:
            raise ModelError(f"layer {layer}: {error}") from None


def read_weight(scheme: Scheme, tensors: Mapping[str, Tensor]) -> Weight:
    """The tensors of one layer, by their last names -> its weight. KeyError names one that is missing."""
    weight = _read(scheme, tensors)
    if isinstance(weight, IntWeight):
        columns, found = weight.shape[1], weight.scales.shape[1]
        group = scheme.group or columns
        if found != -(-columns // group):
            raise ModelError(f"{columns} columns in groups of {group} need {-(-columns // group)} scales a row, it has {found}")
    return weight


def _read(scheme: Scheme, tensors: Mapping[str, Tensor]) -> Weight:
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
        if not dot or f".{last}" not in _WEIGHTS or scheme is None or not _is_matrix(layer, found[name]):
            continue
        if f".{last}" != _weight_name(scheme):
            raise ModelError(f"config.json says that {layer} is quantized ({spec.method}), but the checkpoint holds {name}")
        shape = _shape(scheme, found[name])
        for each in tensor_names(scheme):
            shapes.pop(f"{layer}.{each}", None)
        shapes[f"{layer}.weight"] = shape
    return {name: shape for name, shape in shapes.items() if not name.endswith(kv_scales.ENDS)}


def _is_matrix(layer: str, shape: Shape) -> bool:
    """Of a linear layer: rules may match everything, and embeddings have two dimensions too."""
    return len(shape) == 2 and not layer.endswith("embed_tokens")


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


def planned_bytes(spec: QuantSpec | None, shapes: Mapping[str, Shape], dtype: torch.dtype) -> int:
    """What a model of these plain shapes takes in memory: weights, scales and zero points."""
    total = 0.0
    for name, shape in shapes.items():
        layer, _, last = name.rpartition(".")
        scheme = spec.scheme_of(layer) if spec and last == "weight" and _is_matrix(layer, shape) else None
        if scheme is None:
            total += math.prod(shape) * dtype.itemsize
            continue
        rows, columns = shape
        per_scale = scheme.group or scheme.block[1] or columns
        scale_bytes = 4  # float32, or 16 bits beside a zero point
        total += rows * columns * scheme.bits / 8 + rows * -(-columns // per_scale) * scale_bytes
    return int(total)


def random_weight(scheme: Scheme, shape: Shape, seed: int) -> Weight:
    """Random values in the form of the scheme, the size of an initialized model's: for measuring without a checkpoint."""
    rows, columns = shape
    noise = torch.Generator(torch.get_default_device()).manual_seed(seed)
    scale = 3**0.5 / math.sqrt(columns)  # of a uniform weight in -1 .. 1 with the usual variance
    if scheme.kind == "int" and scheme.activations is None:
        codes = torch.randint(0, 2**scheme.bits, shape, dtype=torch.uint8, generator=noise)
        group = scheme.group or columns
        count = -(-columns // group)
        scales = torch.full((rows, count), scale / 2 ** (scheme.bits - 1), dtype=torch.float16)
        zeros = None if scheme.symmetric else torch.randint(6, 10, (rows, count), dtype=torch.uint8, generator=noise)
        return IntWeight(scheme.bits, codes, scales, zeros, in_order_groups(columns, group)).checked()
    block = scheme.block[1] or columns
    scales = torch.full((rows, -(-columns // block)), scale / (127 if scheme.kind == "int" else fp8.LARGEST))
    values = torch.randint(-127, 128, shape, dtype=torch.int8, generator=noise)
    if scheme.kind == "float":
        values = (values.to(torch.bfloat16) * 3.5).to(torch.float8_e4m3fn)
    static = scheme.activations is not None and not scheme.activations.dynamic
    return ByteWeight(values, scales, block, scheme.activations, torch.full((1,), 0.02) if static else None).checked()
