"""Pages of float8: whether a worker has them, and the scales of keys and values that a checkpoint carries for them."""

from collections.abc import Callable, Set

import torch
from torch import Tensor

from gpu_worker.quant.scheme import Json, QuantSpec, choose, refuse
from shared.config import BadConfig
from shared.model_folder import ModelError

FLOAT8 = torch.float8_e4m3fn
CAPABILITY = (8, 9)  # of a GPU that converts float8
# Last names of the scales of keys and of values, below the attention layer: compressed-tensors', older tools'.
_NAMES = (("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
ENDS = tuple(f".{name}" for pair in _NAMES for name in pair)


def says_scales(config: Json) -> bool:
    """Whether a quantization_config promises them; what cannot be honoured is refused with what was found."""
    scheme = config.get("kv_cache_scheme")
    if scheme is None or scheme == "static":
        return scheme is not None
    if not isinstance(scheme, dict):
        raise refuse(f"kv_cache_scheme = {scheme!r}, expected an object")
    choose(scheme, "type", ("float",), "float")
    choose(scheme, "num_bits", (8,))
    choose(scheme, "strategy", ("tensor", "attn_head"), "tensor")
    choose(scheme, "dynamic", (False,), False)
    choose(scheme, "symmetric", (True,), True)
    return True


def page_dtype(wanted: str, quant: QuantSpec | None, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What pages hold. wanted: the setting kv_cache_dtype; dtype: of activations."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY
    if wanted == "none" or (wanted == "auto" and not (quant and quant.kv_scales and capability >= CAPABILITY)):
        return dtype
    if capability < CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, CAPABILITY))
        raise BadConfig(f"kv_cache_dtype = {wanted!r}: this GPU has compute capability {found}, float8 needs {needed}")
    return FLOAT8


def read(get: Callable[[str], Tensor], names: Set[str], layer: str, heads: int, *, required: bool) -> Tensor:
    """f32[2, heads], of keys and of values, on the CPU; 1 where the checkpoint has none and promised none.

    layer: model.layers.0.self_attn; heads: KV heads of the whole model, of which each may have a scale of its own.
    """
    pair = next((pair for pair in _NAMES if f"{layer}.{pair[0]}" in names or f"{layer}.{pair[1]}" in names), None)
    if pair is None:
        if required:
            raise ModelError(f"config.json says kv_cache_scheme, but the checkpoint has no {layer}.{_NAMES[0][0]}")
        return torch.ones(2, heads)
    return torch.stack([_one(get, names, f"{layer}.{name}", heads) for name in pair])


def _one(get: Callable[[str], Tensor], names: Set[str], name: str, heads: int) -> Tensor:
    """f32[heads]"""
    if name not in names:
        raise ModelError(f"the checkpoint has one scale of float8 pages without the other: no {name}")
    scales = get(name).float().reshape(-1)
    if len(scales) not in (1, heads):
        raise ModelError(f"{name} has {len(scales)} values, expected 1 or {heads}, one for each KV head")
    bad = scales[~(torch.isfinite(scales) & (scales > 0))]
    if len(bad):
        raise ModelError(f"{name} = {float(bad[0])}, expected a positive number; --kv-cache-dtype none serves without it")
    return scales.expand(heads)
