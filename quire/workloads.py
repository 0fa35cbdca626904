"""The workloads every engine is measured on: fixed lengths, random token ids, end-of-sequence ignored."""

import random
from typing import NamedTuple


class Workload(NamedTuple):
    num_requests: int
    shared_tokens: int  # leading prompt tokens that all requests have in common
    own_tokens: int  # further prompt tokens, different in each
    output_tokens: int


WORKLOADS = {
    "single": Workload(1, 0, 128, 512),
    "chat-16": Workload(16, 0, 512, 256),
    "chat-64": Workload(64, 0, 512, 256),
    "chat-1024": Workload(1024, 0, 512, 256),
    "prefix-512": Workload(512, 2048, 128, 128),
    "prefix-8k": Workload(256, 8192, 64, 256),
    "long-16": Workload(16, 0, 16_000, 16),
    # Small ones, for a machine without a GPU.
    "cpu-1": Workload(1, 0, 96, 96),
    "cpu-8": Workload(8, 0, 96, 96),
    "cpu-32": Workload(32, 0, 96, 96),
    "cpu-prefix-16": Workload(16, 512, 32, 32),
}

_EDGE_IDS = 1000  # ids at both ends of the vocabulary are left out: special tokens live there


def prompts(name: str, vocab_size: int = 32_000, seed: int = 0) -> list[list[int]]:
    """Prompts of one workload, one list of ids per request; the same name and seed give the same ids everywhere."""
    workload = WORKLOADS[name]
    rng = random.Random(f"{name}-{seed}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(_EDGE_IDS, vocab_size - _EDGE_IDS) for _ in range(count)]

    shared = ids(workload.shared_tokens)
    return [shared + ids(workload.own_tokens) for _ in range(workload.num_requests)]
