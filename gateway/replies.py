"""The JSON of answers: whole ones, stream chunks, log-probabilities. Both generation APIs; nothing here waits or decides."""

import json
from collections.abc import Iterable
from collections.abc import Sequence as Items
from json.encoder import encode_basestring
from typing import Any

from gateway.choice import Choice, Entry
from gateway.request import ValidRequest
from gateway.sequence import Score
from gateway.session import Run, Usage
from gateway.tokenizer import Tokenizer

quote = encode_basestring  # the JSON of one string, as dump writes it
dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(value: object) -> bytes:
    return b"data: " + dump(value).encode() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class TokenNames:
    """How tokens print in log-probabilities: their text; bytes that are no text by themselves as escapes; or their id."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool, escape_prefix: str) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._escape_prefix = escape_prefix

    def raw(self, token: int) -> bytes:
        return self._tokenizer.piece(token)

    def name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        piece = self._tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return self._escape_prefix + "".join(f"\\x{byte:02x}" for byte in piece)


class Reply:
    """Shapes of one request's answer. chat: chat.completion, else text_completion."""

    def __init__(self, request: ValidRequest, tokenizer: Tokenizer, model: str, request_id: str, created: int) -> None:
        self.request = request
        self.chat = request.messages is not None
        self._names = TokenNames(tokenizer, request.tokens_as_ids, "" if self.chat else "bytes:")
        kind = "chat.completion" if self.chat else "text_completion"
        self._head = {"id": request_id, "object": kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk" if self.chat else kind}
        # Chunks that carry only text are built from these around the text's JSON.
        self._before = f"data: {dump(self._chunk_head)[:-1]},".encode() + b'"choices":[{"index":'
        self._middle = b',"delta":{"content":' if self.chat else b',"text":'
        usage = b',"usage":null' if request.include_usage else b""
        end = b"}" if self.chat else b""
        self.after = end + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def before(self, index: int) -> bytes:
        """Everything of a text chunk of this choice that stands before its text."""
        return self._before + str(index).encode() + self._middle

    # --- streams

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        body: dict[str, Any] = {**self._chunk_head, "choices": choices}
        if self.request.include_usage:
            body["usage"] = usage_json(usage) if usage else None
        return event(body)

    def opening(self, choice: Choice) -> dict[str, Any]:
        """The first chunk of a choice, before any text."""
        body = self._delta(choice, {"role": "assistant", "content": ""}, "", None)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = choice.sequence.prompt.ids
        return body

    def growth(self, choice: Choice, text: str, entries: Items[Entry]) -> dict[str, Any]:
        logprobs = self.logprobs(entries) if self.request.logprobs >= 0 else None
        body = self._delta(choice, {"content": text}, text, logprobs)
        if self.request.return_token_ids:
            body["token_ids"] = [entry.token for entry in entries]
        return body

    def ending(self, choice: Choice) -> dict[str, Any]:
        body = self._delta(choice, {}, "", None)
        return {**body, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _delta(self, choice: Choice, delta: dict[str, Any], text: str, logprobs: object) -> dict[str, Any]:
        grown = {"delta": delta} if self.chat else {"text": text}
        return {"index": choice.index, **grown, "logprobs": logprobs, "finish_reason": None}

    # --- whole answers

    def whole(self, run: Run) -> dict[str, Any]:
        body: dict[str, Any] = {**self._head, "choices": [self._choice(each) for each in run.choices]}
        body["usage"] = usage_json(run.usage)
        if self.chat and self.request.return_token_ids:
            body["prompt_token_ids"] = run.prompts[0].ids
        if self.chat and self.request.prompt_logprobs >= 0:
            body["prompt_logprobs"] = self._prompt_logprobs(run.choices[0])
        return body

    def _choice(self, choice: Choice) -> dict[str, Any]:
        said: dict[str, Any] = {"text": choice.text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        body: dict[str, Any] = {
            "index": choice.index,
            **said,
            "logprobs": self.logprobs(choice.entries) if self.request.logprobs >= 0 else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.request.return_token_ids:
            body["token_ids"] = choice.token_ids
            if not self.chat:
                body["prompt_token_ids"] = choice.sequence.prompt.ids
        if not self.chat and self.request.prompt_logprobs >= 0:
            body["prompt_logprobs"] = self._prompt_logprobs(choice)
        return body

    # --- log-probabilities

    def logprobs(self, entries: Iterable[Entry]) -> dict[str, Any]:
        scored = [(entry, entry.score or Score(None, [])) for entry in entries]
        if self.chat:
            return {"content": [self._chat_entry(entry.token, score) for entry, score in scored], "refusal": None}
        name = self._names.name
        return {
            "tokens": [name(entry.token) for entry, _ in scored],
            "token_logprobs": [score.logprob for _, score in scored],
            "top_logprobs": [
                None
                if score.logprob is None
                else {**{name(token): lp for token, lp in score.top}, name(entry.token): score.logprob}
                for entry, score in scored
            ],
            "text_offset": [entry.start for entry, _ in scored],
        }

    def _chat_entry(self, token: int, score: Score) -> dict[str, Any]:
        alternatives = [self._chat_token(other, logprob) for other, logprob in score.top]
        return {**self._chat_token(token, score.logprob), "top_logprobs": alternatives}

    def _chat_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._names.name(token), "logprob": logprob, "bytes": list(self._names.raw(token))}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None]:
        """vLLM's shape. The rank of a prompt token is known only where it is among the alternatives."""
        ids = choice.sequence.prompt.ids
        lines: list[dict[str, Any] | None] = [None]
        for token, score in zip(ids[1:], choice.prompt_scores, strict=False):
            top = score.top[: self.request.prompt_logprobs]
            line = {other: self._prompt_entry(other, logprob, rank) for rank, (other, logprob) in enumerate(top, start=1)}
            if token not in line:
                line[token] = self._prompt_entry(token, score.logprob, None)
            lines.append({str(other): entry for other, entry in line.items()})
        return lines

    def _prompt_entry(self, token: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._names.name(token)}
