"""Scripted episodes that are prone to drift, with the real recording of calls."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from struct import pack, unpack
from typing import Any

import msgspec
from attempts import BEGUN
from sampler import TRAPS, VOCABULARY, Behavior, Engine

from hermes_rl import events as ev
from hermes_rl.events import EventLog
from hermes_rl.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from hermes_rl.models import Conversation, ModelRequest, Sampling
from hermes_rl.models.calls import Clock, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Traffic
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments import answer_spans, rollout_faults, row_faults, usage_faults, with_segments
from hermes_rl.trajectory import fold

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)


@dataclass
class _Slot:
    waited_s: float = 0.0

    def report(self, *args: Any, **more: Any) -> None:
        pass


class NoLimits:
    answered_at: float | None = None

    def __init__(self) -> None:
        self.traffic = Traffic()

    @asynccontextmanager
    async def slot(self, estimate: Any = None) -> AsyncIterator[_Slot]:
        yield _Slot()


class SimulatedClock:
    """A clock that advances only by sleeping."""

    def __init__(self, random: Random) -> None:
        self.now, self.calls, self.random = 1000.0, 0, random

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def new_id(self) -> str:
        self.calls += 1
        return f"call-{self.calls}"

    def clock(self) -> Clock:
        now = lambda: self.now  # noqa: E731
        return Clock(now, now, self.sleep, self.random.uniform, self.new_id)


class Episode:
    """One episode: a seed decides what the agent does with its history."""

    def __init__(
        self, seed: int, engine: type[Engine] = Engine, edits: float = 0.04, **behavior: Any
    ) -> None:
        self.random, self.edits = Random(seed), edits
        drawn = Behavior(
            bridged=self.random.random() < 0.5,
            drops_reasoning=self.random.random() < 0.3,
            volatile=self.random.random() < 0.05,
        )
        for name, value in behavior.items():
            setattr(drawn, name, value)
        self.engine = engine(Random(seed + 1), drawn)
        self.log = EventLog()
        self.caller = ModelCaller(
            [Route.single("", self.engine, NoLimits())],
            self.log,
            RetryPolicy(base_s=0.01, cap_s=0.01, outage_s=1e9, max_attempts=99),
            clock=SimulatedClock(Random(seed + 2)).clock(),
        )
        self.agents = 0

    async def run(self) -> "Episode":
        self.log.record(BEGUN)
        await self.run_agent(
            "main", [SystemMessage(content="be good"), UserMessage(content="do it")]
        )
        self.log.record(ev.Graded(reward=1.0))
        self.log.record(ev.Ended(finished_at=1001.0, end_reason="answered"))
        self.row, self.segments = with_segments(self.log.events, fold(self.log.events))
        return self

    async def run_agent(self, name: str, prompt: list[Message], deep: bool = True) -> None:
        random, conversation, turn = self.random, Conversation(prompt), 0
        for _ in range(random.randint(1, 7 if deep else 3)):
            turn += 1
            request = ModelRequest("policy", conversation, "", sampling=PLAIN)
            fate = random.random()
            if fate < 0.06:
                (
                    answer,
                    _,
                ) = await asyncio.gather(  # only one of the two answers is continued
                    self.caller.call(request, turn=turn, agent=name),
                    self.caller.call(request, turn=turn, agent=name),
                )
            else:
                answer = await self.caller.call(request, turn=turn, agent=name)
            if 0.06 <= fate < 0.16:
                self.log.record(ev.AnswerDiscarded(turn=turn, why="empty answer", agent=name))
                if fate < 0.13:
                    answer = await self.caller.call(request, turn=turn, agent=name)
                else:
                    self.add(conversation, AssistantMessage(content="(empty)"), turn, True)
                    self.add(conversation, UserMessage(content="well"), turn, True)
                    continue
            elif fate < 0.2:
                judged = ModelRequest("judge", Conversation(prompt), "", sampling=PLAIN)
                await self.caller.call(judged, turn=turn, purpose="judge", agent=name)
            message = answer.message
            if random.random() < self.edits:
                message = msgspec.structs.replace(message, content=message.content + " edited")
            self.add(conversation, message, turn)
            await self.handle_answer(conversation, message, turn, deep)
            if deep and random.random() < 0.1:
                conversation = await self.compacted(conversation, turn)

    async def handle_answer(
        self, conversation: Conversation, message: AssistantMessage, turn: int, deep: bool
    ) -> None:
        for call in message.tool_calls:
            if deep and self.random.random() < 0.15:
                await self.delegate()
            text = " ".join(self.random.choices([*VOCABULARY, *TRAPS], k=4))
            self.add(
                conversation, ToolMessage(tool_call_id=call.id, name="terminal", content=text), turn
            )
        if not message.tool_calls:
            self.add(conversation, UserMessage(content="continue"), turn, synthetic=True)

    async def delegate(self) -> None:
        """Run sub-agents concurrently."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.random.randint(1, 3)):
                self.agents += 1
                prompt = [SystemMessage(content="be good"), UserMessage(content="help")]
                group.create_task(self.run_agent(f"helper-{self.agents}", prompt, deep=False))

    async def compacted(self, conversation: Conversation, turn: int) -> Conversation:
        request = ModelRequest("policy", conversation, "", sampling=PLAIN)
        answer = await self.caller.call(request, turn=turn, purpose="summary")
        self.log.record(ev.ContextStarted(start=len(conversation), reason="full"))
        head = list(conversation)[:2]
        return Conversation([*head, UserMessage(content="so far: " + answer.message.content)])

    def add(
        self, conversation: Conversation, message: Message, turn: int, synthetic: bool = False
    ) -> None:
        conversation.append(message)
        self.log.record(ev.MessageAdded(message=message, turn=turn, synthetic=synthetic))

    def compare_with_log(self) -> list[str]:
        return list(log_faults(self.engine, self.segments))

    def check_rules(self) -> list[str]:
        return list(rule_faults(self.row, self.segments))


def log_faults(engine: Engine, segments: tuple[Segment, ...]) -> Iterator[str]:
    """Yield the differences between segments and the sampler's log."""
    truth = {e.call_id: e for e in engine.log if e.delivered and e.policy}
    trained: set[str] = set()
    for segment in segments:
        row = msgspec.structs.asdict(segment)
        for call_id, run in zip(segment.call_ids, answer_spans(row), strict=True):
            entry, ids = truth.get(call_id), tuple(segment.input_ids)
            if entry is None:
                yield f"{call_id}: was not sampled, or its answer was lost"
                continue
            if not run.trained:
                continue
            if call_id in trained:
                yield f"{call_id}: trained twice"
            trained.add(call_id)
            if ids[: run.start] != entry.prompt:
                yield f"{call_id}: another prompt"
            if ids[run.start : run.end] != entry.sampled:
                yield f"{call_id}: other ids"
            if tuple(segment.logprobs[run.start : run.end]) != as_float32(entry.logprobs):
                yield f"{call_id}: other logprobs"
    # A first part of an answer has no mask if the whole answer was discarded.
    parts = {s.call_ids[-1] for s in segments if s.exclude_reason == "aborted"} - trained
    wanted = {call_id: entry for call_id, entry in truth.items() if call_id not in parts}
    yield from (f"{call_id}: not trained" for call_id in wanted if call_id not in trained)
    if sum(sum(s.loss_mask) for s in segments) != sum(len(e.sampled) for e in wanted.values()):
        yield "the trained tokens are not the sampled ones"


def rule_faults(row: Trajectory, segments: tuple[Segment, ...]) -> Iterator[str]:
    """Yield the faults that `check RUN --tokens` reports without a tokenizer."""
    if row.metrics.get("segments_rejected"):
        yield "rejected"
        return
    rows = [msgspec.structs.asdict(s) for s in segments]
    yield from (fault for r in rows for fault in row_faults(r))
    yield from rollout_faults(rows)
    yield from usage_faults(rows, [msgspec.structs.asdict(c) for c in row.calls])


def as_float32(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(unpack(f"{len(values)}f", pack(f"{len(values)}f", *values)))


async def run_episodes(
    seeds: range, engine: type[Engine] = Engine, **behavior: Any
) -> list[Episode]:
    return [await Episode(seed, engine, **behavior).run() for seed in seeds]
