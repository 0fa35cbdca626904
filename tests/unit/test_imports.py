"""The dependency rule of ARCHITECTURE.md: which role may import what, by reading the code and by running it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("gateway", "scheduler", "gpu_worker")
PACKAGES = (*ROLES, "quire", "shared")

# Third-party module -> packages (or files) that may import it. What is not listed may be imported anywhere.
OWNERS = {
    "torch": ("gpu_worker",),
    "triton": ("gpu_worker",),
    "numba": ("gpu_worker",),
    "llvmlite": ("gpu_worker",),
    "transformers": ("gpu_worker",),
    "safetensors": ("gpu_worker",),
    "gguf": ("gpu_worker",),
    "accelerate": ("gpu_worker",),
    "aiohttp": ("gateway", "quire"),
    "pydantic": ("gateway", "quire"),
    "tokenizers": ("gateway", "quire", "gpu_worker/convert.py"),
    "jinja2": ("gateway", "quire"),
    "jiter": ("gateway",),
    "openai": (),
    "opentelemetry": ("shared/tracing.py", "gateway/app.py"),
    "pynvml": ("gpu_worker",),
    "zmq": ("shared/wire.py", "shared/keys.py"),
    "msgpack": ("shared/codec.py",),
    "huggingface_hub": ("shared/model_store.py",),
}
DYNAMIC = ("importlib.import_module", "import_module", "__import__")
# Our package -> those of ours that it may import.
ALLOWED = {
    "shared": {"shared"},
    "gateway": {"shared", "gateway"},
    "scheduler": {"shared", "scheduler"},
    "gpu_worker": {"shared", "gpu_worker"},
    "quire": {"shared", "quire", "gateway"},
}


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, wherever it stands; relative ones come out as "."."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else (node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)


def faults(path: str, source: str) -> list[str]:
    """What a file at this path (relative to the root) may not import, one line each."""
    package = path.split("/")[0]
    found = []
    for line, name in imports_of(source):
        top = name.split(".")[0]
        if top in PACKAGES and top not in ALLOWED[package]:
            found.append(f"{path}:{line} imports {name}")
        owners = OWNERS.get(top)
        if owners is not None and package not in owners and path not in owners:
            found.append(f"{path}:{line} imports {name}")
        if name == ".":
            found.append(f"{path}:{line} imports relatively")
    return found


def test_every_import_obeys_the_rule() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len({file.relative_to(ROOT).parts[0] for file in files}) == len(PACKAGES)
    found = [fault for file in files for fault in faults(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/app.py", "import torch"),
        ("gateway/app.py", "from scheduler.core import Core"),
        ("scheduler/core.py", "def late():\n    from gpu_worker import slots"),
        ("scheduler/core.py", "import aiohttp.web"),
        ("shared/codec.py", "import zmq.asyncio"),
        ("shared/pages.py", "import importlib\nimportlib.import_module('gateway.app')"),
        ("gpu_worker/service.py", "import quire.main"),
        ("gpu_worker/service.py", "from . import slots"),
    ],
)
def test_a_broken_rule_is_noticed(path: str, source: str) -> None:
    assert faults(path, source)


def modules_after(statement: str) -> set[str]:
    """Top-level modules that are loaded in a fresh process after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


@pytest.mark.parametrize("role", ["gateway", "scheduler"])
def test_a_role_without_a_gpu_never_loads_torch(role: str) -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in sorted((ROOT / role).rglob("*.py"))
        if file.name not in ("__main__.py", "__init__.py")
    ]
    assert modules
    loaded = modules_after("import " + ", ".join(modules))
    assert role in loaded
    assert not loaded & {"torch", "triton", "numba", "transformers", "quire", *(set(ROLES) - {role})}


@pytest.mark.parametrize("command", ["serve", "chat", "version"])
def test_a_command_starts_without_heavy_imports(command: str) -> None:
    statement = (
        f"import quire.main, contextlib\nwith contextlib.suppress(SystemExit):\n    quire.main.main(['{command}', '--help'])"
    )
    loaded = modules_after(statement)
    assert "quire" in loaded
    assert not loaded & {"torch", "triton", "numba", "transformers", "aiohttp", "zmq", "pydantic", "numpy"}
