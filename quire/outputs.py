"""What the Python API returns, under vLLM's names."""

from dataclasses import dataclass

from gateway.choice import Choice
from gateway.sequence import Score
from gateway.session import Run
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None  # 1: the likeliest; None: not among the alternatives asked for
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # by token id: the token itself and its alternatives


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer. Text, token ids and log-probabilities describe the same tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    finish_reason: str | None  # "stop", "length" or "abort"; None: not finished
    stop_reason: int | str | None  # the stop string or stop id that ended it; None: the model's own end


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens that were in the cache


def request_output(run: Run, tokenizer: Tokenizer, request_id: str) -> RequestOutput:
    """A snapshot of a run of one prompt."""
    (prompt,) = run.prompts
    outputs = [_completion(choice, tokenizer, run.request.logprobs >= 0) for choice in run.choices]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=list(prompt.ids),
        prompt_logprobs=_prompt_logprobs(run, tokenizer) if run.request.prompt_logprobs >= 0 else None,
        outputs=outputs,
        finished=all(output.finish_reason for output in outputs),
        num_cached_tokens=run.usage.cached_tokens,
    )


def _completion(choice: Choice, tokenizer: Tokenizer, scored: bool) -> CompletionOutput:
    logprobs = [_logprobs(entry.token, entry.score, tokenizer) for entry in choice.entries] if scored else None
    total = sum(each[entry.token].logprob for each, entry in zip(logprobs, choice.entries, strict=True)) if logprobs else None
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=logprobs,
        cumulative_logprob=total,
        finish_reason=choice.finish_reason or None,
        stop_reason=choice.stop_reason,
    )


def _prompt_logprobs(run: Run, tokenizer: Tokenizer) -> list[TokenLogprobs | None]:
    """Per prompt token; the first one has none."""
    scores = run.choices[0].prompt_scores
    scored = zip(run.prompts[0].ids[1:], scores, strict=False)
    return [None, *(_logprobs(token, score, tokenizer) for token, score in scored)]


def _logprobs(token: int, score: Score | None, tokenizer: Tokenizer) -> TokenLogprobs:
    top = score.top if score else []
    found = {other: Logprob(value, rank, _text(other, tokenizer)) for rank, (other, value) in enumerate(top, start=1)}
    if token not in found:
        logprob = score.logprob if score and score.logprob is not None else float("-inf")
        found[token] = Logprob(logprob, None, _text(token, tokenizer))
    return found


def _text(token: int, tokenizer: Tokenizer) -> str:
    """Bytes that are no whole character become U+FFFD."""
    return tokenizer.piece(token).decode("utf-8", "replace")
