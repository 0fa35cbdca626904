"""Token id -> the bytes it adds to the text, where a tokenizer's decoder is a concatenation of such pieces.

Understood are the decoders of byte-level BPE, SentencePiece BPE with byte fallback, and unigram (Metaspace). `find` checks what
it derived against the real decoder and gives None when they differ or the decoder is of another kind: then text is made by
decoding a window of tokens instead.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBE_TOKENS = 2048  # tokens whose pieces are compared with the real decoder


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies: itself if printable, else one from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(0x100 + at): byte for at, byte in enumerate(others)}


ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([ALPHABET[char] for char in token])
    except KeyError:  # an added token with characters of its own
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


class Pieces:
    """Bytes of tokens, and what becomes of a space at the very start of a text."""

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self._replace: list[tuple[str, str]] = []
        self._to_bytes: Callable[[str], bytes] = str.encode
        self.strip_start = 0  # spaces removed from the start of the whole text
        self.first_drops = ""  # character that the first token of a text loses wherever it stands

    def bytes_of(self, token_id: int, *, first: bool = False) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if first and self.first_drops:
            token = token.replace(self.first_drops, "")
        for old, new in self._replace:
            token = token.replace(old, new)
        piece = self._to_bytes(token)
        if first and self.strip_start:
            spaces = len(piece) - len(piece.lstrip(b" "))
            piece = piece[min(spaces, self.strip_start) :]
        return piece

    def learn(self, step: dict[str, Any], *, fused: bool) -> bool:
        """Take in one step of the decoder; False: no such step can be told token by token."""
        match step:
            case {"type": "ByteLevel"} if self._to_bytes is str.encode:
                self._to_bytes = _byte_level
            case {"type": "ByteFallback"} if self._to_bytes is str.encode:
                self._to_bytes = _byte_fallback
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                self._replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                self.strip_start = start
            case {"type": "Metaspace", "replacement": old} if not fused:
                self._replace.append((old, " "))
                if step.get("prepend_scheme", "always") != "never":
                    self.first_drops = old
            case {"type": "Fuse"}:
                pass
            case _:
                return False
        return True


def find(tokenizer: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> Pieces | None:
    """Pieces of this tokenizer (decoder: its JSON), or None when its decoder is not a concatenation of pieces."""
    steps = decoder["decoders"] if decoder and decoder.get("type") == "Sequence" else [decoder]
    pieces = Pieces(tokenizer.id_to_token)
    fused = False
    for step in steps:
        if step is None or not pieces.learn(step, fused=fused):
            return None
        fused = fused or step["type"] == "Fuse"
    return pieces if _agrees(pieces, tokenizer) else None


def _agrees(pieces: Pieces, tokenizer: tokenizers.Tokenizer) -> bool:
    """Compare with the real decoder on random runs of tokens that are text by themselves."""
    rng = random.Random(0)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = [token for token in rng.sample(range(size), min(size, PROBE_TOKENS)) if _is_text(pieces.bytes_of(token))]
    for start in range(0, len(ids), 32):
        run = ids[start : start + 32]
        joined = b"".join(pieces.bytes_of(token, first=at == 0) for at, token in enumerate(run))
        if joined.decode("utf-8", "replace") != tokenizer.decode(run, skip_special_tokens=False):
            return False
    return True


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
