"""GPU utilisation as NVML says it, and nothing where it cannot."""

import pynvml
import pytest
import torch

from gpu_worker.gpu_load import gpu_utilization


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (37, 0.37),
        (0, 0.0),
        (pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), None),  # a MIG slice
        (RuntimeError("no driver"), None),
    ],
)
def test_what_the_driver_says(said: int | Exception, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization(device: torch.device) -> int:
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    assert gpu_utilization(torch.device("cuda", 0)) == expected
    assert gpu_utilization(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_driver_there_is_nothing_to_say() -> None:
    assert gpu_utilization(torch.device("cuda", 0)) is None
