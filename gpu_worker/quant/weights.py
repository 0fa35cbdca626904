"""Weights as a checkpoint means them, free of its packing: exact values, cut along either dimension."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.quant.scheme import Activations
from shared.model_folder import ModelError


def _check_scales(name: str, scales: Tensor) -> None:
    if not scales.is_floating_point() or scales.dtype.itemsize < 2:
        raise ModelError(f"{name} are stored as {scales.dtype}, expected float16, bfloat16 or float32")
    bad = scales.numel() - int(torch.isfinite(scales).sum())
    if bad:
        raise ModelError(f"of {scales.numel()} {name} {bad} are NaN or infinite")


@dataclass(frozen=True)
class IntWeight:
    """w[n, k] = scales[n, groups[k]] * (codes[n, k] - zeros[n, groups[k]]); inputs are not rounded."""

    bits: int  # 4 or 8
    codes: Tensor  # u8[N, K]
    scales: Tensor  # [N, G], in the checkpoint's dtype
    zeros: Tensor | None  # u8[N, G]; None: 2^(bits - 1) everywhere
    groups: Tensor  # i32[K]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def middle(self) -> int:
        return int(2 ** (self.bits - 1))

    def checked(self) -> "IntWeight":
        """Itself, with the zero points left out when they say nothing; ModelError when its tensors do not fit together."""
        (n, k), found = self.shape, tuple(self.scales.shape)
        _check_scales("scales", self.scales)
        if self.groups.dtype not in (torch.int32, torch.int64):
            raise ModelError(f"group numbers are stored as {self.groups.dtype}, expected int32")
        if len(found) != 2 or found[0] != n or tuple(self.groups.shape) != (k,):
            raise ModelError(f"a weight of {n} x {k} has scales of {found} and {tuple(self.groups.shape)} group numbers")
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ModelError(f"scales of {found} have zero points of {tuple(self.zeros.shape)}")
        if k and not 0 <= int(self.groups.min()) <= int(self.groups.max()) < found[1]:
            named = f"{int(self.groups.min())} to {int(self.groups.max())}"
            raise ModelError(f"columns name groups {named}, there are scales of {found[1]}")
        says_nothing = self.zeros is not None and bool((self.zeros == self.middle).all())
        return replace(self, groups=self.groups.to(torch.int32), zeros=None if says_nothing else self.zeros)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K]: the exact products (they fit float32), then rounded once."""
        groups = self.groups.long()
        zeros = self.middle if self.zeros is None else self.zeros.float()[:, groups]
        return (self.scales.float()[:, groups] * (self.codes.float() - zeros)).to(dtype)

    def rows(self, start: int, stop: int) -> "IntWeight":
        """A column-parallel rank's part: some outputs, all inputs."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop], zeros=zeros)

    def columns(self, start: int, stop: int) -> "IntWeight":
        """A row-parallel rank's part: some inputs, all outputs. Keeps every group that one of them names."""
        used, groups = torch.unique(self.groups[start:stop], return_inverse=True)
        zeros = None if self.zeros is None else self.zeros[:, used]
        codes = self.codes[:, start:stop]
        return replace(self, codes=codes, scales=self.scales[:, used], zeros=zeros, groups=groups.to(torch.int32))

    def as_bytes(self) -> "ByteWeight":
        """The same values as signed bytes: of 8 bits, without zero points, with one scale a row."""
        values = (self.codes.to(torch.int16) - self.middle).to(torch.int8)
        return ByteWeight(values, self.scales.float(), self.shape[1], None).checked()

    def explicit_zeros(self) -> Tensor:
        return torch.full(self.scales.shape, self.middle, dtype=torch.uint8) if self.zeros is None else self.zeros


@dataclass(frozen=True)
class ByteWeight:
    """w[n, k] = values[n, k] * scales[n, k // block]: int8 or float8_e4m3fn, inputs rounded as `activations` says."""

    values: Tensor  # i8 or f8[N, K]
    scales: Tensor  # f32[N, ceil(K / block)]
    block: int  # columns per scale; K: one scale a row
    activations: Activations | None
    input_scale: Tensor | None = None  # f32[1]: the one scale of static activations

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def checked(self) -> "ByteWeight":
        (n, k), found = self.shape, tuple(self.scales.shape)
        _check_scales("scales", self.scales)
        if self.input_scale is not None:
            _check_scales("input_scale", self.input_scale)
        if found != (n, -(-k // max(self.block, 1))):
            raise ModelError(f"a weight of {n} x {k} in blocks of {self.block} columns has scales of {found}")
        how = self.activations
        if how and how.granularity == "group" and how.group != self.block:
            raise ModelError(f"inputs are rounded in groups of {how.group} columns, weights have a scale for {self.block}")
        if how and not how.dynamic and self.input_scale is None:
            raise ModelError("the config says static activations and the checkpoint has no input_scale")
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K]"""
        spread = self.scales.repeat_interleave(self.block, 1)[:, : self.shape[1]]
        return (self.values.float() * spread).to(dtype)

    def rows(self, start: int, stop: int) -> "ByteWeight":
        return replace(self, values=self.values[start:stop], scales=self.scales[start:stop])

    def columns(self, start: int, stop: int) -> "ByteWeight":
        """Some inputs, all outputs. A cut inside a block makes the blocks smaller, to the largest size that has none."""
        block, scales = self.block, self.scales
        if block >= self.shape[1]:
            return replace(self, values=self.values[:, start:stop], block=stop - start)
        smaller = block
        while smaller > 1 and (start % smaller or block % smaller):
            smaller -= 1
        if smaller < 16:
            raise ModelError(f"inputs {start} to {stop} of a layer cannot be cut out of scale blocks of {block} columns")
        scales = scales.repeat_interleave(block // smaller, 1)[:, start // smaller : -(-stop // smaller)]
        activations = self.activations and replace(self.activations, group=min(self.activations.group, smaller))
        return replace(self, values=self.values[:, start:stop], scales=scales, block=smaller, activations=activations)


Weight = IntWeight | ByteWeight
