"""Reading checkpoints: whole, sharded, tied, and every way they can be wrong, each with one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker import ops
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.linear import Linear, PackedLinear, can_pack, for_device
from gpu_worker.model.spec import ModelSpec, read_spec
from gpu_worker.model.weights import Dummy, Safetensors, load_decoder, tensor_shapes
from shared.model_folder import ModelError
from tests.unit.worker.batches import CPU
from tests.unit.worker.test_spec import LLAMA


def spec_of(**changes: Any) -> ModelSpec:
    return read_spec(LLAMA | changes)


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    source = Dummy(spec)
    return {name: source.get(name) for name in tensor_shapes(spec)}


def write(folder: Path, state: dict[str, Tensor], shards: int = 1) -> Path:
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(state)
    for shard in range(shards):
        part = {name: state[name] for name in names[shard::shards]}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(spec, Safetensors(folder, spec), ops.load(CPU), dtype=dtype, device=CPU, max_model_len=64)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_fused_matrices_hold_their_parts_in_order(tmp_path: Path, shards: int, tied: bool) -> None:
    spec = spec_of(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, num_key_value_heads=2)
    state = {name: torch.randn_like(tensor) for name, tensor in tensors(spec).items()}
    decoder = load(write(tmp_path, state, shards), spec)
    x = torch.randn(5, 64)
    layer, prefix = decoder.layers[1], "model.layers.1."

    def expected(names: list[str]) -> Tensor:
        return torch.cat(
            [x @ state[f"{prefix}{n}.weight"].float().T + state[f"{prefix}{n}.bias"].float() for n in names], dim=1
        )

    assert torch.allclose(layer.qkv(x), expected([f"self_attn.{n}_proj" for n in "qkv"]), atol=1e-4)
    assert torch.allclose(layer.gate_up(x), expected(["mlp.gate_proj", "mlp.up_proj"]), atol=1e-4)
    head = state["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    assert torch.allclose(decoder.logits(x), x @ head.T, atol=1e-4)
    assert torch.equal(decoder.embedding.weight, state["model.embed_tokens.weight"].float())
    assert torch.equal(layer.post_norm, state[prefix + "post_attention_layernorm.weight"].float())


def test_a_tied_model_ignores_a_stored_head_and_rotary_buffers(tmp_path: Path) -> None:
    spec = spec_of(tie_word_embeddings=True)
    state = tensors(spec) | {
        "lm_head.weight": torch.zeros(100, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    assert load(write(tmp_path, state), spec).logits(torch.ones(1, 64)).abs().sum() > 0


def break_missing(state: dict[str, Tensor]) -> None:
    del state["model.layers.2.mlp.up_proj.weight"]


def break_extra(state: dict[str, Tensor]) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def break_shape(state: dict[str, Tensor]) -> None:
    state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 95)


@pytest.mark.parametrize(("change", "words"), [
    (break_missing, ["lacks 1 tensors", "model.layers.2.mlp.up_proj.weight"]),
    (break_extra, ["holds 1 tensors", "q_proj.bias"]),
    (break_shape, ["model.layers.1.mlp.down_proj.weight", "(64, 95)", "(64, 96)"]),
])  # fmt: skip
def test_wrong_tensors_are_named(tmp_path: Path, change: Any, words: list[str]) -> None:
    spec = spec_of()
    state = tensors(spec)
    change(state)
    write(tmp_path, state)
    with pytest.raises(ModelError) as refused:
        load(tmp_path, spec)
    for word in [*words, str(tmp_path)]:
        assert word in str(refused.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    spec = spec_of()
    write(tmp_path, tensors(spec))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], b"{" + whole[1:], whole[:4], b"\xff" * 200):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
            load(tmp_path, spec)


def test_dummy_weights_are_the_same_at_every_start() -> None:
    spec = spec_of()
    assert all(torch.equal(tensor, Dummy(spec).get(name)) for name, tensor in tensors(spec).items())
    assert tensors(spec)["model.norm.weight"].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_matrices_equal_plain_ones(dtype: torch.dtype, bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this CPU does not pack {dtype}")
    linear = Linear(torch.randn(300, 64).to(dtype), torch.randn(300).to(dtype) if bias else None)
    packed = for_device(linear)
    assert isinstance(packed, PackedLinear) and packed.num_bytes == linear.num_bytes
    for rows in (1, 2, 33, 200):
        x = torch.randn(rows, 64).to(dtype)
        assert torch.allclose(packed(x).float(), linear(x).float(), atol=1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("num_ids", [0, 90, 100, 200])
def test_rows_that_only_pad_the_vocabulary_can_win_nothing(tmp_path: Path, num_ids: int) -> None:
    spec = spec_of()
    state = tensors(spec)
    folder = write(tmp_path, state, 1)
    table = ops.load(CPU)
    decoder = load_decoder(
        spec, Safetensors(folder, spec), table, dtype=torch.float32, device=CPU, max_model_len=64, num_ids=num_ids
    )
    x, out = torch.randn(3, 64), torch.zeros(3, spec.vocab_size)
    decoder.logits_into(x, out)
    expected = x @ state["lm_head.weight"].float().T
    if 0 < num_ids < spec.vocab_size:
        expected[:, num_ids:] = -torch.inf
    assert torch.allclose(out, expected, atol=1e-4)
    assert torch.allclose(decoder.logits(x), expected, atol=1e-4)
