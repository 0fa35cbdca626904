"""Naive float64 references of the kernels, and paged caches whose every unused cell is NaN."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.reference.float8 import to_float8

MASK = 0xFFFFFFFF


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error in the 2-norm; NaN anywhere makes it NaN, which no comparison passes."""
    difference = out.detach().double().cpu() - reference.double().cpu()
    return float(difference.norm() / reference.double().cpu().norm().clamp(min=1e-30))


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 8e-3


@dataclass
class Paged:
    """Rows of given context lengths in a poisoned cache. groups: (rows, shared pages) from row 0 on."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_slots: Tensor
    context_lens: Tensor
    groups: list[tuple[int, int]]
    kv_scales: Tensor | None = None  # f32[2, hkv]: the caches hold float8

    def in_float8(self) -> "Paged":
        """The same, rounded to float8, every head with a scale of its own; unused cells are still NaN."""
        scales = torch.rand((2, self.k_cache.shape[1]), device=self.k_cache.device) * 0.02 + 0.01
        k, v = (
            to_float8(cache.transpose(1, 2).flatten(0, 1), each).view(cache.transpose(1, 2).shape).transpose(1, 2).contiguous()
            for cache, each in zip((self.k_cache, self.v_cache), scales, strict=True)
        )
        return replace(self, k_cache=k, v_cache=v, kv_scales=scales)

    def context(self, row: int) -> tuple[Tensor, Tensor]:
        """k, v of the row, float64 [context, hkv, d]."""
        page = self.k_cache.shape[2]
        length = int(self.context_lens[row])
        pages = self.page_table[int(self.row_slots[row]), : -(-length // page)].long()
        scales = torch.ones(2, self.k_cache.shape[1], device=pages.device) if self.kv_scales is None else self.kv_scales
        k, v = (
            _pages(cache, pages).transpose(1, 2).flatten(0, 1)[:length] * each.double()[:, None]
            for cache, each in zip((self.k_cache, self.v_cache), scales, strict=True)
        )
        return k, v


def _pages(cache: Tensor, pages: Tensor) -> Tensor:
    """float64 of some pages; torch picks no float8, only bytes."""
    return (cache.view(torch.uint8)[pages].view(cache.dtype) if cache.itemsize == 1 else cache[pages]).double()


def paged(
    lengths: list[int],
    kv_heads: int,
    head: int,
    page: int,
    dtype: torch.dtype,
    device: str,
    groups: list[tuple[int, int]] | None = None,
    spare_pages: int = 7,
    seed: int = 0,
    poison: bool = True,
) -> Paged:
    """lengths 0: padding rows (slot 0). Pages are the highest ids of the pool, shuffled; other cells and pages are NaN."""
    generator = torch.Generator().manual_seed(seed)
    groups = groups or []
    counts = [-(-length // page) for length in lengths]
    need = sum(counts) + 1
    pages = need + spare_pages
    order = (torch.randperm(need - 1, generator=generator) + pages - need + 1).tolist()
    table = torch.zeros((len(lengths) + 3, max([*counts, 1]) + 2), dtype=torch.int32)
    table[:] = pages + 12345  # entries past a row's pages mean nothing
    table[0] = 0
    slots = [0 if length == 0 else len(lengths) + 2 - row for row, length in enumerate(lengths)]
    for row, count in enumerate(counts):
        for place in range(count):
            table[slots[row], place] = order.pop()
    first = 0
    for rows, shared in groups:
        for row in range(first + 1, first + rows):
            table[slots[row], :shared] = table[slots[first], :shared]
        first += rows
    shape = (pages, kv_heads, page, head)
    caches = []
    for number in (1, 2):
        torch.manual_seed(seed * 2 + number)
        if poison:
            cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
            for row, length in enumerate(lengths):
                for place in range(counts[row]):
                    live = min(page, length - place * page)
                    cell = cache[int(table[slots[row], place]), :, :live]
                    cell.copy_(torch.randn(cell.shape, device=device))
        else:
            cache = torch.randn(shape, dtype=dtype, device=device)
        caches.append(cache)
    return Paged(
        caches[0], caches[1], table.to(device), torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device), groups,
    )  # fmt: skip


def heads(qkv: Tensor, q_heads: int, kv_heads: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v [T, heads, d] of the rows of a qkv product."""
    parts = qkv.reshape(len(qkv), q_heads + 2 * kv_heads, head)
    return parts[:, :q_heads], parts[:, q_heads : q_heads + kv_heads], parts[:, q_heads + kv_heads :]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, soft_cap: float = 0.0) -> Tensor:
    """q: [n, hq, d], the last n of the context's tokens; k, v: [context, hkv, d] -> float64 [n, hq, d]."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(ratio, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    key = torch.arange(k.shape[0], device=q.device)[None, :]
    query = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    s = s.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [T, h, d] -> float64, half-split rotation of the first rope_dim dimensions."""
    half = cos_sin.shape[1] // 2
    angles, x = cos_sin[positions.long()].double()[:, None], x.double()
    cos, sin = angles[..., :half], angles[..., half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def gumbel(seed: int, position: int, vocabulary: int) -> Tensor:
    """float64 [V], from the words of ARCHITECTURE.md ("Noise")."""
    k0 = _mix((seed & MASK) ^ _mix((position + 0x9E3779B9) & MASK))
    k1 = _mix((seed >> 32) ^ k0)
    token = torch.arange(vocabulary, dtype=torch.int64)
    h = token ^ (token >> 16) ^ k0
    h = (h * 0x7FEB352D & MASK) ^ k1
    h ^= h >> 15
    h = h * 0x846CA68B & MASK
    h ^= h >> 16
    u = ((h >> 1).float() * 2.0**-31 + 2.0**-33).clamp(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-u))


def keep(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Mask [V] of the tokens that a row keeps, by sorting."""
    x = logits.double().cpu()
    threshold = torch.tensor(float("-inf"), dtype=torch.float64)
    if min_p > 0:
        threshold = x.max() + temperature * torch.log(torch.tensor(min_p, dtype=torch.float64))
    if top_k:
        threshold = torch.maximum(threshold, x.sort(descending=True).values[min(top_k, len(x)) - 1])
    if top_p < 1:
        values = x[x >= threshold].sort(descending=True).values
        reached = (values / temperature).softmax(-1).cumsum(-1)
        count = int((reached < top_p).sum()) + 1
        threshold = torch.maximum(threshold, values[min(count, len(values)) - 1])
    return x >= threshold
