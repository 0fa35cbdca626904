"""The answers of /v1/responses: the whole object, and the events that lead to it, numbered from 0."""

import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

from gateway.choice import Choice, Entry
from gateway.replies import TokenNames, dump
from gateway.request import ValidRequest
from gateway.sequence import Score
from gateway.session import Run, Usage
from gateway.sse import EventWriter
from gateway.tokenizer import Tokenizer

NO_TOOLS: dict[str, Any] = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "max_tool_calls": None}
NOT_STORED: dict[str, Any] = {"store": False, "background": False, "previous_response_id": None, "conversation": None}


class ResponseReply:
    """Shapes of one answer. said_again: what it repeats of the request."""

    def __init__(
        self, request: ValidRequest, tokenizer: Tokenizer, model: str, created: int, said_again: Mapping[str, Any]
    ) -> None:
        self.request = request
        self._names = TokenNames(tokenizer, False, "")
        self._message_id = f"msg_{secrets.token_hex(16)}"
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": created,
            "model": model,
            **said_again,
            **NOT_STORED,
            **NO_TOOLS,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_logprobs": max(0, request.logprobs),
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "text": {"format": {"type": "text"}},
        }

    @property
    def place(self) -> dict[str, Any]:
        """Where events say that they belong."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def response(self, status: str, output: Items[object] = (), usage: Usage | None = None, **facts: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(output),
            "usage": usage_json(usage) if usage else None,
            **facts,
        }

    def whole(self, run: Run) -> dict[str, Any]:
        choice = run.choices[0]
        return self.ended(choice, choice.text, self.logprobs(choice.entries), run.usage)

    def ended(self, choice: Choice, text: str, logprobs: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        status = ending(choice)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self.response(status, [self.message(status, [part(text, logprobs)])], usage, incomplete_details=why)

    def message(self, status: str, content: Items[object] = ()) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": list(content)}

    def logprobs(self, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        if self.request.logprobs < 0:
            return []
        scored = [(entry.token, entry.score or Score(None, [])) for entry in entries]
        return [
            {**self._token(token, score.logprob), "top_logprobs": [self._token(*each) for each in score.top]}
            for token, score in scored
        ]

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._names.name(token), "logprob": logprob, "bytes": list(self._names.raw(token))}


def ending(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEvents:
    """Listener of a run: turns what its choice grows by into the events of the API, in their order."""

    def __init__(self, reply: ResponseReply, writer: EventWriter) -> None:
        self._reply = reply
        self._writer = writer
        self._number = 0  # of the next event
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self.run: Run | None = None  # set when opened

    def on_text(self, choice: Choice, text: str, entries: Items[Entry]) -> None:
        if not self._number:
            self._begin()
        self._texts.append(text)
        logprobs = self._reply.logprobs(entries)
        self._logprobs += logprobs
        self._send("response.output_text.delta", **self._reply.place, delta=text, logprobs=logprobs)

    def on_end(self, choice: Choice) -> None:
        if not self._number:
            self._begin()
        text, logprobs = "".join(self._texts), self._logprobs
        message = self._reply.message(ending(choice), [part(text, logprobs)])
        self._send("response.output_text.done", **self._reply.place, text=text, logprobs=logprobs)
        self._send("response.content_part.done", **self._reply.place, part=part(text, logprobs))
        self._send("response.output_item.done", output_index=0, item=message)

    def finish(self, run: Run) -> None:
        """The event that ends the stream."""
        if run.failure is None:
            response = self._reply.ended(run.choices[0], "".join(self._texts), self._logprobs, run.usage)
            self._send(f"response.{response['status']}", response=response)
            return
        if not self._number:
            self._begin()
        error = {"code": "server_error", "message": run.failure.text}
        self._send("response.failed", response=self._reply.response("failed", error=error))

    def _begin(self) -> None:
        for event in ("response.created", "response.in_progress"):
            self._send(event, response=self._reply.response("in_progress"))
        self._send("response.output_item.added", output_index=0, item=self._reply.message("in_progress"))
        self._send("response.content_part.added", **self._reply.place, part=part("", []))

    def _send(self, event: str, **facts: Any) -> None:
        body = dump({"type": event, "sequence_number": self._number, **facts})
        self._number += 1
        self._writer.send(f"event: {event}\ndata: {body}\n\n".encode())
