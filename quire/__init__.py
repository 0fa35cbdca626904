"""Quire: the command and the Python API (LLM, AsyncEngine, SamplingParams)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine import AsyncEngine
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "quire.llm",
    "AsyncEngine": "quire.engine",
    "CompletionOutput": "quire.outputs",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "quire.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Load the API when it is first named: the command does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
