"""GPTQ checkpoints (Frantar et al., 2022): int32 words of codes packed along K, zero points packed along N.

Tensors of a layer [N, K] with b bits, G groups, w = 32 / b: qweight i32[K / w, N], qzeros i32[G, N / w], scales [G, N],
g_idx i32[K] (the group of each column; absent: in order). Codes lie from the low bits up. Format "gptq" (v1) stores the zero
point minus 1 modulo 2^b, "gptq_v2" the zero point itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from gpu_worker.quant.formats.words import in_order_groups, unpack
from gpu_worker.quant.scheme import (
    Json,
    QuantSpec,
    Scheme,
    an_object,
    choose,
    everything,
    flag,
    group_size,
    path_part,
    pattern,
    refuse,
)
from gpu_worker.quant.weights import IntWeight
from shared.model_folder import ModelError

NAMES = ("qweight", "qzeros", "scales", "g_idx")


def read_config(config: Json) -> QuantSpec:
    scheme = _scheme(config)
    rules: list[tuple[Callable[[str], bool], Scheme | None]] = []
    for key, changes in an_object("dynamic", config.get("dynamic") or {}).items():
        rules.append(_dynamic(scheme, key, an_object(f"dynamic {key!r}", changes)))
    if not flag(config, "lm_head", False):
        rules.append((path_part(["lm_head"]), None))
    names = _names(config.get("modules_in_block_to_quantize") or config.get("inside_layer_modules") or [])
    if names:
        rules.append((path_part(names), scheme))
    else:
        rules.append((everything, scheme))
    return QuantSpec("gptq", tuple(rules))


def _names(chosen: Any) -> list[str]:
    """Of layers, or of groups of layers."""
    groups = [[each] if isinstance(each, str) else each for each in (chosen if isinstance(chosen, list) else [chosen])]
    if not all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups):
        raise refuse(f"modules_in_block_to_quantize = {chosen!r}, expected a list of names")
    return [name for group in groups for name in group]


def _scheme(config: Json) -> Scheme:
    bits = choose(config, "bits", (4, 8))
    group = group_size(config, -1)
    layout = choose(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.get("format") in ("gptq", "gptq_v2") and "checkpoint_format" not in config:
        layout = config["format"]
    elif config.get("format") not in (None, layout, "int"):
        raise refuse(f"format = {config['format']!r} and checkpoint_format = {layout!r} contradict each other")
    return Scheme(
        layout=layout,
        kind="int",
        bits=bits,
        granularity="channel" if group == -1 else "group",
        group=max(group, 0),
        symmetric=flag(config, "sym", True),
        act_order=flag(config, "desc_act", False),
    )


def _dynamic(scheme: Scheme, key: str, changes: Json) -> tuple[Callable[[str], bool], Scheme | None]:
    """One per-layer rule: "-:pattern" leaves layers alone, "+:pattern" (or a bare pattern) changes some of their settings."""
    sign, text = (key[:1], key[2:]) if key[:2] in ("-:", "+:") else ("+", key)
    matches = pattern(text, "dynamic").match
    if sign == "-":
        return (lambda layer: matches(layer) is not None), None
    unknown = set(changes) - {"bits", "group_size", "sym", "desc_act"}
    if unknown:
        raise refuse(f"dynamic {key!r} changes {', '.join(sorted(unknown))}, which is not supported")
    group = group_size(changes, scheme.group or -1)
    changed = replace(
        scheme,
        bits=choose({"bits": changes.get("bits", scheme.bits)}, "bits", (4, 8)),
        granularity="channel" if group == -1 else "group",
        group=max(group, 0),
        symmetric=bool(changes.get("sym", scheme.symmetric)),
        act_order=bool(changes.get("desc_act", scheme.act_order)),
    )
    return (lambda layer: matches(layer) is not None), changed


def read_weight(scheme: Scheme, tensors: Mapping[str, Tensor]) -> IntWeight:
    """The tensors of one layer, by their last names -> its weight."""
    per_word = 32 // scheme.bits
    qweight, scales = tensors["qweight"], tensors["scales"]
    k, n = qweight.shape[0] * per_word, qweight.shape[1]
    codes = unpack(qweight.t().contiguous(), scheme.bits)  # [N, K]
    stored = unpack(tensors["qzeros"], scheme.bits)[:, :n].t()  # [N, G]
    zeros = (stored + 1) & (2**scheme.bits - 1) if scheme.layout == "gptq" else stored
    groups = tensors.get("g_idx")
    if groups is None:
        if scheme.act_order and scheme.group:
            raise ModelError("the config says desc_act and the checkpoint has no g_idx")
        groups = in_order_groups(k, scheme.group or k)
    return IntWeight(scheme.bits, codes, scales.t().contiguous(), zeros.contiguous(), groups).checked()
