"""What every tenant has used of a priority class, to the token and over its weight: whoever has used least is next."""


class Tier:
    """One priority class. Those who wait in it share it; what they use in other classes does not count here."""

    __slots__ = ("accounts", "floor")

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}  # by tenant
        self.floor = 0.0  # share of the least served who waited when somebody was taken last; it only grows


class Account:
    """One tenant in one class. Each prompt token that no cache had and each generated token is charged once, when it is
    computed; what a preemption or a failure makes it compute again is free."""

    __slots__ = ("live", "num_tokens", "share", "tier", "waiting", "waiting_tokens", "weight")

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.weight = 1
        self.num_tokens = 0  # charged
        self.share = 0.0  # tokens over weight, and at least what the floor was when it came to wait last
        self.live = 0  # sequences, waiting or running
        self.waiting = 0
        self.waiting_tokens = 0

    def charge(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.share += num_tokens / self.weight

    def rejoin(self) -> None:
        """It comes to wait: what it left unused while it wanted nothing is gone, or everybody else would wait for it now."""
        self.share = max(self.share, self.tier.floor)


class Accounts:
    __slots__ = ("_tiers",)

    def __init__(self) -> None:
        self._tiers: dict[int, Tier] = {}  # by priority

    def of(self, priority: int, tenant: str, weight: int) -> Account:
        """The account that a new sequence belongs to; its weight is what the gateway says now."""
        tier = self._tiers.get(priority)
        if tier is None:
            tier = self._tiers[priority] = Tier()
        account = tier.accounts.get(tenant)
        if account is None:
            account = tier.accounts[tenant] = Account(tier)
        account.weight = weight
        return account

    @property
    def num_accounts(self) -> int:
        return sum(len(tier.accounts) for tier in self._tiers.values())

    def waiting_weight(self, newcomer: Account) -> int:
        """Of all who wait, the newcomer included."""
        accounts = [account for tier in self._tiers.values() for account in tier.accounts.values()]
        return sum(account.weight for account in accounts if account.waiting or account is newcomer)

    def forget_idle(self) -> None:
        """An account without sequences matters only while it is ahead of those who wait."""
        for priority, tier in list(self._tiers.items()):
            idle = [name for name, account in tier.accounts.items() if not account.live]
            if len(idle) == len(tier.accounts):
                del self._tiers[priority]
                tier.accounts.clear()  # a circle would stay until the next collection, which may be hours away
                continue
            for name in idle:
                if tier.accounts[name].share <= tier.floor:
                    del tier.accounts[name]
