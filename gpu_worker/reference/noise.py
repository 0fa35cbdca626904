"""Counter-based Gumbel noise g(seed, position, token), bits exactly as ARCHITECTURE.md defines them.

A stateless hash: chunking, batching, preemption and migration draw the same numbers. 32-bit words are kept in int32 tensors,
whose arithmetic wraps; a logical shift is an arithmetic one and a mask.
"""

import numpy as np
import torch
from torch import Tensor

_A = 0x7FEB352D
_B = 0x846CA68B - 2**32
_token_words: dict[int, Tensor] = {}  # vocabulary size -> token ^ (token >> 16)


def _shift_xor(words: Tensor, bits: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(words, bits, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _mix(words: Tensor) -> Tensor:
    """lowbias32 of every word, in place."""
    scratch = torch.empty_like(words)
    _shift_xor(words, 16, scratch)
    _shift_xor(words.mul_(_A), 15, scratch)
    _shift_xor(words.mul_(_B), 16, scratch)
    return words


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """seeds i32[S, 2] (low, high word), positions i32[S] -> two keys i32[S]."""
    a = _mix(positions + (0x9E3779B9 - 2**32))
    k0 = _mix(a.bitwise_xor_(seeds[:, 0]))
    return k0, _mix(seeds[:, 1] ^ k0)


def add_gumbel(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> None:
    """logits f32[S, V] += temperature f32[S] * g, row by row so that a row's scratch stays in the CPU's cache."""
    vocab = logits.shape[1]
    tokens = _token_words.get(vocab)
    if tokens is None:
        ids = np.arange(vocab, dtype=np.int32)
        tokens = _token_words[vocab] = torch.from_numpy(ids ^ (ids >> 16))
    first, second = (key.tolist() for key in row_keys(seeds, positions))
    words, scratch, noise = torch.empty_like(tokens), torch.empty_like(tokens), torch.empty(vocab)
    for row, heat in enumerate(temperature.tolist()):
        if heat > 0:
            _gumbel(tokens, first[row], second[row], words, scratch, noise)
            logits[row].add_(noise, alpha=min(heat, 1e30))  # finite noise keeps a row finite


def _gumbel(tokens: Tensor, k0: int, k1: int, words: Tensor, scratch: Tensor, out: Tensor) -> None:
    torch.bitwise_xor(tokens, k0, out=words)
    _shift_xor(words.mul_(_A).bitwise_xor_(k1), 15, scratch)
    _shift_xor(words.mul_(_B), 16, scratch)
    torch.bitwise_right_shift(words, 1, out=words).bitwise_and_(0x7FFFFFFF)
    out.copy_(words).mul_(2.0**-31).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    out.neg_().log1p_().neg_().log_().neg_()
