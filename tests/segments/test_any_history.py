"""For any order and history of calls, every answer is trained once, as it was sampled."""

import msgspec
import pytest
from attempts import AttemptBuilder, verify_all
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import events as ev
from hermes_rl.models.tokens import TokensFault
from hermes_rl.segments import rollout_faults, row_faults, usage_faults, with_segments
from hermes_rl.trajectory import fold

ids = st.lists(st.integers(0, 2), max_size=4)
step = st.fixed_dictionaries(
    {
        "from": st.integers(0, 20),
        "kept": st.integers(0, 40),
        "whole": st.booleans(),
        "glue": ids,
        "sampled": ids.filter(bool),
        "agent": st.sampled_from(["main", "main", "main", "helper"]),
        "purpose": st.sampled_from(["agent", "agent", "agent", "agent", "summary"]),
        "fate": st.sampled_from(["kept", "kept", "kept", "discarded", "context", "at once"]),
        "again": st.booleans(),
    }
)


def build_attempt(steps) -> tuple[AttemptBuilder, dict[str, list[int]]]:
    """Build calls whose prompts begin like earlier paths, up to some position."""
    attempt, paths, answers = AttemptBuilder(), [[]], {}
    turn = 0
    for number, one in enumerate(steps):
        turn += not one["again"]
        path = paths[one["from"] % len(paths)]
        prompt = [*(path if one["whole"] else path[: one["kept"]]), *one["glue"]]
        name = f"call-{number}"
        label = {"agent": one["agent"], "purpose": one["purpose"]}
        if one["fate"] == "at once":
            attempt.start(f"{name}-b", max(turn, 1), **label)
        attempt.call(name, max(turn, 1), prompt, one["sampled"], **label)
        answers[name] = [*prompt, *one["sampled"]]
        if one["fate"] == "at once":
            other = [*one["sampled"], 1]
            attempt.end(f"{name}-b", prompt, other, agent=one["agent"])
            answers[f"{name}-b"] = [*prompt, *other]
        elif one["fate"] == "discarded":
            attempt.discard(max(turn, 1), one["agent"])
        elif one["fate"] == "context":
            attempt.events.append(ev.ContextStarted(start=0, reason="full"))
        paths.append(answers[name])
    return attempt, answers


@settings(max_examples=150)
@given(st.lists(step, min_size=1, max_size=10))
def test_every_answer_is_trained_once(steps):
    attempt, answers = build_attempt(steps)
    attempt.events.append(ev.Ended(finished_at=2.0, end_reason="answered"))
    row, segments = with_segments(attempt.events, fold(attempt.events))
    assert "segments_rejected" not in row.metrics
    rows = [{name: getattr(s, name) for name in s.__struct_fields__} for s in segments]
    calls = [{name: getattr(c, name) for name in c.__struct_fields__} for c in row.calls]
    assert [f for r in rows for f in row_faults(r)] == []
    assert list(rollout_faults(rows)) == list(usage_faults(rows, calls)) == []
    trained = {s.call_ids[-1]: s.input_ids for s in segments}
    assert all(answers[name] == path for name, path in trained.items())
    assert sum(sum(s.loss_mask) for s in segments) == row.usage.output_tokens
    assert row.metrics["followed_calls"] >= row.metrics["forked_calls"]
    firsts = [s for s in segments if s.branch_kind == "main"]
    assert len(firsts) <= 1
    assert all(s.branch_index == 0 for s in firsts)


CHANGES = {
    "input_ids": lambda value: value + 1,
    "loss_mask": lambda value: not value,
    "sampled_mask": lambda value: not value,
    "logprobs": lambda value: -0.25 if value is None else None,
    "turn_ids": lambda value: value + 1,
    "version_ids": lambda value: value + 1,
}


@settings(max_examples=150)
@given(st.lists(step, min_size=1, max_size=8), st.data())
def test_a_single_wrong_value_is_refused(steps, data):
    """Calls determine the turn of sampled tokens only."""
    attempt, _ = build_attempt(steps)
    attempt.events.append(ev.Ended(finished_at=2.0, end_reason="answered"))
    _, segments = with_segments(attempt.events, fold(attempt.events))
    row = data.draw(st.integers(0, len(segments) - 1))
    column = data.draw(st.sampled_from(sorted(CHANGES)))
    places = range(len(segments[row].input_ids))
    if column == "turn_ids":
        places = [place for place in places if segments[row].sampled_mask[place]]
    place = data.draw(st.sampled_from(places))
    cells = list(getattr(segments[row], column))
    cells[place] = CHANGES[column](cells[place])
    wrong = list(segments)
    wrong[row] = msgspec.structs.replace(segments[row], **{column: cells})
    with pytest.raises(TokensFault):
        verify_all(wrong, attempt.events)
