"""Rows of table segments from hand-made events: each column, each reason, each rule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from episode_kit import BEGUN, rounded

from hermes_rl import events as ev
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Conversation, ModelRequest, Sampling, TokenCapture
from hermes_rl.models.tokens import TokenGraph, TokensFault, record_of
from hermes_rl.record import Segment
from hermes_rl.segments import happened, prove, with_segments
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0)
EOM, EOT = 128008, 128009


def check_segments(segments: Sequence[Segment], events: Sequence[ev.Event]) -> None:
    """Hold segments against every rule and against the events that they were made from."""
    calls = happened(events)
    ok = any(isinstance(e, ev.Ended) and e.cause is None for e in events)
    prove(segments, TokenGraph.of(calls.tokens, calls.agents), calls.calls, ok=ok)


@dataclass
class Story:
    """An attempt, told call by call."""

    events: list[ev.Event] = field(default_factory=lambda: [BEGUN])
    graph: TokenGraph = field(default_factory=TokenGraph)
    sampling: Sampling = PLAIN
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self, name: str, turn: int, **label: Any) -> "Story":
        label = {"purpose": "agent", "model": "policy", **label}
        self.events.append(ev.CallStarted(call_id=name, turn=turn, started_at=1.0, **label))
        return self

    def end(self, name: str, prompt, sampled, *, agent="main", reason="stop", version=None, **more):
        outcome = more.pop("outcome", "ok")
        told = {"logprobs": tuple(-0.5 for _ in sampled), "logprobs_kind": "sampling", **more}
        tokens = TokenCapture(prompt_ids=tuple(prompt), completion_ids=tuple(sampled), **told)
        request = ModelRequest(
            "policy", Conversation(), "", sampling=self.sampling, extra=self.extra
        )
        event = record_of(self.graph, name, agent, tokens, request)
        assert event is not None
        usage = Usage(input_tokens=len(prompt), output_tokens=len(sampled))
        end = ev.CallEnded(
            call_id=name,
            outcome=outcome,
            latency_s=0.1,
            finish_reason=reason,
            usage=usage,
            policy_version=version,
        )
        self.events += [event, end]
        return self

    def call(self, name: str, turn: int, prompt, sampled, **more: Any) -> "Story":
        label = {k: more.pop(k) for k in ("purpose", "model") if k in more}
        self.start(name, turn, agent=more.get("agent", "main"), **label)
        return self.end(name, prompt, sampled, **more)

    def discard(self, turn: int) -> "Story":
        self.events.append(ev.AnswerDiscarded(turn=turn, why="empty answer"))
        return self

    def done(self, reason: str = "answered", cause: str | None = None):
        ended = ev.Ended(finished_at=2.0, end_reason=reason, cause=cause)
        self.events += [ev.Graded(reward=0.5), ended]
        _, segments = with_segments(self.events, fold(self.events))
        check_segments(segments, self.events)
        return list(segments)


def test_the_golden_case_an_end_token_off_by_one_after_tool_calls():
    """The model ended its call with 128008, the server writes 128009 into the history: the prompt
    of the next turn is another one at that token, and nothing is trained behind a wrong token."""
    call = [27, 14506, 29, 97, EOM]
    prompt = [1, 10, 11, 12]
    again = [*prompt, 27, 14506, 29, 97, EOT, 20, 21]
    first, second = (
        Story()
        .call("one", 1, prompt, call, reason="tool_calls", version="3")
        .call("two", 2, again, [30, 31, EOT], version="5")
        .done()
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
    assert second.loss_mask == [False] * 11 + [True] * 3  # the shared beginning is trained above
    assert second.turn_ids == [0] * 4 + [1] * 7 + [2] * 3
    assert second.version_ids == [-1] * 4 + [3] * 4 + [-1] * 3 + [5] * 3
    assert (second.branch_kind, second.parent_branch) == ("fork", 0)
    assert second.fork_reason == "retokenized_history"
    assert (second.policy_version_min, second.policy_version_max) == ("5", "5")
    assert second.call_ids == ["one", "two"]
    assert second.call_starts == [4, 11]
    assert second.trainable


def test_a_call_extends_only_by_an_id_prefix():
    story = Story().call("one", 1, [1, 2], [3, 4], version="9")
    story.call("two", 2, [1, 2, 3, 4, 5], [6], reason="length", version="10")
    (only,) = story.done()
    assert only.input_ids == [1, 2, 3, 4, 5, 6]
    assert only.loss_mask == [False, False, True, True, False, True]
    assert only.finish_reasons == ["stop", "length"]
    assert (only.policy_version_min, only.policy_version_max) == ("9", "10")
    assert only.truncated
    assert (only.temperature, only.top_p, only.top_k, only.min_p) == (1.0, 1.0, -1, 0.0)
    assert only.reward == 0.5


def test_an_answer_that_was_thrown_away_stands_aside():
    story = Story().call("one", 1, [1], [2]).call("bad", 2, [1, 2, 3], [4]).discard(2)
    story.call("good", 2, [1, 2, 3], [5]).call("last", 3, [1, 2, 3, 5, 6], [7])
    main, aside = story.done()
    assert main.input_ids == [1, 2, 3, 5, 6, 7]
    assert main.trainable
    assert main.call_ids == ["one", "good", "last"]
    assert aside.input_ids == [1, 2, 3, 4]
    assert aside.loss_mask == [False, False, False, True]
    assert (aside.branch_kind, aside.fork_reason, aside.parent_branch) == ("retry", "retry", 0)
    assert (aside.trainable, aside.exclude_reason) == (False, "discarded")


def test_an_aborted_answer_is_trained_nowhere():
    story = Story().call("one", 1, [1], [2]).call("cut", 2, [1, 2, 3], [4, 4], outcome="unknown")
    main, aside = story.call("good", 2, [1, 2, 3], [5]).done()
    assert (main.call_ids, main.trainable) == (["one", "good"], True)
    assert (aside.input_ids, aside.call_ids) == ([1, 2, 3, 4, 4], ["one", "cut"])
    assert aside.sampled_mask == [False, True, False, True, True]
    assert aside.loss_mask == [False] * 5
    assert (aside.trainable, aside.exclude_reason) == (False, "aborted")


def test_calls_side_by_side_are_told_apart_by_their_ids():
    story = Story().call("root", 1, [1], [2])
    story.start("a", 2).start("b", 2)
    story.end("b", [1, 2, 3], [50, 51]).end("a", [1, 2, 3], [40])
    first, second = story.done()
    assert first.call_ids == ["root", "b"]
    assert second.call_ids == ["root", "a"]
    assert second.input_ids == [1, 2, 3, 40]
    assert second.loss_mask == [False, False, False, True]
    assert second.fork_reason == "parallel_call"


def test_sub_agents_and_new_contexts_begin_branches():
    story = Story().call("one", 1, [1, 2], [3]).call("sub", 1, [1, 9], [8], agent="helper")
    story.call("sum", 1, [1, 2, 3, 4], [5], purpose="summary")
    story.events.append(ev.ContextStarted(start=3, reason="full"))
    story.call("two", 2, [1, 5, 5], [6])
    kinds = [(s.branch_kind, s.fork_reason, s.agent_name, s.exclude_reason) for s in story.done()]
    assert kinds == [
        ("main", None, "main", None),
        ("subagent", "subagent", "helper", None),
        ("compaction", "compaction", "main", "summary"),
        ("compaction", "compaction", "main", None),
    ]


def test_why_a_history_left_its_path():
    thought = AssistantMessage(content="so", reasoning_content="hm")
    story = Story().call("one", 1, [1, 2], [3, 4])
    story.events.append(ev.MessageAdded(message=thought, turn=1))
    story.call("two", 2, [1, 2, 4, 5], [6]).call("three", 3, [9, 9], [7])
    story.call("four", 4, [9, 8], [7], fork_reason="edited_history")
    assert [s.fork_reason for s in story.done()] == [
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
def test_what_may_be_trained(capture, extra, sampling, why):
    story = Story(sampling=sampling, extra=extra).call("one", 1, [1, 2], [3, 4], **capture)
    (segment,) = story.done()
    assert segment.exclude_reason == why
    assert segment.trainable == (why is None)
    assert all(p is None or p <= 0 for p in segment.logprobs)


def test_two_models_in_one_branch_are_no_policy():
    story = Story().call("one", 1, [1], [2]).call("two", 2, [1, 2, 3], [4], model="fallback")
    assert [s.exclude_reason for s in story.done()] == ["mixed_models"]


def test_logprobs_of_two_kinds_have_no_one_name_and_cost_nobody_its_segments():
    story = Story().call("one", 1, [1], [2], logprobs_kind="raw").call("two", 2, [1, 2, 3], [4])
    (segment,) = story.done()
    assert (segment.logprobs_kind, segment.exclude_reason) == ("unknown", "unknown_logprobs")


def test_a_killed_attempt_keeps_what_was_captured_and_trains_nothing():
    story = Story().call("one", 1, [1, 2], [3]).start("two", 2)
    row = fold(story.events, lost="worker_lost", at=5.0)
    row, (segment,) = with_segments(story.events, row)
    assert row.status == "failed"
    assert segment.input_ids == [1, 2, 3]
    assert (segment.trainable, segment.exclude_reason) == (False, "failed")
    assert segment.reward is None


def test_failures_are_never_trainable():
    story = Story().call("one", 1, [1, 2], [3])
    (segment,) = story.done("error", "sandbox_died")
    assert (segment.trainable, segment.exclude_reason) == (False, "failed")


def test_a_rollout_without_ids_has_no_segments_and_no_metrics():
    events = [BEGUN, ev.Ended(finished_at=2.0, end_reason="answered")]
    row = fold(events)
    assert with_segments(events, row) == (row, ())


def test_events_keep_ids_and_logprobs_through_the_journal():
    story = Story().call("one", 1, [1, 2], [2**31 - 1, 0], logprobs=(-0.1, -1e-7))
    line = msgspec.json.encode(story.events)
    again = msgspec.json.decode(line, type=list[ev.Event])
    assert again == story.events
    tokens = next(e for e in again if isinstance(e, ev.TokensAdded))
    assert ev.unpack_ids(tokens.sampled) == (2**31 - 1, 0)
    assert ev.unpack_logprobs(tokens.logprobs or b"") == rounded((-0.1, -1e-7))


BROKEN = [
    ({"loss_mask": [True] * 6}, "not sampled is to be trained"),
    ({"loss_mask": [False] * 6}, "nothing is to be trained"),
    ({"sampled_mask": [False, False, True, True, True, True]}, "n_sampled"),
    ({"logprobs": [None, None, -0.5, -0.5, None]}, "not as long"),
    ({"logprobs": [None, None, -0.5, -0.5, None, None]}, "has no logprob"),
    ({"logprobs": [None, -0.5, -0.5, -0.5, None, -0.5]}, "has a logprob"),
    ({"logprobs": [None, None, -0.5, 0.5, None, -0.5]}, "above 0"),
    ({"logprobs": [None, None, -0.5, -0.25, None, -0.5]}, "logprobs are not the row's"),
    ({"input_ids": [1, 2, 3, 3, 5, 6]}, "path is not the row's"),
    ({"input_ids": [1, 2, 3, 4, 5, -6]}, "no id"),
    ({"call_starts": [2]}, "do not fit"),
    ({"call_starts": [5, 2]}, "no places in order"),
    ({"call_starts": [3, 5]}, "belong to no call"),
    ({"call_starts": [2, 9]}, "no places in order"),
    ({"loss_mask": [False, False, True, False, False, True]}, "trained in part"),
    ({"version_ids": [0] * 6}, "has a policy version"),
    ({"prompt_len": 3}, "prompt_len"),
    ({"call_ids": ["one", "one"]}, "do not fit"),
    ({"call_ids": ["two", "one"]}, "sampled at"),
    ({"call_ids": ["one", "who"]}, "nothing was recorded"),
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
    ({"parent_branch": 0}, "no other branch"),
]


@pytest.mark.parametrize(("change", "fault"), BROKEN)
def test_a_broken_rule_is_named(change, fault):
    story = Story().call("one", 1, [1, 2], [3, 4]).call("two", 2, [1, 2, 3, 4, 5], [6])
    (segment,) = story.done()
    with pytest.raises(TokensFault) as raised:
        check_segments([msgspec.structs.replace(segment, **change)], story.events)
    assert fault in str(raised.value)
