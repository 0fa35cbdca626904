"""How many prefill tokens one plan of a replica may carry: short decode gaps when little waits, large steps when much does."""

MIN_GAP_US = 12_000.0  # a step with decode rows should take no longer than this while little prefill waits
MAX_GAP_US = 250_000.0  # ... and no longer than this while a crowd waits: more than twice MIN_GAP_US of it
FLOOR_TOKENS = 128  # prefill always moves: fewer tokens would waste the step's fixed cost
SMOOTHING = 0.2


class ChunkBudget:
    """step time = decode part + prefill tokens * cost per token, both learned from finished steps (0: not known yet).

    A large step computes a token for less, so what waits is done sooner; a small one keeps the gap between the tokens of
    running streams short. So one or two short prompts trickle in beside the running rows, and what a crowd brings is
    computed at once, as far as MAX_GAP_US permits.
    """

    __slots__ = ("decode_us", "max_tokens", "token_us")

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.decode_us = 0.0
        self.token_us = 0.0

    def observe(self, num_prefill_tokens: int, num_decode: int, step_us: int) -> None:
        if num_prefill_tokens == 0:
            self.decode_us += SMOOTHING * (step_us - self.decode_us) if self.decode_us else step_us
        elif num_prefill_tokens >= FLOOR_TOKENS:
            cost = max(step_us - (self.decode_us if num_decode else 0.0), 0.0) / num_prefill_tokens
            self.token_us += SMOOTHING * (cost - self.token_us) if self.token_us else cost

    def crowded(self, num_waiting_tokens: int) -> bool:
        return num_waiting_tokens * self.token_us > 2 * MIN_GAP_US

    def tokens(self, num_decode: int, num_waiting_tokens: int) -> int:
        """Prefill tokens of the next plan beside num_decode decode rows, when so many prefill tokens wait for the replica."""
        room = self.max_tokens - num_decode
        if num_decode == 0 or self.token_us == 0.0:
            return room
        gap_us = MAX_GAP_US if self.crowded(num_waiting_tokens) else MIN_GAP_US
        fitting = int((gap_us - self.decode_us) / self.token_us)
        return min(room, max(fitting, FLOOR_TOKENS))
