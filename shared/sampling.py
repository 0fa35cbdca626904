"""How one sequence is sampled: the fixed record that opens a slot, and the edits of its logits."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

FOREVER = 2**31 - 1  # Edit.until of an edit that never ends


class Flag:
    NEEDS_HISTORY = 1  # penalties or conditional edits look back: the worker must hold this slot's whole token history
    ALLOW_ONLY = 2  # only tokens named by an edit may be sampled


class Sampling(NamedTuple):
    """Field order is the wire order. Defaults change nothing: plain sampling from the model's distribution."""

    seed: int = 0  # u64; with the position of the sampled token it determines the noise
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches it, in (0, 1]
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest, in [0, 1]
    presence_penalty: float = 0.0  # subtracted once from the logit of every token already in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or output
    top_k: int = 0  # keep the k likeliest; 0: all
    num_prompt: int = 0  # prompt tokens; the output index of position p is p - num_prompt
    logprobs: int = -1  # alternatives returned per sampled token; -1: no log-probabilities
    score_width: int = -1  # alternatives returned per prompt token; -1: prompt not scored
    flags: int = 0

    def pack(self) -> bytes:
        return _SAMPLING.pack(*self)

    @classmethod
    def unpack(cls, record: bytes) -> "Sampling":
        return cls(*_SAMPLING.unpack(record))


class Edit(NamedTuple):
    """Add value (-inf: forbid) to the logit of token while the output index is below until.

    Edits of negative tokens are conditions of the next one that is not: -1 - id, in order, are the last output ids without
    which it does nothing. Whoever sends conditions sets NEEDS_HISTORY.
    """

    token: int
    value: float
    until: int = FOREVER


# 4 bytes of padding keep the seed of every record in a column 8-byte aligned.
_SAMPLING = struct.Struct("<Q6f5i4x")
_EDIT = struct.Struct("<ifi")
SAMPLING_BYTES = _SAMPLING.size
EDIT_BYTES = _EDIT.size

# The same layouts as numpy structured dtypes, for the worker: np.frombuffer(plan.opens, OPEN_DTYPE).
_SAMPLING_FIELDS = [
    ("seed", "<u8"),
    ("temperature", "<f4"),
    ("top_p", "<f4"),
    ("min_p", "<f4"),
    ("presence_penalty", "<f4"),
    ("frequency_penalty", "<f4"),
    ("repetition_penalty", "<f4"),
    ("top_k", "<i4"),
    ("num_prompt", "<i4"),
    ("logprobs", "<i4"),
    ("score_width", "<i4"),
    ("flags", "<i4"),
    ("padding", "<i4"),
]
OPEN_FIELDS = [("slot", "<i4"), ("computed", "<i4"), *_SAMPLING_FIELDS]
EDIT_FIELDS = [("token", "<i4"), ("value", "<f4"), ("until", "<i4")]


def conditional(ids: Sequence[int], value: float) -> list[Edit]:
    """An edit of the last of these ids where the output ends with all ids before it."""
    return [*(Edit(-1 - each, 0.0) for each in ids[:-1]), Edit(ids[-1], value)]


def pack_edits(edits: list[Edit]) -> bytes:
    return b"".join(_EDIT.pack(*edit) for edit in edits)


def unpack_edits(column: bytes) -> list[Edit]:
    return [Edit(*fields) for fields in _EDIT.iter_unpack(column)]


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one choice of a request: choice 0 keeps the request's seed, so n = 1 equals the first of n."""
    return (seed + choice * 0x9E3779B97F4A7C15) & (2**64 - 1)
