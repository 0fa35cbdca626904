"""Which part of every weight one rank holds: heads, inner columns and vocabulary are divided, the rest everybody has whole.

q, k, v, gate and up give some outputs of all inputs (rows of the weight), o and down all outputs of some inputs (columns);
the embedding and the head have a run of the vocabulary. Where there are fewer KV heads than ranks, several hold the same one.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from gpu_worker.limits import check_division
from gpu_worker.model.spec import ModelSpec
from gpu_worker.quant.weights import Weight
from shared.model_folder import ModelError


class Part(NamedTuple):
    """start .. stop of a weight [out, in]: of its outputs, or of its inputs."""

    outputs: bool
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model of this spec."""

    whole: ModelSpec
    rank: int
    size: int

    @property
    def spec(self) -> ModelSpec:
        """What this rank computes: a decoder of fewer heads and a narrower middle. Its logits are those of the whole model."""
        inner = self.whole.intermediate_size // self.size
        return replace(self.whole, num_heads=self._num_heads, num_kv_heads=self._num_kv_heads, intermediate_size=inner)

    @property
    def held(self) -> ModelSpec:
        """The shapes of the weights in this rank's memory."""
        start, stop = self.vocabulary
        return replace(self.spec, vocab_size=stop - start)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """First id and end of the ids whose rows this rank has."""
        start = self.rank * self.vocabulary_width
        return start, min(start + self.vocabulary_width, self.whole.vocab_size)

    @property
    def vocabulary_width(self) -> int:
        """Ids of every rank but the last, which may have fewer."""
        return -(-self.whole.vocab_size // self.size)

    @property
    def _num_heads(self) -> int:
        return self.whole.num_heads // self.size

    @property
    def _num_kv_heads(self) -> int:
        return max(1, self.whole.num_kv_heads // self.size)

    def part(self, layer: str) -> Part | None:
        """layer: its name in the checkpoint without ".weight". None: every rank has all of it."""
        head_dim, last = self.whole.head_dim, layer.rpartition(".")[2]
        queries, inner = self._num_heads * head_dim, self.whole.intermediate_size // self.size
        match last:
            case "q_proj":
                return Part(True, self.rank * queries, (self.rank + 1) * queries)
            case "k_proj" | "v_proj":
                first = self.rank * self.whole.num_kv_heads // self.size
                return Part(True, first * head_dim, (first + self._num_kv_heads) * head_dim)
            case "o_proj":
                return Part(False, self.rank * queries, (self.rank + 1) * queries)
            case "gate_proj" | "up_proj":
                return Part(True, self.rank * inner, (self.rank + 1) * inner)
            case "down_proj":
                return Part(False, self.rank * inner, (self.rank + 1) * inner)
            case "embed_tokens" | "lm_head":
                return Part(True, *self.vocabulary)
            case _:
                return None

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of an unquantized tensor. A bias of o or down is added by one rank, as their outputs are summed."""
        layer, _, kind = name.rpartition(".")
        part = self.part(layer)
        if self.size == 1 or part is None:
            return tensor
        if part.outputs:
            return tensor[part.start : part.stop]
        if kind == "bias":
            return tensor if self.rank == 0 else tensor.new_zeros(tensor.shape)
        return tensor[:, part.start : part.stop].contiguous()

    def cut_quantized(self, layer: str, weight: Weight) -> Weight:
        part = self.part(layer)
        if self.size == 1 or part is None:
            return weight
        if part.outputs:
            return weight.rows(part.start, part.stop)
        try:
            return weight.columns(part.start, part.stop)
        except ModelError as error:
            raise ModelError(f"tensor_parallel_size = {self.size}, rank {self.rank}: layer {layer}: {error}") from None


def divide(spec: ModelSpec, rank: int, size: int) -> Shard:
    """The share of one rank; BadConfig with both numbers when the model cannot be divided so."""
    check_division(spec, size)
    return Shard(spec, rank, size)
