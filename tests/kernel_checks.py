"""Checks of each kernel against its float64 reference, run small on a CPU (interpreter) and large on a GPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.kernels import adjust_logits, apply_plan, decode_schedule, filter_logits, gather_keys
from gpu_worker.kernels import sample as sampling
from gpu_worker.kernels.attention_decode import attention_decode
from gpu_worker.kernels.attention_prefill import attention_prefill
from gpu_worker.kernels.attention_shared import attention_shared
from gpu_worker.kernels.decode_schedule import Groups
from gpu_worker.kernels.embed import embed
from gpu_worker.kernels.few_rows_linear import few_rows_linear, few_rows_shape
from gpu_worker.kernels.logprobs import logprobs
from gpu_worker.kernels.rms_norm import add_rms_norm, rms_norm
from gpu_worker.kernels.rope_and_store import rope_and_store
from gpu_worker.kernels.silu_mul import silu_mul
from gpu_worker.kernels.skinny_linear import skinny_linear
from shared.messages import StepPlan
from shared.sampling import Sampling
from tests import kernel_reference as reference
from tests.kernel_reference import Paged, error, paged, tolerance


def device_groups(case: Paged, extra: int = 2) -> Groups:
    """The groups of a case as the kernels want them, with unused entries at the end."""
    device = case.context_lens.device
    rows = [0, *(count for count, _ in case.groups)]
    starts = [sum(rows[: number + 1]) - rows[number] for number in range(len(rows))]
    row_groups = torch.zeros(len(case.context_lens), dtype=torch.int32)
    for number in range(1, len(rows)):
        row_groups[starts[number] : starts[number] + rows[number]] = number
    columns = [starts + [0] * extra, rows + [0] * extra, [0, *(pages for _, pages in case.groups)] + [0] * extra]
    return Groups(row_groups.to(device), *(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


def run_decode(
    q: Tensor, case: Paged, scale: float, window: int = 0, soft_cap: float = 0.0, target: int = 64, min_span: int = 64
) -> Tensor:
    rows, q_heads, head = q.shape
    kv_heads, page = case.k_cache.shape[1:3]
    groups = device_groups(case) if case.groups else None
    count = groups.starts.shape[0] if groups else 0
    space = decode_schedule.allocate(rows, q_heads, kv_heads, head, q.device, count, target)
    space.part_values.fill_(float("nan"))
    space.part_sums.fill_(float("nan"))
    decode_schedule.schedule_decode(
        space, case.context_lens, case.row_slots, page, q_heads, kv_heads, groups, window, target, min_span
    )
    cache = (q, case.k_cache, case.v_cache, case.page_table)
    if groups and not window:
        attention_shared(*cache, case.row_slots, space, scale, soft_cap, case.kv_scales)
    return attention_decode(*cache, space, scale, soft_cap, case.kv_scales, out=torch.full_like(q.contiguous(), float("nan")))


def check_decode(
    lengths: list[int],
    q_heads: int,
    kv_heads: int,
    head: int,
    page: int,
    dtype: torch.dtype,
    device: str,
    groups: list[tuple[int, int]] | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    target: int = 64,
    seed: int = 0,
    spare_pages: int = 7,
    float8: bool = False,
) -> None:
    case = paged(lengths, kv_heads, head, page, dtype, device, groups, spare_pages, seed)
    case = case.in_float8() if float8 else case
    # Queries with the row stride of a qkv product.
    wide = torch.randn((len(lengths), (q_heads + 2 * kv_heads) * head), device=device).to(dtype)
    q, _, _ = reference.heads(wide, q_heads, kv_heads, head)
    out = run_decode(q, case, head**-0.5, window, soft_cap, target)
    for row, length in enumerate(lengths):
        if length:
            expected = reference.attention(q[row : row + 1], *case.context(row), head**-0.5, window, soft_cap)
            found = error(out[row : row + 1], expected)
            assert found < tolerance(dtype), f"{row = } {length = } {found = }"


def check_prefill(
    rows: list[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    head: int,
    page: int,
    dtype: torch.dtype,
    device: str,
    window: int = 0,
    soft_cap: float = 0.0,
    seed: int = 0,
    spare_pages: int = 7,
    float8: bool = False,
    **options: Any,
) -> None:
    """rows: (cached prefix, new tokens). The new tokens' cells in the cache stay NaN: they come from k_new and v_new."""
    case = paged([prefix for prefix, _ in rows], kv_heads, head, page, dtype, device, None, spare_pages, seed)
    case = case.in_float8() if float8 else case
    case.row_slots = torch.arange(len(rows) + 2, 2, -1, dtype=torch.int32, device=device)
    new = [count for _, count in rows]
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    padding = 3  # lines of qkv past the batch hold NaN
    qkv = torch.full((sum(new) + padding, (q_heads + 2 * kv_heads) * head), float("nan"), dtype=dtype, device=device)
    qkv[: sum(new)] = torch.randn((sum(new), qkv.shape[1]), device=device).to(dtype)
    q, k, v = reference.heads(qkv, q_heads, kv_heads, head)
    prefixes = case.context_lens
    lens = prefixes + torch.tensor(new, dtype=torch.int32, device=device)
    out = torch.full((sum(new) + padding, q_heads, head), float("nan"), dtype=dtype, device=device)
    attention_prefill(
        q, k, v, case.k_cache, case.v_cache, case.page_table, case.row_slots, starts, lens, head**-0.5, window, soft_cap,
        out=out, kv_scales=case.kv_scales, **options,
    )  # fmt: skip
    for row, (_, count) in enumerate(rows):
        span = slice(int(starts[row]), int(starts[row]) + count)
        old_k, old_v = case.context(row)
        keys, values = torch.cat((old_k, k[span].double())), torch.cat((old_v, v[span].double()))
        expected = reference.attention(q[span], keys, values, head**-0.5, window, soft_cap)
        found = error(out[span], expected)
        assert found < tolerance(dtype), f"{row = } {rows[row] = } {found = }"
    assert out[sum(new) :].isnan().all(), "padding lines must not be written"


def check_prefill_of_copies(
    rows: list[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    head: int,
    page: int,
    dtype: torch.dtype,
    device: str,
    float8: bool = False,
    **options: Any,
) -> None:
    """rows: (cached prefix, new tokens). Rows that gather_keys copies equal the same rows read through pages."""
    case = paged([sum(each) for each in rows], kv_heads, head, page, dtype, device, None, 7, 0)
    case = case.in_float8() if float8 else case
    new = [count for _, count in rows]
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q = torch.randn((sum(new), q_heads, head), device=device).to(dtype)
    context = [case.context(row) for row in range(len(rows))]
    k_new, v_new = (
        torch.cat([each[which][prefix:] for each, (prefix, _) in zip(context, rows, strict=True)]).to(dtype) for which in (0, 1)
    )
    host = (case.row_slots.cpu().numpy(), np.array(new, np.int32), case.context_lens.cpu().numpy())
    plan = gather_keys.plan_gather(*host, torch.device(device), min_queries=32, min_prefix=32)
    assert plan is not None and (plan.starts < 0).any(), "some rows are copied, some are not"
    gathered = gather_keys.gather_keys(case.k_cache, case.v_cache, case.page_table, plan, dtype, case.kv_scales)
    copies = (*gathered, plan.starts)
    out = attention_prefill(
        q, k_new, v_new, case.k_cache, case.v_cache, case.page_table, case.row_slots, starts, case.context_lens, head**-0.5,
        copies=copies, kv_scales=case.kv_scales, **options,
    )  # fmt: skip
    for row, (keys, values) in enumerate(context):
        span = slice(int(starts[row]), int(starts[row + 1]))
        expected = reference.attention(q[span], keys, values, head**-0.5, 0, 0.0)
        assert error(out[span], expected) < tolerance(dtype), f"{row = } {rows[row] = }"


def check_norms(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn((tokens, hidden), device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    assert error(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)) < tolerance(dtype)
    residual = torch.randn((tokens, hidden), device=device).to(dtype)
    total = (x.double() + residual.double()).to(dtype)
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert error(residual, total) < tolerance(dtype)
    assert error(out, reference.rms_norm(residual, weight, 1e-6)) < tolerance(dtype)


def check_silu_mul(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn((tokens, 2 * width), device=device).to(dtype)
    gate, up = x.double()[:, :width], x.double()[:, width:]
    assert error(silu_mul(x), torch.nn.functional.silu(gate) * up) < tolerance(dtype)


def check_embed(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn((97, hidden), device=device).to(dtype)
    ids = torch.randint(0, 97, (tokens,), dtype=torch.int32, device=device)
    assert torch.equal(embed(ids, weight), weight[ids.long()])


def check_rope(
    tokens: int, q_heads: int, kv_heads: int, head: int, rope_dim: int, page: int, norm: bool, dtype: torch.dtype, device: str
) -> None:
    pages = tokens + 3
    caches = [torch.full((pages, kv_heads, page, head), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    untouched = [cache.clone() for cache in caches]
    qkv = torch.randn((tokens, (q_heads + 2 * kv_heads) * head), device=device).to(dtype)
    before = qkv.clone()
    cells = (torch.randperm((pages - 1) * page - 1)[:tokens] + page).to(device)
    cells[0] = pages * page - 1
    cells[-1] = 5  # padding writes to page 0
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32, device=device)
    cos_sin = torch.randn((50, rope_dim), device=device)
    weights = [torch.randn(head, device=device).to(dtype) for _ in range(2)] if norm else [None, None]
    q, k, v = rope_and_store(qkv, positions, cells, cos_sin, caches[0], caches[1], q_heads, weights[0], weights[1], 1e-6)
    parts = list(reference.heads(before, q_heads, kv_heads, head))
    for number, weight in enumerate(weights):
        part = parts[number].double()
        parts[number] = reference.rope(part if weight is None else reference.rms_norm(part, weight, 1e-6), positions, cos_sin)
    for out, expected in zip((q, k, v), parts, strict=True):
        assert error(out, expected) < tolerance(dtype)
    for cache, clean, new in zip(caches, untouched, (k, v), strict=True):
        flat = cache.transpose(1, 2).flatten(0, 1)
        assert torch.equal(flat[cells], new)
        clean_flat = clean.transpose(1, 2).flatten(0, 1)
        clean_flat[cells] = new
        assert torch.equal(flat.nan_to_num(7.0), clean_flat.nan_to_num(7.0)), "other cells must not change"


def sampling_records(samplings: list[Sampling], device: str) -> Tensor:
    """i32 [slots, words], slot 0 unused."""
    words = [torch.frombuffer(bytearray(record.pack()), dtype=torch.int32) for record in [Sampling(), *samplings]]
    return torch.stack(words).to(device)


def columns(records: Tensor) -> dict[str, Tensor]:
    names = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    floats = {name: records.view(torch.float32)[:, 2 + place] for place, name in enumerate(names)}
    return {"seeds": records[:, 0:2], **floats, "top_k": records[:, 8], "num_prompt": records[:, 9]}


def check_sample(logits: Tensor, samplings: list[Sampling], positions: list[int], filters: bool = True) -> None:
    """Row r uses slot S - r. The drawn token must be the reference's, or within rounding of its score."""
    device = str(logits.device)
    rows, vocabulary = logits.shape
    column = columns(sampling_records(samplings[::-1], device))
    slots = torch.arange(rows, 0, -1, dtype=torch.int32, device=device)
    where = torch.tensor(positions, dtype=torch.int32, device=device)
    thresholds = None
    if filters:
        asking = [r for r, s in enumerate(samplings) if s.temperature > 0 and (s.top_k or s.top_p < 1 or s.min_p)]
        thresholds = filter_logits.filter_thresholds(
            logits, torch.tensor(asking, dtype=torch.int64, device=device), slots,
            column["temperature"], column["top_k"], column["top_p"], column["min_p"],
            filter_logits.FilterSpace(rows, device),
        )  # fmt: skip
    space = sampling.DrawSpace(rows, device)
    out = sampling.draw(logits, slots, where, column["seeds"], column["temperature"], space, thresholds).tolist()
    assert not space.arrivals.any()
    for row, record in enumerate(samplings):
        x = logits[row].double().cpu()
        if x.isnan().any() or x.max() == float("-inf"):
            assert out[row] == -1, f"{row = } {out[row] = }"
            continue
        score = x.clone()
        if record.temperature > 0:
            kept = reference.keep(logits[row], record.temperature, record.top_k, record.top_p, record.min_p)
            assert kept[out[row]], f"{row = } {record = } token {out[row]} was dropped"
            score += record.temperature * reference.gumbel(record.seed, positions[row], vocabulary)
            score = score.masked_fill(~kept, float("-inf"))
        best = int(score.argmax())
        slack = 1e-3 * max(record.temperature, 0.0)
        assert out[row] == best or score[out[row]] >= score[best] - slack, f"{row = } {record = } {out[row]} != {best}"


def check_adjust(rows: int, vocabulary: int, device: str) -> None:
    torch.manual_seed(3)
    logits = torch.randn((rows, vocabulary), device=device)
    expected = logits.double().cpu()
    edit_rows = torch.tensor([0, 0, 0, rows - 1, rows - 1])
    edit_tokens = torch.tensor([1, vocabulary - 1, 1, 5, 6])
    values = torch.tensor([0.5, 2.0, 0.25, float("-inf"), 1.0])
    allow = torch.tensor([rows - 1])
    kept = expected[rows - 1].clone()
    expected[rows - 1] = float("-inf")
    expected[rows - 1, 5:7] = kept[5:7]
    for row, token, value in zip(edit_rows.tolist(), edit_tokens.tolist(), values.tolist(), strict=True):
        expected[row, token] += value
    adjust_logits.apply_edits(logits, edit_rows.to(device), edit_tokens.to(device), values.to(device), allow.to(device))
    assert torch.allclose(logits.double().cpu(), expected, atol=1e-6)

    history = torch.randint(0, min(vocabulary, 40), (rows + 1, 300), dtype=torch.int32)
    samplings = [Sampling(presence_penalty=0.3 * r, frequency_penalty=0.1, repetition_penalty=1.3, num_prompt=20 * r)
                 for r in range(rows)]  # fmt: skip
    column = columns(sampling_records(samplings, device))
    positions = torch.tensor([35 * r + 5 for r in range(rows)], dtype=torch.int32)
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    asking = torch.arange(0, rows, 2)
    space = adjust_logits.PenaltySpace(vocabulary, device, programs=2)
    for row in asking.tolist():
        all_ids = history[row + 1, : positions[row]].long()
        outputs = history[row + 1, samplings[row].num_prompt : max(int(positions[row]), samplings[row].num_prompt)].long()
        counts = torch.bincount(outputs, minlength=vocabulary).double()
        seen = torch.bincount(all_ids, minlength=vocabulary) > 0
        x = expected[row]
        x = torch.where(seen, torch.where(x > 0, x / 1.3, x * 1.3), x)
        expected[row] = x - samplings[row].presence_penalty * (counts > 0) - 0.1 * counts
    adjust_logits.apply_penalties(
        logits, asking.to(device), slots.to(device), positions.to(device), history.to(device), column["num_prompt"],
        column["presence_penalty"], column["frequency_penalty"], column["repetition_penalty"], space,
    )  # fmt: skip
    assert torch.allclose(logits.double().cpu(), expected, atol=1e-4)
    assert not space.counts.any()


def check_logprobs(rows: int, vocabulary: int, width: int, dtype: torch.dtype, device: str) -> None:
    logits = torch.randn((rows, vocabulary), device=device).to(dtype) * 4
    logits[0, 3:] = float("-inf")
    asking = torch.arange(0, rows, 2, device=device)
    targets = torch.randint(0, vocabulary, (rows,), dtype=torch.int32, device=device)
    targets[0] = 1
    chosen, ids, values = logprobs(logits, asking, targets, width)
    exact = logits.double().cpu().log_softmax(-1)
    for row in range(rows):
        if row % 2:
            assert chosen[row].isnan() and not ids[row].any() and (values[row] == float("-inf")).all()
            continue
        assert abs(float(chosen[row]) - float(exact[row, targets[row]])) < 1e-4
        order = exact[row].sort(descending=True, stable=True)
        live = order.values[:width] > float("-inf")
        assert torch.allclose(values[row].double().cpu()[live], order.values[:width][live], atol=1e-4)
        assert torch.equal(ids[row].long().cpu()[live], order.indices[:width][live])
        assert not ids[row].cpu()[~live].any() and (values[row].cpu()[~live] == float("-inf")).all()


def check_skinny(outputs: int, inputs: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn((1, inputs), device=device).to(dtype)
    weight = torch.randn((outputs, inputs), device=device).to(dtype) / inputs**0.5
    gain = torch.randn(inputs, device=device).to(dtype)
    residual = torch.randn((1, outputs), device=device).to(dtype)
    product = x.double() @ weight.double().T
    normed = reference.rms_norm(x, gain, 1e-5) @ weight.double().T
    gate, up = normed.chunk(2, -1)
    assert error(skinny_linear(x, weight), product) < tolerance(dtype)
    assert error(skinny_linear(x, weight, gain, 1e-5), normed) < tolerance(dtype)
    assert error(skinny_linear(x, weight, gain, 1e-5, silu=True), torch.nn.functional.silu(gate) * up) < tolerance(dtype)
    expected = product + residual.double()
    assert skinny_linear(x, weight, residual=residual, out=residual) is residual
    assert error(residual, expected) < tolerance(dtype)


def check_few_rows(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str, small: bool = False) -> None:
    """small: small tiles in both directions too."""
    base = torch.randn((rows, inputs + 16), device=device).to(dtype)
    x = base[:, :inputs]
    weight = torch.randn((outputs, inputs), device=device).to(dtype) / inputs**0.5
    bias = torch.randn(outputs, device=device).to(dtype)
    product = x.double() @ weight.double().T
    shapes = [few_rows_shape(rows, outputs, silu=False)]
    if small:
        shapes += [{**shapes[0], "BN": 32, "BK": 64, "STAGES": 2, "num_warps": 4, "SWAP": swap} for swap in (0, 1)]
    for shape in shapes:
        out = torch.full((rows, outputs), torch.nan, dtype=dtype, device=device)
        assert few_rows_linear(x, weight, out=out, shape=shape) is out
        assert error(out, product) < tolerance(dtype)
        assert error(few_rows_linear(x, weight, bias, shape=shape), product + bias.double()) < tolerance(dtype)
    gate, up = product.chunk(2, -1)
    assert error(few_rows_linear(x, weight, silu=True), torch.nn.functional.silu(gate) * up) < tolerance(dtype)


def check_apply_plan(device: str) -> None:
    def column(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    page, slots, max_pages = 16, 9, 6
    opened = Sampling(seed=2**63 + 5, temperature=0.5, top_k=7)
    plan = StepPlan(
        step=1, num_chunk=0, num_last=1, num_decode=4, row_slots=column(8, 3, 5, 2, 7), row_lens=column(2),
        tokens=column(11, 12), page_writes=column(5, 1, 77, 8, 0, 3),
        opens=column(8, 0) + opened.pack(), edit_counts=b"", edits=b"", history_counts=column(8, 4, 2, 3, 0, 1),
        history=column(21, 22, 23), registrations=b"", page_copies=b"", score_positions=b"", score_targets=b"",
        score_width=0, group_counts=column(2, 1, 2, 0),
    )  # fmt: skip
    records = torch.zeros((slots, apply_plan.RECORD_WORDS), dtype=torch.int32, device=device)
    table = (torch.arange(slots * max_pages, dtype=torch.int32, device=device) + 100).reshape(slots, max_pages)
    table[0] = 0
    history = torch.zeros((slots, 90), dtype=torch.int32, device=device)
    last = torch.arange(slots, dtype=torch.int32, device=device) * 1000
    inputs = apply_plan.allocate(8, 3, device)
    for tensor in inputs:
        tensor.fill_(-5)
    staged = torch.zeros(4096, dtype=torch.int32)
    words = apply_plan.pack(plan, np.array([15, 16, 95, 0], np.int32), staged.numpy(), 3)
    assert 0 < words < 200
    apply_plan.apply_plan(staged.to(device), records, table, history, last, inputs, page)
    assert records[8].cpu().numpy().tobytes() == opened.pack()
    assert not records[:8].any()
    assert table[5, 1] == 77 and table[8, 0] == 3
    assert history[8, 4:6].tolist() == [21, 22] and history[3, 0] == 23 and history.count_nonzero() == 3
    assert inputs.row_slots.tolist() == [3, 5, 2, 7, 0, 0, 0, 0]
    assert inputs.input_ids.tolist() == [3000, 5000, 2000, 7000, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [15, 16, 95, 0, 0, 0, 0, 0]
    expected = [int(table[3, 0]) * 16 + 15, 77 * 16, int(table[2, 5]) * 16 + 15, int(table[7, 0]) * 16, 0, 0, 0, 0]
    assert inputs.cells.tolist() == expected
    assert inputs.context_lens.tolist() == [16, 17, 96, 1, 0, 0, 0, 0]
    assert inputs.query_starts.tolist() == list(range(9))
    assert inputs.row_groups.tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert inputs.groups.tolist() == [[0, 0, 2, 0], [0, 2, 2, 0], [0, 1, 0, 0]]
