"""What all tests share: the embedded model's folder, and GPU tests skipped where there is no GPU."""

import os
from pathlib import Path

import pytest

from shared import gpus, model_store
from shared.config import Config

if not gpus.gpu_ids():  # before any test module defines a kernel
    os.environ["TRITON_INTERPRET"] = "1"
# Before torch is imported, here and in the workers that tests start: test processes share the cores, and OpenMP threads that
# wait for each other by spinning would make every step many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in config.option.markexpr:  # as in: pytest -m "long or not long"
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: make chaos"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only now: most test processes need no torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a model folder, converted once per machine; parallel test processes wait for the first."""
    return model_store.resolve("", Config().cache_dir)
