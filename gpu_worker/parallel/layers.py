"""What makes one rank of a finished decoder: the sums after o and down, and the divided vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.model.decoder import Decoder
from gpu_worker.model.embedding import Embedding
from gpu_worker.model.linear import Matmul
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.shard import Shard


class Summed:
    """A matrix of some of the inputs: the ranks' products are added."""

    def __init__(self, matrix: Matmul, group: Group) -> None:
        self.matrix = matrix
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.sum_into(self.matrix(x))

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes


class Joined:
    """A matrix of some of the outputs, wanted whole by everybody: the ranks' outputs stand side by side."""

    def __init__(self, matrix: Matmul, group: Group, width: int, total: int) -> None:
        self.matrix = matrix
        self._group = group
        self._width = width
        self._total = total

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(self.matrix(x))

    def join(self, mine: Tensor) -> Tensor:
        """This rank's outputs -> everybody's."""
        return self._group.join_columns(mine, self._width, self._total)

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes


class DividedEmbedding(Embedding):
    """A run of the vocabulary: the rank that has a token gives its row, the others zeros."""

    def __init__(self, weight: Tensor, first: int, group: Group) -> None:
        super().__init__(weight)
        self._first = first
        self._group = group

    def __call__(self, ids: Tensor) -> Tensor:
        here = ids - self._first
        mine = (here >= 0) & (here < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, here, 0), self.weight)
        return self._group.sum_into(torch.where(mine[:, None], rows, 0))


def parallelize(decoder: Decoder, shard: Shard, group: Group) -> None:
    """The decoder holds this rank's parts; now it also speaks with the other ranks."""
    for layer in decoder.layers:
        layer.o = Summed(layer.o, group)
        layer.down = Summed(layer.down, group)
    decoder.embedding = DividedEmbedding(decoder.embedding.weight, shard.vocabulary[0], group)
    decoder.head = Joined(decoder.head, group, shard.vocabulary_width, shard.whole.vocab_size)
