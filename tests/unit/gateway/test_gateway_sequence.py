"""What a sequence tells the scheduler: sampling, edits, page hashes, and how it goes on after a loss."""

import math
from typing import Any

from gateway.limits import Limits
from gateway.openai import parse_completion
from gateway.sequence import Prompt, Recipe, Sequence
from shared import columns, pages
from shared.messages import Finish, GatewayWelcome, Submit
from shared.sampling import Edit, Flag, Sampling, choice_seed, unpack_edits

WELCOME = GatewayWelcome(1, 1, 16, b"key" * 8)
EOS = (2, 3)


def sequence(num_prompt: int = 40, choice: int = 0, max_new: int = 100, **fields: Any) -> Sequence:
    request = parse_completion({"prompt": "x", **fields}, Limits(model_name="toy", vocab_size=1000))
    recipe = Recipe.of(request, EOS, 7, arrived=10.0)
    return Sequence(Prompt(list(range(100, 100 + num_prompt))), recipe, choice, max_new, sink=None)  # type: ignore[arg-type]


def submit(**fields: Any) -> Submit:
    return sequence(**fields).submit(WELCOME, 12.5, again=False)


def sampling(**fields: Any) -> Sampling:
    return Sampling.unpack(submit(**fields).sampling)


def edits(**fields: Any) -> list[Edit]:
    return unpack_edits(submit(**fields).edits)


def test_a_plain_request() -> None:
    message = submit()
    assert columns.read_i32(message.tokens).tolist() == list(range(100, 140))
    assert (message.num_prompt, message.max_new, message.min_new, message.age_s) == (40, 100, 0, 2.5)
    assert columns.read_i32(message.stop_ids).tolist() == [2, 3]
    assert message.page_hashes == pages.page_hashes(WELCOME.hash_key, message.root_hash, message.tokens, 16)
    assert len(message.page_hashes) == 2 * 16
    assert Sampling.unpack(message.sampling) == Sampling(seed=7, num_prompt=40)
    assert message.edits == b""


def test_a_resumed_sequence_is_prompt_and_output_with_all_page_hashes() -> None:
    for num_prompt in (1, 15, 16, 17, 40):
        for num_output in (1, 15, 16, 33):
            resumed = sequence(num_prompt)
            first = resumed.submit(WELCOME, 11.0, again=False)
            resumed.output.extend(range(500, 500 + num_output))
            message = resumed.submit(WELCOME, 15.0, again=True)
            assert columns.read_i32(message.tokens).tolist() == [*resumed.prompt.ids, *range(500, 500 + num_output)]
            assert message.page_hashes == pages.page_hashes(WELCOME.hash_key, message.root_hash, message.tokens, 16)
            assert message[2:9] == first[2:9]
            assert message.age_s == 5.0


def test_page_hashes_follow_the_scheduler_that_is_there() -> None:
    resumed = sequence()
    before = resumed.submit(WELCOME, 11.0, again=True).page_hashes
    other = GatewayWelcome(1, 2, 32, b"other key")
    message = resumed.submit(other, 11.0, again=True)
    assert message.page_hashes != before
    assert message.page_hashes == pages.page_hashes(b"other key", message.root_hash, message.tokens, 32)


def test_every_choice_has_its_seed() -> None:
    assert [sampling(choice=choice).seed for choice in (0, 1, 2)] == [choice_seed(7, choice) for choice in (0, 1, 2)]
    assert sampling(choice=0).seed == 7


def test_s71_penalties_and_history() -> None:
    assert sampling(presence_penalty=0).flags == 0
    for name, value in (("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.25)):
        record = sampling(**{name: value})
        assert record.flags == Flag.NEEDS_HISTORY
        changed: dict[str, Any] = {name: value}
        assert record == Sampling(seed=7, num_prompt=40, flags=Flag.NEEDS_HISTORY)._replace(**changed)


def test_b17_min_tokens_forbids_every_stop_id() -> None:
    assert submit(min_tokens=4).min_new == 4
    assert edits(min_tokens=4, stop_token_ids=[9]) == [Edit(token, -math.inf, 4) for token in (2, 3, 9)]
    assert edits(min_tokens=4, ignore_eos=True, stop_token_ids=[9]) == [Edit(9, -math.inf, 4)]
    assert edits(min_tokens=4, logit_bias={"2": 100}) == [Edit(2, 100.0), *(Edit(token, -math.inf, 4) for token in EOS)]


def test_ignore_eos_leaves_the_requests_own_stop_ids() -> None:
    assert columns.read_i32(submit(ignore_eos=True, stop_token_ids=[9, 9]).stop_ids).tolist() == [9]


def test_allowed_ids_are_the_only_ones_named() -> None:
    """An edit of an id that is not allowed would allow it."""
    fields = {"allowed_token_ids": [5, 2], "logit_bias": {"5": 1.5, "6": 9}, "min_tokens": 3}
    assert sampling(**fields).flags == Flag.ALLOW_ONLY
    assert edits(**fields) == [Edit(5, 1.5), Edit(2, 0.0), Edit(2, -math.inf, 3)]


def test_logprobs_and_scores() -> None:
    assert sampling(logprobs=3).logprobs == 3
    assert sampling(logprobs=3).score_width == -1
    assert sampling(logprobs=3, echo=True).score_width == 3
    assert sampling(logprobs=3, prompt_logprobs=5).score_width == 5


def test_a_finish_that_got_lost_is_known_all_the_same() -> None:
    ended = sequence(max_new=3, min_tokens=1)
    ended.output.extend([2])
    assert ended.finished_reason == 0  # output token 0 is below min_tokens = 1
    ended.output.extend([3])
    assert ended.finished_reason == Finish.STOP
    full = sequence(max_new=3)
    full.output.extend([7, 7])
    assert full.finished_reason == 0
    full.output.append(7)
    assert full.finished_reason == Finish.LENGTH
    scoring = sequence(max_new=0, echo=True, logprobs=1)
    assert scoring.finished_reason == 0
    scoring.num_scored = 40
    assert scoring.finished_reason == Finish.LENGTH
