"""quantization_config: what is read, and what is refused with what was found."""

from typing import Any

import pytest

from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.scheme import QuantSpec
from shared.model_folder import ModelError

LAYER = "model.layers.3.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    base = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {**base, "ignore": ["lm_head"], **more}


def spec(config: dict[str, Any], wanted: str = "auto") -> QuantSpec:
    found = read_quantization({"quantization_config": config}, wanted)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"bits": 4}, "None"),
        ({**GPTQ, "bits": 3}, "bits = 3"),
        ({**GPTQ, "bits": True}, "bits = True"),
        ({**GPTQ, "group_size": 0}, "group_size = 0"),
        ({**GPTQ, "group_size": "128"}, "'128'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
        ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, "contradict"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "no regular expression"),
        ({**GPTQ, "dynamic": {"+:.*": {"pack_dtype": "int8"}}}, "pack_dtype"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({**FP8, "activation_scheme": "static", "weight_block_size": [128, 128]}, "contradict"),
        ({**FP8, "weight_block_size": [128]}, "[128]"),
        ({**FP8, "fmt": "e5m2"}, "'e5m2'"),
        (compressed(WEIGHTS, format="marlin-24"), "'marlin-24'"),
        (compressed({**WEIGHTS, "num_bits": 2}), "num_bits = 2"),
        (compressed({**WEIGHTS, "type": "float", "num_bits": 8}), "contradict"),
        (compressed(WEIGHTS, INPUTS), "not supported"),
        (compressed({**WEIGHTS, "num_bits": 8}, {**INPUTS, "symmetric": False}, format="int-quantized"), "symmetric = False"),
        (compressed(WEIGHTS, config_groups={}), "config_groups"),
        (compressed(WEIGHTS, sparsity_config={"format": "sparse-24"}), "sparse-24"),
        ({"quant_method": ["gptq"]}, "['gptq']"),
        ({**GPTQ, "dynamic": ["x"]}, "dynamic = ['x'], expected an object"),
        ({**GPTQ, "dynamic": {"+:.*": "x"}}, "expected an object"),
        ({**GPTQ, "dynamic": {"+:.*": {"group_size": "x"}}}, "group_size = 'x'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 3}}}, "bits = 3"),
        ({**GPTQ, "modules_in_block_to_quantize": [3]}, "[3]"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({**FP8, "ignored_layers": {"a": 1}}, "ignored_layers = {'a': 1}"),
        ({**FP8, "kv_cache_scheme": "fp4"}, "kv_cache_scheme = 'fp4'"),
        (compressed(WEIGHTS, kv_cache_scheme={"type": "int", "num_bits": 4}), "type = 'int'"),
        (compressed(WEIGHTS, ignore=[3]), "ignore = [3]"),
        (compressed(WEIGHTS, config_groups={"g": "x"}), "g = 'x', expected an object"),
        (compressed(WEIGHTS, config_groups={"g": {"targets": "Linear", "weights": WEIGHTS}}), "targets = 'Linear'"),
        (compressed(WEIGHTS, config_groups={"g": {"weights": WEIGHTS, "format": "nvfp4-packed"}}), "'nvfp4-packed'"),
        (compressed({**WEIGHTS, "symmetric": "no"}), "symmetric = 'no'"),
        (compressed({**WEIGHTS, "actorder": "random"}), "actorder = 'random'"),
        (compressed({**WEIGHTS, "group_size": 0}), "group_size = 0"),
    ],
)
def test_refused_with_what_was_found(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as error:
        spec(config)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_setting_against_the_checkpoint() -> None:
    assert read_quantization({}) is None
    assert spec(GPTQ, "gptq").method == "gptq"
    with pytest.raises(ModelError, match="the checkpoint says gptq"):
        spec(GPTQ, "awq")
    with pytest.raises(ModelError, match="not quantized"):
        read_quantization({}, "gptq")
    with pytest.raises(ModelError, match="'int2'"):
        read_quantization({}, "int2")
    at_load = read_quantization({}, "fp8")
    assert at_load is not None and at_load.scheme_of(LAYER) is not None and at_load.scheme_of("lm_head") is None


def test_gptq_rules_per_layer() -> None:
    found = spec({**GPTQ, "dynamic": {"-:.*\\.layers\\.0\\.": {}, "+:.*down_proj": {"bits": 8, "group_size": -1}}})
    assert found.scheme_of("model.layers.0.mlp.down_proj") is None
    down, up = found.scheme_of(LAYER), found.scheme_of("model.layers.3.mlp.up_proj")
    assert down is not None and (down.bits, down.granularity) == (8, "channel")
    assert up is not None and (up.bits, up.group) == (4, 128)
    assert found.scheme_of("lm_head") is None
    some = spec({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]})
    assert some.scheme_of(LAYER) is not None and some.scheme_of("model.layers.3.mlp.up_proj") is None


def test_layers_left_alone() -> None:
    awq = spec({"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["mlp.down_proj"]})
    assert awq.scheme_of(LAYER) is None and awq.scheme_of("model.layers.3.mlp.down_projector") is not None
    ignored = compressed(WEIGHTS, ignore=["re:.*down_proj$", "lm_head"])
    assert spec(ignored).scheme_of(LAYER) is None and spec(ignored).scheme_of(LAYER + "x") is not None
    fp8 = spec({**FP8, "modules_to_not_convert": ["model.layers.3.mlp"]})
    assert fp8.scheme_of(LAYER) is None and fp8.scheme_of("model.layers.30.mlp.down_proj") is not None


@pytest.mark.parametrize(("order", "scattered"), [("group", True), ("dynamic", True), ("weight", False), (None, False)])
def test_act_order_of_compressed_tensors(order: str | None, scattered: bool) -> None:
    scheme = spec(compressed({**WEIGHTS, "actorder": order})).scheme_of(LAYER)
    assert scheme is not None and scheme.act_order is scattered


def test_a_group_of_all_columns() -> None:
    scheme = spec(compressed({**WEIGHTS, "group_size": -1})).scheme_of(LAYER)
    assert scheme is not None and scheme.group == 0


def test_targets_decide_in_order() -> None:
    config = compressed(WEIGHTS)
    eight = {"targets": ["re:.*down_proj"], "weights": {**WEIGHTS, "num_bits": 8}}
    config["config_groups"] = {"group_0": eight, **{"group_1": config["config_groups"]["group_0"]}}
    down, up = spec(config).scheme_of(LAYER), spec(config).scheme_of("model.layers.3.mlp.up_proj")
    assert down is not None and up is not None and (down.bits, up.bits) == (8, 4)


def test_native_fp8_blocks() -> None:
    scheme = spec({**FP8, "weight_block_size": [128, 128]}).scheme_of(LAYER)
    assert scheme is not None and scheme.activations is not None
    assert (scheme.block, scheme.granularity, scheme.activations.group) == ((128, 128), "block", 128)
