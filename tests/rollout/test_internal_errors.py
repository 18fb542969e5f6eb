"""An internal error ends one attempt, with its calls recorded, and not the run."""

from typing import Any

import pytest

from hermes_rl import events as ev
from hermes_rl.events import EventLog
from hermes_rl.messages import AssistantMessage
from hermes_rl.rollout import Episode, Stage, lost_row, run_attempt

from .conftest import Journal, Open, script


class Unfoldable(str):
    """Text that the row's encoder refuses."""

    def __new__(cls) -> Any:
        return str.__new__(cls, "lone \ud800 surrogate")


@pytest.mark.parametrize("spoilt", [False, True])
async def test_calls_before_a_bug_are_kept(stage: Open, spoilt: bool) -> None:
    s = await stage(backend="none")
    journal = Journal()
    await s.attempt({"prompt": script({"run": "true"}, "ok")}, journal=journal)
    log = EventLog(Journal().record, [e for e in journal.events if not isinstance(e, ev.Ended)])
    if spoilt:
        log.events.append(ev.MessageAdded(message=AssistantMessage(content=Unfoldable()), turn=2))
    row = lost_row(log, KeyError("a bug"))
    assert (row.status, row.cause, row.reward) == ("failed", "harness", None)
    assert row.error == "KeyError: 'a bug'"
    assert len(row.calls) == s.server.requests == 2
    assert bool(row.messages) != spoilt


async def test_refused_event_does_not_lose_the_row(stage: Open) -> None:
    s = await stage(backend="none")
    journal = Journal()
    await s.attempt({"prompt": script({"run": "true"}, "ok")}, journal=journal)

    def refuse(event: ev.Event) -> None:
        if isinstance(event, ev.MessageAdded):
            raise TypeError("it has no JSON form")

    log = EventLog(refuse, [e for e in journal.events if not isinstance(e, ev.Ended)])
    with pytest.raises(TypeError) as caught:
        log.record(ev.MessageAdded(message=AssistantMessage(content=Unfoldable()), turn=2))
    row = lost_row(log, caught.value)
    assert (row.cause, len(row.calls), len(row.messages)) == ("harness", 2, 5)


async def test_text_of_a_bug_shows_no_key(stage: Open) -> None:
    s = await stage(backend="none")
    journal = Journal()
    await s.attempt({"prompt": script("ok")}, journal=journal)
    log = EventLog(Journal().record, journal.events[:1])
    row = lost_row(log, ValueError("header Authorization: Bearer abc123def \udcff"))
    assert row.error == "ValueError: header Authorization: *** \ufffd"


async def test_bug_before_the_rollout_has_a_row(stage: Open) -> None:
    def broken(stage: Stage) -> Episode:
        raise ZeroDivisionError("a bug")

    s = await stage(backend="none")
    item, log = s.item({"prompt": "p"}), EventLog(Journal().record)
    with pytest.raises(ZeroDivisionError) as caught:
        await run_attempt(s.context, item, log, make=broken)
    row = lost_row(log, caught.value)
    assert (row.unit_id, row.cause, row.error) == (
        item.unit_id, "harness", "ZeroDivisionError: a bug",
    )  # fmt: skip
