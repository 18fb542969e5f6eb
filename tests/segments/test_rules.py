"""Each rule of table `segments` (DESIGN 5.5), broken once: such a row is never written."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from attempts import PLAIN, AttemptBuilder, verify_all

from hermes_rl import events as ev
from hermes_rl.models import Sampling
from hermes_rl.models.tokens import TokensFault
from hermes_rl.record import Segment
from hermes_rl.segments import rollout_faults, row_faults, usage_faults

PER_TOKEN = ("input_ids", "loss_mask", "sampled_mask", "logprobs", "turn_ids", "version_ids")
change = msgspec.structs.replace


def read_error_body(rows: list[Segment], attempt: AttemptBuilder) -> str:
    with pytest.raises(TokensFault) as raised:
        verify_all(rows, attempt.events)
    return str(raised.value)


def one_call(**capture: Any) -> tuple[AttemptBuilder, Segment]:
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3, 4], **capture)
    (row,) = attempt.finish()
    return attempt, row


def forked() -> tuple[AttemptBuilder, list[Segment]]:
    """Two calls; the prompt of the second one differs from the first inside its answer."""
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3, 4]).call("two", 2, [1, 2, 3, 9], [6])
    return attempt, attempt.finish()


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
    # Every sampled token is trained in exactly one branch of a rollout.
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
    # A branch shares with its parent the tokens that it does not train.
    (lambda a, b: [a, change(b, parent_branch=None)], "tokens of another, but no parent"),
    *(
        (lambda a, b, n=n: [a, change(b, parent_branch=n)], f"branch 1: its parent {n} is not")
        for n in (1, 7, -1)
    ),
    (lambda a, b: [a, with_id(b, 0)], "branch 1 has sampled tokens that its parent 0 has not"),
    (lambda a, b: [a, with_id(b, 2)], "branch 1 has sampled tokens that its parent 0 has not"),
    # A call whose prompt does not extend the last one starts a new branch.
    (lambda a, b: [joined(a, b)], "call two: sampled at 4, trained at 5"),
]


@pytest.mark.parametrize(("broken", "fault"), FORKS)
def test_rules_of_forked_rollouts(broken: Any, fault: str) -> None:
    attempt, (first, second) = forked()
    assert second.loss_mask != second.sampled_mask  # it shares a sampled token
    assert fault in read_error_body(broken(first, second), attempt)


ROW_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"loss_mask": [True] * 6}, "trained that was not sampled"),
    ({"loss_mask": [False] * 6}, "no token is trained"),
    ({"sampled_mask": [False, False, True, True, True, True]}, "n_sampled"),
    ({"logprobs": [None, None, -0.5, -0.5, None, None]}, "has no logprob"),
    ({"logprobs": [None, -0.5, -0.5, -0.5, None, -0.5]}, "has a logprob"),
    ({"logprobs": [None, None, -0.5, 0.5, None, -0.5]}, "above 0"),
    ({"logprobs": [None, None, -0.5, -0.25, None, -0.5]}, "logprobs differ from the row"),
    ({"input_ids": [1, 2, 3, 3, 5, 6]}, "path differs from the row"),
    ({"input_ids": [1, 2, 3, 4, 5, -6]}, "a token id is negative"),
    ({"call_starts": [2]}, "differ in length"),
    ({"call_starts": [5, 2]}, "not increasing positions"),
    ({"call_starts": [3, 5]}, "belong to no call"),
    ({"call_starts": [2, 9]}, "not increasing positions"),
    ({"loss_mask": [False, False, True, False, False, True]}, "only partly trained"),
    ({"turn_ids": [0, 0, 1, 2, 1, 2]}, "call one is of turn 1"),
    ({"version_ids": [0] * 6}, "has a policy version"),
    ({"version_ids": [-1, -1, 7, 8, -1, -1]}, "call one is of policy version 7"),
    ({"version_ids": [-1, -1, 7, -1, -1, -1]}, "call one is of policy version 7"),
    ({"finish_reasons": ["length", "stop"]}, "ended with stop"),
    ({"prompt_len": 3}, "prompt_len"),
    ({"call_ids": ["one", "one"]}, "a call is there twice"),
    ({"call_ids": ["two", "one"]}, "sampled at"),
    ({"call_ids": ["one", "who"]}, "not in the recorded tokens"),
    ({"trainable": False}, "exclude_reason None"),
    ({"exclude_reason": "because"}, "unknown"),
    ({"fork_reason": "because"}, "unknown"),
    ({"branch_kind": "twig"}, "unknown"),
    ({"token_source": "retokenized"}, "its ids are"),
    ({"logprobs_kind": "unknown"}, "its logprobs are"),
    ({"logprobs_kind": "raw", "top_p": None}, "not plain"),
    ({"logprobs_kind": "raw", "min_p": None}, "not plain"),
    ({"branch_index": 1}, "branches [1]"),
    ({"n_branches": 2}, "n_branches"),
    ({"parent_branch": 0}, "not another branch"),
]


@pytest.mark.parametrize(("columns", "fault"), ROW_FAULTS)
def test_a_broken_rule_is_named(columns: dict[str, Any], fault: str) -> None:
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3, 4], version="7")
    (row,) = attempt.call("two", 2, [1, 2, 3, 4, 5], [6]).finish()
    assert fault in read_error_body([change(row, **columns)], attempt)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_all_lists_of_a_row_have_one_length(name: str) -> None:
    attempt, row = one_call()
    values = getattr(row, name)
    empty: dict[str, Any] = {key: [] for key in PER_TOKEN}
    for other in ({name: [*values, values[-1]]}, {name: values[:-1]}, empty):
        assert "not as long" in read_error_body([change(row, **other)], attempt)


# A trainable row needs ids of the engine and logprobs of the sampling policy.

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


def make_trainable(row: Segment, **columns: Any) -> Segment:
    return change(row, trainable=True, exclude_reason=None, **columns)


@pytest.mark.parametrize(("parameter", "capture", "extra", "sampling"), SHAPED)
def test_raw_logprobs_are_refused_if_a_parameter_changed_the_distribution(
    parameter: str, capture: Any, extra: Any, sampling: Sampling
) -> None:
    """Also if the columns of the row do not show it."""
    attempt = AttemptBuilder(sampling=sampling, extra=dict(extra))
    attempt.call("one", 1, [1, 2], [3, 4], logprobs_kind="raw", **capture)
    (row,) = attempt.finish()
    assert (row.trainable, row.exclude_reason) == (False, "raw_logprobs")
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    fault = read_error_body([make_trainable(row, **plain)], attempt)
    assert "call one are raw" in fault
    assert parameter in fault


UNTRAINABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"source": "retokenized"}, "token_source", "engine"),
    ({"logprobs_kind": "unknown"}, "logprobs_kind", "sampling"),
    ({"logprobs_kind": "constrained"}, "logprobs_kind", "sampling"),
    ({"logprobs_kind": "constrained"}, "logprobs_kind", "raw"),
    ({"logprobs_kind": "raw"}, "logprobs_kind", "sampling"),
]


@pytest.mark.parametrize(("capture", "column", "claimed"), UNTRAINABLE)
def test_a_row_cannot_claim_more_than_its_calls(
    capture: dict[str, Any], column: str, claimed: str
) -> None:
    attempt, row = one_call(**capture)
    if capture.get("logprobs_kind") != "raw":
        assert "trainable, but its" in read_error_body([make_trainable(row)], attempt)
    assert "call one" in read_error_body([make_trainable(row, **{column: claimed})], attempt)


def with_one_raw_call() -> AttemptBuilder:
    attempt = AttemptBuilder().call("one", 1, [1], [2], logprobs_kind="raw", shaped_by=("grammar",))
    return attempt.call("two", 2, [1, 2, 3], [4], logprobs_kind="raw")


def with_fallback_model() -> AttemptBuilder:
    attempt = AttemptBuilder().call("one", 1, [1], [2])
    return attempt.call("two", 2, [1, 2, 3], [4], model="fallback")


EXCLUDED: list[tuple[AttemptBuilder, str, str]] = [
    (with_one_raw_call(), "raw_logprobs", "call one are raw, and grammar changed"),
    (AttemptBuilder().call("a", 1, [1], [3], logprobs=None), "no_logprobs", "has no logprob"),
    (
        AttemptBuilder().call("bad", 1, [1], [2]).discard(1).call("good", 1, [1], [3]),
        "discarded",
        "call bad is not in the conversation (discarded)",
    ),
    (with_fallback_model(), "mixed_models", "several models"),
]


@pytest.mark.parametrize(("attempt", "reason", "fault"), EXCLUDED, ids=lambda x: str(x)[:20])
def test_an_excluded_row_cannot_be_made_trainable(
    attempt: AttemptBuilder, reason: str, fault: str
) -> None:
    rows = attempt.finish()
    assert reason in [row.exclude_reason for row in rows]
    kind = {"logprobs_kind": "sampling"} if reason == "no_logprobs" else {}
    changed = [make_trainable(r, **kind) if r.exclude_reason == reason else r for r in rows]
    assert fault in read_error_body(changed, attempt)


@pytest.mark.parametrize("cause", ["sandbox_died", "verifier", None])
def test_rows_of_failed_attempts_are_not_trainable(cause: str | None) -> None:
    """With None the attempt was killed and has no end."""
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3])
    (row,) = attempt.finish("error", cause) if cause else attempt.finish()
    attempt.events = [e for e in attempt.events if cause or not isinstance(e, ev.Ended)]
    assert "trainable, but the attempt failed" in read_error_body([make_trainable(row)], attempt)


# `check RUN --tokens` has the stored rows only, and no events.


def stored(rows: list[Segment]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(row) for row in rows]


def call_column(input_tokens: int, output_tokens: int, **more: Any) -> dict[str, Any]:
    call = {"call_id": "one", "turn": 1, "agent": "main", "finish_reason": "stop"}
    return {**call, "input_tokens": input_tokens, "output_tokens": output_tokens, **more}


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (call_column(2, 2), None),
        (call_column(2, 3), "2 sampled ids, but the server counted 3"),
        (call_column(1, 2), "a prompt of 2 ids, but the server counted 1"),
        (call_column(2, 2, turn=4), "is of turn 4 of main"),
        (call_column(2, 2, agent="helper"), "is of turn 1 of helper"),
        (call_column(2, 2, call_id="another"), "is not in column calls"),
    ],
)
def test_tokens_are_compared_with_the_usage_of_calls(
    call: dict[str, Any], fault: str | None
) -> None:
    _, row = one_call()
    found = list(usage_faults(stored([row]), [call]))
    assert [fault in one for one in found] == [True] if fault else found == []


def test_stored_rows_of_a_fork_are_checked_without_events() -> None:
    _, rows = forked()
    assert not [fault for row in stored(rows) for fault in row_faults(row)]
    assert not list(rollout_faults(stored(rows)))
    first, second = stored(rows)
    second["input_ids"][2] = 77
    assert list(rollout_faults([first, second])) == [
        "branch 1 has sampled tokens that its parent 0 has not"
    ]
