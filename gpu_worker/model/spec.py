"""A model's shape, read from config.json. Architectures are data: what differs between them stands in one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_worker.model.rope_config import Rope, positive, read_rope
from shared.model_folder import ModelError

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]


@dataclass(frozen=True)
class _Family:
    """How an architecture differs from Llama, where config.json does not say so itself."""

    qkv_bias: bool | None = None  # None: as attention_bias says
    o_bias: bool | str | None = None  # a key of config.json that says it; None: as attention_bias says
    mlp_bias: bool | None = None  # None: as mlp_bias says
    qk_norm: bool = False
    # Layers with sliding_window. "": none; "all"; "named": all, or those that layer_types names;
    # "switched": if use_sliding_window, from max_window_layers on, or those that layer_types names.
    window: str = ""
    default_window: int = 0  # of a config that lacks the key
    fused: bool = False  # the checkpoint holds q, k, v as one matrix, and gate, up
    multiplied: bool = False  # embedding_multiplier and its like


FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, o_bias=False, mlp_bias=False, window="all", default_window=4096),
    "MinistralForCausalLM": _Family(qkv_bias=False, o_bias=False, mlp_bias=False, window="named", default_window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, o_bias=False, mlp_bias=False, window="switched", default_window=4096),
    "Qwen3ForCausalLM": _Family(mlp_bias=False, qk_norm=True, window="switched", default_window=4096),
    "Phi3ForCausalLM": _Family(qkv_bias=False, o_bias=False, mlp_bias=False, window="all", fused=True),
    "GraniteForCausalLM": _Family(multiplied=True),
    "SeedOssForCausalLM": _Family(o_bias="attention_out_bias"),
    "InternLM3ForCausalLM": _Family(),
}
_DTYPES = ("bfloat16", "float16", "float32")


class Multipliers(NamedTuple):
    """Factors of an architecture that scales its activations. All but attention's are multiplied into the weights."""

    embedding: float = 1.0
    attention: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    residual: float = 1.0  # of what a layer adds
    logits: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    windows: tuple[int, ...]  # of every layer: keys a query sees, itself included; 0: all
    rope: Rope
    max_position_embeddings: int  # the model's own limit of a sequence
    dtype_name: str  # of the checkpoint
    fused: bool  # the checkpoint holds q, k, v as one matrix, and gate, up
    multipliers: Multipliers

    @property
    def dtype(self) -> "torch.dtype":
        import torch  # only now: a start is checked without it

        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.dtype_name]

    @property
    def context_limit(self) -> int:
        """Tokens a sequence may have: some scalings stretch max_position_embeddings, others are counted in it already."""
        rope, limit = self.rope, self.max_position_embeddings
        if rope.kind in ("linear", "dynamic"):
            return int(limit * rope.factor)
        if rope.kind == "yarn":
            return max(limit, int(rope.original_max_position_embeddings * rope.factor))
        return limit

    @property
    def attention_scale(self) -> float:
        return self.multipliers.attention or self.head_dim**-0.5

    def weight_factor(self, name: str) -> float:
        """What the named tensor is multiplied by when it is read. A tied head must not have the embedding's factor."""
        embedding, _, residual, logits = self.multipliers
        if name == "model.embed_tokens.weight":
            return embedding
        if name == "model.norm.weight":
            return logits / embedding if self.tied_head else logits
        return residual if ".o_proj." in name or ".down_proj." in name else 1.0

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = 1 if self.tied_head else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size


def read_spec(config: Json) -> ModelSpec:
    """The spec of a parsed config.json; ModelError names what is missing, unknown or contradictory."""
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported (supported: silu)")
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"config.json: {heads} heads, {kv_heads} KV heads and head size {head_dim} do not fit together")
    num_layers = positive(config, "num_hidden_layers")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=_o_bias(config, family),
        mlp_bias=bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, family, num_layers),
        rope=read_rope(config, head_dim),
        max_position_embeddings=positive(config, "max_position_embeddings"),
        dtype_name=_dtype_name(config),
        fused=family.fused,
        multipliers=_multipliers(config) if family.multiplied else Multipliers(),
    )


def _architecture(config: Json) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    by_type = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
    if not names and config.get("model_type") in by_type:
        return by_type[config["model_type"]]
    found = ", ".join(map(str, names)) or config.get("model_type") or "none"
    raise ModelError(f"config.json: architecture {found} is not supported (supported: {', '.join(FAMILIES)})")


def _dtype_name(config: Json) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(_DTYPES)})")
    return str(name)


def _o_bias(config: Json, family: _Family) -> bool:
    if isinstance(family.o_bias, bool):
        return family.o_bias
    return bool(config.get(family.o_bias or "attention_bias", False))


def _multipliers(config: Json) -> Multipliers:
    factors = {}
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        value = config.get(name, 1.0)
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {name} = {value!r}, expected a positive number")
        factors[name] = float(value)
    embedding, attention, residual, scaling = factors.values()
    return Multipliers(embedding, attention, residual, 1 / scaling)


def _windows(config: Json, family: _Family, num_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window", family.default_window) or 0
    if not family.window or (family.window == "switched" and not config.get("use_sliding_window", False)):
        window = 0
    if not window:
        return (0,) * num_layers
    kinds = config.get("layer_types") if family.window != "all" else None
    if kinds is not None:
        if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
            raise ModelError(f"config.json: layer_types must name sliding_attention or full_attention {num_layers} times")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = config.get("max_window_layers", 28) if family.window == "switched" else 0
    return tuple(window if layer >= first else 0 for layer in range(num_layers))
