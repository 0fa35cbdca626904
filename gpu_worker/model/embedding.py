"""Token ids to hidden states."""

import torch.nn.functional as F
from torch import Tensor


class Embedding:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [V, H]

    def __call__(self, ids: Tensor) -> Tensor:
        """i32[T] -> [T, H]"""
        return F.embedding(ids, self.weight)
