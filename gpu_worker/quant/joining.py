"""Matrices that see the same input, one under the other along the outputs: when they are one multiplication, and its weight."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpu_worker.quant.packed import PackedInts
from gpu_worker.quant.weights import ByteWeight

Form = PackedInts | ByteWeight  # what a linear layer multiplies with


def can_join(parts: Sequence[Form]) -> bool:
    """Whether one multiplication can do all of them: same kind, same groups of the same inputs, same rounding of them."""
    return all(_alike(parts[0], part) for part in parts[1:])


def _alike(first: Form, part: Form) -> bool:
    if isinstance(first, PackedInts) and isinstance(part, PackedInts):
        same = first.bits == part.bits and first.scales.dtype == part.scales.dtype and first.group == part.group
        if first.columns is None or part.columns is None:
            return same and first.columns is part.columns
        return same and torch.equal(first.columns, part.columns)
    if isinstance(first, ByteWeight) and isinstance(part, ByteWeight):
        same = first.values.dtype == part.values.dtype and first.activations == part.activations
        return same and first.block == part.block
    return False


def join(parts: Sequence[Form]) -> Form:
    """They must satisfy can_join."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, PackedInts):
        ints = [part for part in parts if isinstance(part, PackedInts)]
        bare = all(part.zeros is None for part in ints)
        zeros = None if bare else torch.cat([part.explicit_zeros() for part in ints], 1)
        words, scales = (torch.cat([getattr(part, name) for part in ints], 1) for name in ("words", "scales"))
        return replace(first, words=words, scales=scales, zeros=zeros)
    rest = [part for part in parts if isinstance(part, ByteWeight)]
    inputs = [part.input_scale for part in rest if part.input_scale is not None]
    # Static scales of the same input differ a little between the parts: the largest covers all.
    largest = torch.stack(inputs).amax(0) if inputs else None
    values, scales = torch.cat([part.values for part in rest]), torch.cat([part.scales for part in rest])
    return replace(first, values=values, scales=scales, input_scale=largest)
