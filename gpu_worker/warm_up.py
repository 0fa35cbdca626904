"""What a GPU worker does once at its start, so that no request waits for it: compile and load kernels, take its memory.

Every kernel of a prefill or mixed step and every kind of sampling runs once. Where the kernel cache is empty, the same steps
first run without launching Triton kernels: that compiles all of them side by side. For what is compiled and loaded one
layer of each kind stands for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gpu_worker.graphs import DecodeGraphs
from gpu_worker.kernels.compiling import compiling_only
from gpu_worker.kernels.gather_keys import MIN_PREFIX
from gpu_worker.model.decoder import Layer
from gpu_worker.phases import Phases
from gpu_worker.runner import Runner
from shared.columns import i32
from shared.messages import StepPlan
from shared.sampling import Edit, Flag, Sampling, pack_edits

PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=1.0, top_p=0.9, top_k=5, min_p=0.01, logprobs=2)
PENALIZED = FILTERED._replace(presence_penalty=0.1, flags=Flag.NEEDS_HISTORY)
# Tokens of a step at which cuBLAS may take another kernel.
PRODUCT_ROWS = (24, 48, 96, 160, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


@torch.inference_mode()
def warm_up(runner: Runner, graphs: DecodeGraphs, max_batched_tokens: int, phases: Phases) -> None:
    """Also capture the first graphs. All pages that the steps read and write are page 0; the slots are empty afterwards."""
    with _one_layer_of_a_kind(runner):
        with compiling_only():
            _steps(runner, max_batched_tokens)
            graphs.run_first()
        phases.end("compile")
        _steps(runner, max_batched_tokens)
    _products(runner, max_batched_tokens)
    phases.end("first_steps")
    graphs.capture_first()


@contextmanager
def _one_layer_of_a_kind(runner: Runner) -> Iterator[None]:
    """Inside, the model has one layer for each window and each set of forms of matrices."""
    decoder, cache = runner.decoder, runner.cache
    layers, pages = decoder.layers, cache.layers
    kinds = {_kind(layer): number for number, layer in reversed(list(enumerate(layers)))}
    decoder.layers = [layers[number] for number in sorted(kinds.values())]
    cache.layers = [pages[number] for number in sorted(kinds.values())]
    try:
        yield
    finally:
        decoder.layers, cache.layers = layers, pages


def _kind(layer: Layer) -> tuple[object, ...]:
    """The matrices' types and sizes: a quantized model may leave some layers as they are."""
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return layer.window, *((type(matrix), matrix.num_bytes) for matrix in matrices)


def _steps(runner: Runner, max_batched_tokens: int) -> None:
    rows = runner.slots.num_slots - 2  # beside one that decodes
    for num_rows, length in ((rows, max_batched_tokens), (1, 9000), (2, 2000), (min(100, rows), 16), (1, 16)):
        length = min(length, runner.slots.max_model_len - 1, max_batched_tokens // max(num_rows, 1) - 1)
        if num_rows > 0 and length > 0:
            _run(runner, length, num_rows, 1, PLAIN)
    for length in (8192, 1024, 512):  # chunks after a long prefix
        if length < max_batched_tokens and length + MIN_PREFIX < runner.slots.max_model_len:
            _run(runner, length, 1, 1, PLAIN, cached=MIN_PREFIX)
    for sampling in (PLAIN, FILTERED, PENALIZED):
        _run(runner, 1, 1, min(4, rows), sampling, grouped=True)


def _run(
    runner: Runner, length: int, rows: int, decoding: int, sampling: Sampling, *, cached: int = 0, grouped: bool = False
) -> None:
    """One step of rows prompts after a cached prefix and some decode rows; grouped: the latter share their first page."""
    page = runner.slots.page_tokens
    slots = range(1, rows + decoding + 1)
    nothing = {name: b"" for name in StepPlan._fields}
    fields: dict[str, Any] = {
        **nothing,
        "step": 0,
        "score_width": 0,
        "num_chunk": 0,
        "num_last": rows,
        "num_decode": decoding,
        "opens": b"".join(i32([slot, cached if slot <= rows else page + 1]) + sampling.pack() for slot in slots),
        "row_slots": i32(slots),
        "row_lens": i32([length] * rows),
        "tokens": i32([0] * rows * length),
    }
    if grouped and decoding > 1:
        fields["group_counts"] = i32([decoding, 1])
    if sampling.flags & Flag.NEEDS_HISTORY:
        fields["history_counts"] = i32(np.array([(slot, 0, 1) for slot in slots]).reshape(-1).tolist())
        fields["history"] = i32([0] * len(slots))
        fields["edit_counts"] = i32([1, 1])
        fields["edits"] = pack_edits([Edit(0, 1.0)])
    runner.collect(runner.launch(StepPlan(**fields)))
    runner.reset()


def _products(runner: Runner, max_batched_tokens: int) -> None:
    """cuBLAS loads a kernel at its first use, and loading waits for all that the device still has to do."""
    layer = runner.decoder.layers[0]
    spec = runner.decoder.spec
    for rows in (each for each in PRODUCT_ROWS if each <= max_batched_tokens):
        x = torch.zeros((rows, spec.hidden_size), dtype=runner.decoder.embedding.weight.dtype, device=runner.device)
        layer.o(layer.qkv(x)[:, : spec.num_heads * spec.head_dim].contiguous())
        layer.down(runner.decoder.ops.silu_mul(layer.gate_up(x)))
