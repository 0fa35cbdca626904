"""Products whose inner dimension is split over programs: a tile's last program adds the parts, always in the same order."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILES = 2**14


@functools.cache
def counters(device: torch.device) -> Tensor:
    """i32[MAX_TILES] of zeros: programs of each tile that have arrived. A kernel leaves them at zero; one stream a device."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@functools.cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_split(tiles: int, steps: int, device: torch.device, waves: int = 4, min_steps: int = 4) -> int:
    """Parts of the inner dimension, so that tiles * parts fills the device `waves` times; a part has at least min_steps."""
    wanted = -(-waves * num_processors(device) // tiles)
    return max(min(wanted, steps // min_steps, 16), 1) if tiles <= MAX_TILES else 1


@triton.jit
def store_tile(out, bias, total, rows, columns, ROWS, COLUMNS, HAS_BIAS: tl.constexpr):
    """total: f32[BR, BC] of out [ROWS, COLUMNS] (contiguous); columns index the bias."""
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    cell = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    tl.store(out + cell, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish_tile(
    out, bias, parts, arrived, total, rows, columns, tile, part, ROWS, COLUMNS, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Store a finished tile, or put a part of it into parts f32[SPLIT, ROWS, COLUMNS] and finish it if this is the last."""
    if SPLIT == 1:
        store_tile(out, bias, total, rows, columns, ROWS, COLUMNS, HAS_BIAS)
    else:
        inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        cell = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        size = tl.cast(ROWS, tl.int64) * COLUMNS
        tl.store(parts + part * size + cell, total, mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them says so
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == SPLIT - 1:
            whole = tl.zeros_like(total)
            for each in tl.static_range(SPLIT):
                whole += tl.load(parts + each * size + cell, mask=inside, other=0.0, cache_modifier=".cg")
            store_tile(out, bias, whole, rows, columns, ROWS, COLUMNS, HAS_BIAS)
            tl.store(arrived + tile, 0)
