"""Whatever order and history calls have: every answer is trained once, as it was sampled, and no
rollout is refused for it."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_segments import Story, check_segments

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
        "said": ids.filter(bool),
        "agent": st.sampled_from(["main", "main", "main", "helper"]),
        "purpose": st.sampled_from(["agent", "agent", "agent", "agent", "summary"]),
        "fate": st.sampled_from(["kept", "kept", "kept", "discarded", "context", "at once"]),
        "again": st.booleans(),
    }
)


def told(steps) -> tuple[Story, dict[str, list[int]]]:
    """Calls whose prompts begin as earlier paths do, up to some place."""
    story, paths, answers = Story(), [[]], {}
    turn = 0
    for number, one in enumerate(steps):
        turn += not one["again"]
        path = paths[one["from"] % len(paths)]
        prompt = [*(path if one["whole"] else path[: one["kept"]]), *one["glue"]]
        name = f"call-{number}"
        label = {"agent": one["agent"], "purpose": one["purpose"]}
        if one["fate"] == "at once":
            story.start(f"{name}-b", max(turn, 1), **label)
        story.call(name, max(turn, 1), prompt, one["said"], **label)
        answers[name] = [*prompt, *one["said"]]
        if one["fate"] == "at once":
            other = [*one["said"], 1]
            story.end(f"{name}-b", prompt, other, agent=one["agent"])
            answers[f"{name}-b"] = [*prompt, *other]
        elif one["fate"] == "discarded":
            story.events.append(
                ev.AnswerDiscarded(turn=max(turn, 1), why="empty", agent=one["agent"])
            )
        elif one["fate"] == "context":
            story.events.append(ev.ContextStarted(start=0, reason="full"))
        paths.append(answers[name])
    return story, answers


@settings(max_examples=150)
@given(st.lists(step, min_size=1, max_size=10))
def test_every_answer_is_trained_once(steps):
    story, answers = told(steps)
    story.events.append(ev.Ended(finished_at=2.0, end_reason="answered"))
    row, segments = with_segments(story.events, fold(story.events))
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


CELLS = {
    "input_ids": lambda told: told + 1,
    "loss_mask": lambda told: not told,
    "sampled_mask": lambda told: not told,
    "logprobs": lambda told: -0.25 if told is None else None,
    "turn_ids": lambda told: told + 1,
    "version_ids": lambda told: told + 1,
}


@settings(max_examples=150)
@given(st.lists(step, min_size=1, max_size=8), st.data())
def test_a_single_wrong_cell_is_refused(steps, data):
    """Of the turn, only that of sampled tokens is told by the calls."""
    story, _ = told(steps)
    story.events.append(ev.Ended(finished_at=2.0, end_reason="answered"))
    _, segments = with_segments(story.events, fold(story.events))
    row = data.draw(st.integers(0, len(segments) - 1))
    column = data.draw(st.sampled_from(sorted(CELLS)))
    places = range(len(segments[row].input_ids))
    if column == "turn_ids":
        places = [place for place in places if segments[row].sampled_mask[place]]
    place = data.draw(st.sampled_from(places))
    cells = list(getattr(segments[row], column))
    cells[place] = CELLS[column](cells[place])
    wrong = list(segments)
    wrong[row] = msgspec.structs.replace(segments[row], **{column: cells})
    with pytest.raises(TokensFault):
        check_segments(wrong, story.events)
