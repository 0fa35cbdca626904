"""A bucket that refills evenly: so many units a minute, a whole minute's worth at most. Time is an argument."""

import math

from gateway.errors import ApiError

MINUTE_S = 60.0


class Bucket:
    def __init__(self, per_minute: int, unit: str) -> None:
        """per_minute 0: no limit."""
        self.per_minute = per_minute
        self._unit = unit
        self._level = float(per_minute)  # below 0: a debt, as the length of an answer is known only at its end
        self._at = 0.0

    def level(self, now: float) -> float:
        if now > self._at:
            self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE_S)
            self._at = now
        return self._level

    def require(self, amount: int, now: float, tenant: str) -> None:
        """429 unless so much is there. More than the bucket can ever hold will never be."""
        if not self.per_minute:
            return
        level = self.level(now)
        if amount > self.per_minute:
            text = f"Tenant {tenant} may use {self.per_minute} {self._unit} per minute, this request needs {amount} at once"
            raise ApiError(429, text, code="rate_limit_exceeded")
        if level < amount:
            wait_s = (amount - level) * MINUTE_S / self.per_minute
            text = f"Tenant {tenant} may use {self.per_minute} {self._unit} per minute: {amount} needed, "
            text += f"{max(0, int(level))} left, in {wait_s:.1f} s there will be enough"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=math.ceil(wait_s))

    def spend(self, amount: int, now: float) -> None:
        if self.per_minute:
            self._level = self.level(now) - amount

    def headers(self, now: float) -> dict[str, str]:
        """x-ratelimit-*, as OpenAI names them; none without a limit."""
        if not self.per_minute:
            return {}
        level = self.level(now)
        return {
            f"x-ratelimit-limit-{self._unit}": str(self.per_minute),
            f"x-ratelimit-remaining-{self._unit}": str(max(0, int(level))),
            f"x-ratelimit-reset-{self._unit}": f"{(self.per_minute - level) * MINUTE_S / self.per_minute:.1f}s",
        }
