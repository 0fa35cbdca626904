"""The number of ids in a tokenizer.json: of every kind of vocabulary, with holes, and when the file says nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram

from shared.token_ids import num_token_ids


def saved(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_added_tokens_count(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert num_token_ids(saved(tmp_path, tokenizer)) == 3
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert num_token_ids(saved(tmp_path, tokenizer)) == 4 == tokenizer.get_vocab_size()


def test_a_hole_does_not_shorten_it(tmp_path: Path) -> None:
    assert num_token_ids(saved(tmp_path, Tokenizer(BPE({"a": 0, "b": 9}, [])))) == 10


def test_a_vocabulary_that_is_a_list(tmp_path: Path) -> None:
    assert num_token_ids(saved(tmp_path, Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)))) == 2


def test_a_token_that_only_the_configuration_adds(tmp_path: Path) -> None:
    saved(tmp_path, Tokenizer(BPE({"a": 0, "b": 1}, [])))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"1": {}, "7": {}}}))
    assert num_token_ids(tmp_path) == 8


@pytest.mark.parametrize("content", [{}, [], {"model": {}}, {"model": {"vocab": {"a": "x"}}}, {"model": None}])
def test_a_file_that_does_not_say(tmp_path: Path, content: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert num_token_ids(tmp_path) == 0
    assert num_token_ids(tmp_path / "absent") == 0
