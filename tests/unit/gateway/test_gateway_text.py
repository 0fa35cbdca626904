"""Token ids to text as they come, for every tokenizer family; and stop strings, against a plain reference."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text_stream import StopMatcher, StopSet, WindowDetokenizer, detokenizer
from gateway.tokenizer import Tokenizer
from tests import gateway_toys

EMOJI = ["😀", "👨‍👩‍👧‍👦", "🇳🇴", "नमस्ते", "สวัสดี", "“quoted”", "naïve 你好"]
TEXTS = ["Hello world", "( x )", " starts with a space", "two  spaces", "a\tb\n c", *EMOJI]
PIECED = ["byte_level", "sentencepiece", "unigram"]


@cache
def toy(family: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        gateway_toys.write_model(Path(folder), gateway_toys.FAMILIES[family]())
        return Tokenizer(Path(folder), "<s>")


def deltas(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True) -> list[str]:
    stream = detokenizer(tokenizer, prompt, skip)
    return [*(stream.push(token) for token in output), stream.flush()]


@pytest.mark.parametrize("family", PIECED)
def test_families_have_pieces(family: str) -> None:
    assert toy(family).has_pieces


def test_a_decoder_that_joins_words_is_not_taken_for_pieces() -> None:
    assert not toy("word_piece").has_pieces


@pytest.mark.parametrize("family", [*PIECED, "word_piece"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_b07_deltas_join_to_the_decoded_text(family: str, text: str, cut: int) -> None:
    tokenizer = toy(family)
    ids = tokenizer.encode("the quick" if cut else text, False) + (tokenizer.encode(text, False) if cut else [])
    for at in {0, min(cut, len(ids)), len(ids) // 2}:
        whole, before = tokenizer.decode(ids, True), tokenizer.decode(ids[:at], True)
        if whole.startswith(before):  # a cut within a character has no "text of the prompt"
            assert "".join(deltas(tokenizer, ids[:at], ids[at:])) == whole[len(before) :]


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", EMOJI)
def test_b05_incomplete_characters_wait(family: str, text: str) -> None:
    tokenizer = toy(family)
    ids = tokenizer.encode("a" + text, False)
    for end in range(2, len(ids) + 1):
        *parts, tail = deltas(tokenizer, ids[:1], ids[1:end])
        assert not any("\ufffd" in part for part in parts)
        assert tail in ("", "\ufffd")
    assert tail == ""


@given(st.data())
def test_byte_level_text_is_exactly_what_the_decoder_says(data: st.DataObject) -> None:
    """Any ids at all, valid text or not, special tokens or not, cut anywhere outside a character."""
    tokenizer = toy("byte_level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    skip = data.draw(st.booleans())
    assert "".join(deltas(tokenizer, [], ids, skip)) == tokenizer.decode(ids, skip)


@given(st.sampled_from(PIECED), st.text(max_size=30), st.text(max_size=30), st.booleans())
def test_b07_any_text_of_any_family(family: str, prompt: str, text: str, special: bool) -> None:
    tokenizer = toy(family)
    before = tokenizer.encode(prompt, special)
    after = tokenizer.encode(text, False)
    expected = tokenizer.decode(before + after, True)
    given_text = tokenizer.decode(before, True)
    assert expected.startswith(given_text)
    assert given_text + "".join(deltas(tokenizer, before, after)) == expected


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_b07_smollm2(smollm2: Tokenizer, prompt: str, text: str) -> None:
    before, after = smollm2.encode(prompt, False), smollm2.encode(text, False)
    expected = smollm2.decode(before + after, True)
    assert smollm2.decode(before, True) + "".join(deltas(smollm2, before, after)) == expected


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer(smollm2_folder)


def test_sentencepiece_strips_one_space_only_at_the_start_of_all_text() -> None:
    tokenizer = toy("sentencepiece")
    ids = tokenizer.encode("Hello world", False)
    assert "".join(deltas(tokenizer, [], ids)) == "Hello world"
    assert "".join(deltas(tokenizer, [tokenizer.id_of("<s>") or 0], ids)) == "Hello world"
    assert "".join(deltas(tokenizer, tokenizer.encode("x", False), ids)) == " Hello world"


def test_an_answer_completes_the_character_its_prompt_began() -> None:
    tokenizer = toy("byte_level")
    ids = tokenizer.encode("😀!", False)
    assert "".join(deltas(tokenizer, ids[:2], ids[2:])) == "😀!"


def test_the_window_agrees_with_the_pieces() -> None:
    tokenizer = toy("byte_level")
    for text in TEXTS:
        ids = tokenizer.encode("prompt" + text, False)
        stream = WindowDetokenizer(tokenizer, ids[:6], True)
        assert "".join([*(stream.push(token) for token in ids[6:]), stream.flush()]) == text


# --- stop strings


def reference(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str]:
    """(text before the first stop string to end, that stop string): the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, ""


STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=500)
@given(st.lists(st.text("ab\u00e9", max_size=4), max_size=20), STOPS)
def test_b02_stream_equals_reference_whatever_the_chunks(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopSet(stops))
    sent, found = "", ""
    expected, stop = reference("".join(chunks), stops)
    for chunk in chunks:
        released, found = matcher.push(chunk)
        sent += released
        assert expected.startswith(sent), "nothing that was sent is ever taken back"
        if found:
            break
        assert len(matcher.held) <= max(map(len, stops)) - 1
    else:
        sent += matcher.flush()
    assert (sent, found) == (expected, stop)


@pytest.mark.parametrize(
    ("chunks", "stops", "sent", "found"),
    [
        (["ABC", "DEF", "GHI"], ["DEFGHI"], ["ABC", "", ""], "DEFGHI"),
        (["ABC", "DEF", "XYZ"], ["DEFGHI"], ["ABC", "", "DEFXYZ"], ""),
        ([" Paris"], ["Pari"], [" "], "Pari"),
        ([" Paris"], ["aris"], [" P"], "aris"),
        (["aaa", "ab"], ["aab"], ["a", "a"], "aab"),
        (["x", "abc"], ["c", "abc"], ["x", ""], "abc"),
        (["ab", "cd"], ["abcX", "b"], ["a"], "b"),
    ],
)
def test_b02_examples(chunks: list[str], stops: list[str], sent: list[str], found: str) -> None:
    matcher = StopMatcher(StopSet(stops))
    results = []
    for chunk in chunks:
        results.append(matcher.push(chunk))
        if results[-1][1]:
            break
    assert [text for text, _ in results] == sent
    assert results[-1][1] == found


def test_many_long_stops_cost_little() -> None:
    """The worst set that the limits admit: no time that grows with its size."""
    import time

    stops = ["a" * 60 + chr(0x4E00 + number) for number in range(64)]
    matcher = StopMatcher(StopSet(stops))
    started = time.perf_counter()
    for _ in range(2000):
        matcher.push("aaaab")
    assert time.perf_counter() - started < 1.0
