"""How busy the GPU is, as its driver measures it (NVML)."""

import pynvml
import torch


def gpu_utilization(device: torch.device) -> float | None:
    """Share of the driver's last sample in which a kernel ran, 0 to 1; None without a GPU, or where its driver does not say."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100  # finds the device by its UUID, whatever is visible
    except (RuntimeError, pynvml.NVMLError):  # no NVML library in the container, or a slice of a GPU (MIG)
        return None
