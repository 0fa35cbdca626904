"""What a model folder must hold, and its fingerprint. Reads config.json only; knows no architecture."""

import hashlib
import json
from pathlib import Path
from typing import Any

# They change without changing the model: which library wrote the file, and where it lay.
_VOLATILE = ("_name_or_path", "transformers_version")


class ModelError(ValueError):
    """A model that cannot be served; one line for a person, naming the path."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError when it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__} instead of an object")
    return value


def read_config(folder: Path | str) -> dict[str, Any]:
    """config.json of a model folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    return read_json(folder / "config.json")


def fingerprint(folder: Path | str) -> str:
    """16 hex digits that every role of one cell must agree on: a hash of config.json without its volatile keys."""
    config = {key: value for key, value in read_config(folder).items() if key not in _VOLATILE}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def weight_files(folder: Path | str) -> list[Path]:
    """The safetensors files of a model folder, as its index names them; ModelError when one is missing or empty."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        bad = [name for name in weight_map.values() if not isinstance(name, str) or not name or Path(name).name != name]
        if bad:
            raise ModelError(f"{index}: weight_map names {bad[0]!r}, expected a file's name")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} lacks {file.name}, which its index names")
        if not file.stat().st_size:
            raise ModelError(f"{file} is empty")
    return files


def check(folder: Path | str, *, weights: bool = True) -> None:
    """ModelError unless the folder holds a config, a tokenizer and (unless weights is False) all weight files."""
    folder = Path(folder)
    read_config(folder)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        raise ModelError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")
    if weights:
        weight_files(folder)
