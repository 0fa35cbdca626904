"""How many ids a model's tokenizer knows; a checkpoint's embedding may have more rows, which pad it to a round number."""

import json
from pathlib import Path
from typing import Any


def num_token_ids(folder: Path | str) -> int:
    """One more than the largest id in tokenizer.json and tokenizer_config.json; 0 when tokenizer.json does not say."""
    try:
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text("utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = (int(token["id"]) for token in tokenizer.get("added_tokens", ()))
        return 1 + max(max(ids, default=-1), max(added, default=-1), *_configured_ids(Path(folder)))
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _configured_ids(folder: Path) -> list[int]:
    """Ids of added_tokens_decoder, which may name tokens that tokenizer.json lacks; [-1] without the file."""
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return [-1, *(int(number) for number in config.get("added_tokens_decoder", {}))]
