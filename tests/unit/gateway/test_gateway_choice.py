"""One choice fed by hand: what a scheduler that keeps the contract never sends, and the order of what a listener hears."""

import asyncio
from typing import Any

import pytest

from gateway.choice import Choice
from gateway.errors import ApiError
from gateway.limits import Limits
from gateway.metrics import Histogram
from gateway.openai import parse_completion
from gateway.sequence import Prompt, Recipe, Sequence
from gateway.text_stream import StopSet
from gateway.tokenizer import Tokenizer
from shared.messages import Finish
from tests import gateway_toys


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("toy")
    return Tokenizer(gateway_toys.write_model(folder, gateway_toys.byte_level()), "<s>")


class Owner:
    """A run of one choice that writes down what it is told."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.heard: list[Any] = []

    def choice_ended(self, choice: Choice) -> None:
        self.heard.append("ended")

    def fail(self, error: ApiError) -> None:
        self.heard.append(error.status)

    def on_text(self, choice: Choice, text: str, entries: Any) -> None:
        self.heard.append(text)

    def on_end(self, choice: Choice) -> None:
        self.heard.append(choice.finish_reason)


def play(tokenizer: Tokenizer, tokens: list[int], reason: int, **fields: Any) -> list[Any]:
    request = parse_completion({"prompt": [9], **fields}, Limits(model_name="toy", vocab_size=tokenizer.size))
    recipe = Recipe.of(request, (2, 3), 1, 0.0)
    owner = Owner()
    sequence = Sequence(Prompt([9]), recipe, 0, 100, sink=None, id=1)  # type: ignore[arg-type]
    stops = StopSet(request.stop) if request.stop else None
    choice = sequence.sink = Choice(0, sequence, request, tokenizer, stops, owner, Histogram())
    choice.start(owner)
    for at, token in enumerate(tokens):
        sequence.output.append(token)
        choice.on_token(token, None, float(at + 1))
    choice.on_finish(reason)
    return owner.heard


async def test_a_stop_id_below_min_tokens_is_a_token_like_any_other(tokenizer: Tokenizer) -> None:
    fields = {"min_tokens": 2, "skip_special_tokens": False}
    assert play(tokenizer, [2, 3, 2], Finish.STOP, **fields) == ["</s>", "<end>", "stop", "ended"]


async def test_the_end_is_told_once_and_last(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab😀", False)
    assert play(tokenizer, [*ids, 2], Finish.STOP) == ["a", "b", "😀", "stop", "ended"]
    assert play(tokenizer, ids[:4], Finish.LENGTH) == ["a", "b", "\ufffd", "length", "ended"]
    assert play(tokenizer, ids[:1], Finish.LENGTH, stop=["ab"]) == ["a", "length", "ended"]
    assert play(tokenizer, [], Finish.ABORT) == ["abort", "ended"]
    assert play(tokenizer, ids[:1], Finish.ERROR) == ["a", 500]
    assert play(tokenizer, ids[:1], Finish.DEADLINE) == ["a", 504]


async def test_an_incomplete_tail_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀", False)
    assert play(tokenizer, ids[:3], Finish.LENGTH, stop=["a\ufffd"]) == ["stop", "ended"]
