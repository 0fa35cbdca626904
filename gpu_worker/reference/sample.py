"""From logits to tokens, for all sampled rows at once; the exact rules stand in ARCHITECTURE.md."""

import torch
from torch import Tensor

from gpu_worker.batch import Edits, Needs, Sampled
from gpu_worker.reference.noise import add_gumbel
from gpu_worker.slots import Slots

TINY = 1e-30  # temperatures beyond it act like it: 0 and infinity have no place in a division
FEW = 256  # a filter looks at this many largest logits first, and at all of them only when these do not decide


def sample(logits: Tensor, slots: Slots, row_slots: Tensor, positions: Tensor, needs: Needs) -> Sampled:
    """logits f32[S, V], overwritten. row_slots, positions i32[S]."""
    rows = row_slots.long()
    logprobs, top_ids, top_logprobs = _scores(logits, slots, rows, needs)
    if needs.edits is not None:
        apply_edits(logits, needs.edits)
    if needs.penalized is not None:
        _penalize(logits, slots, rows, positions, needs.penalized)
    if needs.filtered is not None:
        chosen = logits[needs.filtered]
        cut = _thresholds(chosen, slots, rows[needs.filtered])
        logits[needs.filtered] = chosen.masked_fill_(chosen < cut[:, None], -torch.inf)
    if needs.noise:
        add_gumbel(logits, slots.column_f32("temperature")[rows], slots.seeds[rows], positions)
    best, tokens = logits.max(dim=-1)
    tokens = tokens.int().masked_fill_(~torch.isfinite(best), -1)  # -inf: nothing is allowed; NaN: the model failed on this row
    if needs.scored is None:
        return Sampled(tokens, None, None, None)
    assert logprobs is not None
    chosen = logprobs.gather(1, tokens[needs.scored].clamp(min=0).long()[:, None])[:, 0]
    all_logprobs = torch.full(tokens.shape, torch.nan)
    all_logprobs[needs.scored] = chosen
    return Sampled(tokens, all_logprobs, top_ids, top_logprobs)


def apply_edits(logits: Tensor, edits: Edits) -> None:
    bias = None
    if len(edits.allow_only):
        named = torch.zeros(logits.shape, dtype=torch.bool)
        named[edits.rows, edits.tokens] = True
        bias = ~named[edits.allow_only]
    logits.index_put_((edits.rows, edits.tokens), edits.values, accumulate=True)
    if bias is not None:
        logits[edits.allow_only] = logits[edits.allow_only].masked_fill_(bias, -torch.inf)


def _scores(logits: Tensor, slots: Slots, rows: Tensor, needs: Needs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Log-probabilities [scored rows, V] of the raw logits, and the alternatives of all sampled rows."""
    if needs.scored is None:
        return None, None, None
    logprobs = torch.log_softmax(logits[needs.scored], dim=-1)
    if not needs.top_width:
        return logprobs, None, None
    ids = torch.zeros((len(rows), needs.top_width), dtype=torch.int32)
    values = torch.full((len(rows), needs.top_width), -torch.inf)
    top = torch.topk(logprobs, min(needs.top_width, logprobs.shape[1]), dim=-1)
    beyond = torch.arange(top.values.shape[1]) >= slots.column_i32("logprobs")[rows[needs.scored]][:, None]
    ids[needs.scored, : top.values.shape[1]] = top.indices.int().masked_fill_(beyond, 0)
    values[needs.scored, : top.values.shape[1]] = top.values.masked_fill_(beyond, -torch.inf)
    return logprobs, ids, values


def _penalize(logits: Tensor, slots: Slots, rows: Tensor, positions: Tensor, some: Tensor) -> None:
    """Presence and frequency count the output, repetition also the prompt."""
    members = rows[some]
    lengths = positions[some, None]
    width = int(lengths.max())
    places = torch.arange(width)
    ids = slots.tokens[members, :width].long()
    known = places < lengths
    in_output = known & (places >= slots.column_i32("num_prompt")[members, None])
    vocab = logits.shape[1]
    counts = torch.zeros((len(members), vocab)).scatter_add_(1, ids, in_output.float())
    seen = torch.zeros((len(members), vocab)).scatter_add_(1, ids, known.float()) > 0
    chosen = logits[some]
    repetition = slots.column_f32("repetition_penalty")[members, None]
    chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    chosen -= slots.column_f32("frequency_penalty")[members, None] * counts
    chosen -= slots.column_f32("presence_penalty")[members, None] * (counts > 0)
    logits[some] = chosen


def _thresholds(logits: Tensor, slots: Slots, rows: Tensor) -> Tensor:
    """f32[n]: the lowest logit each row keeps."""
    vocab = logits.shape[1]
    temperature = slots.column_f32("temperature")[rows].clamp(TINY, 1 / TINY)
    top_k = slots.column_i32("top_k")[rows]
    top_k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    top_p = slots.column_f32("top_p")[rows]
    floor = logits.amax(dim=-1) + temperature * slots.column_f32("min_p")[rows].log()  # log 0 = -inf: no floor
    few = min(FEW, vocab)
    largest = torch.topk(logits, few, dim=-1).values
    cut, decided = _cut(logits, largest, temperature, top_k, top_p, floor)
    if few < vocab and not bool(decided.all()):
        rest = ~decided
        ordered = torch.sort(logits[rest], dim=-1, descending=True).values
        cut[rest], _ = _cut(logits[rest], ordered, temperature[rest], top_k[rest], top_p[rest], floor[rest])
    return cut


def _cut(
    logits: Tensor, largest: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    """Thresholds from the largest logits [n, few] in falling order, and which rows they decide."""
    few, vocab = largest.shape[1], logits.shape[1]
    kth = largest.gather(1, (top_k.clamp(max=few) - 1).long()[:, None])[:, 0]
    inside = (top_k <= few) | (top_k == vocab)
    keep = torch.where(top_k == vocab, floor, torch.maximum(kth, floor))
    # Of the softmax over what top_k and min_p keep: mass of the strictly larger logits.
    top = largest[:, :1]
    heat = temperature[:, None]
    kept = (logits >= keep[:, None]) & (logits > -torch.inf)
    total = torch.where(kept, ((logits - top) / heat).exp(), 0.0).sum(dim=-1, keepdim=True)
    mass = torch.where(largest >= keep[:, None], ((largest - top) / heat).exp(), 0.0).cumsum(dim=-1) / total
    reached = mass >= top_p[:, None]
    place = reached.int().argmax(dim=-1, keepdim=True)  # first place where the mass reaches top_p
    nucleus = torch.where(top_p < 1, largest.gather(1, place)[:, 0], -torch.inf)
    decided = inside & (reached.any(dim=-1) | (top_p >= 1) | (largest[:, -1] < keep))
    nucleus = torch.where(reached.any(dim=-1), nucleus, -torch.inf)
    return torch.maximum(keep, nucleus), decided
