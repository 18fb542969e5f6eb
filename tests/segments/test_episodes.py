"""Segments contain the sampled ids, whatever an agent does with its history, and the checks detect
bugs that change them."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
from episodes import Episode, log_faults, rule_faults, run_episodes
from sampler import BOS, SPECIAL, Engine, decode, encode

from hermes_rl import events as ev
from hermes_rl.messages import ToolMessage
from hermes_rl.models import TokenCapture


async def test_segments_of_many_episodes_contain_the_sampled_ids():
    episodes = await run_episodes(range(250))
    for number, episode in enumerate(episodes):
        assert not episode.compare_with_log(), number
        assert not episode.check_rules(), number
    answers = [e for episode in episodes for e in episode.engine.log if e.delivered and e.policy]
    assert len(answers) > 1250
    segments = [segment for episode in episodes for segment in episode.segments]
    kinds = Counter(segment.branch_kind for segment in segments)
    reasons = Counter(segment.fork_reason for segment in segments)
    left_out = Counter(segment.exclude_reason for segment in segments)
    calls = [call for episode in episodes for call in episode.row.calls]
    cut = sum("length" in segment.finish_reasons for segment in segments)
    assert all(kinds[kind] > 25 for kind in ("main", "fork", "compaction", "subagent", "retry"))
    for reason in ("retokenized_history", "dropped_reasoning", "template", "parallel_call"):
        assert reasons[reason] > 12, reason
    assert left_out["discarded"] > 25
    assert left_out["summary"] > 25
    assert sum(call.outcome == "cut" for call in calls) > 25
    assert sum(call.purpose == "judge" for call in calls) > 25
    assert cut > 75
    sampled = sum(len(entry.sampled) for entry in answers)
    assert sum(sum(segment.loss_mask) for segment in segments) == sampled  # each token once
    assert not {name: n for name, n in drift_of(episodes).items() if n < 75}


def drift_of(episodes: list[Episode]) -> dict[str, int]:
    """Count what makes ids drift."""
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
        "splits that the tokenizer does not make": sum(
            encode(decode(entry.sampled), special=True) != list(entry.sampled) for entry in log
        ),
        "stripped reasoning": reasons["dropped_reasoning"],
        "tool text with special tokens": sum(any(s in o for s in SPECIAL) for o in outputs),
        "compaction": sum(isinstance(event, ev.ContextStarted) for event in events),
        "sub-agents": sum(episode.agents for episode in episodes),
        "requests sent again, refused": sum(call.outcome == "refused" for call in calls),
        "requests sent again, answer lost": sum(call.outcome == "cut" for call in calls),
        "answers requested again": sum(isinstance(e, ev.AnswerDiscarded) for e in events),
        "length cuts": sum(call.finish_reason == "length" for call in calls),
    }


async def test_a_bridged_history_never_drifts():
    episodes = await run_episodes(range(60), bridged=True, edits=0.0)
    assert sum(e.row.metrics["followed_calls"] for e in episodes) > 100
    assert sum(e.row.metrics["forked_calls"] for e in episodes) == 0
    sources = {s.token_source for e in episodes for s in e.segments}
    assert sources == {"bridged"}


class Retokenizes(Engine):
    async def capture(self, tokens, entry):
        ids = tuple(encode(decode(entry.sampled), special=True))
        values = (*entry.logprobs, *[-1.0] * len(ids))[: len(ids)]
        return replace(tokens, completion_ids=ids, logprobs=values)


class DropsEndToken(Engine):
    async def capture(self, tokens, entry):
        return replace(tokens, completion_ids=entry.sampled[:-1], logprobs=entry.logprobs[:-1])


class DuplicatesFirstToken(Engine):
    async def capture(self, tokens, entry):
        return replace(tokens, prompt_ids=(BOS, *entry.prompt))


class ShiftsLogprobs(Engine):
    async def capture(self, tokens, entry):
        return replace(tokens, logprobs=(*entry.logprobs[1:], entry.logprobs[0]))


class StripsControlTokens(Engine):
    async def capture(self, tokens, entry):
        pairs = zip(entry.sampled, entry.logprobs, strict=True)
        kept = [(i, p) for i, p in pairs if i not in SPECIAL.values()]
        ids, logprobs = zip(*kept, strict=True) if kept else ((), ())
        return replace(tokens, completion_ids=ids, logprobs=logprobs)


class CountsLostAnswer(Engine):
    """The lost answer of a retried request is added to the next one."""

    async def capture(self, tokens, entry):
        before = self.log[-2] if len(self.log) > 1 else entry
        if before.delivered:
            return tokens
        return replace(
            tokens,
            completion_ids=before.sampled + entry.sampled,
            logprobs=before.logprobs + entry.logprobs,
        )


class SwapsAnswers(Engine):
    """Two concurrent answers are swapped."""

    waiting: ClassVar[list[tuple[TokenCapture, asyncio.Future[TokenCapture]]]] = []

    async def capture(self, tokens, entry):
        if self.waiting:
            other, future = self.waiting.pop()
            future.set_result(tokens)
            return other
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((tokens, future))
        for _ in range(30):
            await asyncio.sleep(0)
        if not future.done():
            self.waiting.clear()
            return tokens
        return future.result()


BUGS = [
    Retokenizes,
    DropsEndToken,
    DuplicatesFirstToken,
    StripsControlTokens,
    CountsLostAnswer,
    SwapsAnswers,
]


@pytest.mark.parametrize("bug", BUGS)
async def test_injected_bugs_are_detected(bug):
    episodes = await run_episodes(range(40), bug)
    by_log = sum(bool(episode.compare_with_log()) for episode in episodes)
    by_rule = sum(bool(episode.check_rules()) for episode in episodes)
    assert by_log >= 4  # a bug has no effect in some episodes
    assert by_rule >= by_log * 0.8  # `check RUN` detects it too, without the log


async def test_shifted_logprobs_are_detected_with_the_log():
    """All values are plausible: only the log shows it."""
    for episode in await run_episodes(range(10), ShiftsLogprobs):
        assert any("other logprobs" in fault for fault in episode.compare_with_log())


async def test_a_rollout_with_a_call_recorded_twice_has_a_row_and_no_segments(caplog):
    for name in ("the same", "another"):
        episode = Episode(3)
        record = episode.log.record

        def twice(event, record=record, name=name):
            record(event)
            if type(event).__name__ == "TokensAdded":
                call_id = event.call_id if name == "the same" else f"{event.call_id}-again"
                record(msgspec.structs.replace(event, call_id=call_id))

        episode.log.record = twice
        await episode.run()
        assert episode.segments == ()
        assert episode.row.reward == 1.0
        assert episode.row.metrics["segments_rejected"] == 1.0
        assert "no segments for task" in caplog.text
        assert episode.row.error is not None
        assert episode.row.error.startswith("segments: TokensFault: ")
        assert episode.check_rules() == ["rejected"]


async def test_a_shared_prefix_that_is_trained_twice_is_detected():
    found = 0
    for episode in await run_episodes(range(40), bridged=False):
        trained = tuple(
            msgspec.structs.replace(s, loss_mask=s.sampled_mask) for s in episode.segments
        )
        if trained == episode.segments:
            continue
        found += 1
        assert any("is trained" in f for f in rule_faults(episode.row, trained))
        assert any("trained twice" in f for f in log_faults(episode.engine, trained))
    assert found > 5
