"""Log-probabilities of chosen tokens and of the likeliest alternatives, for the rows that ask."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["WIDTH"])
def _logprobs(logits, rows, targets, chosen, top_ids, top_values, vocabulary, logits_stride, WIDTH, BLOCK: tl.constexpr):
    # One program per asking row: one pass for the log-sum-exp, then one pass (in L2) per alternative, each taking the
    # largest logit after the previous one in the order (value falling, id rising).
    number = tl.program_id(0)
    row = tl.load(rows + number)
    line = logits + row * logits_stride
    highest = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        id = first + tl.arange(0, BLOCK)
        x = tl.load(line + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, x)
        total = total * tl.exp(highest - new_highest) + tl.exp(x - new_highest)
        highest = new_highest
    largest = tl.max(highest, 0)
    norm = largest + tl.log(tl.sum(total * tl.exp(highest - largest), 0))
    target = tl.load(targets + row)
    target_logit = tl.load(line + tl.maximum(target, 0)).to(tl.float32)
    tl.store(chosen + row, tl.where(target >= 0, target_logit - norm, float("nan")))

    last_value = float("inf")
    last_id = -1
    for place in range(0, WIDTH):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for first in range(0, vocabulary, BLOCK):
            id = first + tl.arange(0, BLOCK)
            x = tl.load(line + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
            after = (x < last_value) | ((x == last_value) & (id > last_id))
            take = after & (x > best)
            best = tl.where(take, x, best)
            best_id = tl.where(take, id, best_id)
        last_value = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last_value, best_id, 0x7FFFFFFF), 0)
        found = last_value > float("-inf")
        tl.store(top_ids + row * WIDTH + place, tl.where(found, last_id, 0))
        tl.store(top_values + row * WIDTH + place, tl.where(found, last_value - norm, float("-inf")))


def logprobs(logits: Tensor, rows: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the softmax of logits: log-probability of targets, and ids and log-probabilities of the width likeliest.

    logits: [S, V] f32 or bf16; rows: i64 [n] that ask; targets: i32 [S], -1: none
    -> f32 [S] (NaN where not asked), i32 [S, width] (0), f32 [S, width] (-inf); equal logits in order of id.
    """
    count = logits.shape[0]
    chosen = torch.full((count,), float("nan"), dtype=torch.float32, device=logits.device)
    top_ids = torch.zeros((count, width), dtype=torch.int32, device=logits.device)
    top_values = torch.full((count, width), float("-inf"), dtype=torch.float32, device=logits.device)
    if rows.shape[0]:
        block = min(8192, triton.next_power_of_2(logits.shape[1]))
        _logprobs[(rows.shape[0],)](
            logits, rows, targets, chosen, top_ids, top_values, logits.shape[1], logits.stride(0), width,
            BLOCK=block, num_warps=16 if block >= 4096 else 4,
        )  # fmt: skip
    return chosen, top_ids, top_values
