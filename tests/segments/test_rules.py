"""Each rule of table `segments` (DESIGN 5.5), broken once: a row like that is never written."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from test_segments import PLAIN, Story, check_segments

from hermes_rl import events as ev
from hermes_rl.models import Sampling
from hermes_rl.models.tokens import TokensFault
from hermes_rl.record import Segment
from hermes_rl.segments import rollout_faults, row_faults, usage_faults

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


def joined(first: Segment, second: Segment) -> Segment:
    """Both calls in one branch, although the second does not extend the first."""
    lists = {name: getattr(first, name) + getattr(second, name)[-2:] for name in PER_TOKEN[1:]}
    row = change(
        first,
        **lists,
        n_branches=1,
        call_ids=["one", "two"],
        call_starts=[2, 5],
        finish_reasons=["stop", "stop"],
        n_sampled=3,
        input_ids=[1, 2, 3, 4, 9, 6],
    )
    return change(row, loss_mask=row.sampled_mask)


def with_id(row: Segment, place: int) -> Segment:
    return change(row, input_ids=[*row.input_ids[:place], 77, *row.input_ids[place + 1 :]])


Rows = list[Segment]
FORKS: list[tuple[Callable[[Segment, Segment], Rows], str]] = [
    # Every sampled token is trained at most once over the branches of a rollout, and at least once.
    (lambda a, b: [a, change(b, loss_mask=b.sampled_mask)], "call one is trained 2 times"),
    (
        lambda a, b: [change(row, n_branches=3) for row in (a, b, change(b, branch_index=2))],
        "call two is trained 2 times",
    ),
    (
        lambda a, b: [change(b, branch_index=0, n_branches=1, parent_branch=None)],
        "call one is trained in no branch",
    ),
    (lambda a, b: [change(a, n_branches=1)], "call two is in no branch"),
    # What a branch does not train itself it shares with its parent.
    (lambda a, b: [a, change(b, parent_branch=None)], "tokens of another, but no parent"),
    *(
        (lambda a, b, n=n: [a, change(b, parent_branch=n)], f"branch 1: its parent {n} is no other")
        for n in (1, 7, -1)
    ),
    (lambda a, b: [a, with_id(b, 0)], "branch 1 has sampled tokens that its parent 0 has not"),
    (lambda a, b: [a, with_id(b, 2)], "branch 1 has sampled tokens that its parent 0 has not"),
    # A call whose prompt does not extend the last one starts a new branch.
    (lambda a, b: [joined(a, b)], "call two: sampled at 4, trained at 5"),
]


@pytest.mark.parametrize(("broken", "fault"), FORKS)
def test_rows_of_a_fork_that_break_a_rule(broken: Any, fault: str) -> None:
    story, (first, second) = forked()
    assert second.loss_mask != second.sampled_mask  # it shares a sampled token
    assert fault in refusal(broken(first, second), story)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_all_lists_of_a_row_have_one_length(name: str) -> None:
    story = Story().call("one", 1, [1, 2], [3, 4])
    (row,) = story.done()
    held = getattr(row, name)
    for other in ({name: [*held, held[-1]]}, {name: held[:-1]}, {name: [] for name in PER_TOKEN}):
        assert "not as long" in refusal([change(row, **other)], story)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"turn_ids": [0, 0, 1, 2]}, "call one is of turn 1"),
        ({"version_ids": [-1, -1, 7, 8]}, "call one is of policy version 7"),
        ({"version_ids": [-1, -1, 7, -1]}, "call one is of policy version 7"),
        ({"finish_reasons": ["length"]}, "ended with stop"),
    ],
)
def test_an_answer_with_what_is_another_call_s(columns: dict[str, Any], fault: str) -> None:
    story = Story().call("one", 1, [1, 2], [3, 4], version="7")
    (row,) = story.done()
    assert fault in refusal([change(row, **columns)], story)


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


def forced(row: Segment, **more: Any) -> Segment:
    return change(row, trainable=True, exclude_reason=None, **more)


def test_one_call_of_the_path_is_enough() -> None:
    story = Story().call("one", 1, [1], [2], logprobs_kind="raw", shaped_by=("grammar",))
    story.call("two", 2, [1, 2, 3], [4], logprobs_kind="raw")
    (row,) = story.done()
    assert row.exclude_reason == "raw_logprobs"
    assert "call one are raw, and grammar shaped" in refusal([forced(row)], story)


def test_logprobs_that_are_absent() -> None:
    story = Story().call("one", 1, [1, 2], [3, 4], logprobs=None)
    (row,) = story.done()
    assert "has no logprob" in refusal([forced(row, logprobs_kind="sampling")], story)


def test_answers_that_are_no_part_of_the_conversation() -> None:
    story = Story().call("bad", 1, [1], [2]).discard(1).call("good", 1, [1], [3])
    rows = [forced(r) if r.exclude_reason == "discarded" else r for r in story.done()]
    assert "call bad is no part of the conversation (discarded)" in refusal(rows, story)


def test_two_models_in_one_row() -> None:
    story = Story().call("one", 1, [1], [2]).call("two", 2, [1, 2, 3], [4], model="fallback")
    (row,) = story.done()
    assert "several models" in refusal([forced(row)], story)


@pytest.mark.parametrize("cause", ["sandbox_died", "verifier", None])
def test_attempts_that_failed(cause: str | None) -> None:
    """None: it was killed, and has no end."""
    story = Story().call("one", 1, [1, 2], [3])
    (row,) = story.done("error", cause) if cause else story.done()
    story.events = [e for e in story.events if cause or not isinstance(e, ev.Ended)]
    assert "trainable, but the attempt failed" in refusal([forced(row)], story)


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
