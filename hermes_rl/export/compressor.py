"""`compress_run`: the trajectories of a run within a token budget, as another run directory.

A trajectory that is too long keeps its beginning (system prompt, first user message, first turn)
and its last turns. From the first message between them on, as many turns as necessary are replaced
by one user message with a summary, marked synthetic. Rows are read and written one at a time. What
a model was paid for is in `summaries.jsonl` before it is used, so that a run that was killed pays
for nothing twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.agent import static_digest, summary_prompt
from hermes_rl.aio import in_thread
from hermes_rl.config import ModelConfig
from hermes_rl.errors import ModelError, Outage, UserError
from hermes_rl.events import AttemptKey, Begun, CallEnded, CallStarted, Ended, Event, EventLog
from hermes_rl.identity import trajectory_id
from hermes_rl.messages import Message, UserMessage, conversation_from_openai, to_openai
from hermes_rl.models import Conversation, ModelRequest, Sampling
from hermes_rl.models.calls import ModelCaller, RetryPolicy
from hermes_rl.record import Context, MessageInfo, Trajectory, replacements
from hermes_rl.store import (
    TRAJECTORIES,
    Driver,
    Finished,
    JournalWriter,
    Publisher,
    Run,
    decode_metrics,
    load_ledger,
    load_run,
    open_run,
    write_stats,
)
from hermes_rl.text import SECRETS
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage, UsageTotal
from hermes_rl.wiring import Link, open_link

BEGIN = "[Summary of {turns} turns that were removed here to save space]"
BYTES_PER_TOKEN = 4
MESSAGE_TOKENS = 4
IMAGE_TOKENS = 1_500
ROWS_AT_ONCE = 8
SHOWN_CHARS = 120_000
"""Characters of removed messages that a summary is made from."""
TEMPERATURE = 0.3
TOO_LONG = 2.0
"""A summary longer than this many times its limit is not used."""
SUMMARY_SECONDS = 300.0
PAID = "summaries.jsonl"
BYTES = "bytes"
"""In the place of a tokenizer: four bytes are a token."""

NOT_COPIED = ("captured_calls", "followed_calls", "forked_calls")
"""Metrics of token ids, which rows with other messages do not have."""

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class CompressOptions:
    """How much is kept."""

    target_tokens: int = 15_250
    summary_tokens: int = 750
    keep_last: int = 4
    """Turns at the end that stay as they are."""
    concurrency: int = 16
    """Summaries that are written at once."""


class CompressReport(msgspec.Struct, kw_only=True):
    """What `compress_run` did, or would do."""

    run: str
    out: str | None
    rows: int = 0
    compressed: int = 0
    over_target: int = 0
    """Trajectories that are still longer than the target: their beginning and end are too long."""
    tokens_before: int = 0
    tokens_after: int = 0
    """Estimated when nothing was written."""
    static_digests: int = 0
    """Summaries that no model wrote."""
    usage: UsageTotal | None = None
    """Of the calls for summaries."""
    cost_usd: float | None = None
    """Of these calls, or their forecast; None where a price is not known."""
    tokens_by: str = "characters"
    """The tokenizer."""


@dataclass(frozen=True)
class Region:
    """The messages that a summary replaces: positions [start, end)."""

    start: int
    end: int
    turns: int
    tokens: int


@dataclass
class Row:
    """A trajectory to compress."""

    columns: dict[str, Any]
    """Of table `trajectories`, as `Trajectory` takes them."""
    messages: list[str]
    """JSON texts, in order of happening, without what earlier compressions wrote."""
    infos: list[dict[str, Any]]
    tokens: list[int]
    images: list[list[dict[str, Any]]]
    """Entries of `image_data`, by message."""
    beside: int
    """Tokens of the tool schemas."""

    @property
    def total(self) -> int:
        """Tokens of the whole trajectory."""
        return self.beside + sum(self.tokens)

    def parsed(self, start: int, end: int) -> list[Message]:
        """Messages in the internal form."""
        return conversation_from_openai(msgspec.json.decode(m) for m in self.messages[start:end])


def region_of(row: Row, options: CompressOptions, summary: int) -> Region | None:
    """What is removed from a trajectory; None when it fits, or nothing can be removed.

    Args:
        summary: tokens of the message that takes its place.
    """
    excess = row.total - options.target_tokens
    if excess <= 0:
        return None
    turns = [n for n, info in enumerate(row.infos) if info["role"] == "assistant"]
    if len(turns) <= options.keep_last + 1:
        return None
    first, last = turns[1], turns[-options.keep_last] if options.keep_last else len(row.infos)
    needed, taken, end = excess + summary, 0, first
    for begin, following in zip(turns[1:], [*turns[2:], len(row.infos)], strict=True):
        if begin >= last or taken >= needed:
            break
        taken += sum(row.tokens[begin:following])
        end = following
    if taken <= summary:
        return None
    number = sum(first <= turn < end for turn in turns)
    return Region(first, end, number, taken)


def compress_run(
    run: str | Path,
    out: str | Path | None = None,
    options: CompressOptions | None = None,
    *,
    model: ModelConfig | None = None,
    tokenizer: str | None = None,
    dry_run: bool = False,
) -> CompressReport:
    """Write the trajectories of a run, the long ones compressed, as another run directory.

    The same call resumes an output that was cut, and adds rows that the run got since.

    Args:
        run: the run directory; it is only read.
        out: the run directory to write; default RUN-compressed.
        model: writes the summaries; None writes digests without a model.
        tokenizer: a folder with tokenizer.json, or a name on the hub; None and `bytes` count a
            token for four bytes.
        dry_run: write nothing, call no model.

    Raises: UserError; StoreError when `out` was made with other options; DiskFull.
    """
    work = _Work(load_run(run), str(run), options or CompressOptions(), model, tokenizer)
    if dry_run:
        return asyncio.run(work.forecast())
    target = Path(out) if out is not None else Path(f"{str(run).rstrip('/')}-compressed")
    if target.resolve().is_relative_to(Path(run).resolve()):
        raise UserError(f"{target} is within the run itself. Choose another --out")
    return asyncio.run(work.write(target))


class _Work:
    """One call of `compress_run`."""

    def __init__(
        self,
        run: Run,
        name: str,
        options: CompressOptions,
        model: ModelConfig | None,
        tokenizer: str | None,
    ) -> None:
        self.run, self.options, self.model = run, options, model
        self.count, self.tokens_by = _counter(tokenizer)
        self.report = CompressReport(run=name, out=None, tokens_by=self.tokens_by)
        self._summary = options.summary_tokens + MESSAGE_TOKENS + self.count(BEGIN)
        """Tokens of the message with a summary, as long as it may be."""

    async def forecast(self) -> CompressReport:
        """Count, and estimate the cost."""
        report, usages = self.report, []
        for row in self._rows(lambda _: False):
            region = self._seen(row)
            if region is not None:
                after = row.total + self._summary - region.tokens
                report.tokens_after += after - row.total
                report.over_target += after > self.options.target_tokens
                prompt = min(region.tokens, SHOWN_CHARS // BYTES_PER_TOKEN) + 300
                usages.append(Usage(input_tokens=prompt, output_tokens=self.options.summary_tokens))
        if self.model is None:
            report.cost_usd = 0.0
            return report
        known = [usage.input_tokens or 0 for usage in usages]
        made = [usage.output_tokens or 0 for usage in usages]
        report.usage = UsageTotal(
            input_tokens=sum(known), output_tokens=sum(made), total_tokens=sum(known) + sum(made)
        )
        async with open_link(self.model) as link:
            prices = link.routes.routes(link.model)[0].prices
            costs = [prices.price(link.model, usage) if prices else None for usage in usages]
        report.cost_usd = None if None in costs else float(sum(c for c in costs if c is not None))
        return report

    def _seen(self, row: Row) -> Region | None:
        """Count a row; what is to be removed from it."""
        region, report = region_of(row, self.options, self._summary), self.report
        report.rows += 1
        report.tokens_before += row.total
        report.tokens_after += row.total
        report.compressed += region is not None
        report.over_target += region is None and row.total > self.options.target_tokens
        return region

    async def write(self, out: Path) -> CompressReport:
        """Write what is not written yet."""
        self.report.out = str(out)
        async with (
            await open_run(out, self._identity()) as driver,
            JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
            _link(self.model, self.options.concurrency) as link,
        ):
            publisher = Publisher(journal)
            with _Paid(out / PAID) as paid:
                await self._write_all(driver, journal, publisher, _Summaries(link, paid, self))
            await publisher.drain()
            ledger = await in_thread(load_ledger, driver.run_dir)
            await in_thread(write_stats, driver.run_dir, ledger, {"units": len(ledger)})
        (out / PAID).unlink(missing_ok=True)  # all of it is in rows
        return self.report

    def _identity(self) -> dict[str, Any]:
        options = self.options
        summary: Any = "static digest"
        if self.model is not None:
            fields = {"name", "temperature", "top_p", "max_tokens", "reasoning"}
            summary = self.model.model_dump(include=fields, exclude_none=True)
        source = self.run.run_dir.epoch(self.run.run_dir.epochs()[-1]).run_id
        return {
            "compress": {
                "run": source,
                "target_tokens": options.target_tokens,
                "summary_tokens": options.summary_tokens,
                "keep_last": options.keep_last,
                "tokenizer": self.tokens_by,
                "summary": summary,
            }
        }

    async def _write_all(
        self, driver: Driver, journal: JournalWriter, publisher: Publisher, summaries: _Summaries
    ) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            for row in self._rows(lambda unit: driver.ledger.next_attempt(unit) > 0):
                if len(tasks) >= 2 * self.options.concurrency:
                    tasks = await _first_done(tasks)
                if journal.full.is_set():
                    await publisher.drain()
                tasks.add(asyncio.create_task(self._one(row, driver, journal, summaries)))
            while tasks:
                tasks = await _first_done(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(
        self, row: Row, driver: Driver, journal: JournalWriter, summaries: _Summaries
    ) -> None:
        key = AttemptKey(unit_id=row.columns["unit_id"], epoch=driver.epoch, attempt=0)
        region = self._seen(row)
        changes: dict[str, Any] = {}
        if region is not None:
            summary = await summaries.of(row, region)
            changes = self._replaced(row, region, summary)
        metadata = msgspec.json.decode(row.columns["metadata"])
        metadata["compressed_from"] = row.columns["trajectory_id"]
        new_id = trajectory_id(key.unit_id, key.epoch, key.attempt)
        columns = {
            **row.columns,
            **changes,
            "metadata": msgspec.json.encode(metadata).decode(),
            "trajectory_id": new_id,
            "root_trajectory_id": new_id,
            "run_id": driver.run_id,
            "attempt": key.attempt,
        }
        await journal.finish(Finished(key=key, row=msgspec.convert(columns, Trajectory)))
        if region is not None:
            summaries.paid.forget(row.columns["trajectory_id"])

    def _replaced(self, row: Row, region: Region, summary: _Summary) -> dict[str, Any]:
        """The columns that change when a region becomes a summary."""
        begin = BEGIN.format(turns=region.turns)
        message = UserMessage(content=f"{begin}\n{summary.text.strip()}")
        text = msgspec.json.encode(to_openai(message)).decode()
        assert isinstance(message.content, str)
        info = MessageInfo(
            role="user",
            turn=row.infos[region.start]["turn"],
            context=0,
            synthetic=True,
            tool_name=None,
            tool_ok=None,
            chars=len(message.content),
            raw_content=None,
            raw_arguments=None,
            reasoning_details=None,
        )
        infos = [{**one, "context": 0} for one in row.infos]
        tokens = MESSAGE_TOKENS + self.count(message.content)
        after = row.total - region.tokens + tokens
        self.report.tokens_after += tokens - region.tokens
        self.report.over_target += after > self.options.target_tokens
        self.report.static_digests += summary.static
        metrics = {
            **row.columns["metrics"],
            "tokens_before": float(row.total),
            "tokens_after": float(after),
            "removed_messages": float(region.end - region.start),
            "static_digest": float(summary.static),
        }
        return {
            "messages": [*row.messages[: region.start], text, *row.messages[region.end :]],
            "message_info": [
                *infos[: region.start],
                msgspec.to_builtins(info),
                *infos[region.end :],
            ],
            "contexts": [
                Context(start=0, kept=[], summary_index=region.start, reason="compressed")
            ],
            "metrics": metrics,
            "image_data": [
                image
                for images in (*row.images[: region.start], *row.images[region.end :])
                for image in images
            ],
            **summary.added_to(row.columns),
        }

    def _rows(self, is_done: Callable[[str], bool]) -> Iterator[Row]:
        for columns in _columns_of(self.run):
            if not is_done(columns["unit_id"]):
                yield self._row(columns)

    def _row(self, columns: dict[str, Any]) -> Row:
        replaced = replacements(columns)
        pairs = zip(columns["messages"], columns["message_info"], strict=True)
        kept = [pair for index, pair in enumerate(pairs) if index not in replaced]
        left = iter(columns["image_data"] or ())
        every = [[*islice(left, _images_in(text))] for text in columns["messages"]]
        images = [one for index, one in enumerate(every) if index not in replaced]
        tokens = [self._tokens(text) for text, _ in kept]
        tools = columns["tools"]
        beside = self.count(tools) if tools and tools != "[]" else 0
        if len(kept) < len(columns["messages"]):
            columns = {
                **columns,
                "messages": [text for text, _ in kept],
                "message_info": [{**info, "context": 0} for _, info in kept],
                "contexts": [Context(start=0, kept=[], summary_index=None, reason="")],
                "image_data": [image for of_one in images for image in of_one],
            }
        messages, infos = [text for text, _ in kept], [info for _, info in kept]
        return Row(columns, messages, infos, tokens, images, beside)

    def _tokens(self, text: str) -> int:
        form, images = msgspec.json.decode(text), 0
        content = form.get("content") or ""
        if isinstance(content, list):
            images = sum(part.get("type") != "text" for part in content)
            content = "\n".join(str(part.get("text", "")) for part in content)
        texts = [content, form.get("reasoning_content") or ""]
        if form.get("tool_calls"):
            texts.append(msgspec.json.encode(form["tool_calls"]).decode())
        return MESSAGE_TOKENS + sum(map(self.count, filter(None, texts))) + IMAGE_TOKENS * images


def _images_in(text: str) -> int:
    """Images of a message whose bytes are in `image_data`."""
    if '"image"' not in text:
        return 0
    content = msgspec.json.decode(text).get("content")
    parts = content if isinstance(content, list) else ()
    return sum(part.get("type") == "image" for part in parts)


async def _first_done(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait for one or more; the others. Raises: the error of one that failed."""
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        await task
    return others


@dataclass(frozen=True)
class _Summary:
    """The text that replaces a region, and the calls that were made for it."""

    text: str
    static: bool
    row: Trajectory | None = None
    """The fold of the calls; None without any."""

    def added_to(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Calls, usage and cost of a row with these calls."""
        if self.row is None:
            return {}
        usage = dict(columns["usage"])
        for name, value in msgspec.to_builtins(self.row.usage).items():
            if value is not None:
                usage[name] = (usage[name] or 0) + value
        costs = (columns["cost_usd"], self.row.cost_usd)
        return {
            "calls": [*columns["calls"], *msgspec.to_builtins(self.row.calls)],
            "usage": usage,
            "cost_usd": None if None in costs else sum(c for c in costs if c is not None),
            "unpriced_calls": columns["unpriced_calls"] + self.row.unpriced_calls,
        }


@dataclass
class _Summaries:
    """Writes summaries, each at most once."""

    link: Link | None
    paid: _Paid
    work: _Work

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.work.options.concurrency)

    async def of(self, row: Row, region: Region) -> _Summary:
        """The summary of a region."""
        key = row.columns["trajectory_id"]
        removed = row.parsed(region.start, region.end)
        most = self.work.options.summary_tokens
        events, text = self.paid.read(key)
        if text is None and self.link is not None:
            async with self._slots:
                events, text = await self._ask(key, removed, events)
        if not text or self.work.count(text) > TOO_LONG * most:
            shown = sum(map(len, row.messages[region.start : region.end]))
            chars = max(64, most * shown // max(1, region.tokens))
            return _Summary(static_digest(removed, None, chars), True, _accounts(row, events))
        return _Summary(text, False, _accounts(row, events))

    async def _ask(
        self, key: str, removed: Sequence[Message], before: list[Event]
    ) -> tuple[list[Event], str | None]:
        """Call the model; its answer, also one that cannot be used, is stored first."""
        assert self.link is not None
        link, most = self.link, self.work.options.summary_tokens
        log = EventLog(partial(self.paid.note, key), before)
        caller = ModelCaller(link.routes.routes(link.model), log, RetryPolicy())
        request = ModelRequest(
            model=link.model,
            conversation=Conversation(
                [UserMessage(content=summary_prompt(removed, None, most, SHOWN_CHARS))]
            ),
            call_id="",
            sampling=self._sampling(link.sampling, most),
        )
        try:
            async with asyncio.timeout(SUMMARY_SECONDS):
                answer = await caller.call(request, turn=0, purpose="summary")
            text = answer.message.content.strip()
        except TimeoutError:
            text = ""
        except ModelError as error:
            if error.cause in _STOPS:
                raise Outage(f"no summary can be written: {error}. Fix that") from error
            text = ""
        await self.paid.keep(key, text)
        return log.events, text

    @staticmethod
    def _sampling(sampling: Sampling, most: int) -> Sampling:
        temperature = TEMPERATURE if sampling.temperature is None else sampling.temperature
        limit = sampling.max_tokens or 2 * most
        return replace(sampling, temperature=temperature, max_tokens=limit, seed=None)


_STOPS = ("auth", "billing", "model_not_found", "outage")
"""Causes that every further call would meet too."""


def _accounts(row: Row, events: Sequence[Event]) -> Trajectory | None:
    calls = [e for e in events if isinstance(e, CallStarted | CallEnded)]
    if not calls:
        return None
    names = ("run_id", "group_id", "member", "repeat", "row_index", "task_id", "task_hash")
    same = {name: row.columns[name] for name in (*names, "config_hash", "seed", "model")}
    key = AttemptKey(unit_id=row.columns["unit_id"], epoch=0, attempt=0)
    begun = Begun(key=key, started_at=0.0, prompt="", api_mode="", endpoint="", **same)
    return fold([begun, *calls, Ended(finished_at=0.0, end_reason="answered")])


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: str
    event: Event | None = None
    text: str | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


class _Paid:
    """What was sent to a model and what it answered, by trajectory: a file of JSON lines, which is
    read where it is needed. A line that a kill cut is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, list[tuple[int, int]]] = {}
        """Trajectory -> offset and length of its lines."""

    def __enter__(self) -> _Paid:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        place = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._places.setdefault(_decode_line(line).key, []).append((place, len(line)))
                place += len(line)
        os.ftruncate(self._fd, place)
        self._end = place
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def read(self, key: str) -> tuple[list[Event], str | None]:
        """The calls and the answer of a trajectory; an empty answer is one that cannot be used."""
        events: list[Event] = []
        text: str | None = None
        for place, length in self._places.get(key, ()):
            line = _decode_line(os.pread(self._fd, length, place))
            if line.event is not None:
                events.append(line.event)
            text = line.text if line.text is not None else text
        return events, text

    def note(self, key: str, event: Event) -> None:
        """Store a call."""
        if isinstance(event, CallStarted | CallEnded):
            self._write(_Line(key=key, event=event))

    async def keep(self, key: str, text: str) -> None:
        """Store an answer, durably."""
        self._write(_Line(key=key, text=text))
        await asyncio.to_thread(os.fsync, self._fd)

    def forget(self, key: str) -> None:
        """Of a trajectory whose row is stored."""
        self._places.pop(key, None)

    def _write(self, line: _Line) -> None:
        data = msgspec.json.encode(SECRETS.scrub_record(line)) + b"\n"
        if os.pwrite(self._fd, data, self._end) != len(data):
            raise OSError(28, "No space left on device")
        self._places.setdefault(line.key, []).append((self._end, len(data)))
        self._end += len(data)


@asynccontextmanager
async def _link(model: ModelConfig | None, calls: int) -> AsyncIterator[Link | None]:
    if model is None:
        yield None
        return
    async with open_link(model, calls=calls) as link:
        yield link


def _counter(tokenizer: str | None) -> tuple[Count, str]:
    """What counts tokens, and its name for the identity of the output."""
    if tokenizer in (None, BYTES):
        return _by_bytes, "four bytes per token"
    from hermes_rl.models.tokens import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return lambda text: len(loaded.encode(text)), loaded.sha256[:16]


def _by_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _columns_of(run: Run) -> Iterator[dict[str, Any]]:
    """The rows of `trajectories`, as `Trajectory` takes them, a few at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in run.run_dir.parts("trajectories"):
        with run.run_dir.read_part(part, pq.ParquetFile) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE):
                yield from map(_plain, pa.Table.from_batches([batch]).to_pylist())
    for table in run.unpublished(["trajectories"])["trajectories"].values():
        yield from map(_plain, table.to_pylist())


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    columns = {name: None for name in TRAJECTORIES.names} | row
    columns["metrics"] = {
        name: value
        for name, value in decode_metrics(row["metrics"] or ()).items()
        if name not in NOT_COPIED
    }
    for name in ("started_at", "finished_at"):
        columns[name] = _micros(row[name])
    columns["calls"] = [{**c, "started_at": _micros(c["started_at"])} for c in row["calls"] or ()]
    return columns


def _micros(moment: datetime | int) -> int:
    if isinstance(moment, int):
        return moment
    return (moment - _EPOCH) // timedelta(microseconds=1)
