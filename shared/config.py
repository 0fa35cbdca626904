"""All settings of all roles: read once from file, environment and flags (later wins), then frozen.

A TOML file (--config, or QUIRE_CONFIG) < environment (QUIRE_MAX_MODEL_LEN=4096) < flags (--max-model-len 4096). Unknown names
and values of the wrong type are refused with the value. Nothing else in the project reads the environment.
"""

import argparse
import dataclasses
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FATAL_EXIT = 2  # exit code of a role whose start cannot succeed unless something is changed: nobody should restart it


class BadConfig(ValueError):
    """A setting that cannot be used; the text names it and its value."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    # Model
    model: str = _setting("", "model folder, GGUF file or hub id; empty: the embedded SmolLM2-135M-Instruct")
    served_model_name: str = _setting("", "name of the model in the API; empty: last part of --model")
    cache_dir: str = _setting("~/.cache/quire", "folder for downloaded and converted models and compiled kernels")
    dtype: str = _setting("auto", "auto (as in the checkpoint), bfloat16, float16 or float32")
    quantization: str = _setting("auto", "auto: as the checkpoint says")
    dummy_weights: bool = _setting(False, "random weights in the model's shape; only config.json and the tokenizer are read")

    # Memory and batching (names as users know them from vLLM)
    max_model_len: int = _setting(0, "tokens, prompt + output of one sequence; 0: as the model allows and the pages hold")
    block_size: int = _setting(16, "tokens in one KV page: 16, 32 or 64")
    max_num_seqs: int = _setting(256, "sequences running at once on one worker")
    max_num_batched_tokens: int = _setting(0, "tokens of all rows of one step; 0: 8192 on a GPU, 1024 on a CPU")
    gpu_memory_utilization: float = _setting(0.9, "share of the GPU's memory that a worker may use, 0 to 1")
    kv_cache_dtype: str = _setting(
        "auto", "float8 KV pages, twice the tokens: fp8, none, or auto (if the checkpoint has scales)"
    )
    kv_cache_bytes: int = _setting(0, "bytes of KV pages; 0: what the memory plan leaves on a GPU, 512 MiB on a CPU")
    tensor_parallel_size: int = _setting(1, "GPUs of this machine that share one copy of the model (on a CPU: processes)")
    device: str = _setting("auto", "auto (a GPU if there is one), cuda or cpu")
    cpu_threads: int = _setting(0, "threads of a CPU worker; 0: all cores, or what the container's CPU limit allows")

    # HTTP
    host: str = _setting("127.0.0.1", "address the gateway listens on")
    port: int = _setting(8000, "port the gateway listens on; 0: any free one")
    tls_cert: str = _setting("", "file with the gateway's certificate chain (PEM); empty: plain HTTP")
    tls_key: str = _setting("", "file with the private key of tls_cert (PEM)")
    api_key_file: str = _setting("", "file of tenants and hashed API keys (gateway/api_keys.py); empty: no key is asked for")
    admin_port: int = _setting(0, "port on loopback for quire drain and the gateway's /health, /ready and /metrics; 0: none")
    cors_origins: str = _setting("", "web origins that may call the gateway, separated by commas; *: all; empty: none")
    max_body_bytes: int = _setting(16 * 2**20, "bytes of one request body")
    template_timeout_s: float = _setting(2.0, "seconds one chat template may take")
    sse_comment_s: float = _setting(10.0, "seconds between comment lines on a stream that has nothing to say")
    write_buffer_bytes: int = _setting(2**20, "bytes a stream may be ahead of a slow reader before it is dropped")

    # Links between the roles
    gateway_link: str = _setting("tcp://127.0.0.1:5711", "where the scheduler binds for gateways, and gateways connect")
    worker_link: str = _setting("tcp://127.0.0.1:5712", "where the scheduler binds for workers, and workers connect")
    curve_dir: str = _setting("", "folder of key files (quire keys DIR); empty: no encryption, and only loopback addresses")
    name: str = _setting("", "name of this gateway or replica; empty: host name and process id")
    heartbeat_s: float = _setting(0.5, "seconds between heartbeats on every link")
    silence_s: float = _setting(5.0, "seconds without a frame after which the other side counts as gone")

    # Scheduling
    credits: int = _setting(2, "plans in flight per replica; 1: no overlap")
    max_queued_requests: int = _setting(4096, "sequences that may wait; more are answered 429")
    max_queued_tokens: int = _setting(0, "tokens of all sequences that may wait; more are answered 429; 0: no limit")
    max_wait_s: float = _setting(0.0, "seconds a new sequence may be predicted to wait before it is answered 429; 0: no limit")
    resume_grace_s: float = _setting(60.0, "seconds that a resumable stream is kept after its client left, or after its end")
    step_timeout_s: float = _setting(120.0, "seconds one step may take before its worker counts as hung")
    hash_key_file: str = _setting("", "file with the cell's page hash key; empty: <cache-dir>/hash.key, made at first start")

    # Operation
    log_level: str = _setting("info", "debug, info, warning or error")
    log_json: bool = _setting(False, "one JSON object per log line instead of text")
    otlp_endpoint: str = _setting("", "OpenTelemetry collector that gets traces, as http://collector:4318; empty: no traces")
    trace_share: float = _setting(1.0, "share of the requests that are traced where the caller does not say, 0 to 1")
    metrics_port: int = _setting(
        0, "port of a role's /metrics, a worker's /ready, a gateway's /health and /ready, without key or TLS; 0: none"
    )
    metrics_host: str = _setting("127.0.0.1", "address that metrics_port listens on")


def _fail(name: str, value: object, why: str) -> NoReturn:
    raise BadConfig(f"{name} = {value!r}: {why}")


def _check(config: Config) -> Config:
    """Rules that need no model and no device."""
    if config.block_size not in (16, 32, 64):
        _fail("block_size", config.block_size, "must be 16, 32 or 64")
    if config.dtype not in ("auto", "bfloat16", "float16", "float32"):
        _fail("dtype", config.dtype, "must be auto, bfloat16, float16 or float32")
    if config.kv_cache_dtype not in ("auto", "fp8", "none"):
        _fail("kv_cache_dtype", config.kv_cache_dtype, "must be auto, fp8 or none")
    if config.device not in ("auto", "cuda", "cpu"):
        _fail("device", config.device, "must be auto, cuda or cpu")
    if config.log_level not in ("debug", "info", "warning", "error"):
        _fail("log_level", config.log_level, "must be debug, info, warning or error")
    if not 0 < config.gpu_memory_utilization <= 1:
        _fail("gpu_memory_utilization", config.gpu_memory_utilization, "must be above 0 and at most 1")
    if not 0 <= config.trace_share <= 1:
        _fail("trace_share", config.trace_share, "must be at least 0 and at most 1")
    if config.otlp_endpoint and urlsplit(config.otlp_endpoint).scheme not in ("http", "https"):
        _fail("otlp_endpoint", config.otlp_endpoint, "must begin with http:// or https://")
    counts = ("max_num_seqs", "credits", "tensor_parallel_size", "max_body_bytes", "max_queued_requests", "write_buffer_bytes")
    for name in counts:
        if getattr(config, name) < 1:
            _fail(name, getattr(config, name), "must be at least 1")
    for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_bytes", "cpu_threads", "max_queued_tokens"):
        if getattr(config, name) < 0:
            _fail(name, getattr(config, name), "must not be negative")
    for name in ("heartbeat_s", "silence_s", "step_timeout_s", "template_timeout_s", "sse_comment_s", "resume_grace_s"):
        if not 0 < getattr(config, name) < 1e6:
            _fail(name, getattr(config, name), "must be a positive number of seconds")
    if not 0 <= config.max_wait_s < 1e6:
        _fail("max_wait_s", config.max_wait_s, "must be a number of seconds, 0 or more")
    for name in ("port", "metrics_port", "admin_port"):
        if not 0 <= getattr(config, name) <= 65535:
            _fail(name, getattr(config, name), "must be between 0 and 65535")
    for name in ("gateway_link", "worker_link"):
        link = getattr(config, name)
        if not config.curve_dir and urlsplit(link).hostname not in LOOPBACK:
            _fail(name, link, "only loopback addresses may be used without keys (curve_dir)")
    if config.silence_s < 2 * config.heartbeat_s:
        _fail("silence_s", config.silence_s, f"must be at least twice heartbeat_s = {config.heartbeat_s}")
    return config


def _convert(name: str, kind: type, value: object) -> object:
    if kind is bool and isinstance(value, str):
        word = value.lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        _fail(name, value, "must be true or false")
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            _fail(name, value, f"must be of type {kind.__name__}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        _fail(name, value, f"must be of type {kind.__name__}")
    return value


_FIELDS = {each.name: each for each in dataclasses.fields(Config)}


def _kind(name: str) -> type:
    kind = _FIELDS[name].type
    assert isinstance(kind, type)
    return kind


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, plus --config; absent flags leave no value."""
    parser.add_argument("--config", help="TOML file of settings")
    for name, each in _FIELDS.items():
        flag = "--" + name.replace("_", "-")
        help_text = f"{each.metadata['help']} (default: {each.default!r})".replace("%", "%%")
        if _kind(name) is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        else:
            parser.add_argument(flag, dest=name, default=None, help=help_text)


def from_sources(
    flags: Mapping[str, object], environment: Mapping[str, str], file_values: Mapping[str, object] | None = None
) -> Config:
    """Merge the sources; BadConfig names the first setting that is unknown or has a wrong value."""
    merged: dict[str, object] = {}
    for name, value in (file_values or {}).items():
        if name not in _FIELDS:
            _fail(name, value, "is no setting")
        merged[name] = _convert(name, _kind(name), value)
    for variable, value in environment.items():
        name = variable.removeprefix("QUIRE_").lower()
        if variable.startswith("QUIRE_") and variable != "QUIRE_CONFIG":
            if name not in _FIELDS:
                _fail(variable, value, "is no setting")
            merged[name] = _convert(variable, _kind(name), value)
    for name, value in flags.items():
        if name in _FIELDS and value is not None:
            merged[name] = _convert("--" + name.replace("_", "-"), _kind(name), value)
    return _check(Config(**merged))  # type: ignore[arg-type]


def load(parsed: argparse.Namespace) -> Config:
    """Settings of this process, from parsed flags (add_flags), the environment and the file they name."""
    path = getattr(parsed, "config", None) or os.environ.get("QUIRE_CONFIG")
    file_values = None
    if path:
        try:
            file_values = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            _fail("config", path, str(error))
    return from_sources(vars(parsed), os.environ, file_values)


def parse_args(description: str, argv: Sequence[str] | None = None) -> Config:
    """Settings of one role's process; a bad setting ends it with FATAL_EXIT and one line."""
    started = Path(sys.argv[0])
    role = started.parent.name if started.name == "__main__.py" else started.name  # python -m scheduler: scheduler
    parser = argparse.ArgumentParser(prog=role, description=description)
    add_flags(parser)
    parsed = parser.parse_args(argv)
    try:
        return load(parsed)
    except BadConfig as error:
        parser.exit(FATAL_EXIT, f"{role}: error: {error}\n")


def to_flags(config: Config) -> list[str]:
    """Flags that give another process the same settings; only what differs from the defaults."""
    flags = []
    for name, each in _FIELDS.items():
        value = getattr(config, name)
        if value == each.default:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        else:
            flags.append(f"{flag}={value}")
    return flags
