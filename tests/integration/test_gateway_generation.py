"""What answers say, over HTTP against scripted tokens: text, stops, usage, log-probabilities; whole and streamed alike."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from shared import columns
from shared.messages import STOPPED, Finish, Submit
from shared.sampling import Sampling
from tests import gateway_toys
from tests.integration.gateway_bench import Answer, Bench
from tests.integration.stub_scheduler import Play


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = gateway_toys.byte_level()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return gateway_toys.write_model(tmp_path_factory.mktemp("toy"), tokenizer)


def say(bench: Bench, *tokens: str | int, **options: Any) -> None:
    """Every sequence from now on says these tokens."""
    ids = [bench.id(token) if isinstance(token, str) else token for token in tokens]
    bench.stub.script = lambda submit, sampling: Play(ids, **options)


# --- stop strings


@pytest.mark.parametrize(("stop", "text"), [("Pari", " "), ("aris", " P"), ("P", " "), (" Paris", ""), (["x", "ri"], " Pa")])
async def test_b01_stop_string_inside_one_token(bench: Bench, stop: Any, text: str) -> None:
    say(bench, " Paris", "ABC")
    whole, _ = await bench.both(stop=stop, max_tokens=9)
    assert whole.text() == text
    assert whole.choice()["finish_reason"] == "stop"
    assert whole.choice()["stop_reason"] == (stop if isinstance(stop, str) else "ri")
    assert whole.usage["completion_tokens"] == 1


async def test_b02_nothing_of_a_stop_string_is_sent(bench: Bench) -> None:
    say(bench, "ABC", "DEF", "GHI", "XYZ")
    whole, streamed = await bench.both(stop=["DEFGHI"], max_tokens=9)
    assert whole.text() == "ABC"
    assert whole.usage["completion_tokens"] == 3
    assert [choice["text"] for event in streamed.events[:-1] for choice in event["choices"]] == ["ABC", ""]


@pytest.mark.parametrize("max_tokens", [2, 3, 9])
async def test_b02_held_text_is_released(bench: Bench, max_tokens: int) -> None:
    """When the match becomes impossible, and when the answer ends by length or by a stop id."""
    say(bench, "ABC", "DEF", "XYZ")
    whole, _ = await bench.both(stop=["DEFGHI"], max_tokens=max_tokens)
    assert whole.text() == "ABCDEFXYZ"[: 3 * max_tokens]
    assert whole.choice()["finish_reason"] == ("stop" if max_tokens == 9 else "length")
    assert whole.choice()["stop_reason"] is None


async def test_the_stop_may_be_part_of_the_output(bench: Bench) -> None:
    say(bench, "ABC", "DEF", "GHI")
    whole, _ = await bench.both(stop=["EFG"], max_tokens=9, include_stop_str_in_output=True)
    assert (whole.text(), whole.choice()["stop_reason"]) == ("ABCDEFG", "EFG")


async def test_a_stop_string_ends_the_work_at_the_scheduler(bench: Bench) -> None:
    say(bench, *["ABC"] * 50, delay_s=0.005)
    answer = await bench.complete(stop=["BCABCABC"], max_tokens=1000)
    assert (answer.text(), answer.usage["completion_tokens"]) == ("A", 3)
    await bench.until_idle()
    assert len(bench.stub.aborted) == 1
    assert bench.stub.abort_reasons == [STOPPED], "a whole answer is not booked as aborted"
    assert bench.stub.finished == []


async def test_s56_many_requests_with_stop_lists_of_their_own(bench: Bench) -> None:
    import asyncio

    say(bench, "ABC", "DEF", "GHI", "XYZ", delay_s=0.001)
    text = "ABCDEFGHIXYZ"
    rng = random.Random(1)

    async def one() -> None:
        start, size = rng.randrange(12), rng.randrange(1, 4)
        stop = text[start : start + size]
        others = [f"no{rng.randrange(99)}" for _ in range(rng.randrange(5))]
        whole = await bench.complete(stop=[*others, stop], max_tokens=4)
        assert whole.text() == text[: text.find(stop)]

    await asyncio.gather(*(one() for _ in range(100)))


# --- characters and spaces


@pytest.mark.parametrize("text", ["😀", "👨‍👩‍👧‍👦", "🇳🇴", "नमस्ते", "สวัสดี"])
async def test_b05_no_replacement_character_while_bytes_are_incomplete(bench: Bench, text: str) -> None:
    ids = bench.ids("x" + text)
    for max_tokens in range(1, len(ids) + 1):
        say(bench, *ids)
        whole, streamed = await bench.both(max_tokens=max_tokens)
        expected = bytes(("x" + text).encode()[:max_tokens]).decode("utf-8", "replace")
        assert whole.text() == expected
        chunks = [choice["text"] for event in streamed.events[:-1] for choice in event["choices"]]
        assert not any("\ufffd" in chunk for chunk in chunks[:-2])  # at most the tail, just before the last chunk


async def test_s04_first_token_is_the_stop_and_logprobs_are_wanted(bench: Bench) -> None:
    say(bench, "</s>")
    for answer in (*(await bench.both(logprobs=2, max_tokens=5))[:1], await bench.chat(logprobs=True, max_tokens=5)):
        assert answer.text() == ""
        assert answer.choice()["finish_reason"] == "stop"
        assert answer.usage["completion_tokens"] == 1
    say(bench, "ABC")
    whole, _ = await bench.both(logprobs=2, stop="AB", max_tokens=5)
    assert (whole.text(), whole.usage["completion_tokens"], whole.choice()["logprobs"]["tokens"]) == ("", 1, [])


# --- ids, log-probabilities


async def test_s02_text_ids_and_logprobs_describe_the_same_tokens(bench: Bench) -> None:
    say(bench, "ABC", "DEF", "GHI", "XYZ")
    fields = {"stop": ["EFGH"], "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
    whole, streamed = await bench.both(**fields)
    expected = [bench.id("ABC"), bench.id("DEF")]  # GHI lies wholly inside the stop string, of DEF a D is left
    assert whole.text() == "ABCD"
    assert whole.choice()["token_ids"] == expected
    assert whole.choice()["logprobs"]["tokens"] == ["ABC", "DEF"]
    assert whole.choice()["logprobs"]["text_offset"] == [0, 3]
    assert joined(streamed, "token_ids") == expected
    assert [token for part in joined_logprobs(streamed) for token in part["tokens"]] == ["ABC", "DEF"]
    kept, _ = await bench.both(**fields, include_stop_str_in_output=True)
    assert kept.text() == "ABCDEFGH"
    assert kept.choice()["token_ids"] == [*expected, bench.id("GHI")]


async def test_s02_an_end_token_is_listed_only_where_it_is_included(bench: Bench) -> None:
    say(bench, "ABC", "<end>")
    whole, streamed = await bench.both(max_tokens=9, return_token_ids=True)
    assert whole.choice()["token_ids"] == joined(streamed, "token_ids") == [bench.id("ABC")]
    assert whole.usage["completion_tokens"] == 2
    fields = {"max_tokens": 9, "return_token_ids": True, "include_stop_str_in_output": True}
    whole, streamed = await bench.both(**fields)
    assert whole.choice()["token_ids"] == joined(streamed, "token_ids") == [bench.id("ABC"), bench.id("<end>")]
    whole, _ = await bench.both(**fields, skip_special_tokens=False)
    assert whole.text() == "ABC<end>"


def joined(streamed: Answer, name: str) -> list[int]:
    choices = [choice for event in streamed.events[:-1] for choice in event["choices"]]
    return [token for choice in choices for token in choice.get(name) or []]


def joined_logprobs(streamed: Answer) -> list[dict[str, Any]]:
    choices = [choice for event in streamed.events[:-1] for choice in event["choices"]]
    return [choice["logprobs"] for choice in choices if choice["logprobs"]]


async def test_stop_token_ids_and_their_reason(bench: Bench) -> None:
    say(bench, "ABC", "DEF", "GHI")
    whole, _ = await bench.both(stop_token_ids=[bench.id("DEF")], max_tokens=9)
    assert (whole.text(), whole.choice()["stop_reason"]) == ("ABC", bench.id("DEF"))
    whole, _ = await bench.both(max_tokens=9)
    assert (whole.text(), whole.choice()["stop_reason"]) == ("ABCDEFGHI", None)


async def test_b10_minus_infinity_is_left_out_or_floored(bench: Bench) -> None:
    minus = float("-inf")
    say(bench, "ABC", top=[(bench.id("ABC"), -0.1), (5, minus), (6, minus)], logprob=minus)
    whole = await bench.complete(logprobs=5, top_k=1, max_tokens=1)
    assert whole.status == 200
    assert whole.choice()["logprobs"]["token_logprobs"] == [-9999.0]
    assert whole.choice()["logprobs"]["top_logprobs"] == [{"ABC": -9999.0}]
    chat = await bench.chat(logprobs=True, top_logprobs=20, logit_bias={"5": -100}, max_tokens=1)
    (entry,) = chat.choice()["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert [each["token"] for each in entry["top_logprobs"]] == ["ABC"]


async def test_b11_bytes_are_exact(bench: Bench) -> None:
    text = "“hé😀”"
    ids = bench.ids(text)
    say(bench, *ids, top=[(ids[1], -1.0), (bench.id("“"), -2.0), (ids[5], -3.0), (ids[0], -4.0), (ids[6], -5.0)])
    whole = await bench.chat(logprobs=True, top_logprobs=5, max_tokens=len(ids))
    content = whole.choice()["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text == whole.text()
    for entry in [*content, *(other for each in content for other in each["top_logprobs"])]:
        assert entry["bytes"]
        assert entry["token"]
        if bytes(entry["bytes"]).isascii():
            assert entry["token"].encode() == bytes(entry["bytes"])
    assert content[0]["token"] == "\\xe2"
    streamed = await bench.chat(logprobs=True, top_logprobs=5, max_tokens=len(ids), stream=True)
    parts = [part for event in streamed.events[:-1] for part in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert parts == content
    older = await bench.complete(logprobs=1, max_tokens=len(ids))
    assert older.choice()["logprobs"]["tokens"][:2] == ["bytes:\\xe2", "bytes:\\x80"]


async def test_s05_special_tokens_among_alternatives_have_their_name(bench: Bench) -> None:
    say(bench, "ABC", top=[(bench.id("</s>"), -1.0), (bench.id("<end>"), -2.0)])
    whole = await bench.chat(logprobs=True, top_logprobs=2, max_tokens=1)
    (entry,) = whole.choice()["logprobs"]["content"]
    assert [each["token"] for each in entry["top_logprobs"]] == ["</s>", "<end>"]
    assert bytes(entry["top_logprobs"][0]["bytes"]) == b"</s>"
    printed = await bench.complete(logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    assert printed.choice()["logprobs"]["tokens"] == [f"token_id:{bench.id('ABC')}"]


@pytest.mark.parametrize("stream", [False, True])
async def test_b08_score_only(bench: Bench, stream: bool) -> None:
    answer = await bench.complete("a b c", max_tokens=0, echo=True, logprobs=1, stream=stream)
    assert answer.status == 200
    assert answer.text() == "a b c"
    assert answer.choice()["finish_reason"] == "length"
    logprobs = joined_logprobs(answer)[0] if stream else answer.choice()["logprobs"]
    assert logprobs["tokens"] == ["<s>", "a", " ", "b", " ", "c"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4]
    if not stream:
        assert answer.usage["completion_tokens"] == 0
    assert bench.stub.submits[-1].max_new == 0
    assert (await bench.complete("a b c", max_tokens=0)).status == 400


async def test_echo_scores_prompt_and_answer(bench: Bench) -> None:
    say(bench, "ABC", "DEF")
    whole, streamed = await bench.both("xy", echo=True, logprobs=0, max_tokens=2, add_special_tokens=False)
    assert whole.text() == "xyABCDEF"
    assert whole.choice()["logprobs"]["tokens"] == ["x", "y", "ABC", "DEF"]
    assert whole.choice()["logprobs"]["text_offset"] == [0, 1, 2, 5]
    assert [token for part in joined_logprobs(streamed) for token in part["tokens"]] == ["x", "y", "ABC", "DEF"]
    by_ids, _ = await bench.both(bench.ids("xy"), echo=True, max_tokens=2)
    assert by_ids.text() == "xyABCDEF"


async def test_prompt_logprobs(bench: Bench) -> None:
    say(bench, "ABC", top=[(bench.id("y"), -1.0), (7, -2.0)])
    whole = await bench.complete("xyz", prompt_logprobs=2, max_tokens=1, add_special_tokens=False)
    lines = whole.choice()["prompt_logprobs"]
    assert lines[0] is None
    assert lines[1][str(bench.id("y"))] == {"logprob": -1.0, "rank": 1, "decoded_token": "y"}
    assert lines[2][str(bench.id("z"))] == {"logprob": -2.0, "rank": None, "decoded_token": "z"}
    assert len(lines) == 3
    chat = await bench.chat("q", prompt_logprobs=0, max_tokens=1)
    assert len(chat.body["prompt_logprobs"]) == chat.usage["prompt_tokens"]


# --- usage


async def test_b14_usage_of_streams_equals_whole_answers(bench: Bench) -> None:
    fields = {"n": 3, "max_tokens": 4, "seed": 1}
    prompts = ["a" * 100, "b"]

    def script(submit: Submit, sampling: Sampling) -> Play:
        long = submit.num_prompt > 50
        return Play([bench.id("ABC")] * (3 if long else 2), cached=(96 if sampling.seed == 1 else 97) if long else 0)

    bench.stub.script = script
    whole, streamed = await bench.both(prompts, **fields)
    assert whole.usage == {
        "prompt_tokens": 103,
        "completion_tokens": 3 * 4 + 3 * 3,
        "total_tokens": 124,
        "prompt_tokens_details": {"cached_tokens": 96},
    }
    assert streamed.events[-2]["choices"] == []
    assert all(event["usage"] is None for event in streamed.events[:-2])
    without = await bench.complete(prompts, **fields, stream=True)
    assert all("usage" not in event for event in without.events[:-1])


async def test_b14_continuous_usage_is_a_running_total(bench: Bench) -> None:
    say(bench, "ABC", "DEF", "GHI")
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = await bench.complete(max_tokens=3, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in streamed.events[:-1]]
    assert counts == [1, 2, 3, 3, 3]
    assert {event["usage"]["prompt_tokens"] for event in streamed.events[:-1]} == {2}


# --- ends


async def test_b17_min_tokens_are_exact(bench: Bench) -> None:
    eos, end = bench.id("</s>"), bench.id("<end>")
    say(bench, "a")
    for prompt in ("x", "x" * 100):
        for bias in ({str(eos): 100}, {str(end): 100}, {str(eos): 100, str(end): 100}):
            whole, _ = await bench.both(prompt, logit_bias=bias, min_tokens=4, max_tokens=16, return_token_ids=True)
            assert whole.usage["completion_tokens"] == 5
            assert len(whole.choice()["token_ids"]) == 4
            assert not {eos, end} & set(whole.choice()["token_ids"])
            assert whole.choice()["finish_reason"] == "stop"
    assert (await bench.complete(min_tokens=5, max_tokens=4)).error["param"] == "min_tokens"


async def test_b17_stop_strings_wait_for_min_tokens(bench: Bench) -> None:
    say(bench, *["a"] * 16)
    whole, _ = await bench.both(stop=["a"], min_tokens=4, max_tokens=16)
    assert (whole.text(), whole.usage["completion_tokens"]) == ("aaaa", 5)
    say(bench, "ABC", "DEF", "GHI", "ABC", "DEF")
    whole, _ = await bench.both(stop=["CD"], min_tokens=2, max_tokens=16)
    assert whole.text() == "ABCDEFGHIAB"


async def test_finish_reasons(bench: Bench) -> None:
    say(bench, "ABC", "DEF")
    assert (await bench.both(max_tokens=2))[0].choice()["finish_reason"] == "length"
    assert (await bench.both(max_tokens=3))[0].choice()["finish_reason"] == "stop"
    assert (await bench.both(max_tokens=5, ignore_eos=True))[0].usage["completion_tokens"] == 5
    say(bench, "ABC", reason=Finish.ABORT)
    assert (await bench.both(max_tokens=5))[0].choice()["finish_reason"] == "abort"
    say(bench, "ABC", reason=Finish.LENGTH)  # the pool's limit
    assert (await bench.both(max_tokens=5))[0].choice()["finish_reason"] == "length"


# --- several choices and prompts


@pytest.mark.parametrize("n", [3, 512])
async def test_b25_choices_are_complete_and_have_their_own_seed(bench: Bench, n: int) -> None:
    words = [bench.id(word) for word in ("ABC", "DEF", "GHI", "XYZ")]

    def script(submit: Submit, sampling: Sampling) -> Play:
        if sampling.seed == 1:
            return Play([])  # choice 0 hits its stop at once
        return Play([words[sampling.seed % 4], words[sampling.seed // 4 % 4]])

    bench.stub.script = script
    whole, streamed = await bench.both("x", n=n, temperature=1, seed=1, max_tokens=2)
    assert [choice["index"] for choice in whole.body["choices"]] == list(range(n))
    assert [choice["finish_reason"] for choice in whole.body["choices"]] == ["stop"] + ["length"] * (n - 1)
    assert len({choice["text"] for choice in whole.body["choices"]}) > 2
    assert sum(choice["finish_reason"] is not None for event in streamed.events[:-1] for choice in event["choices"]) == n
    assert len({Sampling.unpack(submit.sampling).seed for submit in bench.stub.submits}) == n


async def test_b25_two_requests_at_once_keep_their_choices(bench: Bench) -> None:
    import asyncio

    def script(submit: Submit, sampling: Sampling) -> Play:
        first = columns.read_i32(submit.tokens)[1]
        return Play([first, bench.id("ABC")], delay_s=0.002)

    bench.stub.script = script
    answers = await asyncio.gather(*(bench.complete(prompt, n=2, max_tokens=2) for prompt in "qrst"))
    assert [[choice["text"] for choice in each.body["choices"]] for each in answers] == [[f"{p}ABC"] * 2 for p in "qrst"]


@pytest.mark.parametrize("prompts", [["long prompt", "short"], "ids"])
async def test_b26_prompts_and_choices_come_in_order(bench: Bench, prompts: Any) -> None:
    texts = ["long prompt", "short"]

    def script(submit: Submit, sampling: Sampling) -> Play:  # the longer prompt answers last
        return Play([bench.id("ABC")], delay_s=0.03 if submit.num_prompt > 8 else 0)

    bench.stub.script = script
    given = [bench.ids(text) for text in texts] if prompts == "ids" else prompts
    whole, _ = await bench.both(given, echo=True, n=2, max_tokens=1)
    assert [choice["index"] for choice in whole.body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole.body["choices"]] == [text + "ABC" for text in texts for _ in range(2)]


async def test_unseeded_requests_draw_a_seed(bench: Bench) -> None:
    for _ in range(3):
        await bench.complete(max_tokens=1)
    await bench.complete(max_tokens=1, seed=-1)
    seeds = [Sampling.unpack(submit.sampling).seed for submit in bench.stub.submits]
    assert len(set(seeds)) == 4
    assert seeds[-1] == 2**64 - 1


# --- prompts


async def test_token_ids_are_returned_as_they_were_sent(bench: Bench) -> None:
    say(bench, "ABC")
    ids = bench.ids("xyz")
    whole = await bench.complete(ids, max_tokens=1, return_token_ids=True)
    assert whole.choice()["prompt_token_ids"] == ids
    streamed = await bench.complete(ids, max_tokens=1, return_token_ids=True, stream=True)
    assert streamed.events[0]["choices"][0]["prompt_token_ids"] == ids
    chat = await bench.chat("q", max_tokens=1, return_token_ids=True)
    assert bench.session.model.tokenizer.decode(chat.body["prompt_token_ids"], False) == "<s>[user]q\n[assistant]"


async def test_s26_one_bos_in_chat(bench: Bench) -> None:
    bos = bench.id("<s>")
    for extra in ({}, {"add_special_tokens": True}):
        await bench.chat("q", max_tokens=1, **extra)
        assert columns.read_i32(bench.stub.submits[-1].tokens).tolist().count(bos) == 1


async def test_truncation_keeps_the_end_of_the_prompt_only_when_asked(bench: Bench) -> None:
    say(bench, "ABC")
    whole = await bench.complete("abcdefgh", max_tokens=1, truncate_prompt_tokens=3, echo=True)
    assert whole.text() == "fghABC"
    whole = await bench.complete("a" * 5000, max_tokens=48, truncate_prompt_tokens=-1)
    assert whole.usage["prompt_tokens"] == 2000


async def test_template_variables_and_the_generation_prompt(bench: Bench) -> None:
    chat = await bench.chat("q", max_tokens=1, return_token_ids=True, add_generation_prompt=False)
    assert bench.session.model.tokenizer.decode(chat.body["prompt_token_ids"], True) == "[user]q\n"


async def test_the_last_message_is_continued_with_its_turn_left_open(bench: Bench) -> None:
    say(bench, "ABC")
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "q\nso "}]
    body = {"messages": talk, "continue_final_message": True}
    chat = await bench.post("/v1/chat/completions", body | {"max_tokens": 1, "return_token_ids": True})
    assert bench.session.model.tokenizer.decode(chat.body["prompt_token_ids"], True) == "[user]q\n[assistant]q\nso "
    assert chat.text() == "ABC"
    made = await bench.post("/tokenize", body)
    assert made.body["tokens"] == chat.body["prompt_token_ids"]
    both = await bench.post("/v1/chat/completions", body | {"add_generation_prompt": True})
    assert (both.status, both.error["param"]) == (400, "continue_final_message")


async def test_tokenize_and_detokenize(bench: Bench) -> None:
    made = await bench.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert made.body["token_strs"] == ["<s>", "a", "b"]
    assert (made.body["count"], made.body["max_model_len"]) == (3, 2048)
    back = await bench.post("/detokenize", {"tokens": made.body["tokens"]})
    assert back.body == {"prompt": "<s>ab"}
    chat = await bench.post("/tokenize", {"messages": [{"role": "user", "content": "é" * 300}]})
    assert (
        await bench.post("/detokenize", chat.body | {"count": None, "max_model_len": None, "token_strs": None})
    ).status == 400
    back = await bench.post("/detokenize", {"tokens": chat.body["tokens"]})
    assert back.body["prompt"] == "<s>[user]" + "é" * 300 + "\n[assistant]"


async def test_long_texts_are_encoded_off_the_loop_with_the_same_ids(bench: Bench) -> None:
    say(bench, "ABC")
    text = "word " * 300
    await bench.complete(text, max_tokens=1)
    assert columns.read_i32(bench.stub.submits[-1].tokens).tolist() == bench.session.model.tokenizer.encode(text, True)


async def test_s17_done_is_the_last_line_of_a_good_stream(bench: Bench) -> None:
    say(bench, "ABC", "DEF")
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": ["BC"]}),
    ):
        async with bench.client.post(path, json={**body, "stream": True}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = await response.text()
        assert text.endswith("\n\ndata: [DONE]\n\n")
        assert text.count("[DONE]") == 1
        for line in text.split("\n\n")[:-2]:
            json.loads(line.removeprefix("data: "))
