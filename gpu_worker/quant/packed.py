"""The layout of integer weights that the kernels read: planes of 32 columns, so that unpacking moves nothing between threads.

A block is 32 * P columns, P = 16 / bits. words[b, n, i] is 16 bits that hold, from the low bits up, the codes of row n and the
columns b * 32 * P + j * 32 + i for j = 0 .. P - 1. A tile of rows of one block is one contiguous piece of memory; one shift and
one mask give plane j, 32 neighbouring columns that share a scale, in the place where the word already is.

Columns are sorted by group, and every group's run is filled up to whole planes with columns of weight 0; `columns` says which
input each one multiplies (None: they are the inputs in order, perhaps with zeros after the last).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.quant.weights import IntWeight

PLANE = 32
BLOCK_ELEMENTS = 2**22  # packed at once: what a whole matrix would take for a moment is several times its size


@dataclass(frozen=True)
class PackedInts:
    bits: int
    in_features: int
    words: Tensor  # i16[blocks, N, 32]
    scales: Tensor  # [G, N], the checkpoint's dtype; group of column c is c // group
    zeros: Tensor | None  # u8[G, N]; None: 2^(bits - 1)
    group: int  # columns per scale: whole planes that make up a block, or whole blocks
    columns: Tensor | None  # i32[blocks * 32 * P]: the input of each column

    @property
    def num_rows(self) -> int:
        return self.words.shape[1]

    @property
    def num_columns(self) -> int:
        return self.words.shape[0] * PLANE * (16 // self.bits)

    @property
    def num_bytes(self) -> int:
        tensors = (self.words, self.scales, self.zeros, self.columns)
        return sum(each.nbytes for each in tensors if each is not None)

    def explicit_zeros(self) -> Tensor:
        """u8[G, N]"""
        return torch.full_like(self.scales, 2 ** (self.bits - 1), dtype=torch.uint8) if self.zeros is None else self.zeros

    def to(self, device: torch.device) -> "PackedInts":
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        words, scales = self.words.to(device), self.scales.to(device)
        return PackedInts(self.bits, self.in_features, words, scales, move(self.zeros), self.group, move(self.columns))

    def arrange(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, num_columns or in_features], in the order of the columns."""
        return x if self.columns is None else x.index_select(1, self.columns)

    def codes(self, start: int, stop: int) -> Tensor:
        """u8[stop - start, num_columns]: rows start to stop, unpacked."""
        return self._planes(start, stop).to(torch.uint8).flatten(1)

    def dequantize(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[stop - start, num_columns]: rows start to stop, exact products rounded once."""
        codes = self._planes(start, stop).float()
        per_plane = torch.arange(codes.shape[1], device=codes.device) * PLANE // self.group
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[:, start:stop].t().float()[:, per_plane, None]
        codes -= zeros
        codes *= self.scales[:, start:stop].t().float()[:, per_plane, None]
        return codes.flatten(1).to(dtype)

    def _planes(self, start: int, stop: int) -> Tensor:
        """i16[stop - start, planes, 32]"""
        words = self.words[:, start:stop].transpose(0, 1).contiguous()  # [rows, blocks, 32]
        planes = words.new_empty((*words.shape[:2], 16 // self.bits, PLANE))
        for number, shift in enumerate(range(0, 16, self.bits)):
            torch.bitwise_and(words >> shift, 2**self.bits - 1, out=planes[:, :, number])
        return planes.flatten(1, 2)


@dataclass(frozen=True)
class KernelInts:
    """What the kernels read of PackedInts: one word for scale and zero point, wide enough to be copied ahead of its use."""

    words: Tensor  # i16[blocks, N, 32]
    table: Tensor  # i32[G, N], i64 for scales of float32: the zero point above the bits of the scale
    scale_dtype: torch.dtype
    group: int  # columns per scale
    bits: int

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.table.nbytes


def for_kernels(packed: PackedInts) -> KernelInts:
    table = _scale_table(packed.scales, packed.zeros, packed.bits)
    return KernelInts(packed.words, table, packed.scales.dtype, packed.group, packed.bits)


def _scale_table(scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """scales [G, N], zeros u8[G, N] (None: 2^(bits - 1)) -> the table of KernelInts."""
    size = scales.element_size() * 8
    narrow, wide = (torch.int32, torch.int64) if size == 32 else (torch.int16, torch.int32)
    codes = torch.full_like(scales, 1 << (bits - 1), dtype=wide) if zeros is None else zeros.to(wide)
    return (codes << size) | (scales.contiguous().view(narrow).to(wide) & ((1 << size) - 1))


def pack(weight: IntWeight) -> PackedInts:
    """Sort, fill up and pack a whole weight."""
    k = weight.shape[1]
    span = PLANE * (16 // weight.bits)
    size = _regular_group(weight)
    if size:  # the usual case: runs of the same whole number of planes, in order
        order = torch.arange(k)
        group, of_group = size, torch.arange(-(-k // size))
    else:
        order, per_plane = _sorted_planes(weight)
        group, of_group = _widest(per_plane)
    total = -(-order.numel() // span) * span
    source = torch.nn.functional.pad(order, (0, total - order.numel()), value=-1)
    needed = -(-total // group)
    of_group = of_group[torch.arange(needed).clamp(max=of_group.numel() - 1)]
    zeros = None if weight.zeros is None else weight.zeros[:, of_group].t().contiguous()
    in_order = bool((source[:k] == torch.arange(k)).all()) and bool((source[k:] < 0).all())
    columns = None if in_order else source.clamp(min=0).to(torch.int32)
    scales = weight.scales[:, of_group].t().contiguous()
    words = torch.empty((total // span, weight.shape[0], PLANE), dtype=torch.int16, device=weight.codes.device)
    step = max(BLOCK_ELEMENTS // max(total, 1), 1)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        codes = weight.codes[rows]
        if columns is not None or total != k:
            filling = weight.middle if zeros is None else zeros[:, rows].t().repeat_interleave(group, 1)[:, :total]
            codes = torch.where(source >= 0, codes[:, source.clamp(min=0)], filling)
        _fill_words(words[:, rows], codes, weight.bits)
    return PackedInts(weight.bits, k, words, scales, zeros, group, columns)


def _regular_group(weight: IntWeight) -> int:
    """The size of the groups when they are in order, of one size (the last may be shorter) and fit the blocks; else 0."""
    groups = weight.groups
    k, span = groups.numel(), PLANE * (16 // weight.bits)
    size = int((groups == 0).sum())
    if size == k:
        return max(-(-k // span), 1) * span
    fits = size > 0 and size % PLANE == 0 and (size % span == 0 or span % size == 0)
    return size if fits and torch.equal(groups.long(), torch.arange(k) // size) else 0


def _sorted_planes(weight: IntWeight) -> tuple[Tensor, Tensor]:
    """The columns sorted by group, -1 where a run is filled up to whole planes; and the group of each plane."""
    order = torch.argsort(weight.groups, stable=True)
    counts = torch.bincount(weight.groups, minlength=weight.scales.shape[1])
    planes = -(-counts // PLANE)
    starts = torch.cumsum(planes * PLANE, 0) - planes * PLANE
    place_in_run = torch.arange(order.numel()) - (torch.cumsum(counts, 0) - counts).repeat_interleave(counts)
    source = torch.full((int(planes.sum()) * PLANE,), -1)
    source[starts.repeat_interleave(counts) + place_in_run] = order
    return source, torch.arange(counts.numel()).repeat_interleave(planes)


def _widest(per_plane: Tensor) -> tuple[int, Tensor]:
    """Groups of 4, 2 or 1 planes, the widest in which no two groups of the checkpoint meet, and the group of each."""
    for planes in (4, 2, 1):
        filled = -(-per_plane.numel() // planes) * planes
        runs = per_plane[torch.arange(filled).clamp(max=per_plane.numel() - 1)].view(-1, planes)
        if bool((runs == runs[:, :1]).all()):
            return planes * PLANE, runs[:, 0]
    raise AssertionError("one plane has one group")


def _fill_words(words: Tensor, codes: Tensor, bits: int) -> None:
    """codes u8[N, blocks * 32 * P] -> words i16[blocks, N, 32]"""
    planes = codes.view(codes.shape[0], -1, 16 // bits, PLANE).transpose(0, 1)  # [blocks, N, P, 32]
    words.copy_(planes[:, :, 0])
    for number in range(1, 16 // bits):
        words |= planes[:, :, number].to(torch.int16) << (bits * number)
