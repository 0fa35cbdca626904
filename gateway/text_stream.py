"""Token ids to text as they arrive, and the stop strings in it.

Rules, the same for streams and whole answers:
- The text of an answer is what the decoder adds to the prompt's text. Bytes that are only incomplete wait for the next token;
  bytes that can never be text become U+FFFD (one for each maximal bad run), as does an incomplete tail at the end.
- Stop strings are found in text, not in tokens. The first to end wins, the longest of those that end together; the text is cut
  where it begins. Only text that may still become a stop string is held back: at most max(len(stop)) - 1 characters.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from gateway.tokenizer import Tokenizer

WINDOW_TOKENS = 8  # context that a decoder without pieces needs to join words as in the whole text
HOLD_TOKENS = 12  # tokens that may look incomplete before a decoder without pieces is taken at its word

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """Text that this token completes, possibly none."""

    def flush(self) -> str:
        """Text of what is still incomplete; once, at the end."""


class PieceDetokenizer:
    """Joins pieces. The usual token is one list lookup."""

    __slots__ = ("_at_start", "_decoder", "_pending", "_skip", "_texts", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._texts = tokenizer.texts(skip_special)
        self._decoder: codecs.IncrementalDecoder | None = None  # present while bytes are incomplete
        self._pending = True  # slow path: at the start of a text, or within a character
        self._at_start = not any(not (skip_special and tokenizer.is_special(token)) for token in prompt)
        tail = prompt[-4:]  # a prompt may end within a character (4 bytes at most): the answer completes it
        if tail and self._texts[tail[-1]] is None:
            for token in tail:
                self.push(token)
        elif not self._at_start:
            self._pending = False

    def push(self, token: int) -> str:
        if not self._pending:
            text = self._texts[token]
            if text is not None:
                return text
        return self._push_bytes(token)

    def _push_bytes(self, token: int) -> str:
        if self._skip and self._tokenizer.is_special(token):
            return ""
        piece = self._tokenizer.piece(token, first=self._at_start)
        self._at_start = False
        if self._decoder is None:
            self._decoder = _Utf8("replace")
        text = self._decoder.decode(piece)
        if not self._decoder.getstate()[0]:
            self._decoder = None
        self._pending = self._decoder is not None
        return text

    def flush(self) -> str:
        decoder, self._decoder, self._pending = self._decoder, None, False
        return decoder.decode(b"", True) if decoder else ""


class WindowDetokenizer:
    """Decodes the last few tokens each time: for decoders that cannot be told token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._context = list(prompt[-WINDOW_TOKENS:])  # tokens whose text is out already
        self._fresh: list[int] = []

    def _delta(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._fresh, self._skip)[len(before) :]

    def push(self, token: int) -> str:
        self._fresh.append(token)
        text = self._delta()
        if not text or (text.endswith("\ufffd") and len(self._fresh) < HOLD_TOKENS):
            return ""
        self._context = (self._context + self._fresh)[-WINDOW_TOKENS:]
        self._fresh = []
        return text

    def flush(self) -> str:
        text = self._delta() if self._fresh else ""
        self._context, self._fresh = (self._context + self._fresh)[-WINDOW_TOKENS:], []
        return text


def detokenizer(tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> Detokenizer:
    """The text side of one sequence that continues these prompt ids."""
    kind = PieceDetokenizer if tokenizer.has_pieces else WindowDetokenizer
    return kind(tokenizer, prompt, skip_special)


class StopSet:
    """The stop strings of one request as one automaton (Aho-Corasick): one dictionary lookup a character, however many."""

    __slots__ = ("depths", "fails", "firsts", "lengths", "nexts")

    def __init__(self, stops: Sequence[str]) -> None:
        self.nexts: list[dict[str, int]] = [{}]  # state -> character -> state
        self.fails = [0]  # the state of its longest proper suffix
        self.depths = [0]  # characters of the state's string
        self.lengths = [0]  # length of the longest stop string that ends here, 0: none
        self.firsts = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.nexts[state]:
                self.nexts[state][char] = len(self.nexts)
                self.nexts.append({})
                self.fails.append(0)
                self.depths.append(self.depths[state] + 1)
                self.lengths.append(0)
            state = self.nexts[state][char]
        self.lengths[state] = len(stop)

    def _link(self) -> None:
        queue = list(self.nexts[0].values())
        for state in queue:
            for char, child in self.nexts[state].items():
                self.fails[child] = self.step(self.fails[state], char)
                self.lengths[child] = self.lengths[child] or self.lengths[self.fails[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self.nexts[state]:
            state = self.fails[state]
        return self.nexts[state].get(char, 0)


class StopMatcher:
    """Looks for a StopSet in one text. After push, `held` characters at the end are not released yet."""

    __slots__ = ("_state", "_stops", "held")

    def __init__(self, stops: StopSet) -> None:
        self._stops = stops
        self._state = 0
        self.held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(text that is released, stop string that was found or ""). After a find the rest of the text is gone."""
        stops, state = self._stops, self._state
        if not state and stops.firsts.isdisjoint(text):
            return text, ""
        buffer = self.held + text
        for at, char in enumerate(text, start=len(self.held) + 1):
            state = stops.step(state, char)
            length = stops.lengths[state]
            if length:
                self._state, self.held = 0, ""
                return buffer[: at - length], buffer[at - length : at]
        self._state = state
        cut = len(buffer) - stops.depths[state]
        self.held = buffer[cut:]
        return buffer[:cut], ""

    def flush(self) -> str:
        """What was held, when nothing can follow any more."""
        held, self.held, self._state = self.held, "", 0
        return held
