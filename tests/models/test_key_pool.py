"""Key pools: strategies and cooldowns."""

import random
from collections import Counter
from typing import Any

import pytest

from hermes_rl.errors import (
    AuthError,
    BadRequest,
    BillingError,
    ModelError,
    Overloaded,
    RateLimited,
    ServerError,
)
from hermes_rl.models import NoopClient
from hermes_rl.models.calls import Account, KeyPool
from hermes_rl.models.rate import Cooldowns, Limiter

NINETY = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "90s"}


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def accounts(*names: str) -> list[Account]:
    return [Account(n, NoopClient(), Limiter(4)) for n in names]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pool(clock: Clock, strategy: Any = "fill_first", names: str = "ABC") -> KeyPool:
    chance = random.Random(1)
    return KeyPool(
        accounts(*names), Cooldowns(clock), scope="h m", strategy=strategy, chance=chance
    )


def chosen(of: KeyPool, times: int) -> str:
    return "".join(of.choose().name for _ in range(times))


def test_key_strategies(clock: Clock) -> None:
    assert chosen(pool(clock), 4) == "AAAA"
    assert chosen(pool(clock, "round_robin"), 7) == "ABCABCA"
    assert chosen(pool(clock, "least_used"), 7) == "ABCABCA"
    shares = Counter(chosen(pool(clock, "random"), 600))
    assert all(150 < shares[name] < 250 for name in "ABC")


@pytest.mark.parametrize("strategy", ["fill_first", "round_robin", "random", "least_used"])
def test_account_in_cooldown_is_skipped(clock: Clock, strategy: str) -> None:
    keys = pool(clock, strategy)
    assert keys.cool_down(keys.accounts[0], AuthError("401", status=401))
    assert "A" not in chosen(keys, 20)
    clock.now += 299
    assert "A" not in chosen(keys, 20)
    clock.now += 2
    assert "A" in chosen(keys, 60)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (AuthError("x", status=401), 300),
        (RateLimited("x", status=429), 1),
        (RateLimited("x", status=429, retry_after_s=20), 20),
        (RateLimited("x", status=429, rate_limit=NINETY), 90),
        (RateLimited("x", status=429, retry_after_s=20, rate_limit=NINETY), 20),
        (
            RateLimited(
                "x", status=429, rate_limit={**NINETY, "x-ratelimit-remaining-requests": "9"}
            ),
            1,
        ),
        (BillingError("x", status=402), 3600),
        (BillingError("x", status=429, retry_after_s=7200), 7200),
        (ServerError("x", status=500), 0),
        (Overloaded("x", status=529), 0),
        (BadRequest("x", status=400), 0),
    ],
)
def test_cooldown_times(clock: Clock, error: ModelError, seconds: float) -> None:
    keys = pool(clock, names="AB")
    assert keys.cool_down(keys.accounts[0], error)
    assert keys.choose().name == ("B" if seconds else "A")
    clock.now += max(0, seconds - 1)
    assert keys.choose().name == ("B" if seconds else "A")
    clock.now += 2
    assert keys.choose().name == "A"


def test_first_available_account_is_chosen_if_all_cool_down(clock: Clock) -> None:
    keys = pool(clock)
    for account, seconds in zip(keys.accounts, (30, 10, 20), strict=True):
        another = keys.cool_down(account, RateLimited("x", status=429, retry_after_s=seconds))
    assert not another
    assert keys.choose().name == "B"


def test_refused_key_is_the_last_choice(clock: Clock) -> None:
    some = pool(clock, names="AB")
    refused, busy = some.accounts
    assert some.cool_down(refused, AuthError("401"))
    assert not some.cool_down(busy, RateLimited("429"))
    assert some.choose() is busy, "though the refused key is back first"


def test_single_key_is_always_chosen(clock: Clock) -> None:
    keys = pool(clock, names="A")
    assert not keys.cool_down(keys.accounts[0], RateLimited("x", status=429, retry_after_s=60))
    assert not keys.cool_down(keys.accounts[0], AuthError("x", status=401))
    assert keys.choose().name == "A"


def test_rate_cooldowns_are_per_model_and_key_cooldowns_global(clock: Clock) -> None:
    cooldowns = Cooldowns(clock)
    small, large = (KeyPool(accounts("A", "B"), cooldowns, scope=f"h {m}") for m in ("s", "l"))
    small.cool_down(small.accounts[0], RateLimited("x", status=429))
    assert (small.choose().name, large.choose().name) == ("B", "A")
    large.cool_down(large.accounts[1], AuthError("x", status=401))
    assert small.choose().name == "A", "it cools down only for its rate"
