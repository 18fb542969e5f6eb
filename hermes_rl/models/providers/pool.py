"""Accounts that take turns: which key is next, and which must rest.

- `fill_first`: the first that need not rest, in the order given.
- `round_robin`: each in turn. `random`: any. `least_used`: the one that was chosen least.

A refused account rests: 5 minutes after a refused key (401, 403), and for the time that the
provider names after anything else that speaks against the account (429, no credit): Retry-After,
else the reset of the limit that is used up. Without either, one that is over its rate rests until
its limiter would let another request start (a second at least), one without credit for an hour.
Of the accounts that need not rest, those come first whose limiter lets a request start now.
A refusal for the rate speaks of one model, the others of the whole account. What is nobody's
account's fault (5xx, 529, a bad request) lets nobody rest. Rests are shared by all workers of a run
(`hermes_rl.models.rate.share`).

Where there is one account there is nothing to turn to: it is never let rest for its rate, because
the limiter sees to that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from hermes_rl.errors import ModelError
from hermes_rl.models.calls.route import Account
from hermes_rl.models.key_command import KeyRenewed
from hermes_rl.models.rate.headers import resets_s
from hermes_rl.models.rate.share import Cooldowns

Strategy = Literal["fill_first", "round_robin", "random", "least_used"]

AUTH_REST_S = 300.0
REST_S = 3600.0
"""Of an account without credit whose provider names no time."""
LEAST_REST_S = 1.0
"""A provider may name no time at all (`Retry-After: 0`, or a date that has passed)."""

_OF_THE_ACCOUNT = ("auth", "auth_permanent", "billing")
_OF_ITS_RATE = ("rate_limit",)


class KeyPool:
    """The accounts of one model at one endpoint (`hermes_rl.models.calls.route.AccountPool`).

    Args:
        accounts: at least one.
        scope: what a rate is counted by, for example endpoint and model.
        cooldowns: shared by all pools of the process.
    """

    def __init__(
        self,
        accounts: Sequence[Account],
        cooldowns: Cooldowns,
        *,
        scope: str,
        strategy: Strategy = "fill_first",
        chance: random.Random | None = None,
    ) -> None:
        self.accounts = tuple(accounts)
        self._cooldowns, self._scope, self._strategy = cooldowns, scope, strategy
        self._chance = chance or random.Random()
        self._used = dict.fromkeys(range(len(self.accounts)), 0)
        self._turn = 0

    def choose(self) -> Account:
        """See `AccountPool.choose`."""
        left = [self._left_s(account) for account in self.accounts]
        ready = [i for i, seconds in enumerate(left) if seconds <= 0]
        chosen = self._ready(ready) if ready else self._least_bad(left)
        self._used[chosen] += 1
        return self.accounts[chosen]

    def _ready(self, ready: Sequence[int]) -> int:
        """By the strategy, one whose rate lets a request start now; else the first to have room."""
        if len(ready) == 1:
            return ready[0]
        backlog = {i: self.accounts[i].limiter.backlog_s for i in ready}
        free = [i for i in ready if backlog[i] <= 0]
        return self._pick(free) if free else min(ready, key=lambda i: backlog[i])

    def _least_bad(self, left: Sequence[float]) -> int:
        """The first to be back of those that only rest for their rate: a key that was refused will
        be refused again, and that would stop the run."""

        def how_bad(i: int) -> tuple[bool, float]:
            return self._cooldowns.left_s(self.accounts[i].name) > 0, left[i]

        return min(range(len(left)), key=how_bad)

    def rest(self, account: Account, error: ModelError) -> bool:
        """See `AccountPool.rest`."""
        if isinstance(error, KeyRenewed):
            return True
        seconds = self._seconds(account, error)
        if seconds:
            of_rate = error.reason in _OF_ITS_RATE
            name = self._rate_of(account) if of_rate else account.name
            self._cooldowns.start(name, seconds, error.reason)
        others = [a for a in self.accounts if a.name != account.name]
        if error.reason in _OF_THE_ACCOUNT:
            # Who only rests for his rate is waited for: nobody left would stop the run.
            return any(self._cooldowns.left_s(a.name) <= 0 for a in others)
        return any(self._left_s(a) <= 0 for a in others)

    def _seconds(self, account: Account, error: ModelError) -> float:
        """How long an account rests for an error; 0: not at all."""
        if error.reason in ("auth", "auth_permanent"):
            return AUTH_REST_S
        of_rate = error.reason in _OF_ITS_RATE and len(self.accounts) > 1
        if of_rate or error.reason in _OF_THE_ACCOUNT:
            told = error.retry_after_s
            if told is None:
                told = resets_s(error.rate_limit, self._cooldowns.now())
            if told is None:
                told = min(account.limiter.backlog_s, REST_S) if of_rate else REST_S
            return max(told, LEAST_REST_S)
        return 0.0

    def _pick(self, ready: Sequence[int]) -> int:
        match self._strategy:
            case "random":
                return self._chance.choice(ready)
            case "least_used":
                return min(ready, key=lambda i: self._used[i])
            case "round_robin":
                after = [i for i in ready if i >= self._turn]
                chosen = after[0] if after else ready[0]
                self._turn = (chosen + 1) % len(self.accounts)
                return chosen
            case _:
                return ready[0]

    def _left_s(self, account: Account) -> float:
        names = (account.name, self._rate_of(account))
        return max(self._cooldowns.left_s(name) for name in names)

    def _rate_of(self, account: Account) -> str:
        return f"{account.name} {self._scope}"
