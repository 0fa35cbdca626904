"""KV pages of all layers in one allocation. Page 0 is scratch: padding reads and writes it, nobody's content lies there.

Pages hold the activations' type, or float8_e4m3fn: values over a scale per layer and head (Layer.kv_scales), in half the bytes.
Cells beyond a row's length hold anything, also NaN: no kernel reads them.
"""

import numpy as np
import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn


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
        self.layers: list[tuple[Tensor, Tensor]] = [(self._keys(layer[0]), layer[1]) for layer in self.storage]

    def _keys(self, pages: Tensor) -> Tensor:
        """On a CPU the keys of a page lie dimension by dimension, as the scores of 16 keys at once want them; not float8."""
        if not self._on_cpu or pages.dtype == FLOAT8:
            return pages
        num_pages, kv_heads, page_tokens, head_dim = pages.shape
        return pages.view(num_pages, kv_heads, head_dim, page_tokens).transpose(2, 3)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """i64[n] each; all sources are read before any target is written."""
        stored = self.storage.view(torch.uint8) if self.storage.dtype == FLOAT8 else self.storage
        stored.index_copy_(2, targets, stored.index_select(2, sources))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed memory from the system, which takes none until it is touched (torch.zeros would write it)."""
    words = np.zeros(shape, {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize])
    return torch.from_numpy(words).view(dtype)
