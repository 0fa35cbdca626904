"""Applies the results of one plan: tokens to sequences and gateways, complete pages to the index, ends to sequences."""

from typing import Any

from scheduler.cell import Cell
from scheduler.outbox import Outbox
from scheduler.replica import Flight, Replica
from scheduler.sequence import Sequence
from shared.columns import read_i32
from shared.messages import Finish, PromptScores, StepDone

Out = tuple[str, tuple[Any, ...]]
_COLUMN_BYTES = 4


class BadResult(ValueError):
    """A StepDone that does not belong to the oldest plan or has columns of other lengths."""


def hear(replica: Replica, peer: str, done: StepDone) -> StepDone | None:
    """The result of a step, once the slowest rank has it. Every rank samples the same tokens, or something is broken."""
    if len(replica.peers) == 1:
        return done
    replica.heard[peer].append(done)
    if len(replica.heard[peer]) > len(replica.in_flight):
        raise BadResult(f"{peer} has {len(replica.heard[peer])} results of {len(replica.in_flight)} plans in flight")
    if not all(replica.heard.values()):
        return None
    first, *others = [replica.heard[rank].popleft() for rank in replica.peers]
    for rank, other in enumerate(others, start=1):
        if (other.step, other.tokens) != (first.step, first.tokens):
            raise BadResult(f"rank {rank} has other tokens of step {other.step} than rank 0 of step {first.step}")
    return first


def check(done: StepDone, flight: Flight) -> None:
    sampled, scored = len(flight.sequences), sum(score.num_tokens for score in flight.scores)
    lengths = {
        "step": (done.step, flight.step),
        "tokens": (len(done.tokens), sampled * _COLUMN_BYTES),
        "score_logprobs": (len(done.score_logprobs), scored * _COLUMN_BYTES),
        "score_top_ids": (len(done.score_top_ids), scored * done.score_top_width * _COLUMN_BYTES),
        "score_top_logprobs": (len(done.score_top_logprobs), scored * done.score_top_width * _COLUMN_BYTES),
    }
    if done.logprobs or done.top_width:
        lengths["logprobs"] = (len(done.logprobs), sampled * _COLUMN_BYTES)
        lengths["top_ids"] = (len(done.top_ids), sampled * done.top_width * _COLUMN_BYTES)
        lengths["top_logprobs"] = (len(done.top_logprobs), sampled * done.top_width * _COLUMN_BYTES)
    for name, (got, expected) in lengths.items():
        if got != expected:
            raise BadResult(f"StepDone.{name} of step {flight.step}: got {got}, expected {expected}")


def commit(cell: Cell, replica: Replica, done: StepDone, now: float) -> list[Out]:
    """Take the oldest plan's results. Returns what has to leave before the columns still waiting in the outboxes."""
    flight = replica.in_flight[0]
    check(done, flight)
    replica.in_flight.popleft()
    replica.oldest_since = now
    if done.step_us > 0:
        replica.chunk_budget.observe(flight.num_prefill_tokens, flight.num_decode, done.step_us)
        cell.speed.observe(flight.num_prefill_tokens, flight.num_decode, done.step_us)
    _note_first(flight, now)
    _commit_scores(flight, done)
    out: list[Out] = []
    if done.logprobs:  # the rows of one message share a width: these travel by themselves
        out = flush(cell)
        rows = _rows_by_gateway(flight, done)
        _commit_tokens(cell, replica, flight, done)
        _attach_logprobs(flight, rows, done)
        out += flush(cell)
    else:
        _commit_tokens(cell, replica, flight, done)
    for seq, generation in flight.ends:
        if seq.generation == generation:
            cell.finish(seq, Finish.LENGTH)
    if replica.alone is not None and not replica.alone.alone:
        replica.alone = None
    return out


def _note_first(flight: Flight, now: float) -> None:
    """Rows that end a prefill stand before the decode rows."""
    num_last = len(flight.sequences) - flight.num_decode
    for seq, generation in zip(flight.sequences[:num_last], flight.generations, strict=False):
        if seq.generation == generation and not seq.first_at:
            seq.first_at = now


def flush(cell: Cell) -> list[Out]:
    out: list[Out] = []
    for outbox in cell.gateways.values():
        out.extend(outbox.flush())
    return out


def _commit_tokens(cell: Cell, replica: Replica, flight: Flight, done: StepDone) -> None:
    tokens = read_i32(done.tokens).tolist()
    looks: list[tuple[Sequence, int]] = []  # end reached, stop id, or a page to index
    stale = 0
    for account, count in flight.tally:
        account.charge(count)
    outbox: Outbox | None = None
    for seq, generation, token in zip(flight.sequences, flight.generations, tokens, strict=True):
        if seq.generation != generation:
            stale += 1
            seq.account.charge(-1)
            continue
        if seq.outbox is not outbox:
            outbox = seq.outbox
            add_id, add_index, add_token = outbox.ids.append, outbox.indexes.append, outbox.tokens.append
        known = seq.tokens
        num_known = len(known)
        if token >= 0:
            add_index(num_known - seq.num_prompt)
            add_id(seq.id)
            add_token(token)
            known.append(token)
        if num_known + 1 >= seq.check_at or token in seq.stop_ids or token < 0:
            looks.append((seq, token))
    cell.counters.stale_rows += stale
    cell.counters.generated_tokens += len(tokens) - stale
    for seq, token in looks:
        _look(cell, replica, seq, token)


def _look(cell: Cell, replica: Replica, seq: Sequence, token: int) -> None:
    if token < 0:  # nothing was sampled
        cell.counters.generated_tokens -= 1
        seq.account.charge(-1)
        cell.finish(seq, Finish.ERROR)
        return
    replica.register(seq, len(seq.tokens) - 1)  # the last token's cell is not written yet
    if token in seq.stop_ids and seq.num_output > seq.min_new:
        cell.finish(seq, Finish.STOP)
    elif len(seq.tokens) >= seq.end_len:
        cell.finish(seq, Finish.LENGTH)


def _commit_scores(flight: Flight, done: StepDone) -> None:
    offset, width = 0, done.score_top_width
    for seq, generation, start, count in flight.scores:
        rows = range(offset, offset + count)
        offset += count
        if seq.generation != generation:
            continue
        wanted = min(seq.score_width, width)
        seq.scored = start + count
        logprobs = done.score_logprobs[rows.start * _COLUMN_BYTES : rows.stop * _COLUMN_BYTES]
        top_ids = _rows(done.score_top_ids, rows, width, wanted)
        top_logprobs = _rows(done.score_top_logprobs, rows, width, wanted)
        seq.outbox.scores.append(PromptScores(seq.id, start, logprobs, wanted, top_ids, top_logprobs))


def _rows_by_gateway(flight: Flight, done: StepDone) -> dict[Outbox, list[int]]:
    """Rows whose token goes to a gateway, before the commit releases anybody."""
    rows: dict[Outbox, list[int]] = {}
    columns = zip(flight.sequences, flight.generations, read_i32(done.tokens), strict=True)
    for row, (seq, generation, token) in enumerate(columns):
        if seq.generation == generation and token >= 0:
            rows.setdefault(seq.outbox, []).append(row)
    return rows


def _attach_logprobs(flight: Flight, rows_of: dict[Outbox, list[int]], done: StepDone) -> None:
    """Give every gateway the rows of its own sequences, as wide as the widest of them asked."""
    for outbox, rows in rows_of.items():
        asked = max(flight.sequences[row].top_width for row in rows)
        if asked < 0:
            continue
        outbox.top_width = min(asked, done.top_width)
        outbox.logprobs = _rows(done.logprobs, rows, 1, 1)
        outbox.top_ids = _rows(done.top_ids, rows, done.top_width, outbox.top_width)
        outbox.top_logprobs = _rows(done.top_logprobs, rows, done.top_width, outbox.top_width)


def _rows(column: bytes, rows: range | list[int], width: int, wanted: int) -> bytes:
    """The first wanted values of the given rows of a [rows, width] column."""
    size, row_bytes = wanted * _COLUMN_BYTES, width * _COLUMN_BYTES
    if isinstance(rows, range) and wanted == width:
        return column[rows.start * row_bytes : rows.stop * row_bytes]
    return b"".join([column[at * row_bytes : at * row_bytes + size] for at in rows])
