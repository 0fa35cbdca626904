"""Log-probabilities of prompt tokens: what max_new = 0 and echo ask for. Rare, so plain torch on every device."""

import torch
from torch import Tensor

from gpu_worker.batch import Batch
from gpu_worker.model.decoder import Decoder

ROWS_AT_ONCE = 64  # positions whose whole vocabulary is in memory at a time


def prompt_scores(decoder: Decoder, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Of each score position: log of its target f32[P], ids i32[P, width] and logs f32[P, width] of the likeliest."""
    assert batch.score_tokens is not None and batch.score_targets is not None
    logprobs, ids, tops = [], [], []
    for tokens, targets in zip(
        torch.split(batch.score_tokens, ROWS_AT_ONCE), torch.split(batch.score_targets, ROWS_AT_ONCE), strict=True
    ):
        rows = torch.log_softmax(decoder.logits(hidden.index_select(0, tokens)), dim=-1)
        top = torch.topk(rows, min(batch.score_width, rows.shape[1]), dim=-1)
        logprobs.append(rows.gather(1, targets[:, None])[:, 0])
        ids.append(top.indices.int())
        tops.append(top.values)
    return torch.cat(logprobs), torch.cat(ids), torch.cat(tops)
