"""Lower every kernel to Triton's IR for an H200, at the shapes of an 8B model, without a GPU.

The interpreter runs kernels as Python, so it accepts what the compiler refuses (a name that changes its type between two
branches). test_kernels_compile.py runs this as a process of its own, because the interpreter is chosen at import.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.int8: "*i8",
}
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
lowered: list[str] = []


def lower(function: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
    """Stands in for JITFunction.run."""
    options = {name: named.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in named}
    bound = inspect.signature(function.fn).bind(*arguments, **named)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter, (name, value) in zip(function.params, bound.arguments.items(), strict=True):
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(function, signature, constants, {})
    backend = make_backend(TARGET)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(TARGET, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    lowered.append(function.fn.__name__)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def main() -> None:
    JITFunction.run = lower
    from gpu_worker.kernels import adjust_logits, apply_plan, decode_schedule, filter_logits, launch
    from gpu_worker.kernels import sample as sampling
    from gpu_worker.kernels.attention_decode import attention_decode
    from gpu_worker.kernels.attention_prefill import attention_prefill
    from gpu_worker.kernels.attention_shared import attention_shared
    from gpu_worker.kernels.embed import embed
    from gpu_worker.kernels.few_rows_linear import few_rows_linear
    from gpu_worker.kernels.gather_keys import GatherPlan, gather_keys
    from gpu_worker.kernels.logprobs import logprobs
    from gpu_worker.kernels.rms_norm import add_rms_norm, rms_norm
    from gpu_worker.kernels.rope_and_store import rope_and_store
    from gpu_worker.kernels.silu_mul import silu_mul
    from gpu_worker.kernels.skinny_linear import skinny_linear

    for overlap in (False, True):
        for module in (
            rms_norm,
            silu_mul,
            embed,
            rope_and_store,
            attention_decode,
            attention_shared,
            few_rows_linear,
            skinny_linear,
            sampling.draw,
        ):
            module.__globals__["overlapped"] = lambda _, o=overlap: {"PDL": o}
        rows = empty(64, dtype=I32)
        for head, dtype, soft_cap, window, scales in (
            (128, BF16, 0.0, 0, None),
            (80, F32, 30.0, 100, None),
            (128, BF16, 0.0, 0, empty(2, 8, dtype=F32)),
            (80, BF16, 30.0, 100, empty(2, 8, dtype=F32)),
        ):
            cache = empty(100, 8, 16, head, dtype=dtype if scales is None else torch.float8_e4m3fn)
            table = empty(64, 2048, dtype=I32)
            q, k = empty(64, 32, head, dtype=dtype), empty(64, 8, head, dtype=dtype)
            groups = decode_schedule.Groups(rows, *(empty(8, dtype=I32) for _ in range(3)))
            schedule = decode_schedule.allocate(64, 32, 8, head, "cpu", 8)
            for given in (groups, None):
                decode_schedule.schedule_decode(schedule, rows, rows, 16, 32, 8, given, window)
            attention_shared(q, cache, cache, table, rows, schedule, 0.1, soft_cap, scales)
            attention_decode(q, cache, cache, table, schedule, 0.1, soft_cap, scales)
            starts = empty(65, dtype=I32)
            attention_prefill(q, k, k, cache, cache, table, rows, starts, rows, 0.1, window, soft_cap, kv_scales=scales)
            gather_keys(cache, cache, table, GatherPlan(empty(9, 4, dtype=I32), rows, 500), dtype, scales)
            for norm in (None, empty(head, dtype=dtype)):
                for turned in (head, head // 2):
                    angles = empty(100, turned, dtype=F32)
                    qkv = empty(64, 48 * head, dtype=dtype)
                    rope_and_store(qkv, rows, empty(64, dtype=I64), angles, cache, cache, 32, norm, norm, 1e-6, scales)
        x, gain = empty(64, 4096), empty(4096)
        rms_norm(x, gain, 1e-5)
        add_rms_norm(x, x, gain, 1e-5)
        silu_mul(x)
        embed(rows, empty(1000, 4096))
        for few in (x[:2], x):
            few_rows_linear(few, empty(6144, 4096), gain)
            few_rows_linear(few, empty(6144, 4096), silu=True)
        skinny_linear(x[:1], empty(6144, 4096), gain, 1e-5)
        skinny_linear(x[:1], empty(6144, 4096), gain, 1e-5, silu=True)
        skinny_linear(x[:1], empty(4096, 4096), residual=x[:1])
        records = empty(65, apply_plan.RECORD_WORDS, dtype=I32)
        floats = records.view(F32)
        some = empty(8, dtype=I64)
        for dtype in (BF16, F32):
            logits = empty(64, 5000, dtype=dtype)
            for filtered in (None, empty(64, dtype=F32)):
                for noise in (True, False):
                    space = sampling.DrawSpace(64, "cpu")
                    sampling.draw(logits, rows, rows, records[:, :2], floats[:, 2], space, filtered, noise)
            search = filter_logits.FilterSpace(64, "cpu")
            filter_logits.filter_thresholds(logits, some, rows, floats[:, 2], records[:, 8], floats[:, 3], floats[:, 4], search)
            logprobs(logits, some, rows, 5)
        adjust_logits.apply_edits(logits, some, some, empty(8, dtype=F32), some)
        counts = adjust_logits.PenaltySpace(5000, "cpu")
        columns = (records[:, 9], floats[:, 5], floats[:, 6], floats[:, 7])
        adjust_logits.apply_penalties(logits, some, rows, rows, table, *columns, counts)
        inputs = apply_plan.allocate(64, 8, "cpu")
        apply_plan.apply_plan(empty(4096, dtype=I32), records, table, table, rows, inputs, 16)
    assert launch.overlapped(rows) == {"PDL": False}
    print(" ".join(sorted(set(lowered))))


if __name__ == "__main__":
    main()
