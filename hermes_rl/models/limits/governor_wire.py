"""What passes between the workers of a run and its governor: one report, one grant in return.

A lane is one endpoint, account and model: what one limit is for. A pot is one budget: tokens, or
billionths of a US dollar, whole numbers both. Amounts in reports are totals, not differences, where
losing a message must lose nothing.
"""

from __future__ import annotations

import msgspec

from hermes_rl.models.limits.controller import ControllerState
from hermes_rl.models.limits.pace import PaceState
from hermes_rl.models.limits.quotas import Kind, Quota
from hermes_rl.models.limits.rests import Rest


class Unanswered(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a lane wait for answers. In healthy traffic `since_s` is short."""

    said: str = ""
    """What the last request was told, for people: `answers 500 'injected'`; empty for silence."""
    waiting: int
    """Calls without an answer: in flight, queued, or pausing before their next try."""
    since_s: float
    """Seconds since the first failure after the last answer; where there was none since the last
    answer, or since calls began to wait."""
    never: bool = False
    """Nobody was ever answered."""
    alive: bool = True
    """There was a sign of life, so that `endpoint.outage_seconds` holds."""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """One lane, since the worker's last report that was answered."""

    lane: str
    started: int = 0
    """Requests that were sent; below 0 where some were not after all."""
    clean: int = 0
    """Requests that ended well."""
    throttled: int = 0
    trouble: int = 0
    peak: int = 0
    """Most requests in flight at a time."""
    demand: int = 0
    """Most requests in flight and waiting at a time."""
    running: int = 0
    """Requests in flight now."""
    held: int = 0
    """Slots that the worker may use now."""
    alone: int = 0
    """Slots that it would use while no governor answers."""
    purse: dict[Kind, float] = {}
    """What it has left of its buckets; handed in with this report."""
    want: dict[Kind, float] = {}
    """What it would use until its next report."""
    first: dict[Kind, float] = {}
    """What the first that waits would use."""
    quotas: tuple[Quota, ...] = ()
    """What answers' headers said, latest by kind."""
    answered_s: float | None = None
    """Seconds since the last answer."""
    unanswered: Unanswered | None = None


class LaneGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may do on one lane."""

    lane: str
    slots: int
    """Requests in flight, until the grant ends."""
    alone: int
    """Requests in flight after that, while no governor answers."""
    purse: dict[Kind, float] = {}
    """In place of what was handed in."""
    capacity: dict[Kind, float] = {}
    """Of the whole buckets: at most so much is waited for."""
    per_s: dict[Kind, float] = {}
    """How fast the purse fills while no governor answers."""
    answered_s: float | None = None
    """Seconds since another worker was last answered."""


class UnitSpending(msgspec.Struct, frozen=True, array_like=True):
    """One unit's part of a budget."""

    place: int
    """In the dataset; below 0 for calls that belong to no unit."""
    spent: int = 0
    held: int = 0
    """Reserved by its calls in flight."""
    need: int = 0
    """What its calls that wait would reserve."""

    @property
    def begun(self) -> bool:
        """Whether it has cost anything."""
        return self.spent > 0 or self.held > 0


class PotReport(msgspec.Struct, frozen=True, kw_only=True):
    """One budget, as it stands at a worker."""

    pot: str
    spent: int = 0
    """Since the worker's start."""
    held: int = 0
    """Of its lease: reserved by calls, or free."""
    units: tuple[UnitSpending, ...] = ()
    """Units at work there."""
    finished: int = 0
    """Units that were finished there."""
    finished_spent: int = 0
    """What those cost."""


class PotGrant(msgspec.Struct, frozen=True, kw_only=True):
    """One budget's lease."""

    pot: str
    add: int
    """Goes to the worker's lease."""
    most: int
    """A call whose worst case is above this can never be made: so much is not spent yet."""
    unit: int = 0
    """What a unit costs on average: none begins when less than that is unspent. 0 if unknown."""
    only: tuple[int, ...] | None = None
    """Places of the units whose calls may begin; None for all."""
    recall: bool = False
    """Others wait: hand in what no call has reserved."""


class LaneSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One lane, for manifest and report."""

    lane: str
    state: ControllerState
    pace: PaceState = PaceState()
    clean: int
    throttled: int
    trouble: int
    alone: dict[str, int] = {}
    """Worker -> slots that it would use while no governor answers."""
    unanswered: Unanswered | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a governor that takes the place of a dead one has to know. Workers keep it for it."""

    version: int
    lanes: tuple[LaneSummary, ...] = ()
    rates: dict[str, tuple[Quota, ...]] = {}
    """Learned limits, by lane."""
    accounts: dict[str, dict[str, int]] = {}
    """Worker -> pot -> spent and leased. Dead workers' too."""
    live: tuple[str, ...] = ()
    """Workers that were heard lately."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker."""

    worker: str
    lanes: tuple[LaneReport, ...] = ()
    rests: tuple[Rest, ...] = ()
    pots: tuple[PotReport, ...] = ()
    leaving: bool = False
    """The worker's last report: what it holds is free."""
    memory: Memory | None = None
    """What it keeps, after its governor did not answer."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """To a worker."""

    lanes: tuple[LaneGrant, ...] = ()
    rests: tuple[Rest, ...] = ()
    pots: tuple[PotGrant, ...] = ()
    memory: Memory | None = None
    """To be kept; None: keep the last one."""
    lease_s: float = 5.0
    """How long this holds."""


class Charter(msgspec.Struct, frozen=True, kw_only=True):
    """What a governor is told at its start."""

    maximum: int
    """Requests in flight of the whole run, on any lane."""
    start: int = 32
    """Where slow start begins."""
    rates: dict[Kind, float] = {}
    """Configured limits per minute."""
    pots: dict[str, int] = {}
    """Budget of each pot."""
    spent: dict[str, int] = {}
    """What earlier starts of the run have spent, by pot."""
    lease_s: float = 5.0
    cut_interval_s: float = 15.0
    window_s: float = 60.0
    """What limits are named for; shorter in tests, which have no minute."""
    successor: bool = False
    """It takes the place of a dead one: it hands out nothing before it knows what is out."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a governor has to say of its run."""

    lanes: tuple[LaneSummary, ...] = ()
    spent: dict[str, int] = {}
    """By pot, earlier starts and leases of dead workers included."""


encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode
encode_grant = msgspec.msgpack.Encoder().encode
decode_grant = msgspec.msgpack.Decoder(Grant).decode
encode_charter = msgspec.msgpack.Encoder().encode
decode_charter = msgspec.msgpack.Decoder(Charter).decode
encode_summary = msgspec.msgpack.Encoder().encode
decode_summary = msgspec.msgpack.Decoder(Summary).decode
