"""Settings: every source, their order, and every bad value refused with its name and value."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import config as settings
from shared.config import BadConfig, Config, add_flags, from_sources, load, parse_args, to_flags

FIELDS = {each.name: each for each in dataclasses.fields(Config)}
# Another valid value for every field: what its default is not.
OTHER: dict[str, Any] = {
    name: {bool: True, int: 1234, float: 0.75, str: "some text"}[type(each.default)] for name, each in FIELDS.items()
} | {
    "dtype": "float32",
    "block_size": 32,
    "device": "cpu",
    "kv_cache_dtype": "fp8",
    "gateway_link": "tcp://127.0.0.1:7001",
    "worker_link": "tcp://localhost:7002",
    "heartbeat_s": 0.25,
    "silence_s": 7.5,
    "log_level": "debug",
    "otlp_endpoint": "http://collector:4318",
}


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags)


def as_flag(name: str, value: object) -> str:
    return "--" + name.replace("_", "-") + ("" if value is True else f"={value}")


def test_every_field_has_a_comment_and_a_default_of_its_type() -> None:
    for name, each in FIELDS.items():
        assert len(each.metadata["help"]) > 10, name
        assert type(each.default) is each.type, name
        assert each.default != OTHER[name], name
    assert from_sources({}, {}) == Config()


def test_every_number_says_its_unit() -> None:
    units = ("seconds", "tokens", "bytes", "share", "port", "GPU", "threads", "sequences", "plans", "requests", "that may wait")
    for name, each in FIELDS.items():
        if type(each.default) in (int, float):
            assert any(unit in each.metadata["help"] for unit in units), f"{name}: {each.metadata['help']}"


@pytest.mark.parametrize("name", FIELDS)
def test_each_source_sets_each_field(name: str) -> None:
    value = OTHER[name]
    expected = dataclasses.replace(Config(), **{name: value})
    assert from_sources({}, {}, {name: value}) == expected
    assert from_sources({}, {f"QUIRE_{name.upper()}": str(value)}) == expected
    assert from_sources(vars(parsed(as_flag(name, value))), {}) == expected


def test_flags_win_over_environment_over_file() -> None:
    file: Mapping[str, object] = {"port": 1, "credits": 3, "host": "file"}
    environment = {"QUIRE_PORT": "2", "QUIRE_CREDITS": "4", "OTHER": "x"}
    config = from_sources(vars(parsed("--port=3")), environment, file)
    assert (config.port, config.credits, config.host) == (3, 4, "file")


def test_a_flag_can_switch_off_what_the_environment_switched_on() -> None:
    environment = {"QUIRE_LOG_JSON": "yes"}
    assert from_sources({}, environment).log_json
    assert not from_sources(vars(parsed("--no-log-json")), environment).log_json


def test_load_reads_the_file_that_a_flag_or_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('port = 9001\nmodel = "m"\nheartbeat_s = 1\n')
    second.write_text("port = 9002\n")
    monkeypatch.setenv("QUIRE_CONFIG", str(second))
    assert load(parsed()).port == 9002
    assert load(parsed("--config", str(first))) == Config(port=9001, model="m", heartbeat_s=1.0)
    monkeypatch.setenv("QUIRE_CREDITS", "1")
    assert load(parsed()).credits == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "many"),
        ("port", "65536"),
        ("port", "-1"),
        ("metrics_port", "70000"),
        ("credits", "0"),
        ("credits", "1.5"),
        ("block_size", "17"),
        ("max_num_seqs", "0"),
        ("max_model_len", "-5"),
        ("max_num_batched_tokens", "-1"),
        ("kv_cache_bytes", "-1"),
        ("cpu_threads", "-1"),
        ("max_body_bytes", "0"),
        ("write_buffer_bytes", "0"),
        ("max_queued_requests", "0"),
        ("tensor_parallel_size", "0"),
        ("gpu_memory_utilization", "0"),
        ("gpu_memory_utilization", "1.01"),
        ("gpu_memory_utilization", "nan"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("log_level", "loud"),
        ("log_json", "maybe"),
        ("heartbeat_s", "0"),
        ("heartbeat_s", "inf"),
        ("silence_s", "0.9"),
        ("step_timeout_s", "-1"),
        ("template_timeout_s", "nan"),
        ("sse_comment_s", "0"),
        ("gateway_link", "tcp://0.0.0.0:5711"),
        ("worker_link", "tcp://10.1.2.3:5711"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(name: str, value: str) -> None:
    with pytest.raises(BadConfig) as from_flag:
        from_sources(vars(parsed(f"--{name.replace('_', '-')}={value}")) if name != "log_json" else {name: value}, {})
    with pytest.raises(BadConfig) as from_environment:
        from_sources({}, {f"QUIRE_{name.upper()}": value})
    for error in (from_flag, from_environment):
        assert name in str(error.value).lower().replace("-", "_")
        assert "\n" not in str(error.value)
    assert value.removeprefix("-") in str(from_environment.value)


@pytest.mark.parametrize("name, value", [("port", 1.5), ("port", True), ("port", [1]), ("host", 1), ("log_json", 1)])
def test_a_file_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(BadConfig, match=f"{name} = .*: must be of type"):
        from_sources({}, {}, {name: value})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadConfig, match="prot = 1: is no setting"):
        from_sources({}, {}, {"prot": 1})
    with pytest.raises(BadConfig, match="QUIRE_PROT = '1': is no setting"):
        from_sources({}, {"QUIRE_PROT": "1"})


@pytest.mark.parametrize("content", ["port =", "port = 1\nport = 2", "[section]\nport = 1"])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(content)
    with pytest.raises(BadConfig):
        load(parsed("--config", str(file)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="No such file"):
        load(parsed("--config", str(tmp_path / "absent.toml")))


def test_a_role_with_a_bad_setting_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings.sys, "argv", ["/somewhere/scheduler/__main__.py"])  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as ended:
        parse_args("The scheduler", ["--credits=0"])
    assert ended.value.code == settings.FATAL_EXIT
    assert capsys.readouterr().err == "scheduler: error: credits = 0: must be at least 1\n"


@given(st.sets(st.sampled_from(sorted(FIELDS))))
def test_to_flags_gives_another_process_the_same_settings(names: set[str]) -> None:
    config = from_sources({}, {}, {name: OTHER[name] for name in names})
    flags = to_flags(config)
    assert len(flags) == len(names)
    assert from_sources(vars(parsed(*flags)), {}) == config


@given(st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
def test_any_text_survives_to_flags(text: str) -> None:
    config = Config(model=text, served_model_name=text)
    assert from_sources(vars(parsed(*to_flags(config))), {}) == config


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]
