"""How many prefill tokens one plan of a replica may carry, so that decode gaps stay under a target."""

GAP_US = 100_000.0  # a step with decode rows should take no longer than this
FLOOR_TOKENS = 128  # prefill always moves: fewer tokens would waste the step's fixed cost
SMOOTHING = 0.2


class ChunkBudget:
    """step time = decode part + prefill tokens * cost per token, both learned from finished steps (0: not known yet)."""

    __slots__ = ("decode_us", "gap_us", "max_tokens", "token_us")

    def __init__(self, max_tokens: int, gap_us: float = GAP_US) -> None:
        self.max_tokens = max_tokens
        self.gap_us = gap_us
        self.decode_us = 0.0
        self.token_us = 0.0

    def observe(self, num_prefill_tokens: int, num_decode: int, step_us: int) -> None:
        if num_prefill_tokens == 0:
            self.decode_us += SMOOTHING * (step_us - self.decode_us) if self.decode_us else step_us
        elif num_prefill_tokens >= FLOOR_TOKENS:
            cost = max(step_us - (self.decode_us if num_decode else 0.0), 0.0) / num_prefill_tokens
            self.token_us += SMOOTHING * (cost - self.token_us) if self.token_us else cost

    def tokens(self, num_decode: int) -> int:
        """Prefill tokens of the next plan beside num_decode decode rows."""
        room = self.max_tokens - num_decode
        if num_decode == 0 or self.token_us == 0.0:
            return room
        fitting = int((self.gap_us - self.decode_us) / self.token_us)
        return min(room, max(fitting, FLOOR_TOKENS))
