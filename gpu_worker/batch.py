"""What one step computes: tokens, positions and cells of all rows, and what its sampled rows ask for.

Index spaces: token (0 .. T-1: prefill tokens in row order, then one per decode row), row (0 .. R-1: chunk, last, decode),
sampled row (0 .. S-1: the num_last + num_decode last rows).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray = npt.NDArray[np.int32]


class Edits(NamedTuple):
    """Active logit edits of the sampled rows, flat. Several edits of one token add up."""

    rows: Tensor  # i64[E], sampled row
    tokens: Tensor  # i64[E]
    values: Tensor  # f32[E], -inf forbids
    allow_only: Tensor  # i64[A], sampled rows where only tokens named by an edit may be sampled; may be empty


class Needs(NamedTuple):
    """What the host knows about the sampled rows, so that nobody pays for what no row asks. None: no row asks."""

    noise: bool  # any temperature above 0
    edits: Edits | None
    penalized: Tensor | None  # i64[n], sampled rows with a penalty
    filtered: Tensor | None  # i64[n], sampled rows with top_k, top_p or min_p
    scored: Tensor | None  # i64[n], sampled rows that want log-probabilities
    top_width: int  # alternatives per sampled row, the largest asked for; 0: none


class Sampled(NamedTuple):
    tokens: Tensor  # i32[S]; -1: no token is allowed
    logprobs: Tensor | None  # f32[S], NaN where not asked; None when no row asks
    top_ids: Tensor | None  # i32[S, top_width], id 0 with -inf where not asked
    top_logprobs: Tensor | None  # f32[S, top_width]


@dataclass(slots=True, kw_only=True)
class Batch:
    input_ids: Tensor  # i32[T]
    positions: Tensor  # i32[T], index of the token in its sequence
    cells: Tensor  # i64[T], page * page_tokens + offset; cells of page 0 are scratch
    row_slots: Tensor  # i32[R]
    query_starts: Tensor  # i32[R + 1], tokens of row r: query_starts[r] .. query_starts[r + 1]
    context_lens: Tensor  # i32[R], the slot's length after this step
    page_table: Tensor  # i32[slots, max_pages], page ids of every slot; entries at or beyond its length mean nothing
    num_chunk: int
    num_last: int
    num_decode: int
    groups: list[tuple[int, int]]  # (decode rows, leading pages they share), from the first decode row on

    # Sampling
    sampled_tokens: Tensor  # i64[S], token whose hidden state is sampled
    sample_slots: Tensor  # i32[S]
    sample_positions: Tensor  # i32[S], index of the sampled token in its sequence
    needs: Needs

    # Prompt scores: token whose next-token distribution is wanted, and the id whose log-probability is wanted
    score_tokens: Tensor | None = None  # i64[P]
    score_targets: Tensor | None = None  # i64[P]
    score_width: int = 0

    # The same on the host, for whoever plans work by length
    host_row_slots: IntArray
    host_query_lens: IntArray  # [R]
    host_context_lens: IntArray  # [R]

    # What an operation computes once per step and uses in every layer, by its own key
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.num_chunk + self.num_last + self.num_decode

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def first_decode_token(self) -> int:
        return self.num_tokens - self.num_decode
