"""KV pages of all layers in one allocation. Page 0 is scratch: padding reads and writes it, nobody's content lies there."""

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch import IntArray


class KVCache:
    """k and v of a layer are [num_pages, kv_heads, page_tokens, head_dim]. On a CPU only pages in use take memory."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        kv_heads: int,
        page_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._on_cpu = device.type == "cpu"
        shape = (num_layers, 2, num_pages, kv_heads, page_tokens, head_dim)
        self.storage = _lazy_zeros(shape, dtype) if self._on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self.storage]

    @staticmethod
    def page_bytes(*, num_layers: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * kv_heads * page_tokens * head_dim * dtype.itemsize

    def clear_pages(self, pages: IntArray) -> None:
        """Make fresh pages finite before a slot writes them: the torch twins multiply masked cells by 0, and 0 * NaN is NaN.
        The Triton kernels never load masked cells."""
        if self._on_cpu and len(pages):
            self.storage.index_fill_(2, torch.from_numpy(pages.astype(np.int64)), 0)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """i64[n] each; all sources are read before any target is written."""
        self.storage.index_copy_(2, targets, self.storage.index_select(2, sources))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed memory from the system, which takes none until it is touched (torch.zeros would write it)."""
    words = np.zeros(shape, np.int16 if dtype.itemsize == 2 else np.int32)
    return torch.from_numpy(words).view(dtype)
