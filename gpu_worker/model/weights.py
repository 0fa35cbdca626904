"""Weights from safetensors (one file, or several with an index) into a Decoder: checked first, then read by several threads."""

import ctypes
import logging
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from gpu_worker.model.decoder import Decoder, Layer
from gpu_worker.model.embedding import Embedding
from gpu_worker.model.linear import Linear, Matmul, for_device
from gpu_worker.model.rope import cos_sin_table
from gpu_worker.model.spec import ModelSpec
from gpu_worker.ops import Ops
from gpu_worker.parallel.shard import Shard
from gpu_worker.quant import kv_scales
from gpu_worker.quant.loading import QuantLoader, plain_shapes
from gpu_worker.quant.scheme import QuantSpec
from shared import model_folder
from shared.model_folder import ModelError

log = logging.getLogger("quire.model")

CPU = torch.device("cpu")
READERS = 4  # threads; a disk or a page cache is not faster with more
Shape = tuple[int, ...]
# Tensors that some checkpoints carry and no model needs.
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Source(Protocol):
    @property
    def names(self) -> frozenset[str]:
        """All tensors of the checkpoint."""

    @property
    def random_shapes(self) -> dict[str, Shape] | None:
        """Of all tensors, when there is no checkpoint."""

    def get(self, name: str) -> Tensor:
        """The named tensor on the CPU, in the checkpoint's dtype."""


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor a checkpoint of this spec must hold."""
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not spec.tied_head:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for number in range(spec.num_layers):
        layer = f"model.layers.{number}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        for name, shape in attention.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
            if spec.o_bias if name == "o_proj" else spec.qkv_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = shape[:1]
        if spec.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (head_dim,)
        inner = spec.intermediate_size
        for name, shape in {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.items():
            shapes[f"{layer}mlp.{name}.weight"] = shape
            if spec.mlp_bias:
                shapes[f"{layer}mlp.{name}.bias"] = shape[:1]
    return shapes


class Safetensors:
    """The tensors of a model folder. Everything about names and shapes is checked before the first byte of a weight is read."""

    def __init__(self, folder: Path, spec: ModelSpec, quant: QuantSpec | None = None) -> None:
        self.random_shapes: dict[str, Shape] | None = None
        self._files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        self._folder = folder
        shapes: dict[str, Shape] = {}
        for path in model_folder.weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
                for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                    if name in self._files:
                        raise ModelError(f"{path}: tensor {name} is in another file of {folder} too")
                    self._files[name] = file
                    shapes[name] = tuple(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged or no safetensors file: {error}") from None
        self._parts = _unfuse(shapes, spec) if spec.fused else {}
        self.names = frozenset(shapes)
        _check_names(folder, plain_shapes(quant, shapes) if quant else shapes, tensor_shapes(spec), spec)

    def get(self, name: str) -> Tensor:
        try:
            if name in self._parts:
                fused, start, stop = self._parts[name]
                tensor: Tensor = self._files[fused].get_slice(fused)[start:stop]
            else:
                tensor = self._files[name].get_tensor(name)
            return tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._folder}: tensor {name} cannot be read: {error}") from None


def _unfuse(shapes: dict[str, Shape], spec: ModelSpec) -> dict[str, tuple[str, int, int]]:
    """Replace each fused matrix of the right size by its parts: name -> the matrix that holds it, first row and end."""
    parts: dict[str, tuple[str, int, int]] = {}
    q, kv, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    fused = {
        "self_attn.qkv_proj.weight": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "mlp.gate_up_proj.weight": {"gate_proj": inner, "up_proj": inner},
    }
    for name, shape in list(shapes.items()):
        _, _, end = name.partition("model.layers.")
        rows = fused.get(end.partition(".")[2], {})
        if not rows or shape != (sum(rows.values()), spec.hidden_size):
            continue
        del shapes[name]
        start = 0
        for part, height in rows.items():
            of_part = f"{name.rsplit('.', 2)[0]}.{part}.weight"
            parts[of_part] = name, start, start + height
            shapes[of_part] = (height, spec.hidden_size)
            start += height
    return parts


def _check_names(folder: Path, found: dict[str, Shape], wanted: dict[str, Shape], spec: ModelSpec) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors of a {spec.architecture}, the first is {missing[0]}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelError(f"{folder}: tensor {name} has shape {found[name]}, config.json says {shape}")
    extra = [name for name in found if name not in wanted and not name.endswith(_IGNORED)]
    if spec.tied_head:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise ModelError(f"{folder} holds {len(extra)} tensors that no {spec.architecture} has, the first is {extra[0]}")


class Dummy:
    """Random weights of the right shapes: speed and memory without a checkpoint. The same at every start."""

    def __init__(self, spec: ModelSpec, device: torch.device = CPU) -> None:
        self._device = device
        self._shapes = tensor_shapes(spec)
        self.random_shapes: dict[str, Shape] | None = self._shapes
        self.names = frozenset(self._shapes)
        self._numbers = {name: number for number, name in enumerate(self._shapes)}
        self._dtype = spec.dtype

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=self._dtype)
        noise = torch.Generator(self._device).manual_seed(self._numbers[name])
        # A block of noise repeated: drawing billions of normal numbers would take minutes.
        block = torch.randn(min(shape[0], 509), shape[1], generator=noise, device=self._device) / math.sqrt(shape[1])
        return block.to(self._dtype).repeat(-(-shape[0] // block.shape[0]), 1)[: shape[0]]


def load_decoder(
    spec: ModelSpec,
    source: Source,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    quant: QuantSpec | None = None,
    shard: Shard | None = None,
    float8_pages: bool = False,
    num_ids: int = 0,
) -> Decoder:
    """Read, cut, fuse, convert and place all weights; a bar on a terminal, a line per quarter elsewhere.

    spec: of the whole model. shard: the part of it that this rank has; None: all.
    """
    shard = shard or Shard(spec, 0, 1)
    to = _Placing(source, dtype, device, quant, shard)
    first_layer = [shape for name, shape in tensor_shapes(shard.held).items() if ".layers.0." in name]
    layer_bytes = sum(map(math.prod, first_layer)) * dtype.itemsize
    with ThreadPoolExecutor(READERS) as readers:
        layers = list(
            _progress(
                readers.map(lambda number: _layer(to, spec, number, float8_pages), range(spec.num_layers)), spec, layer_bytes
            )
        )
    embedding = to.kept("model.embed_tokens.weight")
    _give_back()
    return Decoder(
        spec=shard.spec,
        ops=ops,
        embedding=Embedding(embedding),
        layers=layers,
        final_norm=to.kept("model.norm.weight"),
        head=for_device(Linear(embedding)) if spec.tied_head else to.linear("", "lm_head", bias=False),
        cos_sin=cos_sin_table(spec.rope, max_model_len).to(device),
        num_ids=num_ids,
    )


def _give_back() -> None:
    """glibc keeps what reader threads freed, hundreds of MB; other libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Placing:
    """Tensors of a source, fused, converted and placed."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, quant: QuantSpec | None, shard: Shard) -> None:
        self._source = source
        self._shard = shard
        shapes = source.random_shapes
        cut = shard.cut_quantized
        self._quant = QuantLoader(quant, source.get, source.names, device, dtype, cut, shapes) if quant else None
        self._promised = bool(quant and quant.kv_scales and shapes is None)  # scales of float8 pages
        self._dtype = dtype
        self._device = device

    def tensor(self, *names: str) -> Tensor:
        """The named tensors, one under the other."""
        parts = [self._shard.cut(name, self._source.get(name)) for name in names]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        factor = self._shard.whole.weight_factor(names[0])
        if factor != 1.0:
            whole = whole.float() * factor
        return whole.to(device=self._device, dtype=self._dtype)

    def kept(self, name: str) -> Tensor:
        """The named tensor in memory of its own: what the reader returns may be a view of the mapped file."""
        tensor = self.tensor(name)
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    def linear(self, prefix: str, *names: str, bias: bool) -> Matmul:
        """One matrix of the named ones, one under the other, in the fastest form for where it lies."""
        bias_of = self.tensor(*(f"{prefix}{name}.bias" for name in names)) if bias else None
        quantized = self._quant and self._quant.linear((prefix + name for name in names), bias_of)
        weights = (f"{prefix}{name}.weight" for name in names)
        return quantized or for_device(Linear(self.tensor(*weights), bias_of))

    def kv_scales(self, layer: str) -> Tensor:
        """Of this rank's KV heads, for pages of float8."""
        heads, head_dim = self._shard.whole.num_kv_heads, self._shard.whole.head_dim
        scales = kv_scales.read(self._source.get, self._source.names, layer, heads, required=self._promised)
        part = self._shard.part(f"{layer}.k_proj")
        held = scales[:, part.start // head_dim : part.stop // head_dim] if part else scales
        return held.contiguous().to(self._device)


def _layer(to: _Placing, spec: ModelSpec, number: int, float8_pages: bool) -> Layer:
    prefix = f"model.layers.{number}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    with torch.inference_mode():
        return Layer(
            input_norm=to.kept(prefix + "input_layernorm.weight"),
            qkv=to.linear(attention, "q_proj", "k_proj", "v_proj", bias=spec.qkv_bias),
            q_norm=to.kept(attention + "q_norm.weight") if spec.qk_norm else None,
            k_norm=to.kept(attention + "k_norm.weight") if spec.qk_norm else None,
            o=to.linear(attention, "o_proj", bias=spec.o_bias),
            post_norm=to.kept(prefix + "post_attention_layernorm.weight"),
            gate_up=to.linear(mlp, "gate_proj", "up_proj", bias=spec.mlp_bias),
            down=to.linear(mlp, "down_proj", bias=spec.mlp_bias),
            window=spec.windows[number],
            kv_scales=to.kv_scales(prefix + "self_attn") if float8_pages else None,
        )


def _progress(layers: Iterator[Layer], spec: ModelSpec, layer_bytes: int) -> Iterator[Layer]:
    if sys.stderr.isatty():
        bar = tqdm(total=spec.num_layers * layer_bytes, unit="B", unit_scale=True, desc="loading weights", leave=False)
        with bar:
            for layer in layers:
                bar.update(layer_bytes)
                yield layer
        return
    yield from _logged(layers, spec.num_layers)


def _logged(layers: Iterator[Layer], total: int) -> Iterator[Layer]:
    for number, layer in enumerate(layers, start=1):
        if number * 4 // total > (number - 1) * 4 // total:
            log.info("loading weights", extra={"layers": f"{number}/{total}"})
        yield layer
