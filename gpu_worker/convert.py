"""Makes a servable model folder, once: python -m gpu_worker.convert SOURCE DEST.

SOURCE is a GGUF file (its weights become bfloat16 safetensors, its metadata config.json, tokenizer and chat template), or a
folder whose tokenizer is a SentencePiece tokenizer.model (DEST links to its files and adds tokenizer.json). DEST appears by a
rename when all of it is on the disk.
"""

import argparse
import os
import shutil
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.model_folder import ModelError


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file, or add tokenizer.json to a model folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("dest", type=Path)
    args = parser.parse_args()
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # its bars would interleave with ours
    try:
        convert(args.source.resolve(), args.dest.resolve())
    except Exception as error:  # whatever the file made transformers say: one line, for the person who named the file
        text = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        _say(f"error: {' '.join(text.split())[:500]}")
        sys.exit(1)


def convert(source: Path, dest: Path) -> None:
    """Make dest from source. Nothing is left behind unless it succeeds."""
    for stale in dest.parent.glob(f"{dest.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temp = dest.with_name(f"{dest.name}.tmp-{os.getpid()}")
    temp.mkdir(parents=True)
    try:
        if source.is_dir():
            _say(f"making tokenizer.json for {source.name} (once)")
            _add_tokenizer(source, temp)
        else:
            _say(f"converting {source.name}, {source.stat().st_size / 1e6:.0f} MB, to bfloat16 (once)")
            started = time.monotonic()
            _convert_gguf(source, temp)
            _say(f"converted in {time.monotonic() - started:.0f} s into {dest}")
        _flush(temp)
        temp.rename(dest)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _convert_gguf(gguf: Path, out: Path) -> None:
    _read_once()
    metadata = _metadata(gguf)  # first: a damaged file is found before the slow imports
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _set_pre_tokenizer(tokenizer, str(metadata.get("tokenizer.ggml.pre", "default")))
    tokenizer.save_pretrained(out, save_jinja_files=False)
    _say("tokenizer done, unpacking the weights")
    how = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=how, dtype=torch.bfloat16
    )
    stop_ids = _stop_ids(metadata, model.config.eos_token_id)
    model.generation_config.eos_token_id = stop_ids if len(stop_ids) != 1 else stop_ids[0]
    model.save_pretrained(out)


def _read_once() -> None:
    """transformers parses the file three times and builds the table of names for every module: half of the conversion."""
    library: Any = import_module("gguf")
    library.GGUFReader = cache(library.GGUFReader)
    library.get_tensor_name_map = cache(library.get_tensor_name_map)


def _metadata(gguf: Path) -> dict[str, Any]:
    """The scalar fields of the file; the vocabulary's arrays are skipped. ModelError unless it holds what it announces."""
    from gguf import GGUFReader, GGUFValueType

    try:
        fields = GGUFReader(str(gguf)).fields
    except (ValueError, IndexError, KeyError, OverflowError):  # of numpy, at an offset or a shape
        held = f"{gguf.stat().st_size:,} bytes"
        raise ModelError(f"cut short or damaged ({held} do not hold what its header announces); copy it again") from None
    return {name: field.contents() for name, field in fields.items() if field.types[0] != GGUFValueType.ARRAY}


def _set_pre_tokenizer(tokenizer: Any, kind: str) -> None:
    """SmolLM splits every digit before the byte-level step; transformers knows the other families by itself."""
    if kind == "smollm":
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)


def _stop_ids(metadata: dict[str, Any], eos: int | list[int] | None) -> list[int]:
    """Ids that end an answer: end of text, of turn and of message, as far as the file names them."""
    ids = [eos] if isinstance(eos, int) else list(eos or [])
    for name in ("eos", "eot", "eom"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and int(token) not in ids:
            ids.append(int(token))
    return ids


def _add_tokenizer(source: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    for file in source.iterdir():
        if file.is_file():
            (out / file.name).symlink_to(file.resolve())
    AutoTokenizer.from_pretrained(source).backend_tokenizer.save(str(out / "tokenizer.json"))


def _flush(folder: Path) -> None:
    """Put the files and their names on the disk, so that no crash leaves a complete-looking folder with holes."""
    files = [file for file in folder.iterdir() if not file.is_symlink()]
    for file in files:
        file.chmod(0o644)  # roles that share the cache may run as other users
    for path in [*files, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main()
