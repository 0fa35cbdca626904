"""bad_words: which token sequences each tokenizer family bans, what is refused, and what the worker is told."""

import dataclasses
import math
from typing import Any

import pytest

from gateway.bad_words import banned_sequences
from gateway.errors import BadRequest
from gateway.limits import Limits
from gateway.openai import parse_completion
from gateway.sequence import Recipe
from gateway.tokenizer import Tokenizer
from shared.sampling import Edit, Flag, unpack_edits
from tests import gateway_toys

LIMITS = Limits(model_name="toy", vocab_size=5000)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = gateway_toys.write_model(tmp_path_factory.mktemp("toy"), gateway_toys.FAMILIES[request.param]())
    return Tokenizer(folder)


@pytest.mark.parametrize("word", ["fox", " fox", "lazy dog"])
def test_s07_forms_with_and_without_a_space(tokenizer: Tokenizer, word: str) -> None:
    banned = banned_sequences(parse_completion({"prompt": "x", "bad_words": [word]}, LIMITS), tokenizer, 5000)
    texts = {b"".join(tokenizer.piece(token) for token in ids).decode() for ids in banned}
    assert {word.strip(), " " + word.strip()} <= texts
    assert all(text.strip() == word.strip() for text in texts)
    assert len(banned) == len(set(banned))


def test_s08_an_id_beyond_the_logits_is_refused(tokenizer: Tokenizer) -> None:
    request = parse_completion({"prompt": "x", "bad_words": ["ok", "fox"]}, LIMITS)
    with pytest.raises(BadRequest, match=r"bad_words\[0\] has token .* 0 to 9") as caught:
        banned_sequences(request, tokenizer, 10)
    assert caught.value.param == "bad_words[0]"


def test_b20_everything_forbidden_is_refused(tokenizer: Tokenizer) -> None:
    request = parse_completion({"prompt": "x", "bad_words": ["x"]}, LIMITS)
    allowed = {ids[0] for ids in banned_sequences(request, tokenizer, 5000) if len(ids) == 1}
    assert allowed
    body: dict[str, Any] = {"prompt": "x", "bad_words": ["x"], "allowed_token_ids": sorted(allowed)}
    with pytest.raises(BadRequest, match="bad_words forbid all") as caught:
        banned_sequences(parse_completion(body, LIMITS), tokenizer, 5000)
    assert caught.value.param == "bad_words"
    body["allowed_token_ids"] = [*sorted(allowed), 1]
    assert banned_sequences(parse_completion(body, LIMITS), tokenizer, 5000)


def test_what_the_worker_is_told() -> None:
    request = parse_completion({"prompt": "x"}, LIMITS)
    recipe = Recipe.of(request, (2,), 7, 0.0, banned=[(5,), (6, 7, 8)])
    assert unpack_edits(recipe.edits) == [Edit(5, -math.inf), Edit(-7, 0.0), Edit(-8, 0.0), Edit(8, -math.inf)]
    assert recipe.sampling.flags == Flag.NEEDS_HISTORY
    recipe = Recipe.of(request, (2,), 7, 0.0, banned=[(5,)])
    assert recipe.sampling.flags == 0
    only = dataclasses.replace(request, allowed_token_ids=(5, 9))
    recipe = Recipe.of(only, (2,), 7, 0.0, banned=[(5,), (6, 7, 8)])  # naming 8 would allow it
    assert unpack_edits(recipe.edits) == [Edit(5, 0.0), Edit(9, 0.0), Edit(5, -math.inf)]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([""], "bad_words[0]"),
        (["x", 3], "bad_words[1]"),
        ("x", "bad_words"),
        (["x"] * 129, "bad_words"),
        (["x" * 257], "bad_words[0]"),
    ],
)
def test_odd_values_are_refused(value: object, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion({"prompt": "x", "bad_words": value}, LIMITS)
    assert caught.value.param == param
