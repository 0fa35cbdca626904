"""Streams that outlive their connection and their gateway: what travels with their sequences, and how another one goes on.

The scheduler keeps the ids of every choice (shared.messages.Kept), the ticket holds the rest of the request. The events of a
choice are a pure function of both, so whoever takes a stream over makes them again from the first and leaves out those that the
client has: its last event id, "STREAM:4.0.7-0", counts them, by choice and (after the dash) of the end.
"""

import asyncio
import re
import secrets
from array import array
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from gateway.choice import Choice, Entry
from gateway.errors import ApiError, BadRequest
from gateway.request import ValidRequest
from gateway.run import RETOLD_AT_ONCE, Known, Prepared, Run
from gateway.sequence import Prompt
from shared.messages import Finish, Kept

if TYPE_CHECKING:
    from gateway.api_keys import Tenant
    from gateway.session import Session

LAST_EVENT_ID = "Last-Event-ID"
_EVENT_ID = re.compile(r"([\w-]{1,64}):(\d{1,9}(?:\.\d{1,9})*)-(\d)")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request without its messages and prompts, which are token ids by now, and how its answer began."""

    request: ValidRequest
    answer_id: str
    created: int
    model: str
    seed: int
    num_choices: int
    max_new: int  # of this choice's prompt
    text: str | None  # of this choice's prompt, where it is echoed


_TICKETS = TypeAdapter(Ticket)


def new_stream() -> str:
    """Whoever knows it, and has a key of the same tenant, can read the stream."""
    return f"stream-{secrets.token_hex(16)}"


def with_tickets(prepared: Prepared, stream: str, answer_id: str, created: int, model: str) -> Prepared:
    """The same request as a stream that can be taken over."""
    asked = prepared.request
    chat = asked.messages is not None
    request = replace(asked, messages=[] if chat else None, prompts=None, template_arguments=None)
    seed, num_choices = prepared.recipe.seed, len(prepared.prompts) * asked.n
    tickets = [
        _TICKETS.dump_json(
            Ticket(request, answer_id, created, model, seed, num_choices, max_new, prompt.text if asked.echo else None)
        )
        for prompt, max_new in zip(prepared.prompts, prepared.max_new, strict=True)
    ]
    return replace(prepared, recipe=replace(prepared.recipe, stream=stream), tickets=tickets)


class Place:
    """How far the events of a stream have come, and how far its client has: by choice, and of the end."""

    def __init__(self, stream: str, num_choices: int, seen: Items[int] = ()) -> None:
        self.seen = list(seen) or [0] * (num_choices + 1)
        self._stream = stream
        self._made = [0] * (num_choices + 1)

    def mark(self, choice: int) -> bytes | None:
        """The id line of the next event of a choice (the number of choices: of the end); None where the client has it."""
        self._made[choice] += 1
        if self._made[choice] <= self.seen[choice]:
            return None
        *choices, end = map(max, self._made, self.seen)
        return f"id: {self._stream}:{'.'.join(map(str, choices))}-{end}\n".encode()


def read_event_id(text: str | None, stream: str) -> list[int]:
    """Events that a client has, by choice and of the end; empty: it has none."""
    if not text:
        return []
    found = _EVENT_ID.fullmatch(text)
    if found is None or found[1] != stream:
        raise BadRequest(f"{LAST_EVENT_ID} must be the last id of an event of {stream}, got {text[:100]!r}", LAST_EVENT_ID)
    return [*map(int, found[2].split(".")), int(found[3])]


@dataclass(frozen=True, slots=True)
class Reopened:
    """A stream as it was when it was taken over."""

    ticket: Ticket
    prepared: Prepared
    place: Place


async def reopen(session: "Session", tenant: "Tenant", found: list[Kept], seen: list[int]) -> Reopened:
    """The request of these choices again, with what is known of its answer. ApiError when a choice is missing."""
    kept = {each.choice: each for each in found}
    tickets = {choice: _TICKETS.validate_json(each.ticket) for choice, each in kept.items()}
    stream, ticket = found[0].stream, tickets[found[0].choice]
    if sorted(kept) != list(range(ticket.num_choices)):
        raise not_found(stream, f"of its {ticket.num_choices} choices only {len(kept)} are left")
    if seen and len(seen) != ticket.num_choices + 1:
        text = f"{LAST_EVENT_ID} counts {len(seen) - 1} choices, but {stream} has {ticket.num_choices}"
        raise BadRequest(text, LAST_EVENT_ID)
    firsts = range(0, ticket.num_choices, ticket.request.n)
    prompts = [Prompt(array("i", kept[at].tokens)[: kept[at].num_prompt].tolist(), tickets[at].text) for at in firsts]
    age_s = max(each.age_s for each in found)
    recipe = session.recipe(ticket.request, ticket.seed, age_s, tenant.name, tenant.salt, tenant.weight)
    prepared = Prepared(
        ticket.request,
        prompts,
        [tickets[at].max_new for at in firsts],
        replace(recipe, stream=stream, turn=found[0].turn),
        [kept[at].ticket for at in firsts],
    )
    place = Place(stream, ticket.num_choices, seen)
    known = [Known(array("i", kept[at].tokens)[kept[at].num_prompt :], kept[at].reason, kept[at].cached) for at in sorted(kept)]
    if ticket.request.logprobs >= 0:
        known = await _without_unscored(session, prepared, known, place.seen)
    return Reopened(ticket, replace(prepared, known=known), place)


def not_found(stream: str, why: str) -> ApiError:
    return ApiError(404, f"There is no stream {stream[:100]!r} to go on with: {why}", code="stream_not_found", param="id")


class _Listed:
    """Counts the text events and the listed tokens of choices that are told their tokens again."""

    def __init__(self) -> None:
        self.num_events: Counter[int] = Counter()  # by choice
        self.num_entries: Counter[int] = Counter()

    def on_text(self, choice: Choice, text: str, entries: Items[Entry]) -> None:
        self.num_events[choice.index] += 1
        self.num_entries[choice.index] += len(entries)

    def on_end(self, choice: Choice) -> None:
        pass


async def _without_unscored(session: "Session", prepared: Prepared, known: list[Known], seen: list[int]) -> list[Known]:
    """Nobody keeps log-probabilities: from the first token on that the client has not seen listed, all are computed again."""
    request, listed = prepared.request, _Listed()
    num_opening = 1 if request.messages is not None or request.return_token_ids else 0
    shortened = []
    for choice, each in zip(Run(session, prepared, listed).choices, known, strict=True):
        choice.start(listed)
        for number, token in enumerate(each.output):
            if number % RETOLD_AT_ONCE == 0:
                await asyncio.sleep(0)
            if listed.num_events[choice.index] + num_opening >= seen[choice.index] or choice.finish_reason:
                break
            choice.retell(token)
        num_echoed = len(choice.sequence.prompt.ids) if request.echo else 0
        output = each.output[: max(0, listed.num_entries[choice.index] - num_echoed)]
        failed = each.reason in (Finish.ERROR, Finish.DEADLINE)
        shortened.append(Known(output, each.reason if failed else 0, each.cached))
    return shortened
