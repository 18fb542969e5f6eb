"""The attempts of a run: the open units of the dataset in order, then retries; and the breaker that
stops a run.

A unit is handed out only while it is open and not in flight. Only receipts change the ledger. A
stopped run hands out nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batch_runner.dataset_index import KEY_BYTES, LEAST_BYTES, Block, DatasetIndex
from batch_runner.manifest import read_manifest
from batch_runner.progress import Sink
from batch_runner.report import Stop
from batch_runner.settings import Settings
from hermes_rl.config import DatasetSection, RunConfig, is_rows_file
from hermes_rl.errors import CAUSES, UserError
from hermes_rl.identity import group_id, unit_id, unit_key, unit_seed
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.sources import BUNDLED, bundled_path, read_rows
from hermes_rl.store import LOST_WORKERS_MAX, Driver, Ledger, RunDir
from hermes_rl.tasks import LazyRow, TaskRow
from hermes_rl.text import SECRETS

if TYPE_CHECKING:
    from batch_runner.images import Images

ISOLATED_AFTER = LOST_WORKERS_MAX - 1
"""After this many lost workers, which other units may have caused, a unit runs alone in a new
worker, so that only its own loss gives it up."""

_REMOTE_ROWS = 1000
"""Rows of a dataset on the hub that are searched for a unit of the run."""

_STEP = 256
"""Units that are looked up together."""


RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""Backoff before the next attempt at a unit: starts at the first value and doubles to the
second."""


_COUNTED_BYTES = 15
"""Of a digest. Python has 48 bytes of memory for these, and 64 for 16."""


class OccurrenceCounter:
    """Counts equal digests. It keeps 15 bytes of each: a million rows take about 80 MB. Only
    repeated digests get a dictionary entry."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._again: dict[bytes, int] = {}
        self._skipped: list[bytes] = []

    def skip(self, digests: bytes) -> None:
        """Count these digests too, of 16 bytes each; at once only if there is a next one."""
        self._skipped.append(digests)

    def next(self, digest: str) -> int:
        """The occurrence of this digest (hex, at least 30 digits): 0 for the first."""
        while self._skipped:
            digests = self._skipped.pop()
            for at in range(0, len(digests), KEY_BYTES):
                self._next(digests[at : at + _COUNTED_BYTES])
        return self._next(bytes.fromhex(digest[: 2 * _COUNTED_BYTES]))

    def _next(self, key: bytes) -> int:
        before = len(self._seen)
        self._seen.add(key)
        if len(self._seen) > before:
            return 0
        self._again[key] = self._again.get(key, 0) + 1
        return self._again[key]


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of the dataset that is not known to be done."""

    unit_id: str
    row: TaskRow
    occurrence: int
    """Position of the row among identical rows."""
    repeat: int


IsDone = Callable[[bytes], bool]
"""Whether the unit of a `unit_key` is done. Called on the reader's thread."""
Note = Callable[[str, int, int | None], None]
"""See `DatasetIndex.note`."""


class UnitReader:
    """Reads the units of a dataset lazily. Blocking; for one thread at a time.

    Rows whose units are all done are not parsed. Memory: one short digest per row, and a number for
    a row with its own repeats.
    """

    def __init__(
        self,
        rows: Iterable[LazyRow | Block],
        config_hash: str,
        repeats: int,
        name: str = "rows",
        note: Note | None = None,
    ) -> None:
        self.rows = 0
        self.bad_rows = 0
        self.skipped = 0
        """Units of rows that were skipped because all repeats are done."""
        self.ended = False
        self._name = name
        self.config_hash = config_hash
        self._repeats = repeats
        self._seen = OccurrenceCounter()
        self._rows = iter(rows)
        self._take_note = note
        self._members_of_row: dict[int, int] = {}
        """Row index -> repeats, where they differ from those of the dataset."""
        self._units: Iterator[Unit] = iter(())
        """The remaining units of the last row."""

    def check_first_row(self) -> None:
        """Read the first row, so that unreadable datasets are reported before anything starts.

        Raises: UserError for no such dataset, an unknown kind, no rows, or no `prompt`.
        """
        first = next(self._rows, None)
        if first is None:
            raise UserError(f"{self._name}: the dataset holds no rows. Check the file, or --limit")
        self._rows = itertools.chain((first,), self._rows)
        if isinstance(first, LazyRow):
            _refuse_unmapped(first.parse())

    def take(self, wanted: int, seconds: float = 0.25, done: IsDone | None = None) -> list[Unit]:
        """Return the next units: at most `wanted`, fewer or none after `seconds`.

        Args:
            done: rows with all units done are skipped and counted in `skipped`.

        Raises: UserError when the dataset cannot be read.
        """
        deadline = time.monotonic() + seconds
        taken = list(itertools.islice(self._units, wanted))
        for row in itertools.islice(self._rows, None if len(taken) < wanted else 0):
            if skipped := (self._skip(row) if isinstance(row, Block) else self._read(row, done)):
                self.skipped += skipped
            else:
                taken += itertools.islice(self._units, wanted - len(taken))
                if len(taken) >= wanted:
                    return taken
            if time.monotonic() > deadline:
                return taken
        self.ended = len(taken) < wanted
        return taken

    def members_of(self, row_index: int) -> int | None:
        """The number of units of a row; None for a row that was not read."""
        read = row_index < self.rows
        return self._members_of_row.get(row_index, self._repeats) if read else None

    def _read(self, row: LazyRow, done: IsDone | None) -> int:
        """Prepare the units of a row. Returns their number when the row is skipped, else 0."""
        self.rows += 1
        task_hash = row.task_hash
        occurrence = self._seen.next(task_hash)
        if done is not None and row.quick:
            members = row.repeats or self._repeats
            for repeat in range(members):
                if not done(unit_key(self.config_hash, task_hash, occurrence, repeat)):
                    break
            else:
                self._note(row, occurrence, members)
                return members
        parsed = row.parse()
        same = parsed.task_hash == task_hash
        if not same:  # nested too deeply: parsing gives another hash
            occurrence = self._seen.next(parsed.task_hash)
        if row.index == 0:
            _refuse_unmapped(parsed)
        self.bad_rows += parsed.task is None
        # A bad row is one failed unit, however often it was meant to run.
        members = 1 if parsed.task is None else parsed.repeats or self._repeats
        self._note(row, occurrence, members, indexed=same and parsed.task is not None)
        self._units = self._members(parsed, occurrence, members)
        return 0

    def _note(self, row: LazyRow, occurrence: int, members: int, *, indexed: bool = True) -> None:
        if members != self._repeats:
            self._members_of_row[row.index] = members
        if self._take_note is not None:
            self._take_note(row.task_hash, occurrence, members if indexed else None)

    def _skip(self, block: Block) -> int:
        """Count the rows of a block whose units are all done."""
        for row, members in block.members.items():
            self._members_of_row[self.rows + row] = members
        self.rows += block.rows
        self._seen.skip(block.tasks)
        return len(block.units) // KEY_BYTES

    def _members(self, row: TaskRow, occurrence: int, members: int) -> Iterator[Unit]:
        for repeat in range(members):
            unit = unit_id(self.config_hash, row.task_hash, occurrence, repeat)
            yield Unit(unit, row, occurrence, repeat)


def _refuse_unmapped(first: TaskRow) -> None:
    """A first row without a prompt means wrong column names, not one bad row.

    Raises: UserError, before anything is run.
    """
    if first.error is not None and first.error.startswith("no column 'prompt'"):
        raise UserError(f"{first.place}: {first.error}")


@dataclass
class Counts:
    """Units of the dataset so far, with their state when they were read."""

    rows: int = 0
    bad_rows: int = 0
    units: int = 0
    done: int = 0
    given_up: int = 0
    known: int = 0
    """Units with at least one recorded attempt."""
    complete: bool = False
    """The whole dataset was read."""

    @property
    def open(self) -> int:
        """Units that are to be run."""
        return self.units - self.done - self.given_up


PILOT_SHARE = 0.01
PILOT_LEAST = 5
"""A pilot runs a hundredth of the units, but not fewer than these."""


@dataclass(frozen=True)
class Pilot:
    """The open units that a pilot runs: one in `every`, until there are enough."""

    every: int
    units: int

    @classmethod
    def for_run(cls, units: int, ended: int) -> Pilot:
        """The pilot of a run.

        Args:
            units: of the dataset.
            ended: units that are done or given up already; they count.
        """
        wanted = min(units, max(PILOT_LEAST, math.ceil(PILOT_SHARE * units)))
        missing = max(0, wanted - ended)
        return cls(every=max(1, (units - ended) // missing) if missing else 1, units=missing)

    def selects(self, place: int) -> bool:
        """Whether the open unit at this position is run: a random one of every `every`, since a
        dataset may be periodic."""
        block, within = divmod(place, self.every)
        drawn = hashlib.sha256(f"pilot,{block}".encode()).digest()
        return within == int.from_bytes(drawn[:8]) % self.every


class Plan:
    """The open units as work items, read lazily in a thread.

    Args:
        reader: the dataset's units.
        ledger: the state of units; only read here.
        seed: the configuration's; a unit's own derives from it.
        pilot: limits the plan to its units.
    """

    def __init__(
        self,
        reader: UnitReader,
        ledger: Ledger,
        *,
        epoch: int = 0,
        seed: int = 0,
        pilot: Pilot | None = None,
    ) -> None:
        self.counts = Counts()
        self.pilot = pilot
        self._reader = reader
        self._ledger = ledger
        self._epoch = epoch
        self._seed = seed
        self._skipped = 0
        self._open = self._picked = 0

    async def take(self) -> list[WorkItem]:
        """Return some of the next open units, or none, until `counts.complete`. Raises:
        UserError."""
        reader = self._reader
        units = await asyncio.to_thread(reader.take, _STEP, done=self._ledger.is_done)
        items = [item for unit in units if (item := self._item(unit)) is not None]
        skipped = reader.skipped - self._skipped
        self._skipped = reader.skipped
        self.counts.units += skipped
        self.counts.known += skipped
        self.counts.done += skipped
        self.counts.rows = reader.rows
        self.counts.bad_rows = reader.bad_rows
        self.counts.complete = reader.ended
        return items if self.pilot is None else [i for i in items if self._select(self.pilot)]

    def _select(self, pilot: Pilot) -> bool:
        """Whether the pilot runs the next open unit."""
        picked = self._picked < pilot.units and pilot.selects(self._open)
        self._open += 1
        self._picked += picked
        return picked

    def members_of(self, row_index: int) -> int | None:
        """How many units a row of the dataset has; None for one that was not read yet."""
        return self._reader.members_of(row_index)

    def _item(self, unit: Unit) -> WorkItem | None:
        attempt = self._ledger.next_attempt(unit.unit_id)
        self.counts.units += 1
        if attempt:
            self.counts.known += 1
            match self._ledger.disposition(unit.unit_id):
                case "done":
                    self.counts.done += 1
                    return None
                case "given_up":
                    self.counts.given_up += 1
                    return None
        row = unit.row
        return WorkItem(
            unit_id=unit.unit_id,
            group_id=group_id(self._reader.config_hash, row.task_hash, unit.occurrence),
            epoch=self._epoch,
            attempt=attempt,
            repeat=unit.repeat,
            repeats=self.members_of(row.index) or 1,
            row_index=row.index,
            task_id=row.task.id if row.task else row.raw_id or row.task_hash[:12],
            task=row.task,
            task_hash=row.task_hash,
            seed=unit_seed(self._seed, unit.unit_id),
            enqueued_at=time.time(),
            bad_row=f"{row.place}: {row.error}" if row.task is None else None,
            isolated=self._ledger.lost_workers(unit.unit_id) >= ISOLATED_AFTER,
            fatal_commands=self._ledger.fatal_commands(unit.unit_id),
        )


def open_indexed(settings: Settings, run_dir: RunDir, ledger: Ledger) -> UnitReader | None:
    """A reader that skips what is done without parsing it; None for datasets without an index."""
    dataset = settings.config.dataset
    path = Path(dataset.path).expanduser()
    lines = path.is_file() and path.suffix.lower() in (".jsonl", ".ndjson")
    whole = settings.opened is None and dataset.limit is None
    if not (lines and whole) or path.stat().st_size < LEAST_BYTES:
        return None
    index = DatasetIndex(
        run_dir.path / "dataset.index",
        path,
        config_hash=settings.config_hash,
        columns=dataset.map,
        repeats=dataset.repeats,
        all_done=ledger.all_done,
    )
    rows = index.rows()
    return UnitReader(rows, settings.config_hash, dataset.repeats, dataset.path, index.note)


def open_reader(settings: Settings) -> UnitReader:
    """The units of the run's dataset, or of its environment's tasks."""
    if settings.opened is None:
        return _dataset_reader(settings, settings.config.dataset.limit)
    from hermes_rl.rl import env_rows

    dataset = settings.config.dataset
    rows = env_rows(settings.opened, dataset.limit)
    return UnitReader(rows, settings.config_hash, dataset.repeats, dataset.path)


def _dataset_reader(settings: Settings, limit: int | None) -> UnitReader:
    dataset = settings.config.dataset
    rows = read_rows(dataset.path, columns=dataset.map, limit=limit)
    return UnitReader(rows, settings.config_hash, dataset.repeats, dataset.path)


def store_rows(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Store rows that a program passed in the run directory, for a resume. Blocking.

    Returns the configuration with the path of that copy.
    Raises: DiskFull; UserError for rows that contain a secret of this process.
    """
    path = Path(config.dataset.path)
    if not is_rows_file(config.dataset.path):
        return config
    kept = run_dir.path.absolute() / path.name
    if not kept.exists():
        data = path.read_bytes()
        if found := SECRETS.find(data):
            raise UserError(
                f"dataset.path: the rows contain the value of {found[0].name}, and would be stored "
                "with the run. Take it out, or pass the rows as a file"
            )
        run_dir.storage.put(path.name, data)
    dataset = config.dataset.model_copy(update={"path": str(kept)})
    return config.model_copy(update={"dataset": dataset})


def refuse_other_dataset(settings: Settings, run_dir: RunDir, ledger: Ledger) -> None:
    """Refuse to resume a run with another dataset; a changed one is accepted. Blocking.

    Raises: UserError when the run knows units, and none of them is in the dataset.
    """
    dataset, known = settings.config.dataset, read_manifest(run_dir).get("dataset")
    before = known.get("path") if isinstance(known, dict) else None
    local = Path(dataset.path).expanduser().exists()
    if settings.opened is not None or not len(ledger) or (dataset.path == before and not local):
        return  # an environment has its own tasks, and a dataset on the hub cannot have changed
    limit = None if local else _REMOTE_ROWS  # with a lower --limit it is still the same dataset
    if not _shares_units(_dataset_reader(settings, limit), ledger):
        made_from = "other rows of it" if dataset.path == before else before or "another dataset"
        raise UserError(
            f"no unit of {dataset.path} is in {settings.out}, which was made from {made_from}. "
            "Choose another --out"
        )


def _shares_units(reader: UnitReader, ledger: Ledger) -> bool:
    """Whether the run has any unit of a dataset. Reads up to the first such unit."""
    while not reader.ended:
        units = reader.take(_STEP, done=ledger.is_done)
        if reader.skipped or any(ledger.next_attempt(unit.unit_id) for unit in units):
            return True
    return False


REQUEUED_MAX = 10_000
"""Units given up that are kept for `requeue`; they are held with their tasks."""


class RunSource:
    """Hands out attempts of the plan and retries, and receives receipts.

    Args:
        window: no more units are read while this many retries and units with unbuilt images wait,
            which bounds memory.
    """

    def __init__(self, plan: Plan, driver: Driver, sink: Sink, *, window: int = 1024) -> None:
        self.stop: Stop | None = None
        self.images: Images | None = None
        """Units that wait for their images; None when no image has to be built."""
        self.gate: Callable[[], Awaitable[None]] | None = None
        """Awaited before each attempt is handed out."""
        self.in_flight: dict[str, WorkItem] = {}
        """By unit id."""
        self._plan = plan
        self._driver = driver
        self._sink = sink
        self._window = window
        self._buffer: deque[WorkItem] = deque()
        self._retries: list[tuple[float, int, WorkItem]] = []
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._left_open_reason: str | None = None
        """Why units were left open for the next start."""
        self.paused = False
        """Hand out nothing until this changes; see `hold`."""
        self.most: int | None = None
        """Maximum number of attempts in flight, below that of the workers."""
        self._given_up: dict[str, list[WorkItem]] = {}
        """Cause -> units that this start gave up."""
        self._kept = 0

    def hold(self, *, paused: bool | None = None, most: int | None = None) -> None:
        """Pause or resume, or change the maximum of attempts in flight."""
        self.paused = self.paused if paused is None else paused
        self.most = self.most if most is None else most
        self._changed.set()

    def requeue(self, cause: str) -> int:
        """Run the units again that this start gave up for a cause. Returns their number."""
        items = self._given_up.pop(cause, [])
        self._kept -= len(items)
        self._driver.ledger.reopen(item.unit_id for item in items)
        for item in items:
            self._retry(item, cause)
        self._sink.tally.given_up -= len(items)
        self._changed.set()
        return len(items)

    @property
    def _held(self) -> bool:
        return self.paused or (self.most is not None and len(self.in_flight) >= self.most)

    def halt(self, stop: Stop) -> None:
        """Hand out nothing more. The first reason is kept."""
        self.stop = self.stop or stop
        self._stopped.set()
        self._changed.set()

    async def stopped(self) -> None:
        """Return once the run is to stop."""
        await self._stopped.wait()

    async def has_work(self) -> bool:
        """Whether there is an attempt to make; otherwise no worker is started."""
        while not self._buffer and not self._plan.counts.complete and self.stop is None:
            await self._read()
        return bool(self._buffer)

    async def fewer_than(self, units: int, seconds: float) -> bool:
        """Whether fewer attempts than `units` are to be made; False when reading takes longer than
        `seconds`."""
        until = time.monotonic() + seconds
        while len(self._buffer) < units and not self._plan.counts.complete and self.stop is None:
            if time.monotonic() > until:
                return False
            await self._read()
        return len(self._buffer) < units

    async def next(self) -> WorkItem | None:
        """Return the next attempt; None when the run is done or stopped. Waits for retries."""
        if self.gate is not None:
            await self.gate()
        while self.stop is None:
            if self._held and (self.in_flight or self._buffer or self._retries):
                self._changed.clear()
                await self._changed.wait()
                continue
            item = self._due_retry() or self._take()
            if item is not None:
                self.in_flight[item.unit_id] = item
                return item
            waiting = self.images.waiting if self.images is not None else 0
            if not self._plan.counts.complete and len(self._retries) + waiting < self._window:
                await self._read()
            elif self._retries or self.in_flight or waiting:
                await self._wait()
            elif self._left_open_reason is not None:
                self.halt(Stop("worker_lost", self._left_open_reason))
            else:
                return None
        return None

    async def receive(self, receipt: Receipt) -> None:
        """Apply a receipt: the unit is done, given up or retried, or the run stops."""
        item = self.in_flight.pop(receipt.unit_id, None)
        disposition = self._driver.receive(receipt)
        self._sink.receive(receipt, disposition)
        consequence = CAUSES[receipt.cause] if receipt.cause else None
        if consequence is not None and consequence.breaker:
            self.halt(Stop(receipt.cause or "", receipt.error or receipt.cause or ""))
        elif item is not None and disposition == "open" and _is_retried(receipt.cause):
            self._retry(item, receipt.cause or "")
        elif item is not None and disposition == "given_up" and self._kept < REQUEUED_MAX:
            self._kept += 1
            self._given_up.setdefault(receipt.cause or "", []).append(item)
        self._changed.set()

    async def _read(self) -> None:
        """Read further units. When that fails the run stops after its running rollouts."""
        try:
            self._buffer.extend(await self._plan.take())
        except UserError as error:
            self.halt(Stop("dataset", str(error)))

    async def leave_open(self, unit_id: str, reason: str) -> None:
        """Leave a unit to the next start, because its attempt cannot get a receipt in this one. The
        run stops when there is no other work."""
        self.in_flight.pop(unit_id, None)
        self._left_open_reason = self._left_open_reason or reason
        self._changed.set()

    def _retry(self, item: WorkItem, cause: str) -> None:
        unit, ledger = item.unit_id, self._driver.ledger
        lost = cause in ("worker_lost", "driver_lost")
        wait = 0.0 if lost else _backoff(ledger.counted_failures(unit))
        again = msgspec.structs.replace(
            item,
            attempt=ledger.next_attempt(unit),
            isolated=ledger.lost_workers(unit) >= ISOLATED_AFTER,
            fatal_commands=ledger.fatal_commands(unit),
            enqueued_at=time.time() + wait,
        )
        due = time.monotonic() + wait
        heapq.heappush(self._retries, (due, next(self._order), again))

    def release(self, items: Sequence[WorkItem]) -> None:
        """Hand out units whose image build ended before others."""
        self._buffer.extendleft(reversed(items))
        self._changed.set()

    def _take(self) -> WorkItem | None:
        """The next unit that does not wait for an image."""
        while self._buffer:
            item = self._buffer.popleft()
            if self.images is None or not self.images.hold(item, self.release):
                return item
        return None

    def _due_retry(self) -> WorkItem | None:
        if self._retries and self._retries[0][0] <= time.monotonic():
            return heapq.heappop(self._retries)[2]
        return None

    async def _wait(self) -> None:
        """Wait until something changes or the next retry is due."""
        self._changed.clear()
        due = self._retries[0][0] - time.monotonic() if self._retries else None
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due)):
                await self._changed.wait()
        except TimeoutError:
            pass


def _is_retried(cause: str | None) -> bool:
    """Whether this start retries the unit; failures of the operator wait for the next start."""
    return cause is not None and CAUSES[cause].retry and CAUSES[cause].owner != "operator"


def _backoff(failures: int) -> float:
    ceiling = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** max(0, failures - 1))
    return ceiling * random.uniform(0.5, 1.0)


_BLOCK = 1 << 20


def estimate_units(dataset: DatasetSection) -> int | None:
    """Rows times repeats; None for what cannot be counted cheaply. Blocking.

    Rows with repeats of their own are counted with the run's.
    """
    if dataset.path.startswith("env:"):
        return dataset.limit * dataset.repeats if dataset.limit else None
    path = Path(dataset.path).expanduser()
    if dataset.path in BUNDLED and not path.exists():
        path = bundled_path(dataset.path)
    rows = _count_rows(path) if path.is_file() else None
    if rows is None:
        return None
    return min(rows, dataset.limit or rows) * dataset.repeats


def _count_rows(path: Path) -> int | None:
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    return None
