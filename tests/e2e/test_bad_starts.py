"""Starts that cannot succeed: each ends by itself, with the code that says so and one clear last line, and leaves nobody."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import FATAL_EXIT
from tests.e2e.serving import Process, ended


@pytest.fixture
def copy(smollm2_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """The embedded model, to be broken: weights are linked, the rest is copied."""
    folder = tmp_path / "broken-model"
    folder.mkdir()
    for file in smollm2_folder.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    yield folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def refused(*flags: object) -> list[str]:
    """Everything that quire serve printed before it gave up."""
    process = Process("quire.main", "serve", "--port=0", *map(str, flags))
    with ended(process):
        assert process.wait(60) == FATAL_EXIT, process.text
        assert process.children() == {}
        assert process.lines[-1].startswith("quire: error: "), process.text
        assert "Traceback" not in process.text
        return process.lines


def test_a_missing_model(tmp_path: Path) -> None:
    (line,) = refused(tmp_path / "absent")
    assert str(tmp_path / "absent") in line


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (line,) = refused(copy)
    assert "holds no weights" in line


def test_a_broken_config(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "llama",')
    (line,) = refused(copy)
    assert "config.json cannot be read" in line


def test_weights_that_are_cut_short(copy: Path) -> None:
    weights = copy / "model.safetensors"
    target = weights.resolve()
    weights.unlink()
    with target.open("rb") as whole:
        weights.write_bytes(whole.read(2**20))
    (line,) = refused(copy)
    assert "model.safetensors is damaged" in line


def test_weights_of_another_shape(copy: Path) -> None:
    edit_config(copy, intermediate_size=1024)
    line = refused(copy)[-1]
    assert "1536" in line and "1024" in line


def test_a_missing_layer(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=31)
    assert "layers.30" in refused(copy)[-1]


def test_an_unknown_architecture(copy: Path) -> None:
    edit_config(copy, model_type="mystery", architectures=["MysteryForCausalLM"])
    (line,) = refused(copy)
    assert "MysteryForCausalLM" in line


def test_a_config_without_a_field(copy: Path) -> None:
    edit_config(copy, hidden_size=None)
    (line,) = refused(copy)
    assert line == "quire: error: config.json: hidden_size = None, expected a positive integer"


def test_a_type_that_a_cpu_cannot_compute_in() -> None:
    (line,) = refused("--device=cpu", "--dtype=float16")
    assert line == "quire: error: dtype = 'float16': a CPU computes in bfloat16 or float32"


def test_more_tokens_than_the_model_allows() -> None:
    (line,) = refused("--max-model-len=8193")
    assert line == "quire: error: max_model_len = 8193: the model allows at most 8192 tokens"


def test_a_metrics_port_in_use() -> None:
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            (line,) = refused(f"--metrics-port={port - 1}")
        if f"port {port - 1}:" not in line:  # else another process has that one
            break
    assert line.startswith(f"quire: error: metrics_port + 1 = {port}: cannot listen")


def test_a_broken_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(copy)[-1]


def test_memory_for_less_than_one_request() -> None:
    (line,) = refused("--device=cpu", "--kv-cache-bytes=100000", "--max-model-len=4096")
    assert "memory for less than one request: 4096 tokens need 257 pages" in line
    assert "there are 100,000" in line


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = refused(f"--port={port}")
    assert line == f"quire: error: cannot listen on 127.0.0.1 port {port}: Address already in use"


def test_an_address_that_is_not_ours() -> None:
    (line,) = refused("--host=192.0.2.1")
    assert "cannot listen on 192.0.2.1" in line


def test_a_bad_setting() -> None:
    (line,) = refused("--credits=0")
    assert line == "quire: error: credits = 0: must be at least 1"


def test_two_models() -> None:
    (line,) = refused("one", "--model=other")
    assert "two models are named" in line


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (line,) = refused("--device=cuda")
    assert "this machine shows no GPU" in line


def test_a_model_that_cannot_be_divided() -> None:
    (line,) = refused("--tensor-parallel-size=2", "--device=cpu")
    assert line == "quire: error: tensor_parallel_size = 2: the model's 9 attention heads cannot be divided by 2"


def test_a_link_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = refused(f"--gateway-link=tcp://127.0.0.1:{port}")
    assert line.startswith(f"quire: error: gateway_link = {port}: cannot listen on 127.0.0.1 port {port}")
