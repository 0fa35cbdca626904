"""From settings to a Runner that is ready for plans. Everything that can be wrong with a start is said here."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker import ops
from gpu_worker.limits import check_dtype
from gpu_worker.memory import MemoryPlan, plan_memory
from gpu_worker.model.linear import can_pack
from gpu_worker.model.spec import Multipliers, read_spec
from gpu_worker.model.weights import Dummy, Safetensors, load_decoder, tensor_shapes
from gpu_worker.parallel.group import Group, Seat, join
from gpu_worker.parallel.layers import parallelize
from gpu_worker.parallel.shard import divide
from gpu_worker.phases import Phases
from gpu_worker.quant.config import read_quantization
from gpu_worker.quant.kv_scales import FLOAT8, page_dtype
from gpu_worker.quant.loading import planned_bytes
from gpu_worker.runner import Runner
from shared import model_folder, model_store
from shared.config import BadConfig, Config
from shared.model_folder import ModelError
from shared.process import usable_cores
from shared.token_ids import num_token_ids

log = logging.getLogger("quire.worker")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Loaded:
    runner: Runner
    memory: MemoryPlan
    fingerprint: str
    phases: Phases
    group: Group | None = None  # of a rank among several


def load(config: Config, seat: Seat | None = None) -> Loaded:
    """Blocking, for a thread of its own. ModelError or BadConfig, one line each, when this model cannot be served so;
    GroupError when the other ranks do not come."""
    phases = Phases()
    phases.end("import")
    device = _device(config)
    set_threads(config)
    folder = Path(model_store.resolve(config.model, config.cache_dir))
    model = model_folder.read_config(folder)
    spec, quant = read_spec(model), read_quantization(model, config.quantization)
    if quant is not None and (spec.fused or spec.multipliers != Multipliers()):
        raise ModelError(f"a quantized {spec.architecture} is not supported: its matrices are fused or multiplied")
    dtype = _dtype(config, spec.dtype, device, quantized=quant is not None)
    shard = divide(spec, seat.rank, seat.size) if seat else divide(spec, 0, 1)
    group = join(seat, device, dtype, config.step_timeout_s) if seat else None
    pages = page_dtype(config.kv_cache_dtype, quant, dtype, device)
    memory = plan_memory(config, shard.spec, dtype, device, planned_bytes(quant, tensor_shapes(shard.held), dtype), pages)
    source = Dummy(spec, device) if config.dummy_weights else Safetensors(folder, spec, quant)
    length = memory.max_model_len
    float8_pages = pages == FLOAT8
    table = ops.load(device, float8_pages=float8_pages)
    phases.end("settings")
    decoder = load_decoder(
        spec,
        source,
        table,
        dtype=dtype,
        device=device,
        max_model_len=length,
        quant=quant,
        shard=shard,
        float8_pages=float8_pages,
        num_ids=num_token_ids(folder),
    )
    if group is not None:
        parallelize(decoder, shard, group)
    phases.end("weights")
    if device.type == "cpu":
        from gpu_worker import cpu  # only here: it imports numba, which no GPU needs

        cpu.prepare(dtype, config.cache_dir)
        phases.end("compile")
    runner = Runner(decoder, memory, dtype, device, phases, in_step=group is not None)
    log.info("memory plan: %s", memory.text, extra={"device": str(device), "dtype": str(dtype).removeprefix("torch.")})
    log.info("loaded", extra={f"{name}_s": round(seconds, 1) for name, seconds in phases.seconds.items()})
    return Loaded(runner, memory, model_folder.fingerprint(folder), phases, group)


def set_threads(config: Config) -> None:
    """torch's threads of the calling thread's work."""
    torch.set_num_threads(config.cpu_threads or usable_cores())


def _device(config: Config) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadConfig("device = 'cuda': torch finds no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(config: Config, checkpoint: torch.dtype, device: torch.device, *, quantized: bool = False) -> torch.dtype:
    check_dtype(config, on_cpu=device.type == "cpu")
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu" and quantized and can_pack(torch.bfloat16):
        return torch.bfloat16  # the type of torch's kernels for few bits
    if device.type == "cpu" and not can_pack(checkpoint):
        name = str(checkpoint).removeprefix("torch.")
        log.info("a CPU has no fast arithmetic for %s: computing in float32", name)
        return torch.float32
    return checkpoint
