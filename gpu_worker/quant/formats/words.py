"""Codes in 32-bit words, low bits first, along the last dimension."""

import torch
from torch import Tensor

from shared.model_folder import ModelError

BLOCK_ELEMENTS = 2**22  # unpacked at once: words shifted and masked take four bytes a code


def unpack(words: Tensor, bits: int) -> Tensor:
    """i32[R, W] -> u8[R, W * 32 / bits]."""
    check_words(words)
    codes = torch.empty((*words.shape, 32 // bits), dtype=torch.uint8, device=words.device)
    step = max(BLOCK_ELEMENTS // max(words.shape[1] * 32 // bits, 1), 1)
    for start in range(0, words.shape[0], step):
        part = words[start : start + step]
        for place, shift in enumerate(range(0, 32, bits)):
            codes[start : start + step, :, place] = (part >> shift) & (2**bits - 1)
    return codes.flatten(1)


def check_words(words: Tensor) -> None:
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ModelError(f"packed words are stored as {words.dtype} of shape {tuple(words.shape)}, expected a matrix of int32")


def pack(codes: Tensor, bits: int) -> Tensor:
    """u8[..., C] -> i32[..., ceil(C * bits / 32)]; the last word is filled up with zeros."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=codes.device)
    words = (codes.reshape(*codes.shape[:-1], -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def in_order_groups(columns: int, size: int) -> Tensor:
    """i32[columns]: the group of each column when groups are runs of this size."""
    return torch.arange(columns, dtype=torch.int32) // size
