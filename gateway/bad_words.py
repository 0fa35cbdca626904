"""Bad words to the token sequences that would complete them: with and without a space before, as a word and inside one."""

from collections.abc import Iterator

from gateway.errors import BadRequest
from gateway.request import ValidRequest
from gateway.tokenizer import Tokenizer

Banned = list[tuple[int, ...]]  # the last id of each is forbidden once the output ends with those before it

BREAK = "\n"  # what follows it is encoded without the space that some tokenizers put before a text


def banned_sequences(request: ValidRequest, tokenizer: Tokenizer, vocab_size: int) -> Banned:
    """BadRequest where a word cannot be banned, or nothing could be sampled."""
    banned: dict[tuple[int, ...], None] = {}
    for at, word in enumerate(request.bad_words):
        for ids in _encodings(word, tokenizer):
            for token in ids:
                if token >= vocab_size:
                    text = f"bad_words[{at}] has token {token}, but token ids of this model are 0 to {vocab_size - 1}"
                    raise BadRequest(text, f"bad_words[{at}]", "token_id_out_of_range")
            banned[ids] = None
    if request.allowed_token_ids and all((token,) in banned for token in request.allowed_token_ids):
        text = f"bad_words forbid all {len(request.allowed_token_ids)} allowed_token_ids: no token could be sampled"
        raise BadRequest(text, "bad_words")
    return list(banned)


def _encodings(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    bare = word.lstrip() or word
    for form in dict.fromkeys((word, bare, " " + bare)):
        if ids := tokenizer.encode(form, False):
            yield tuple(ids)
        start = tokenizer.encode(BREAK, False)
        ids = tokenizer.encode(BREAK + form, False)
        if len(ids) > len(start) and ids[: len(start)] == start:
            yield tuple(ids[len(start) :])
