"""Each rule of table `segments` (DESIGN 5.5), broken once: a row like that is never written."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from test_segments import PLAIN, Story, check_segments

from hermes_rl import events as ev
from hermes_rl.models.base import Sampling
from hermes_rl.models.tokens.capture import TokensFault
from hermes_rl.record import Segment
from hermes_rl.segments.rules import rollout_faults, row_faults, usage_faults

PER_TOKEN = ("input_ids", "loss_mask", "sampled_mask", "logprobs", "turn_ids", "version_ids")
change = msgspec.structs.replace


def refusal(rows: list[Segment], story: Story) -> str:
    with pytest.raises(TokensFault) as raised:
        check_segments(rows, story.events)
    return str(raised.value)


def forked() -> tuple[Story, list[Segment]]:
    """Two turns of which the second leaves the path inside of the first answer."""
    story = Story().call("one", 1, [1, 2], [3, 4]).call("two", 2, [1, 2, 3, 9], [6])
    return story, story.done()


# All lists of a row have one length.


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("longer", [False, True])
def test_lists_of_two_lengths(name: str, longer: bool) -> None:
    story = Story().call("one", 1, [1, 2], [3, 4])
    (row,) = story.done()
    held = getattr(row, name)
    fault = refusal([change(row, **{name: [*held, held[-1]] if longer else held[:-1]})], story)
    assert "not as long" in fault


def test_a_row_without_ids() -> None:
    story = Story().call("one", 1, [1, 2], [3, 4])
    (row,) = story.done()
    assert "not as long" in refusal([change(row, **{name: [] for name in PER_TOKEN})], story)


# Every sampled token is trained at most once over the branches of a rollout, and at least once.


def test_a_shared_beginning_that_two_branches_train() -> None:
    story, (first, second) = forked()
    assert second.loss_mask != second.sampled_mask  # it shares a sampled token
    twice = [first, change(second, loss_mask=second.sampled_mask)]
    assert "call one is trained 2 times" in refusal(twice, story)


def test_a_branch_that_is_there_twice() -> None:
    story, (first, second) = forked()
    again = [change(row, n_branches=3) for row in (first, second, change(second, branch_index=2))]
    assert "call two is trained 2 times" in refusal(again, story)


def test_an_answer_that_nobody_trains() -> None:
    story, (first, second) = forked()
    alone = change(second, branch_index=0, n_branches=1, parent_branch=None)
    assert "call one is trained in no branch" in refusal([alone], story)
    assert "call two is in no branch" in refusal([change(first, n_branches=1)], story)


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("turn_ids", 2, "call one is of turn 1"),
        ("version_ids", 8, "call one is of policy version 7"),
        ("version_ids", -1, "call one is of policy version 7"),
    ],
)
def test_an_answer_with_another_call_s_turn_or_version(column, value, fault) -> None:
    story = Story().call("one", 1, [1, 2], [3, 4], version="7")
    (row,) = story.done()
    held = list(getattr(row, column))
    held[3] = value
    assert fault in refusal([change(row, **{column: held})], story)
    assert "ended with stop" in refusal([change(row, finish_reasons=["length"])], story)


# What a branch does not train itself it shares with its parent.


def test_sampled_tokens_of_another_branch_without_a_parent() -> None:
    story, (first, second) = forked()
    lone = [first, change(second, parent_branch=None)]
    assert "branch 1 has sampled tokens of another, but no parent" in refusal(lone, story)


@pytest.mark.parametrize("parent", [1, 7, -1])
def test_a_parent_that_is_no_other_branch(parent: int) -> None:
    story, (first, second) = forked()
    rows = [first, change(second, parent_branch=parent)]
    assert f"branch 1: its parent {parent} is no other branch" in refusal(rows, story)


def test_a_beginning_that_the_parent_has_not() -> None:
    story, (first, second) = forked()
    for place in (0, 2):  # of the prompt, and of the answer
        ids = list(second.input_ids)
        ids[place] = 77
        fault = refusal([first, change(second, input_ids=ids)], story)
        assert "branch 1 has sampled tokens that its parent 0 has not" in fault


# A call whose prompt does not extend the last one starts a new branch.


def test_a_call_that_goes_on_where_it_does_not_belong() -> None:
    story, (first, second) = forked()
    joined = change(
        first,
        n_branches=1,
        call_ids=["one", "two"],
        call_starts=[2, 5],
        finish_reasons=["stop", "stop"],
        n_sampled=3,
        **{name: getattr(first, name) + getattr(second, name)[-2:] for name in PER_TOKEN[1:]},
        input_ids=[1, 2, 3, 4, 9, 6],
    )
    joined = change(joined, loss_mask=joined.sampled_mask)
    assert "call two: sampled at 4, trained at 5" in refusal([joined], story)


# Trainable needs ids of the engine and logprobs of the sampling policy.

SHAPED: list[tuple[str, Mapping[str, Any], Mapping[str, Any], Sampling]] = [
    ("temperature", {}, {}, Sampling(0.7, 1.0, -1, 0.0)),
    ("top_p", {}, {}, Sampling(1.0, 0.9, -1, 0.0)),
    ("top_k", {}, {}, Sampling(1.0, 1.0, 20, 0.0)),
    ("min_p", {}, {}, Sampling(1.0, 1.0, -1, 0.05)),
    ("top_k", {}, {}, Sampling(1.0, 1.0, None, 0.0)),
    ("repetition_penalty", {}, {"repetition_penalty": 1.05}, PLAIN),
    ("presence_penalty", {}, {"presence_penalty": 0.5}, PLAIN),
    ("frequency_penalty", {}, {"frequency_penalty": -0.5}, PLAIN),
    ("logit_bias", {}, {"logit_bias": {"7": -100}}, PLAIN),
    ("response_format", {}, {"response_format": {"type": "json_object"}}, PLAIN),
    ("structured_outputs", {}, {"structured_outputs": {"json": {}}}, PLAIN),
    ("tool_choice", {}, {"tool_choice": "required"}, PLAIN),
    ("grammar", {"shaped_by": ("grammar",)}, {}, PLAIN),
]


@pytest.mark.parametrize(("word", "capture", "extra", "sampling"), SHAPED)
def test_raw_logprobs_of_what_something_shaped(word, capture, extra, sampling) -> None:
    """A maker that overlooks it, and columns that say nothing of it or are mended to fit."""
    story = Story(sampling=sampling, extra=dict(extra))
    story.call("one", 1, [1, 2], [3, 4], logprobs_kind="raw", **capture)
    (row,) = story.done()
    assert (row.trainable, row.exclude_reason) == (False, "raw_logprobs")
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    planted = change(row, trainable=True, exclude_reason=None, **plain)
    fault = refusal([planted], story)
    assert "call one are raw" in fault
    assert word in fault


NO_POLICY: list[tuple[dict[str, Any], str, str]] = [
    ({"source": "retokenized"}, "token_source", "engine"),
    ({"logprobs_kind": "unknown"}, "logprobs_kind", "sampling"),
    ({"logprobs_kind": "constrained"}, "logprobs_kind", "sampling"),
    ({"logprobs_kind": "constrained"}, "logprobs_kind", "raw"),
    ({"logprobs_kind": "raw"}, "logprobs_kind", "sampling"),
]


@pytest.mark.parametrize(("capture", "column", "told"), NO_POLICY)
def test_a_row_that_says_better_of_its_tokens_than_their_calls(capture, column, told) -> None:
    story = Story().call("one", 1, [1, 2], [3, 4], **capture)
    (row,) = story.done()
    planted = change(row, trainable=True, exclude_reason=None)
    if capture.get("logprobs_kind") != "raw":
        assert "trainable, but its" in refusal([planted], story)
    assert "call one" in refusal([change(planted, **{column: told})], story)


def test_one_call_of_the_path_is_enough() -> None:
    story = Story().call("one", 1, [1], [2], logprobs_kind="raw", shaped_by=("grammar",))
    story.call("two", 2, [1, 2, 3], [4], logprobs_kind="raw")
    (row,) = story.done()
    assert row.exclude_reason == "raw_logprobs"
    planted = change(row, trainable=True, exclude_reason=None)
    assert "call one are raw, and grammar shaped" in refusal([planted], story)


def test_logprobs_that_are_absent() -> None:
    story = Story().call("one", 1, [1, 2], [3, 4], logprobs=None)
    (row,) = story.done()
    planted = change(row, trainable=True, exclude_reason=None, logprobs_kind="sampling")
    assert "has no logprob" in refusal([planted], story)


def test_answers_that_are_no_part_of_the_conversation() -> None:
    story = Story().call("bad", 1, [1], [2]).discard(1).call("good", 1, [1], [3])
    rows = story.done()
    (aside,) = (row for row in rows if row.exclude_reason == "discarded")
    planted = [
        change(row, trainable=True, exclude_reason=None) if row is aside else row for row in rows
    ]
    assert "call bad is no part of the conversation (discarded)" in refusal(planted, story)


def test_two_models_in_one_row() -> None:
    story = Story().call("one", 1, [1], [2]).call("two", 2, [1, 2, 3], [4], model="fallback")
    (row,) = story.done()
    planted = change(row, trainable=True, exclude_reason=None)
    assert "several models" in refusal([planted], story)


@pytest.mark.parametrize("cause", ["sandbox_died", "verifier", None])
def test_attempts_that_failed(cause: str | None) -> None:
    """None: it was killed, and has no end."""
    story = Story().call("one", 1, [1, 2], [3])
    (row,) = story.done("error", cause) if cause else story.done()
    story.events = [e for e in story.events if cause or not isinstance(e, ev.Ended)]
    planted = change(row, trainable=True, exclude_reason=None)
    assert "trainable, but the attempt failed" in refusal([planted], story)


# The same rows as they stand in the files: `check RUN --tokens` has no events to hold them against.


def stored(rows: list[Segment]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(row) for row in rows]


def _books(number_in: int, number_out: int, **more: Any) -> dict[str, Any]:
    call = {"call_id": "one", "turn": 1, "agent": "main", "finish_reason": "stop"}
    return {**call, "input_tokens": number_in, "output_tokens": number_out, **more}


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (_books(2, 2), None),
        (_books(2, 3), "2 sampled ids, but the server counted 3"),
        (_books(1, 2), "a prompt of 2 ids, but the server counted 1"),
        (_books(2, 2, turn=4), "is of turn 4 of main"),
        (_books(2, 2, agent="helper"), "is of turn 1 of helper"),
        (_books(2, 2, call_id="another"), "is not in column calls"),
    ],
)
def test_tokens_beside_the_books(call: dict[str, Any], fault: str | None) -> None:
    story = Story().call("one", 1, [1, 2], [3, 4])
    found = list(usage_faults(stored(story.done()), [call]))
    assert [fault in one for one in found] == [True] if fault else found == []


def test_stored_rows_of_a_fork_are_sound_and_break_alone() -> None:
    _, rows = forked()
    assert not [fault for row in stored(rows) for fault in row_faults(row)]
    assert not list(rollout_faults(stored(rows)))
    first, second = stored(rows)
    second["input_ids"][2] = 77
    assert list(rollout_faults([first, second])) == [
        "branch 1 has sampled tokens that its parent 0 has not"
    ]
