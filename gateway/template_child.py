"""The process in which chat templates run: it can be killed, so a template that loops or eats memory hurts nobody.

Run by path, not as a module: it imports jinja2 and the standard library only. Frames on stdin and stdout are a 4-byte length
and JSON: first {"source", "special", "max_chars"}, then {"messages", "add_generation_prompt", "arguments"}; each answer is
{"text"} or {"error", "code"}. The parent kills what takes too long; were the parent gone, an alarm does.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2**30  # address space of this process
LENGTH = struct.Struct("<I")
ALARM_S = 60  # longer than the parent ever waits


class TooLong(Exception):
    """The rendered text passed its limit."""


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As templates expect it: plain JSON, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """One compiled template with the variables it always sees."""

    def __init__(self, source: str, special: Mapping[str, Any], max_chars: int) -> None:
        """jinja2.TemplateError when the source is no template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special = special
        self._max_chars = max_chars

    def render(self, messages: list[Any], add_generation_prompt: bool, arguments: Mapping[str, Any] | None) -> str:
        variables = {**self._special, "tools": None, "documents": None, **(arguments or {})}
        parts: list[str] = []
        size = 0
        for part in self._template.generate(messages=messages, add_generation_prompt=add_generation_prompt, **variables):
            size += len(part)
            if size > self._max_chars:
                raise TooLong
            parts.append(part)
        return "".join(parts)


def _read(stream: BinaryIO) -> Any:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return json.loads(stream.read(*LENGTH.unpack(head)))


def _write(stream: BinaryIO, value: object) -> None:
    frame = json.dumps(value, ensure_ascii=False).encode()
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def _answer(renderer: Renderer, request: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": renderer.render(request["messages"], request["add_generation_prompt"], request["arguments"])}
    except TooLong:
        return {"error": "The rendered chat template is too long", "code": "prompt_too_long"}
    except MemoryError:
        return {"error": "The chat template needs too much memory", "code": "chat_template_error"}
    except Exception as error:  # whatever a template can raise is the request's or the template's fault, never this process's
        return {"error": f"The chat template refuses these messages: {str(error)[:500]}", "code": "chat_template_error"}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; this process ends with its stdin
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(requests)
    try:
        renderer = Renderer(setup["source"], setup["special"], setup["max_chars"])
    except jinja2.TemplateError as error:
        _write(answers, {"error": f"the chat template does not compile: {error}"})
        return
    _write(answers, {"ok": ""})
    while (request := _read(requests)) is not None:
        signal.alarm(ALARM_S)  # nobody handles it: it ends the process
        answer = _answer(renderer, request)
        signal.alarm(0)
        _write(answers, answer)


if __name__ == "__main__":
    main()
