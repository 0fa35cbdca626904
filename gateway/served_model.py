"""What the gateway reads from the model folder: tokenizer, chat template, end tokens, sampling defaults, logits width."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.limits import Defaults, Limits
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    name: str
    fingerprint: str  # equal for gateway, scheduler and worker of one model
    tokenizer: Tokenizer
    template_source: str  # empty: the model has none
    template_special: dict[str, Any]  # bos_token, eos_token, ... as templates see them
    eos_ids: tuple[int, ...]  # every id that ends an answer by itself
    vocab_size: int
    defaults: Defaults

    @property
    def limits(self) -> Limits:
        return Limits(
            model_name=self.name,
            vocab_size=self.vocab_size,
            defaults=self.defaults,
            has_chat_template=bool(self.template_source),
        )


def load(folder: Path, name: str, fingerprint: str) -> ServedModel:
    """Read the folder; ValueError names the file that is missing or broken."""
    config = _read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    generation = _read_json(folder / "generation_config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(folder, tokenizer_config)
    vocab_size = config.get("vocab_size")
    bos = special.get("bos_token", "")
    tokenizer = Tokenizer(folder, bos, vocab_size if type(vocab_size) is int else 0)
    if type(vocab_size) is not int:
        vocab_size = tokenizer.size
    eos_ids = [*_ids(generation), *_ids(config)]
    if (eos := tokenizer.id_of(special.get("eos_token", ""))) is not None:
        eos_ids.append(eos)
    return ServedModel(
        name=name,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        template_source=_template(folder, tokenizer_config),
        template_special=special,
        eos_ids=tuple(dict.fromkeys(each for each in eos_ids if 0 <= each < vocab_size)),
        vocab_size=vocab_size,
        defaults=_defaults(generation),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if type(value) is not dict:
        raise ValueError(f"{path} is not a JSON object")
    return value


def _ids(config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if type(value) is list else [value]
    return [each for each in ids if type(each) is int]


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    """Named special tokens; a token may be written as its text or as an object that holds it."""
    named = {**_read_json(folder / "special_tokens_map.json"), **tokenizer_config}
    special = {}
    for name, value in named.items():
        text = value.get("content") if type(value) is dict else value
        if name.endswith("_token") and type(text) is str:
            special[name] = text
    return special


def _template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if type(template) is list:  # several by name
        by_name = {each.get("name"): each.get("template") for each in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    return template if type(template) is str else ""


def _defaults(generation: dict[str, Any]) -> Defaults:
    """The model's own sampling defaults, where they say something that can be sampled with."""
    found: dict[str, Any] = {}
    for name, low, high in (("temperature", 0, 2), ("top_p", 1e-6, 1), ("min_p", 0, 1), ("repetition_penalty", 1e-6, 10)):
        value = generation.get(name)
        if isinstance(value, int | float) and low <= value <= high:
            found[name] = float(value)
    top_k = generation.get("top_k")
    if type(top_k) is int and top_k > 0:
        found["top_k"] = top_k
    if generation.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    return Defaults(**found)
