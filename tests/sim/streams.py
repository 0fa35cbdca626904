"""What a gateway of the simulated cell knows, and the checks of every message it gets."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shared.columns import read_f32, read_i32, read_i64
from shared.messages import Drain, Finish, GatewayWelcome, PromptScores, Reject, Status, Tokens
from shared.sampling import Edit, Sampling
from tests.sim.fake_worker import cell_hash, reference, score, top


class Broken(AssertionError):
    """The history shows something that must never happen."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise Broken(text)


def prefix_hash(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = cell_hash(value, token)
    return value


@dataclass(slots=True)
class Stream:
    """What a gateway knows about one sequence."""

    prompt: list[int]
    max_new: int
    min_new: int
    stop_ids: list[int]
    sampling: Sampling
    edits: list[Edit]
    salt: str
    priority: int
    output: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    started: int = 0  # times the scheduler reported its start, for this submit
    aborted: bool = False
    end: int | str = ""  # Finish reason, or the code of a Reject


@dataclass(slots=True)
class Gateway:
    name: str
    peer: str
    streams: dict[int, Stream] = field(default_factory=dict)
    arrived: deque[Any] = field(default_factory=deque)

    @property
    def live(self) -> list[int]:
        return [number for number, stream in self.streams.items() if stream.end == ""]

    def read(self) -> None:
        """Take in and check everything that has arrived."""
        while self.arrived:
            message = self.arrived.popleft()
            match message:
                case Tokens():
                    self._on_tokens(message)
                case PromptScores():
                    self._on_scores(message)
                case Reject():
                    stream = self.streams[message.id]
                    require(stream.end == "", f"{message} after the end {stream.end}")
                    stream.end = message.code
                case GatewayWelcome() | Status() | Drain():
                    pass
                case _:
                    raise Broken(f"unexpected {message}")

    def _on_tokens(self, message: Tokens) -> None:
        ids, tokens = read_i64(message.ids).tolist(), read_i32(message.tokens).tolist()
        for number, cached in zip(read_i64(message.started_ids), read_i32(message.started_cached), strict=True):
            stream = self.streams[number]
            stream.started += 1
            require(stream.started == 1, f"sequence {number} started twice")
            require(0 <= cached <= len(stream.prompt), f"{cached = } of {len(stream.prompt)}")
            require(stream.sampling.score_width < 0 or not cached, "a scored prompt read the cache")
        for row, (number, at) in enumerate(zip(ids, read_i32(message.indexes), strict=True)):
            stream = self.streams[number]
            require(stream.end == "", f"token of sequence {number} after its end")
            require(at == len(stream.output), f"token {at} of sequence {number} after {len(stream.output)}")
            stream.output.append(tokens[row])
            if stream.sampling.logprobs >= 0:
                self._check_logprobs(stream, message, row)
        for number, reason in zip(read_i64(message.finished_ids), message.finished_reasons, strict=True):
            stream = self.streams[number]
            require(stream.end == "", f"sequence {number} ended twice")
            stream.end = reason

    def _check_logprobs(self, stream: Stream, message: Tokens, row: int) -> None:
        prefix = prefix_hash((stream.prompt + stream.output)[:-1])
        require(len(message.logprobs) == len(message.tokens), "no logprobs")
        require(read_f32(message.logprobs)[row] == score(prefix, stream.output[-1]), "logprob of another row")
        width, wanted = message.top_width, stream.sampling.logprobs
        ids, values = top(prefix, wanted)
        at = row * width
        require(read_i32(message.top_ids)[at : at + wanted].tolist() == ids, "alternatives of another row")
        require(read_f32(message.top_logprobs)[at : at + wanted].tolist() == values, "alternatives of another row")

    def _on_scores(self, message: PromptScores) -> None:
        stream = self.streams[message.id]
        require(message.start == len(stream.scores) + 1, f"scores from {message.start} after {len(stream.scores)}")
        stream.scores += read_f32(message.logprobs).tolist()
        require(message.top_width == stream.sampling.score_width, f"{message.top_width = }")
        ends = range(message.start, message.start + len(message.logprobs) // 4)
        tops = [top(prefix_hash(stream.prompt[:end]), message.top_width) for end in ends]
        require(read_i32(message.top_ids).tolist() == [each for ids, _ in tops for each in ids], "score alternatives")

    def check(self, number: int, stream: Stream, limit: int, failures: int) -> None:
        """limit: most tokens of a sequence; failures: how often a worker failed in this history."""
        length = len(stream.prompt)
        if stream.end == "context_length_exceeded":
            require(length + (stream.max_new > 0) > limit, f"sequence {number} of {length} tokens was refused")
            return
        end_len = min(length + stream.max_new, limit)
        edits = tuple((edit.token, edit.value, edit.until) for edit in stream.edits)
        expected, error = reference(
            stream.prompt,
            end_len,
            stream.sampling,
            edits,
            frozenset(stream.stop_ids),
            stream.min_new,
        )
        require(stream.output == expected[: len(stream.output)], f"sequence {number}: {stream.output} is not {expected}")
        scores = [score(prefix_hash(stream.prompt[:at]), stream.prompt[at]) for at in range(1, length)]
        require(stream.scores == scores[: len(stream.scores)], f"sequence {number}: scores differ")
        if stream.end == Finish.ABORT:
            return
        if stream.end == Finish.ERROR and not error:
            require(failures > 1, f"sequence {number} ended with an error after {failures} failures")
            return
        require(stream.output == expected, f"sequence {number} ended early: {stream.output} of {expected}")
        stopped = expected and expected[-1] in stream.stop_ids and len(expected) > stream.min_new
        reason = Finish.ERROR if error else Finish.STOP if stopped else Finish.LENGTH
        require(stream.end == reason, f"sequence {number} ended with {stream.end}, not {reason}")
        scored = stream.sampling.score_width < 0 or len(stream.scores) == length - 1
        require(scored or error, f"sequence {number}: scores missing")
