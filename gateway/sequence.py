"""One sequence as the gateway holds it: all ids delivered so far, and the Submit that would continue it from there."""

import math
from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from gateway.request import ValidRequest
from shared import columns, pages
from shared.messages import Finish, GatewayWelcome, Kept, Reject, Submit
from shared.sampling import Edit, Flag, Sampling, choice_seed, conditional, pack_edits
from shared.tracing import trace_id

TOKEN_BYTES = 4


class Score(NamedTuple):
    """Log-probability of one token (None: it has none, being first), and its likeliest alternatives."""

    logprob: float | None
    top: list[tuple[int, float]]


class Sink(Protocol):
    """Who is told what becomes of a sequence. Called on the loop; nothing is called after the end."""

    def on_token(self, token: int, score: Score | None, now: float) -> None: ...

    def on_scores(self, scores: list[Score]) -> None:
        """Scores of further prompt tokens, in order; the first token of a prompt has none."""

    def on_finish(self, reason: int) -> None: ...

    def on_reject(self, reject: Reject) -> None: ...

    def on_failure(self, text: str) -> None:
        """This process could not handle what arrived."""


@dataclass(slots=True)
class Prompt:
    """One prompt's ids, and its page hashes once they are known."""

    ids: list[int]
    text: str | None = None  # as the client gave it; None: it came as ids, or was cut
    column: bytes = b""
    echo: tuple[str, list[int]] | None = None  # its text and where each token begins in it, once somebody wanted them
    _hashed: tuple[bytes, int, bytes, bytes] = (b"", 0, b"", b"")  # key, page_tokens, root, hashes

    def __post_init__(self) -> None:
        self.column = columns.i32(self.ids)

    def hashes(self, welcome: GatewayWelcome, root: bytes) -> bytes:
        wanted = (welcome.hash_key, welcome.page_tokens, root)
        if self._hashed[:3] != wanted:
            hashes = pages.page_hashes(welcome.hash_key, root, self.column, welcome.page_tokens)
            self._hashed = (*wanted, hashes)
        return self._hashed[3]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How every sequence of one request is computed, in the form the scheduler wants it."""

    seed: int
    sampling: Sampling  # without the seed and num_prompt of a choice
    edits: bytes
    stop_ids: frozenset[int]
    stop_column: bytes
    min_new: int
    priority: int
    tenant: str
    weight: int  # of the tenant, beside others who wait
    salt: str  # of the page hashes
    arrived: float  # loop time
    deadline_s: float
    stream: str = ""  # under which another gateway may take it over
    turn: int = 0  # how often that had happened when this gateway got it
    request: str = ""  # the id under which logs know the request
    trace: str = ""  # W3C traceparent of its span; empty: it is not traced

    @property
    def labels(self) -> dict[str, str]:
        """Under which metrics name the request (exemplars)."""
        ids = {"request_id": self.request, "trace_id": trace_id(self.trace)}
        return {name: value for name, value in ids.items() if value}

    @classmethod
    def of(
        cls,
        request: ValidRequest,
        eos_ids: tuple[int, ...],
        seed: int,
        arrived: float,
        tenant: str = "",
        salt: str = "",
        weight: int = 1,
        banned: Ids[tuple[int, ...]] = (),
    ) -> "Recipe":
        stop_ids = dict.fromkeys((*(() if request.ignore_eos else eos_ids), *request.stop_token_ids))
        penalized = (request.presence_penalty, request.frequency_penalty, request.repetition_penalty) != (0, 0, 1)
        looks_back = penalized or any(len(ids) > 1 for ids in banned)
        sampling = Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            top_k=request.top_k,
            logprobs=request.logprobs,
            score_width=request.score_width,
            flags=Flag.NEEDS_HISTORY * looks_back + Flag.ALLOW_ONLY * bool(request.allowed_token_ids),
        )
        edits = pack_edits([*_edits(request, stop_ids), *_bans(request, banned)])
        stops = columns.i32(stop_ids)
        return cls(
            seed % 2**64,
            sampling,
            edits,
            frozenset(stop_ids),
            stops,
            request.min_tokens,
            request.priority,
            tenant,
            weight,
            salt,
            arrived,
            request.deadline_s,
        )


def _edits(request: ValidRequest, stop_ids: Ids[int] | dict[int, None]) -> list[Edit]:
    """Biases, allowed ids, stop ids forbidden until min_tokens. Where only some ids are allowed, no other may be named."""
    allowed = dict.fromkeys(request.allowed_token_ids)
    biases = request.logit_bias or {}
    if allowed:
        edits = [Edit(token, biases.get(token, 0.0)) for token in allowed]
    else:
        edits = [Edit(token, bias) for token, bias in biases.items()]
    if request.min_tokens:
        edits += [Edit(token, -math.inf, request.min_tokens) for token in stop_ids if not allowed or token in allowed]
    return edits


def _bans(request: ValidRequest, banned: Ids[tuple[int, ...]]) -> list[Edit]:
    allowed = frozenset(request.allowed_token_ids)
    return [edit for ids in banned if not allowed or ids[-1] in allowed for edit in conditional(ids, -math.inf)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request. prompt + output is what has been delivered: the truth a lost scheduler is told again."""

    prompt: Prompt
    recipe: Recipe
    choice: int
    max_new: int
    sink: Sink
    id: int = 0  # under which the scheduler knows it now; 0: not yet, or no more
    output: "array[int]" = field(default_factory=lambda: array("i"))
    cached: int = -1  # prompt tokens found in the cache at its first start; -1: not started
    num_scored: int = 1  # prompt tokens whose score arrived (the first has none)
    index: int = 0  # of the choice in its request
    ticket: bytes = b""  # gateway.resume.Ticket, of a stream that another gateway may take over
    reason: int = 0  # Finish, once the choice has ended
    epoch: int = 0  # of the scheduler that was told of it last

    def submit(self, welcome: GatewayWelcome, now: float, *, again: bool) -> Submit:
        recipe, prompt = self.recipe, self.prompt
        root = pages.root_hash(welcome.hash_key, recipe.salt)
        hashes = prompt.hashes(welcome, root)
        tokens = prompt.column
        if self.output:
            tokens += self.output.tobytes()
            whole = len(hashes) // pages.HASH_BYTES * welcome.page_tokens * TOKEN_BYTES
            parent = hashes[-pages.HASH_BYTES :] or root
            hashes += pages.page_hashes(welcome.hash_key, parent, tokens[whole:], welcome.page_tokens)
        seed = choice_seed(recipe.seed, self.choice)
        age_s = max(0.0, now - recipe.arrived)
        return Submit(
            id=self.id,
            tokens=tokens,
            num_prompt=len(prompt.ids),
            max_new=self.max_new,
            min_new=recipe.min_new,
            stop_ids=recipe.stop_column,
            sampling=recipe.sampling._replace(seed=seed, num_prompt=len(prompt.ids)).pack(),
            edits=recipe.edits,
            root_hash=root,
            page_hashes=hashes,
            priority=recipe.priority,
            tenant=recipe.tenant,
            age_s=age_s,
            # A deadline that passed while nobody could be asked is still the scheduler's to answer.
            deadline_s=max(0.001, recipe.deadline_s - age_s) if recipe.deadline_s else 0.0,
            cached=self.cached,
            stream=recipe.stream,
            turn=recipe.turn,
            choice=self.index,
            ticket=self.ticket,
            weight=recipe.weight,
            request=recipe.request,
            trace=recipe.trace,
            again=again,
        )

    def kept(self, now: float) -> Kept:
        """What a scheduler needs to hand it to another gateway."""
        recipe, prompt = self.recipe, self.prompt
        names = (recipe.stream, recipe.turn, self.index, recipe.tenant, self.ticket)
        tokens = prompt.column + self.output.tobytes()
        return Kept(0, 0, *names, tokens, len(prompt.ids), self.cached, self.reason, max(0.0, now - recipe.arrived))

    @property
    def finished_reason(self) -> int:
        """Why nothing is left to compute although the finish itself did not arrive; 0: something is."""
        output = self.output
        if output and output[-1] in self.recipe.stop_ids and len(output) > self.recipe.min_new:
            return Finish.STOP
        scored = self.recipe.sampling.score_width < 0 or self.num_scored >= len(self.prompt.ids)
        return Finish.LENGTH if len(output) >= self.max_new and scored else 0
