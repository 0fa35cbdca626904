"""The model's tokenizer: text to ids off the event loop, ids to text, and the exact bytes and printed form of single tokens."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from gateway import pieces

INLINE_CHARS = 256  # texts up to this length are encoded on the event loop: cheaper than a hop to a thread
ENCODE_THREADS = 2
# Normalizers may shorten a text (NFC: 3 bytes to 2, whitespace runs to one): a bound that uses its length allows for it.
SHRINK = 4


class Tokenizer:
    """One tokenizer.json. Safe to use from threads."""

    def __init__(self, folder: Path, bos_token: str = "", num_ids: int = 0) -> None:
        """ValueError when the folder has no tokenizer.json that can be read. num_ids: ids the model may sample."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            config: dict[str, Any] = json.loads(text)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(token["id"] for token in config.get("added_tokens", ()) if token.get("special"))
        self._pieces = pieces.find(self._tokenizer, config.get("decoder"))
        num_ids = max(num_ids, self.size)
        self._known: tuple[list[str | None], list[str | None]] = ([None] * num_ids, [None] * num_ids)
        self._shrinks = config.get("normalizer") is not None
        self._longest = 0
        self.bos_token = bos_token
        self.bos_id = self._tokenizer.token_to_id(bos_token) if bos_token else None
        self._pool = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- text to ids

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of a text. A text that begins with the BOS token as text gets no second one."""
        # The batch form lets other threads run meanwhile and computes no offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        if add_special and self.bos_id is not None and ids[:2] == [self.bos_id] * 2 and text.startswith(self.bos_token):
            return ids[1:]
        return ids

    async def encode_async(self, text: str, add_special: bool, alone: bool = True) -> list[int]:
        """encode, in a thread unless the text is short and alone."""
        if alone and len(text) <= INLINE_CHARS:
            return self.encode(text, add_special)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.encode, text, add_special)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of len(encode(text)), from its length alone."""
        if not self._longest:
            self._longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        return len(text) // (self._longest * (SHRINK if self._shrinks else 1))

    # --- ids to text

    @property
    def has_pieces(self) -> bool:
        return self._pieces is not None

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    async def decode_async(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        if len(ids) <= INLINE_CHARS:
            return self.decode(ids, False)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.decode, ids, False)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def texts(self, skip_special: bool) -> list[str | None]:
        """Table of token texts, filled by piece(): None where not known yet, or where a token is not text by itself."""
        return self._known[skip_special]

    def piece(self, token: int, *, first: bool = False) -> bytes:
        """Exact bytes that a token adds to a text (first: to an empty one). Special tokens have their name."""
        if self._pieces is None:
            return self.decode([token], skip_special=False).encode()
        piece = self._pieces.bytes_of(token, first=first)
        if not first:
            self._remember(token, piece)
        return piece

    def _remember(self, token: int, piece: bytes) -> None:
        everything, without_special = self._known
        try:
            everything[token] = piece.decode()
        except UnicodeDecodeError:
            return
        without_special[token] = "" if token in self._special else everything[token]

    def printed(self, token: int) -> str:
        """Name of a token in vocabulary form, for /tokenize."""
        return self._tokenizer.id_to_token(token) or ""

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found
