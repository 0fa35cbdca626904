"""Checks a Submit once: it becomes a Sequence that can finish, or a Reject that says why with numbers."""

import math

from scheduler.accounts import Account
from scheduler.cell import Cell
from scheduler.outbox import Outbox
from scheduler.sequence import Sequence
from shared.columns import read_i32
from shared.messages import Finish, Reject, Submit
from shared.pages import HASH_BYTES
from shared.sampling import SAMPLING_BYTES, Sampling

BAD_REQUEST, TOO_MANY = 400, 429
REBUILDING_S = 60.0  # after the cell's first gateway: what comes in mid-answer was computed under an earlier scheduler
MAX_WEIGHT = 1_000_000
_INT32_MAX = 2**31 - 1


def malformed(submit: Submit, page_tokens: int) -> str:
    """What is wrong with it in itself; empty when nothing is. Types and column lengths are the codec's business."""
    tokens = read_i32(submit.tokens)
    num_output = len(tokens) - submit.num_prompt
    if not 0 < submit.id < 2**63:
        return f"id is {submit.id}, must be from 1 to {2**63 - 1}"
    if not 1 <= submit.num_prompt <= len(tokens):
        return f"num_prompt is {submit.num_prompt}, must be from 1 to the number of tokens, {len(tokens)}"
    if min(tokens) < 0:
        return f"token ids must not be negative, got {min(tokens)}"
    if not 0 <= submit.max_new <= _INT32_MAX or num_output > submit.max_new:
        return f"max_new is {submit.max_new}, must be from the number of output tokens so far, {num_output}, to {_INT32_MAX}"
    if submit.min_new < 0:
        return f"min_new is {submit.min_new}, must not be negative"
    if len(submit.page_hashes) != len(tokens) // page_tokens * HASH_BYTES:
        count = len(submit.page_hashes) // HASH_BYTES
        return f"{count} page hashes for {len(tokens)} tokens, must be {len(tokens) // page_tokens} (pages of {page_tokens})"
    if len(submit.root_hash) != HASH_BYTES:
        return f"root_hash has {len(submit.root_hash)} bytes, must be {HASH_BYTES}"
    if len(submit.sampling) != SAMPLING_BYTES:
        return f"sampling has {len(submit.sampling)} bytes, must be {SAMPLING_BYTES}"
    if Sampling.unpack(submit.sampling).num_prompt != submit.num_prompt:
        return f"num_prompt is {submit.num_prompt}, but {Sampling.unpack(submit.sampling).num_prompt} in sampling"
    if not 1 <= submit.weight <= MAX_WEIGHT:
        return f"weight is {submit.weight}, must be from 1 to {MAX_WEIGHT}"
    for name, seconds in (("age_s", submit.age_s), ("deadline_s", submit.deadline_s)):
        if not (math.isfinite(seconds) and seconds >= 0):
            return f"{name} is {seconds}, must be a number of seconds"
    return ""


def too_long(cell: Cell, seq: Sequence) -> str:
    """Why it can never run here; empty when it can or when no worker has ever been seen. One output token must fit."""
    needed = len(seq.tokens) + (seq.max_new > 0)
    if cell.limit == 0 or needed <= cell.limit:
        return ""
    if needed > cell.max_model_len:
        return (
            f"the sequence has {len(seq.tokens)} tokens and needs room for {needed}, "
            f"but the maximum length of this model is {cell.max_model_len} tokens"
        )
    pages, pool_pages = -(-needed // cell.page_tokens), cell.pool_tokens // cell.page_tokens
    return f"the sequence needs {pages} pages of {cell.page_tokens} tokens, but the pool has {pool_pages} pages"


def admit(cell: Cell, outbox: Outbox, submit: Submit, now: float) -> Sequence | Reject:
    """The sequence is in the queue afterwards, or nothing has changed."""
    text = malformed(submit, cell.page_tokens)
    if not text and submit.id in outbox.sequences:
        text = f"id {submit.id} is in use"
    if text:
        return Reject(submit.id, BAD_REQUEST, "invalid_request", text, "", 0.0)
    cell.last_serial += 1
    order = (submit.priority, now - submit.age_s, cell.last_serial)
    deadline = now + submit.deadline_s if submit.deadline_s else 0.0
    account = cell.accounts.of(submit.priority, submit.tenant, submit.weight)
    seq = Sequence(submit, outbox, account, order, deadline)
    text = too_long(cell, seq)
    if text and not seq.num_output:  # one that has output already ends with LENGTH, as if it had grown here
        return Reject(submit.id, BAD_REQUEST, "context_length_exceeded", text, "", 0.0)
    text = overload(cell, seq, now)
    if text and not _was_admitted(cell, seq, submit):
        return Reject(submit.id, TOO_MANY, "queue_full", text, "", predicted_wait_s(cell, now) or 1.0)
    if submit.again:
        _rebuild(cell, seq, now)
    account.live += 1
    outbox.sequences[seq.id] = seq
    cell.waiting.add(seq)
    if seq.stream and (unwanted := cell.shelf.adopt(seq, now)) is not None:
        cell.finish(unwanted, Finish.ABORT)
    cell.queue_rate.on_queue(now, True)
    return seq


def overload(cell: Cell, seq: Sequence, now: float) -> str:
    """Which limit of the queue one more sequence would break, with both numbers; empty when none. An empty queue takes all."""
    waiting, account = cell.waiting, seq.account
    if len(waiting) >= cell.max_queued and account.waiting >= _part(cell, account, cell.max_queued):
        return f"{len(waiting)} sequences are waiting, at most {cell.max_queued} may{_besides(cell, account, now)}"
    if not len(waiting):
        return ""
    num_tokens, own_tokens = waiting.num_tokens + len(seq.tokens), account.waiting_tokens + len(seq.tokens)
    if 0 < cell.max_queued_tokens < num_tokens and own_tokens > _part(cell, account, cell.max_queued_tokens):
        return f"{num_tokens} tokens would be waiting, at most {cell.max_queued_tokens} may{_besides(cell, account, now)}"
    if cell.max_wait_s > 0 and (rate := cell.queue_rate.per_s(now)) > 0:
        wait_s = _ahead(cell, account) / rate
        if wait_s > cell.max_wait_s:
            return f"the predicted wait is {wait_s:.1f} s, at most {cell.max_wait_s:g} s is allowed"
    return ""


def _part(cell: Cell, account: Account, limit: int) -> float:
    """What a full queue still takes of this tenant: its share, so that nobody's queue keeps others out."""
    return limit * account.weight / cell.accounts.waiting_weight(account)


def _besides(cell: Cell, account: Account, now: float) -> str:
    """What else somebody who is refused may want to know."""
    own = f"{account.waiting} of the sequences are of your tenant; " if account.waiting < len(cell.waiting) else ""
    return f"; {own}the predicted wait is {predicted_wait_s(cell, now):.1f} s"


def _ahead(cell: Cell, account: Account) -> float:
    """About how many start before one more of this account: with fair shares, its own queue slowed down by the others."""
    if account.waiting == len(cell.waiting):
        return account.waiting
    return min(len(cell.waiting), account.waiting * cell.accounts.waiting_weight(account) / account.weight)


def _rebuild(cell: Cell, seq: Sequence, now: float) -> None:
    """Charge what an earlier scheduler computed of it, where this one has not done so before."""
    ours = seq.order[1] >= cell.born or now > cell.born + REBUILDING_S
    if seq.num_output and not ours:
        seq.account.charge(seq.num_prompt - max(seq.first_cached, 0) + seq.num_output)


def _was_admitted(cell: Cell, seq: Sequence, submit: Submit) -> bool:
    """Who was let in stays in: it is told again, has started, or is taken over."""
    return submit.again or seq.started or seq.num_output > 0 or cell.shelf.holds(seq.stream)


def predicted_wait_s(cell: Cell, now: float) -> float:
    """Time until a request that arrives now starts, at the rate at which sequences have started lately."""
    if not len(cell.waiting):
        return 0.0
    rate = cell.start_rate(now)
    return min(len(cell.waiting) / rate, 600.0) if rate > 0 else 600.0
