"""Everything the scheduler counts. Plain numbers that only grow; /metrics reads them when it is scraped."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    prompt_tokens: int = 0  # of sequences that entered a plan
    generated_tokens: int = 0
    lookup_tokens: int = 0  # tokens looked up in a prefix index when a sequence was bound
    hit_tokens: int = 0  # ... and found there
    recomputed_tokens: int = 0  # computed again after a preemption, a move or a failure
    false_credit_tokens: int = 0  # hits promised at placement and not found when bound; stays 0
    preemptions: int = 0
    aborts: int = 0
    failovers: int = 0  # replicas dropped with their state
    stale_rows: int = 0  # rows whose sequence had been released when their result came
    steps: int = 0
    plan_s: float = 0.0  # time spent building plans
    audit_violations: int = 0
    internal_errors: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason
    rejected: Counter[str] = field(default_factory=Counter)  # by code
