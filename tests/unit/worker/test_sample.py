"""The sampler twin against slow references, and its rules: seeds, edits, penalties, extreme settings, nothing allowed."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker import reference
from gpu_worker.batch import Needs, Sampled
from gpu_worker.prepare import make_batch
from gpu_worker.slots import Slots
from shared.columns import i32
from shared.sampling import Edit, Flag, Sampling, conditional, pack_edits
from tests import kernel_reference
from tests.plan_driver import make_plan
from tests.unit.worker.batches import CPU

VOCAB = 1000


def run(
    logits: Tensor,
    samplings: list[Sampling],
    positions: list[int],
    edits: dict[int, list[Edit]] | None = None,
    history: dict[int, list[int]] | None = None,
) -> tuple[Sampled, Needs]:
    """Sample rows through a plan, so that slots and needs are the worker's own. edits and history by row."""
    slots = Slots(len(samplings) + 2, 64, 16, CPU)
    row_slots = [len(samplings) + 1 - row for row in range(len(samplings))]
    opens = b"".join(
        i32([slot, position - 1]) + sampling.pack()
        for slot, position, sampling in zip(row_slots, positions, samplings, strict=True)
    )
    edits, history = edits or {}, history or {}
    plan = make_plan(
        num_decode=len(samplings),
        row_slots=i32(row_slots),
        opens=opens,
        edit_counts=i32(number for row, some in edits.items() for number in (row_slots[row], len(some))),
        edits=b"".join(pack_edits(some) for some in edits.values()),
        history_counts=i32(number for row, ids in history.items() for number in (row_slots[row], 0, len(ids))),
        history=b"".join(i32(ids) for ids in history.values()),
    )
    slots.apply(plan, None)  # type: ignore[arg-type]  # no pages in this plan
    batch = make_batch(plan, slots)
    return reference.sample(logits.clone(), slots, batch.sample_slots, batch.sample_positions, batch.needs), batch.needs


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    logits = random_logits(3)
    logits[1, [500, 20, 900]] = 50.0
    sampled, needs = run(logits, [Sampling(temperature=0.0)] * 3, [5, 6, 7])
    assert sampled.tokens.tolist() == [int(logits[0].argmax()), 20, int(logits[2].argmax())]
    assert needs == Needs(noise=False, edits=None, penalized=None, filtered=None, scored=None, top_width=0)


def test_noise_is_the_hash_of_the_contract() -> None:
    for seed, position in [(0, 0), (1, 5), (2**64 - 1, 30), (0x123456789ABCDEF0, 17)]:
        noise = torch.zeros(1, VOCAB)
        words = torch.from_numpy(np.array([seed], np.uint64).view(np.int32).reshape(1, 2))
        reference.noise.add_gumbel(noise, torch.ones(1), words, torch.tensor([position], dtype=torch.int32))
        expected = kernel_reference.gumbel(seed, position, VOCAB)
        assert torch.allclose(noise[0].double(), expected, rtol=1e-5, atol=2e-6)


def test_random_rows_equal_a_slow_reference() -> None:
    rng = random.Random(3)
    for trial in range(60):
        samplings, positions = [], []
        for _ in range(rng.randrange(1, 6)):
            samplings.append(
                Sampling(
                    seed=rng.randrange(2**64),
                    temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
                    top_k=rng.choice([0, 0, 1, 5, 400, 999, 5000]),
                    top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.999999, 1e-9]),
                    min_p=rng.choice([0.0, 0.0, 0.05, 0.9]),
                )
            )
            positions.append(rng.randrange(1, 60))
        logits = random_logits(len(samplings), trial)
        if rng.random() < 0.3:
            logits = logits.round()  # many ties
        sampled, _ = run(logits, samplings, positions)
        for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
            scores = logits[row].double()
            if sampling.temperature > 0:
                kept = kernel_reference.keep(logits[row], sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
                scores = scores + sampling.temperature * kernel_reference.gumbel(sampling.seed, position, VOCAB)
                scores = scores.masked_fill(~kept, -math.inf)
            token = int(sampled.tokens[row])
            assert scores[token] >= scores.max() - 1e-4, f"{trial = } {row = } {sampling}"


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    logits = random_logits(8)
    samplings = [Sampling(seed=row * 7, top_p=0.9 if row % 2 else 1.0) for row in range(8)]
    together, _ = run(logits, samplings, list(range(1, 9)))
    for row in range(8):
        alone, _ = run(logits[row : row + 1], samplings[row : row + 1], [row + 1])
        assert alone.tokens[0] == together.tokens[row]


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(4000, 1)
    tokens = torch.cat(
        [run(logits[:50], [Sampling(seed=seed)] * 50, list(range(1, 51)))[0].tokens for seed in range(80)]
    )  # fmt: skip
    shares = torch.bincount(tokens, minlength=4) / len(tokens)
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-8, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-9])
def test_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = random_logits(4)
    sampled, _ = run(logits, [Sampling(seed=row, temperature=temperature, top_p=top_p) for row in range(4)], [3, 4, 5, 6])
    assert sampled.tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_huge_temperature_is_uniform_and_finite() -> None:
    logits = random_logits(1).repeat(40, 1)
    sampled, _ = run(logits, [Sampling(seed=row, temperature=3e38, top_p=0.9) for row in range(40)], [9] * 40)
    assert sampled.tokens.min() >= 0 and len(set(sampled.tokens.tolist())) > 30


def test_nothing_allowed_is_minus_one_and_harms_nobody() -> None:
    logits = random_logits(5)
    logits[1] = -math.inf
    logits[2, 17] = math.nan
    allow_only = Sampling(temperature=0.0, flags=Flag.ALLOW_ONLY)
    edits = {3: [Edit(7, 0.0), Edit(7, -math.inf)]}
    for temperature in (0.0, 1.0):
        samplings = [Sampling(seed=1, temperature=temperature)] * 5
        samplings[3] = allow_only._replace(temperature=temperature)
        sampled, _ = run(logits, samplings, [4] * 5, edits)
        assert sampled.tokens.tolist()[1:4] == [-1, -1, -1]
        alone, _ = run(logits[[0, 4]], [Sampling(seed=1, temperature=temperature)] * 2, [4, 4])
        assert sampled.tokens[[0, 4]].tolist() == alone.tokens.tolist()
        assert sampled.tokens[0] >= 0


def test_edits_bias_forbid_allow_and_end() -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 5] = 10.0
    greedy = Sampling(temperature=0.0, num_prompt=4)
    edits = {
        0: [Edit(8, 20.0)],
        1: [Edit(5, -math.inf), Edit(9, 1.0)],
        2: [Edit(5, -math.inf, until=3)],  # output index 2: still forbidden
        3: [Edit(5, -math.inf, until=2)],  # ended
        4: [Edit(30, 0.0), Edit(31, 0.0), Edit(31, 1.5)],
        5: [Edit(5, -6.0), Edit(5, -6.0), Edit(2, 1.0)],
    }
    samplings = [greedy] * 6
    samplings[4] = greedy._replace(flags=Flag.ALLOW_ONLY)
    sampled, _ = run(logits, samplings, [6] * 6, edits)
    assert sampled.tokens.tolist() == [8, 9, 0, 5, 31, 2]


def test_s07_conditional_edits_act_where_the_output_ends_with_their_ids() -> None:
    greedy = Sampling(temperature=0.0, num_prompt=2, flags=Flag.NEEDS_HISTORY)
    histories = [[7, 8, 7, 8], [7, 8, 8, 7], [7, 8, 7, 8], [1, 7, 8], [1, 7, 8, 0, 7, 8], [7, 8, 7, 8]]
    logits = torch.zeros(6, VOCAB)
    logits[:, 5], logits[:, 6] = 10.0, 9.0
    ban = conditional([7, 8, 5], -math.inf)
    edits = {row: list(ban) for row in range(6)}
    edits[2] = [*conditional([9, 5], -math.inf), Edit(6, 0.5), *ban]
    edits[5] = [*ban, Edit(6, -math.inf), *conditional([8, 0], -math.inf)]
    samplings = [greedy] * 6
    sampled, needs = run(logits, samplings, [len(each) for each in histories], edits, dict(enumerate(histories)))
    # Row 3: 7 is prompt, so the output does not hold the whole beginning.
    assert sampled.tokens.tolist() == [6, 5, 6, 5, 6, 1]
    assert needs.edits is not None and int((needs.edits.tokens < 0).sum()) == 0


def test_penalties_count_prompt_and_output_as_their_names_say() -> None:
    history = [3, 3, 4, 5, 5, 6]  # the first 3 are prompt
    logits = torch.full((4, VOCAB), -2.0)
    logits[:, [3, 4, 5, 6]] = torch.tensor([4.0, -1.0, 4.0, 4.0])
    base = Sampling(temperature=0.0, num_prompt=3, flags=Flag.NEEDS_HISTORY)
    samplings = [
        base._replace(presence_penalty=1.0),
        base._replace(frequency_penalty=0.75),
        base._replace(repetition_penalty=2.0),
        Sampling(temperature=0.0),
    ]
    expected = logits.clone()
    expected[0, [5, 6]] -= 1.0
    expected[1, 5] -= 1.5
    expected[1, 6] -= 0.75
    expected[2, [3, 5, 6]] /= 2
    expected[2, 4] *= 2
    direct = logits.clone()
    slots = Slots(6, 64, 16, CPU)
    plan = make_plan(
        num_decode=4,
        row_slots=i32([1, 2, 3, 4]),
        opens=b"".join(i32([slot, 5]) + sampling.pack() for slot, sampling in zip([1, 2, 3, 4], samplings, strict=True)),
        history_counts=i32(number for slot in (1, 2, 3) for number in (slot, 0, 6)),
        history=i32(history * 3),
    )
    slots.apply(plan, None)  # type: ignore[arg-type]
    batch = make_batch(plan, slots)
    reference.sample(direct, slots, batch.sample_slots, batch.sample_positions, batch.needs)
    assert torch.equal(direct, expected)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4)
    samplings = [
        Sampling(temperature=0.0, logprobs=3),
        Sampling(temperature=0.0),
        Sampling(seed=5, temperature=2.0, top_k=3, logprobs=0),
        Sampling(temperature=0.0, logprobs=5),
    ]
    best = int(logits[3].argmax())
    sampled, needs = run(logits, samplings, [4] * 4, {3: [Edit(best, -math.inf)]})
    assert needs.top_width == 5 and sampled.logprobs is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    raw = torch.log_softmax(logits.double(), dim=-1)
    for row in (0, 2, 3):
        assert abs(float(sampled.logprobs[row]) - float(raw[row, int(sampled.tokens[row])])) < 1e-5
    assert math.isnan(float(sampled.logprobs[1]))
    assert sampled.top_ids[3].tolist() == raw[3].topk(5).indices.tolist()  # the forbidden token keeps its finite raw value
    assert sampled.top_ids[3, 0] == best and sampled.tokens[3] != best
    assert sampled.top_ids[0, :3].tolist() == raw[0].topk(3).indices.tolist()
    assert torch.allclose(sampled.top_logprobs[0, :3].double(), raw[0].topk(3).values, atol=1e-5)
    for row, width in enumerate([3, 0, 0, 5]):
        assert sampled.top_ids[row, width:].tolist() == [0] * (5 - width)
        assert sampled.top_logprobs[row, width:].tolist() == [-math.inf] * (5 - width)
