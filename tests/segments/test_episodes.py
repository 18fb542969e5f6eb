"""Ids in segments are the ids that were sampled, whatever an agent does with its history; and the
checks see each bug that would make them others."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
from episode_kit import Episode, log_faults, play, rule_faults
from sampler_kit import BOS, SPECIAL, Engine, decode, encode

from hermes_rl import events as ev
from hermes_rl.messages import ToolMessage
from hermes_rl.models import TokenCapture


async def test_a_thousand_drift_prone_episodes_hold_what_was_sampled():
    episodes = await play(range(1000))
    for number, episode in enumerate(episodes):
        assert not episode.against_the_log(), number
        assert not episode.by_the_rules(), number
    answers = [e for episode in episodes for e in episode.engine.log if e.delivered and e.policy]
    assert len(answers) > 5000
    segments = [segment for episode in episodes for segment in episode.segments]
    kinds = Counter(segment.branch_kind for segment in segments)
    reasons = Counter(segment.fork_reason for segment in segments)
    left_out = Counter(segment.exclude_reason for segment in segments)
    calls = [call for episode in episodes for call in episode.row.calls]
    cut = sum("length" in segment.finish_reasons for segment in segments)
    assert all(kinds[kind] > 100 for kind in ("main", "fork", "compaction", "subagent", "retry"))
    for reason in ("retokenized_history", "dropped_reasoning", "template", "parallel_call"):
        assert reasons[reason] > 50, reason
    assert left_out["discarded"] > 100
    assert left_out["summary"] > 100
    assert sum(call.outcome == "cut" for call in calls) > 100
    assert sum(call.purpose == "judge" for call in calls) > 100
    assert cut > 300
    sampled = sum(len(entry.sampled) for entry in answers)
    assert sum(sum(segment.loss_mask) for segment in segments) == sampled  # each token once
    assert not {name: n for name, n in drift_of(episodes).items() if n < 300}


def drift_of(episodes: list[Episode]) -> dict[str, int]:
    """How often there was what makes ids drift."""
    events = [event for episode in episodes for event in episode.log.events]
    calls = [call for episode in episodes for call in episode.row.calls]
    outputs = [
        event.message.content
        for event in events
        if isinstance(event, ev.MessageAdded) and isinstance(event.message, ToolMessage)
    ]
    log = [entry for episode in episodes for entry in episode.engine.log if entry.delivered]
    reasons = Counter(s.fork_reason for episode in episodes for s in episode.segments)
    return {
        "splits as no tokenizer makes them": sum(
            encode(decode(entry.sampled), special=True) != list(entry.sampled) for entry in log
        ),
        "stripped reasoning": reasons["dropped_reasoning"],
        "tool text with special tokens": sum(any(s in o for s in SPECIAL) for o in outputs),
        "compaction": sum(isinstance(event, ev.ContextStarted) for event in events),
        "sub-agents": sum(episode.agents for episode in episodes),
        "requests sent again, refused": sum(call.outcome == "refused" for call in calls),
        "requests sent again, answer lost": sum(call.outcome == "cut" for call in calls),
        "answers asked for again": sum(isinstance(e, ev.AnswerDiscarded) for e in events),
        "length cuts": sum(call.finish_reason == "length" for call in calls),
    }


async def test_a_bridged_history_never_drifts():
    episodes = await play(range(60), bridged=True, edits=0.0)
    assert sum(e.row.metrics["followed_calls"] for e in episodes) > 100
    assert sum(e.row.metrics["forked_calls"] for e in episodes) == 0
    sources = {s.token_source for e in episodes for s in e.segments}
    assert sources == {"bridged"}


class Retokenises(Engine):
    async def tell(self, tokens, entry):
        ids = tuple(encode(decode(entry.sampled), special=True))
        values = (*entry.logprobs, *[-1.0] * len(ids))[: len(ids)]
        return replace(tokens, completion_ids=ids, logprobs=values)


class DropsTheEnd(Engine):
    async def tell(self, tokens, entry):
        return replace(tokens, completion_ids=entry.sampled[:-1], logprobs=entry.logprobs[:-1])


class DoublesTheBeginning(Engine):
    async def tell(self, tokens, entry):
        return replace(tokens, prompt_ids=(BOS, *entry.prompt))


class ShiftsLogprobs(Engine):
    async def tell(self, tokens, entry):
        return replace(tokens, logprobs=(*entry.logprobs[1:], entry.logprobs[0]))


class StripsControlTokens(Engine):
    async def tell(self, tokens, entry):
        pairs = zip(entry.sampled, entry.logprobs, strict=True)
        kept = [(i, p) for i, p in pairs if i not in SPECIAL.values()]
        ids, logprobs = zip(*kept, strict=True) if kept else ((), ())
        return replace(tokens, completion_ids=ids, logprobs=logprobs)


class CountsALostAnswer(Engine):
    """The answer of a request that was sent again joins that of the next."""

    async def tell(self, tokens, entry):
        before = self.log[-2] if len(self.log) > 1 else entry
        if before.delivered:
            return tokens
        return replace(
            tokens,
            completion_ids=before.sampled + entry.sampled,
            logprobs=before.logprobs + entry.logprobs,
        )


class SwapsNeighbours(Engine):
    """Two answers that come at the same time change places."""

    at_the_door: ClassVar[list[tuple[TokenCapture, asyncio.Future[TokenCapture]]]] = []

    async def tell(self, tokens, entry):
        if self.at_the_door:
            other, told = self.at_the_door.pop()
            told.set_result(tokens)
            return other
        told = asyncio.get_running_loop().create_future()
        self.at_the_door.append((tokens, told))
        for _ in range(30):
            await asyncio.sleep(0)
        if not told.done():
            self.at_the_door.clear()
            return tokens
        return told.result()


BUGS = [
    Retokenises,
    DropsTheEnd,
    DoublesTheBeginning,
    StripsControlTokens,
    CountsALostAnswer,
    SwapsNeighbours,
]


@pytest.mark.parametrize("bug", BUGS)
async def test_a_planted_bug_turns_the_checks_red(bug):
    episodes = await play(range(40), bug)
    by_log = sum(bool(episode.against_the_log()) for episode in episodes)
    by_rule = sum(bool(episode.by_the_rules()) for episode in episodes)
    assert by_log >= 4  # not every episode brings a bug out
    assert by_rule >= by_log * 0.8  # the run's own check sees it too, without the sampler's log


async def test_shifted_logprobs_are_seen_against_the_log():
    """Numbers that are all plausible: nothing but the engine itself can tell."""
    for episode in await play(range(10), ShiftsLogprobs):
        assert any("other logprobs" in fault for fault in episode.against_the_log())


async def test_a_call_that_is_recorded_twice_costs_its_rollout_the_segments_not_the_row(caplog):
    for name in ("the same", "another"):
        episode = Episode(3)
        record = episode.log.record

        def twice(event, record=record, name=name):
            record(event)
            if type(event).__name__ == "TokensAdded":
                own = event.call_id if name == "the same" else f"{event.call_id}-again"
                record(msgspec.structs.replace(event, call_id=own))

        episode.log.record = twice
        await episode.run()
        assert episode.segments == ()
        assert episode.row.reward == 1.0
        assert episode.row.metrics["segments_rejected"] == 1.0
        assert "no segments for task" in caplog.text
        assert episode.row.error is not None
        assert episode.row.error.startswith("segments: TokensFault: ")
        assert episode.by_the_rules() == ["rejected"]


async def test_a_shared_beginning_that_is_trained_twice_is_seen():
    found = 0
    for episode in await play(range(40), bridged=False):
        trained = tuple(
            msgspec.structs.replace(s, loss_mask=s.sampled_mask) for s in episode.segments
        )
        if trained == episode.segments:
            continue
        found += 1
        assert any("is trained" in f for f in rule_faults(episode.row, trained))
        assert any("trained twice" in f for f in log_faults(episode.engine, trained))
    assert found > 5
