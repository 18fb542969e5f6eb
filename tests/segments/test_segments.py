"""Rows of table `segments` from the events of attempts: columns, branches and exclusions."""

import msgspec
import pytest
from attempts import BEGUN, PLAIN, AttemptBuilder
from episodes import as_float32

from hermes_rl import events as ev
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Sampling
from hermes_rl.segments import with_segments
from hermes_rl.trajectory import fold

EOM, EOT = 128008, 128009


def test_a_server_that_changes_the_end_token_of_tool_calls_forks_the_history():
    """The model ends its call with 128008, and the server writes 128009 into the history."""
    call = [27, 14506, 29, 97, EOM]
    prompt = [1, 10, 11, 12]
    again = [*prompt, 27, 14506, 29, 97, EOT, 20, 21]
    first, second = (
        AttemptBuilder()
        .call("one", 1, prompt, call, reason="tool_calls", version="3")
        .call("two", 2, again, [30, 31, EOT], version="5")
        .finish()
    )
    assert first.input_ids == [*prompt, *call]
    assert first.loss_mask == first.sampled_mask == [False] * 4 + [True] * 5
    assert first.logprobs == [None] * 4 + [-0.5] * 5
    assert (first.branch_index, first.branch_kind, first.parent_branch) == (0, "main", None)
    assert (first.prompt_len, first.n_sampled, first.n_branches) == (4, 5, 2)
    assert first.finish_reasons == ["tool_calls"]
    assert first.trainable
    assert second.input_ids == [*again, 30, 31, EOT]
    assert second.sampled_mask == [False] * 4 + [True] * 4 + [False] * 3 + [True] * 3
    assert (
        second.loss_mask == [False] * 11 + [True] * 3
    )  # the first branch trains the shared tokens
    assert second.turn_ids == [0] * 4 + [1] * 7 + [2] * 3
    assert second.version_ids == [-1] * 4 + [3] * 4 + [-1] * 3 + [5] * 3
    assert (second.branch_kind, second.parent_branch) == ("fork", 0)
    assert second.fork_reason == "retokenized_history"
    assert (second.policy_version_min, second.policy_version_max) == ("5", "5")
    assert second.call_ids == ["one", "two"]
    assert second.call_starts == [4, 11]
    assert second.trainable


def test_a_call_extends_a_branch_only_if_its_prompt_has_the_same_ids():
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3, 4], version="9")
    attempt.call("two", 2, [1, 2, 3, 4, 5], [6], reason="length", version="10")
    (only,) = attempt.finish()
    assert only.input_ids == [1, 2, 3, 4, 5, 6]
    assert only.loss_mask == [False, False, True, True, False, True]
    assert only.finish_reasons == ["stop", "length"]
    assert (only.policy_version_min, only.policy_version_max) == ("9", "10")
    assert only.truncated
    assert (only.temperature, only.top_p, only.top_k, only.min_p) == (1.0, 1.0, -1, 0.0)
    assert only.reward == 0.5


def test_a_discarded_answer_has_its_own_branch():
    attempt = AttemptBuilder().call("one", 1, [1], [2]).call("bad", 2, [1, 2, 3], [4]).discard(2)
    attempt.call("good", 2, [1, 2, 3], [5]).call("last", 3, [1, 2, 3, 5, 6], [7])
    main, detached = attempt.finish()
    assert main.input_ids == [1, 2, 3, 5, 6, 7]
    assert main.trainable
    assert main.call_ids == ["one", "good", "last"]
    assert detached.input_ids == [1, 2, 3, 4]
    assert detached.loss_mask == [False, False, False, True]
    assert (detached.branch_kind, detached.fork_reason, detached.parent_branch) == (
        "retry",
        "retry",
        0,
    )
    assert (detached.trainable, detached.exclude_reason) == (False, "discarded")


def test_an_aborted_answer_is_not_trained():
    attempt = (
        AttemptBuilder()
        .call("one", 1, [1], [2])
        .call("cut", 2, [1, 2, 3], [4, 4], outcome="unknown")
    )
    main, detached = attempt.call("good", 2, [1, 2, 3], [5]).finish()
    assert (main.call_ids, main.trainable) == (["one", "good"], True)
    assert (detached.input_ids, detached.call_ids) == ([1, 2, 3, 4, 4], ["one", "cut"])
    assert detached.sampled_mask == [False, True, False, True, True]
    assert detached.loss_mask == [False] * 5
    assert (detached.trainable, detached.exclude_reason) == (False, "aborted")


def test_parallel_calls_are_distinguished_by_their_ids():
    attempt = AttemptBuilder().call("root", 1, [1], [2])
    attempt.start("a", 2).start("b", 2)
    attempt.end("b", [1, 2, 3], [50, 51]).end("a", [1, 2, 3], [40])
    first, second = attempt.finish()
    assert first.call_ids == ["root", "b"]
    assert second.call_ids == ["root", "a"]
    assert second.input_ids == [1, 2, 3, 40]
    assert second.loss_mask == [False, False, False, True]
    assert second.fork_reason == "parallel_call"


def test_sub_agents_and_new_contexts_start_branches():
    attempt = (
        AttemptBuilder().call("one", 1, [1, 2], [3]).call("sub", 1, [1, 9], [8], agent="helper")
    )
    attempt.call("sum", 1, [1, 2, 3, 4], [5], purpose="summary")
    attempt.events.append(ev.ContextStarted(start=3, reason="full"))
    attempt.call("two", 2, [1, 5, 5], [6])
    kinds = [
        (s.branch_kind, s.fork_reason, s.agent_name, s.exclude_reason) for s in attempt.finish()
    ]
    assert kinds == [
        ("main", None, "main", None),
        ("subagent", "subagent", "helper", None),
        ("compaction", "compaction", "main", "summary"),
        ("compaction", "compaction", "main", None),
    ]


def test_reasons_of_forks():
    reasoning = AssistantMessage(content="so", reasoning_content="hm")
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3, 4])
    attempt.events.append(ev.MessageAdded(message=reasoning, turn=1))
    attempt.call("two", 2, [1, 2, 4, 5], [6]).call("three", 3, [9, 9], [7])
    attempt.call("four", 4, [9, 8], [7], fork_reason="edited_history")
    assert [s.fork_reason for s in attempt.finish()] == [
        None,
        "dropped_reasoning",
        "template",
        "edited_history",
    ]


EXCLUDED = [
    ({"source": "retokenized"}, {}, PLAIN, "retokenized"),
    ({"logprobs": None}, {}, PLAIN, "no_logprobs"),
    ({"logprobs": (float("nan"), -1.0)}, {}, PLAIN, "bad_logprobs"),
    ({"logprobs": (0.5, -1.0)}, {}, PLAIN, "bad_logprobs"),
    ({"logprobs": (-1.0, -9999.0)}, {}, PLAIN, "bad_logprobs"),
    ({"logprobs": (-3.4e38, -1.0)}, {}, PLAIN, "bad_logprobs"),
    ({"logprobs": (1e-6, -1.0)}, {}, PLAIN, None),
    ({"logprobs_kind": "unknown"}, {}, PLAIN, "unknown_logprobs"),
    ({"logprobs_kind": "constrained"}, {}, PLAIN, "constrained_logprobs"),
    ({"logprobs_kind": "raw"}, {}, PLAIN, None),
    ({"logprobs_kind": "raw"}, {}, Sampling(temperature=1.0), "raw_logprobs"),
    ({"logprobs_kind": "raw"}, {}, Sampling(0.7, 1.0, -1, 0.0), "raw_logprobs"),
    ({"logprobs_kind": "raw"}, {}, Sampling(1.0, 1.0, -1), "raw_logprobs"),
    ({"logprobs_kind": "raw", "sampling": PLAIN}, {}, Sampling(), None),
    ({"logprobs_kind": "raw", "sampling": PLAIN}, {"min_p": 0.2}, Sampling(), "raw_logprobs"),
    ({"logprobs_kind": "sampling"}, {}, Sampling(0.7, 0.9, 5), None),
    ({"logprobs_kind": "raw"}, {"min_p": 0.1}, PLAIN, "raw_logprobs"),
    ({"logprobs_kind": "raw"}, {"temperature": 0.7}, PLAIN, "raw_logprobs"),
    ({"logprobs_kind": "raw"}, {"repetition_penalty": 1.1}, PLAIN, "raw_logprobs"),
    ({"logprobs_kind": "raw", "shaped_by": ("grammar",)}, {}, PLAIN, "raw_logprobs"),
    ({"source": "bridged"}, {}, PLAIN, None),
]


@pytest.mark.parametrize(("capture", "extra", "sampling", "why"), EXCLUDED)
def test_only_logprobs_of_the_sampling_policy_are_trainable(capture, extra, sampling, why):
    attempt = AttemptBuilder(sampling=sampling, extra=extra).call(
        "one", 1, [1, 2], [3, 4], **capture
    )
    (segment,) = attempt.finish()
    assert segment.exclude_reason == why
    assert segment.trainable == (why is None)
    assert all(p is None or p <= 0 for p in segment.logprobs)


def test_logprobs_of_two_kinds_are_unknown():
    attempt = (
        AttemptBuilder()
        .call("one", 1, [1], [2], logprobs_kind="raw")
        .call("two", 2, [1, 2, 3], [4])
    )
    (segment,) = attempt.finish()
    assert (segment.logprobs_kind, segment.exclude_reason) == ("unknown", "unknown_logprobs")


def test_a_killed_attempt_keeps_its_tokens_and_trains_none():
    attempt = AttemptBuilder().call("one", 1, [1, 2], [3]).start("two", 2)
    row = fold(attempt.events, lost="worker_lost", at=5.0)
    row, (segment,) = with_segments(attempt.events, row)
    assert row.status == "failed"
    assert segment.input_ids == [1, 2, 3]
    assert (segment.trainable, segment.exclude_reason) == (False, "failed")
    assert segment.reward is None


def test_a_rollout_without_ids_has_no_segments_and_no_metrics():
    events = [BEGUN, ev.Ended(finished_at=2.0, end_reason="answered")]
    row = fold(events)
    assert with_segments(events, row) == (row, ())


def test_events_keep_ids_and_logprobs_through_the_journal():
    attempt = AttemptBuilder().call("one", 1, [1, 2], [2**31 - 1, 0], logprobs=(-0.1, -1e-7))
    line = msgspec.json.encode(attempt.events)
    again = msgspec.json.decode(line, type=list[ev.Event])
    assert again == attempt.events
    tokens = next(e for e in again if isinstance(e, ev.TokensAdded))
    assert ev.unpack_ids(tokens.sampled) == (2**31 - 1, 0)
    assert ev.unpack_logprobs(tokens.logprobs or b"") == as_float32((-0.1, -1e-7))
