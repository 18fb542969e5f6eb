"""The request queue of one endpoint, account and model.

First come, first served. A limiter in a single process adapts by itself. In a run it obeys the
grants of the driver's coordinator (`share`), so that all workers share one limit.

`Traffic` keeps what calls have observed: whether the endpoint answers, its last error, how many
calls wait, and the retry budget. A retry of a request that may have been served can be billed
twice, and retries pile up when a server is weakest. So each new call earns a fifth of such a retry,
and one more is earned every few seconds, so that a failing account is still tried. This is the
token bucket of gRPC's retry throttling and Finagle's RetryBudget (a ratio of requests plus a
minimum rate). Unlike there, a retry without a token waits for one, because the time limit decides
when to give up.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from hermes_rl.errors import (
    BadRequest,
    ConnectionLost,
    ModelError,
    ModelTimeout,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServerError,
)
from hermes_rl.models.rate.adaptive import (
    AdaptiveRate,
    Bucket,
    Buckets,
    Charge,
    Estimate,
    Events,
    Rates,
    Signal,
    UsageEstimator,
    rate_signal,
)
from hermes_rl.models.rate.headers import Kind, Quota, read_quotas
from hermes_rl.usage import Usage

ON_THE_WAY_S = 5.0
"""Maximum time of a report and its grant: another worker's answer may be this much older than
reported."""


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer says of a model's weights."""

    version: str | None = None
    complete: bool = False
    """It was announced in a pause: no request started with the earlier weights since they ended."""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one lane (endpoint, account and model) at a worker since its last report."""

    lane: str
    events: Events = Events()
    peak: int = 0
    """Most requests in flight at a time."""
    demand: int = 0
    """Most requests in flight and waiting at a time."""
    balance: dict[Kind, float] = {}
    """What is left of the worker's share of each bucket; this report returns it."""
    want: dict[Kind, float] = {}
    """What the worker would use until its next report."""
    first: dict[Kind, float] = {}
    """What the first request in the queue would use."""
    answered_s: float | None = None
    """Seconds since the last answer."""
    unanswered: Unanswered | None = None


class LaneGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may do on one lane until its next grant."""

    lane: str
    slots: int
    """Requests in flight."""
    balance: dict[Kind, float] = {}
    """The worker's share of each bucket, replacing what it returned."""
    capacity: dict[Kind, float] = {}
    """Capacity of the complete buckets: a larger request starts when a bucket is full."""
    per_s: dict[Kind, float] = {}
    """Average refill rate of the worker's share."""
    answered_s: float | None = None
    """Seconds since any worker was last answered."""
    weights: Announced | None = None
    """What the trainer says of the model's weights."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    ready: asyncio.Future[None]
    charge: Charge


@dataclass
class Slot:
    """Permission for one request. It ends with the context that it came from."""

    waited_s: float
    """Seconds spent waiting for it."""
    limiter: Limiter
    estimate: Estimate
    charge: Charge

    def report(
        self,
        error: ModelError | None,
        usage: Usage | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Report how the request ended, at most once. Without a report the estimate counts as used.

        Args:
            error: None for an answer.
            usage: the answer's, where known; it replaces the estimate.
            headers: the response's rate-limit headers, names in lower case.
        """
        self.limiter.end(self, error, usage, headers)


class Limiter:
    """Hands out slots.

    Args:
        maximum: of requests in flight; None obeys grants.
        start: initial limit of slow start.
        rates: limits per minute that are known; others are learned from headers.
        name: of the lane, in reports.
        on_demand: called when requests begin to wait.
        clock: monotonic, in seconds.
        unix: the time of day, for resets.
    """

    def __init__(
        self,
        maximum: int | None,
        *,
        start: int = 32,
        rates: Rates = Rates(),
        name: str = "",
        on_demand: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.traffic = Traffic()
        self.answered_at: float | None = None
        """A lower bound for when any worker was last answered; None if unknown."""
        self.in_flight = 0
        self.rate: AdaptiveRate | None = None
        """None if grants set the limits."""
        self._buckets = Buckets()
        if maximum is not None:
            self.rate = AdaptiveRate(maximum, clock(), start=start, rates=rates)
            self._buckets = self.rate.buckets
        self._name, self._on_demand, self._clock, self._unix = name, on_demand, clock, unix
        self._waiting: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._expected = UsageEstimator()
        self._slots = 0
        self._per_s: dict[Kind, float] | None = None
        self._ended: dict[Signal, int] = dict.fromkeys(("clean", "throttled", "trouble"), 0)
        self._started = self._peak = self._demand = 0
        self._taken: dict[Kind, float] = {}
        self._quotas: dict[Kind, Quota] = {}
        self._returned: Mapping[Kind, float] = {}

    @property
    def backlog_s(self) -> float:
        """Seconds until another request could start after those in the queue, by the known request
        rate; 0 if no rate is known."""
        return self._buckets.backlog_s(len(self._waiting) + 1, self._clock(), self._per_s)

    @property
    def held(self) -> bool:
        """Whether requests wait, and the last grant allows none at all."""
        return self.rate is None and bool(self._waiting) and self._slots == 0

    @asynccontextmanager
    async def slot(self, estimate: Estimate = Estimate()) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it."""
        charge, waited = self._expected.charge(estimate), 0.0
        self._demand = max(self._demand, self.in_flight + len(self._waiting) + 1)
        if self._waiting or self._wait_s(charge) > 0:
            began = self._clock()
            await self._wait_for_turn(charge)
            waited = self._clock() - began
        else:
            self._take(charge)
        try:
            yield Slot(waited, self, estimate, charge)
        finally:
            self.in_flight -= 1
            self._wake()

    def end(
        self,
        slot: Slot,
        error: ModelError | None,
        usage: Usage | None,
        headers: Mapping[str, str],
    ) -> None:
        """Process the end of a slot's request; see `Slot.report`."""
        signal, now = rate_signal(error), self._clock()
        if usage is not None:
            self._buckets.settle(slot.charge, self._expected.learn(slot.estimate, usage))
        quotas = read_quotas(headers, self._unix()) if headers else ()
        if self.rate is None:
            if signal != "neutral":
                self._ended[signal] += 1
            self._quotas.update({quota.kind: quota for quota in quotas})
        else:
            ended = {} if signal == "neutral" else {signal: 1}
            self.rate.update(Events(running=self.in_flight, quotas=quotas, **ended), now)
        self._wake()

    def report(self) -> LaneReport:
        """Return what happened since the last report."""
        running, waiting = self.in_flight, len(self._waiting)
        now, balances = self._clock(), self._buckets.by_kind
        first = dict(self._waiting[0].charge) if self._waiting else {}
        answered = self.traffic.answered_at
        report = LaneReport(
            lane=self._name,
            events=Events(
                started=self._started,
                running=running,
                quotas=tuple(self._quotas.values()),
                **self._ended,
            ),
            peak=max(self._peak, running),
            demand=max(self._demand, running + waiting),
            balance={kind: bucket.balance for kind, bucket in balances.items()},
            # As much as since the last report, and what waits.
            want={
                kind: 1.5 * self._taken.get(kind, 0.0) + waiting * first.get(kind, 0.0)
                for kind in balances
            },
            first={kind: first.get(kind, 0.0) for kind in balances},
            answered_s=None if answered is None else now - answered,
            unanswered=self.traffic.unanswered(now),
        )
        self._ended = dict.fromkeys(self._ended, 0)
        self._started, self._peak, self._demand = 0, running, 0
        self._taken, self._quotas, self._returned = {}, {}, report.balance
        return report

    def take_grant(self, grant: LaneGrant) -> None:
        """Obey a grant from now on."""
        now = self._clock()
        self._slots, self._per_s = grant.slots, grant.per_s
        if grant.weights is not None:
            self.traffic.weights.take(grant.weights)
        if grant.answered_s is not None:
            self.answered_at = now - grant.answered_s - ON_THE_WAY_S
        for kind in self._buckets.by_kind.keys() - grant.balance.keys():
            del self._buckets.by_kind[kind]
        for kind, amount in grant.balance.items():
            bucket = self._buckets.by_kind.setdefault(kind, Bucket(0.0, 1.0, now, 0.0))
            bucket.capacity = grant.capacity[kind]
            bucket.balance += amount - self._returned.get(kind, 0.0)
        self._returned = {}
        self._wake()

    def _wait_s(self, charge: Charge) -> float:
        """Seconds until one more request may start; infinite until something changes."""
        limit = self._slots if self.rate is None else self.rate.concurrency.limit
        if self.in_flight >= limit:
            return math.inf
        return self._buckets.wait_s(charge, self._clock())

    def _take(self, charge: Charge) -> None:
        self.in_flight += 1
        self._buckets.take(charge)
        if self.rate is not None:
            self.rate.concurrency.note_started(self.in_flight)
            self.rate.update(Events(started=1, running=self.in_flight), self._clock())
            return
        self._peak = max(self._peak, self.in_flight)
        self._started += 1
        for kind in self._buckets.by_kind:
            self._taken[kind] = self._taken.get(kind, 0.0) + charge.get(kind, 0.0)

    def _give_back(self, charge: Charge) -> None:
        """A request that had a slot was not sent."""
        self.in_flight -= 1
        self._buckets.give(charge)
        if self.rate is not None:
            self.rate.update(Events(started=-1, running=self.in_flight), self._clock())
        self._started -= 1

    async def _wait_for_turn(self, charge: Charge) -> None:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), charge)
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            self._on_demand()
            self._wake()  # sets the timer of its turn
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.cancelled():
                with suppress(ValueError):  # `_wake` has removed it
                    self._waiting.remove(waiter)
            else:  # the slot was assigned at the same moment: pass it on
                self._give_back(charge)
            self._wake()
            raise

    def _wake(self) -> None:
        """Let requests start, in order."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.ready.done():  # cancelled a moment ago
                self._waiting.popleft()
                continue
            wait_s = self._wait_s(waiter.charge)
            if wait_s > 0:
                self._wake_in(wait_s)
                return
            self._waiting.popleft()
            self._take(waiter.charge)  # on behalf of the waiter, so that no request overtakes it
            waiter.ready.set_result(None)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not math.isinf(seconds):
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)


_NO_RESPONSE = (ServerError, ModelTimeout, ConnectionLost, ProtocolError)
"""Failures that do not show that the endpoint works."""
_BETWEEN_REQUESTS_S = 1.0
"""Longer than the time between two requests of a call."""
_REASON_CHARS = 160
_VARIES = re.compile(r"\w*\d\w*")
"""Counts, sizes and request IDs: refusals that differ only in these are identical."""


class Unanswered(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that wait for answers. In normal operation `since_s` is short."""

    message: str = ""
    """The last failure, such as `answers 500 'injected'`; empty for silence."""
    waiting: int
    """Calls without an answer: in flight, queued, or pausing before a retry."""
    since_s: float
    """Seconds since the first failure after the last answer; else since the last answer, or since
    calls began to wait."""
    never: bool = False
    """No call was ever answered."""
    alive: bool = True
    """The endpoint has responded, so `endpoint.outage_seconds` applies."""


class Weights:
    """Which weights answered, as far as it is known.

    An engine that names one version for a whole answer may have changed its weights within. So the
    name counts for all tokens only if the same version was the last one seen before the request,
    and no other was seen until the answer.
    """

    def __init__(self) -> None:
        self._seen: str | None = None
        self._changes = 0
        self._announced = Announced()

    def mark(self) -> tuple[str | None, int]:
        """Return what is known when a request starts, for `version_of`."""
        return self._seen, self._changes

    def see(self, version: str | None) -> None:
        """Note the version of an answer's last token."""
        if version is not None and version != self._seen:
            self._seen, self._changes = version, self._changes + 1

    def take(self, announced: Announced) -> None:
        """Note what the trainer says."""
        if announced != self._announced:
            self._announced = announced
            self._changes += 1
            self._seen = announced.version or self._seen

    def version_of(self, mark: tuple[str | None, int], named: str | None) -> str | None:
        """Return the version of all tokens of an answer; None if it is not certain.

        Args:
            named: what the answer says; None leaves it to what the trainer announced.
        """
        self.see(named)
        announced = self._announced.version if self._announced.complete else None
        version = announced if named is None else named
        return version if mark == (version, self._changes) else None


class Traffic:
    """What the calls of a process observe at one endpoint, account and model. Times are monotonic,
    in seconds."""

    RATIO = 0.2
    """Retries that a call earns."""
    EARN_S = 5.0
    """Seconds in which one more is earned without calls."""
    INITIAL = 10.0
    MAXIMUM = 100.0
    """Equals 500 calls."""

    def __init__(self) -> None:
        self.weights = Weights()
        self.answered_at: float | None = None
        """When it last gave a complete answer."""
        self.alive = False
        """It has answered, refused a request with a reason, or reported that it is busy or
        loading."""
        self.probed = False
        """It was probed because it was silent."""
        self.waiting_since = 0.0
        """Since when there have been calls without an answer at all times."""
        self._waiting = 0
        self._idle_since = -math.inf
        self._failing_since: float | None = None
        self.message = ""
        """The last failure since the last answer."""
        self._refusals: Counter[str] = Counter()
        self._refusal = ""
        self._tokens = self.INITIAL
        self._earned_at: float | None = None

    @contextmanager
    def waiting_call(self, clock: Callable[[], float]) -> Iterator[None]:
        """Count a call as waiting for its answer, including the pause before a retry."""
        if not self._waiting and clock() - self._idle_since > _BETWEEN_REQUESTS_S:
            self.waiting_since = clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._idle_since = clock()

    def count_call(self) -> None:
        """Earn retries for a new call."""
        self._tokens = min(self.MAXIMUM, self._tokens + self.RATIO)

    def note_answer(self, now: float) -> None:
        """Note a complete answer."""
        self.answered_at, self.alive = now, True
        self._failing_since, self.message = None, ""
        self._refusals.clear()

    def note_failure(self, error: ModelError, now: float) -> None:
        """Note a failed request."""
        if not isinstance(error, _NO_RESPONSE):
            self.alive = True
        if isinstance(error, (*_NO_RESPONSE, RateLimited, Overloaded, BadRequest)):
            self.message = _describe_failure(error)
            if self._failing_since is None:
                self._failing_since = now

    def note_refusal(self, error: BadRequest) -> None:
        """Note a call that was given up after a refusal."""
        self._refusals[_VARIES.sub("#", str(error))] += 1
        self._refusal = str(error)

    def repeated_refusal(self, calls: int) -> str | None:
        """Return the last refusal if this many calls since the last answer were refused
        identically."""
        return self._refusal if max(self._refusals.values(), default=0) >= calls else None

    def unanswered(self, now: float) -> Unanswered | None:
        """Return why calls wait for answers; None if no call waits."""
        if not self._waiting:
            return None
        since = self.waiting_since
        if self.alive and self._failing_since is not None:
            since = self._failing_since
        elif self.answered_at is not None:
            since = max(since, self.answered_at)
        return Unanswered(
            message=self.message,
            waiting=self._waiting,
            since_s=max(0.0, now - since),
            never=self.answered_at is None,
            alive=self.alive,
        )

    def take_retry_token(self, now: float) -> bool:
        """Take one retry from the budget; return False if there is none now."""
        if self._earned_at is not None:
            earned = max(0.0, now - self._earned_at) / self.EARN_S
            self._tokens = min(self.MAXIMUM, self._tokens + earned)
        self._earned_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _describe_failure(error: ModelError) -> str:
    """Describe a failure, for example `answers 500 'injected'`."""
    text = str(error)
    status, _, reason = text.partition(": ")
    if error.status is None or status != str(error.status):
        return text[:_REASON_CHARS]
    return f"answers {status} '{reason[:_REASON_CHARS]}'" if reason else f"answers {status}"


class Cooldown(msgspec.Struct, frozen=True, kw_only=True):
    """An account that must not be used for a while."""

    account: str
    """The variable that holds its key, never the key."""
    until: float
    """Unix time."""
    reason: str
    """A `Reason` of `hermes_rl.errors`."""


class Cooldowns:
    """The cooldowns of accounts. Of two, the later end applies.

    Args:
        clock: unix time, because cooldowns travel between machines.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.now = clock
        self._by_account: dict[str, Cooldown] = {}

    def left_s(self, account: str) -> float:
        """Return the seconds until an account may be used; 0 for now."""
        known = self._by_account.get(account)
        return 0.0 if known is None else max(0.0, known.until - self.now())

    def start(self, account: str, seconds: float, reason: str) -> None:
        """Start a cooldown."""
        self.update((Cooldown(account=account, until=self.now() + seconds, reason=reason),))

    def update(self, cooldowns: Iterable[Cooldown]) -> None:
        """Merge cooldowns that other workers know."""
        for new in cooldowns:
            known = self._by_account.get(new.account)
            if new.until > self.now() and (known is None or new.until > known.until):
                self._by_account[new.account] = new

    def current(self) -> tuple[Cooldown, ...]:
        """Return the cooldowns that have not ended."""
        now = self.now()
        self._by_account = {k: c for k, c in self._by_account.items() if c.until > now}
        return tuple(self._by_account.values())
