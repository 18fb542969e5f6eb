"""Samples for supervised training: one per context, each assistant message trained once."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import rollouts
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.export import Sample, before_untrained, fingerprint, pieces, samples_of, without_tail


def row_of(events: Sequence[Any]) -> dict[str, Any]:
    row = msgspec.to_builtins(rollouts.finished(0, events).row)
    row["messages"] = [msgspec.json.decode(text) for text in row["messages"]]
    return row


def trained(sample: Sample) -> list[str]:
    return [
        m["content"] or m["tool_calls"][0]["id"]
        for m, is_trained in zip(sample.messages, sample.trained, strict=True)
        if is_trained
    ]


def test_a_context_contains_kept_messages_and_trains_only_new_ones() -> None:
    first, second = samples_of(row_of(rollouts.with_two_contexts()))
    assert [m["role"] for m in first.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert trained(first) == ["e", "f"]
    assert [m["content"] for m in second.messages] == [
        "Long work.",
        "",
        "result two",
        "Summary: one was done.",
        "Done after all.",
    ]
    assert trained(second) == ["Done after all."]
    assert second.copied == [True, True, True, False, False]


def test_a_summary_from_before_the_context_follows_the_kept_messages() -> None:
    row = row_of(rollouts.with_two_contexts())
    row["contexts"][1] = {"start": 6, "kept": [0], "summary_index": 5, "reason": "compacted"}
    _, second = samples_of(row)
    assert [m["content"] for m in second.messages] == [
        "Long work.",
        "Summary: one was done.",
        "Done after all.",
    ]


def test_messages_of_the_harness_and_of_the_prompt_are_not_trained() -> None:
    (sample,) = samples_of(row_of(rollouts.with_synthetic_messages()))
    assert trained(sample) == ["First answer.", "d"]
    (sample,) = samples_of(row_of(rollouts.with_quoted_answer()))
    assert trained(sample) == ["Four."]


def test_pieces_split_at_assistant_messages_that_must_not_be_trained() -> None:
    (sample,) = samples_of(row_of(rollouts.with_synthetic_messages()))
    one, two = pieces(sample)
    assert [m["content"] for m in one.prompt] == ["Go."]
    assert [m["content"] for m in one.completion] == ["First answer."]
    assert [m["content"] for m in two.prompt] == ["Go.", "First answer.", "(empty)", "Continue."]
    assert [m["tool_calls"][0]["id"] for m in two.completion] == ["d"]


def test_a_sample_is_cut_before_the_first_untrainable_assistant_message() -> None:
    (sample,) = samples_of(row_of(rollouts.with_synthetic_messages()))
    assert [m["content"] for m in before_untrained(sample).messages] == ["Go.", "First answer."]
    (sample,) = samples_of(row_of(rollouts.with_quoted_answer()))
    assert before_untrained(sample).messages == []
    assert (
        len(without_tail(next(samples_of(row_of(rollouts.with_synthetic_messages())))).messages)
        == 5
    )


def test_fingerprints_ignore_call_ids() -> None:
    def hashed(name: str, command: str = "ls", trained: bool = True, tools: int = 2) -> bytes:
        function = {"name": "terminal", "arguments": {"command": command}}
        messages: list[dict[str, Any]] = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": name, "function": function}],
            },
            {"role": "tool", "tool_call_id": name, "content": "x"},
        ]
        sample = Sample(
            row={"tools": rollouts.TOOLS[:tools]},
            context=0,
            contexts=1,
            messages=messages,
            infos=[{}, {}],
            trained=[trained, False],
            copied=[False, False],
        )
        return fingerprint(sample)

    assert hashed("a") == hashed("b")
    others = {hashed("a"), hashed("a", "cat"), hashed("a", trained=False), hashed("a", tools=1)}
    assert len(others) == 4


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row of any length, cut into contexts anywhere."""
    roles = draw(st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=12))
    starts = sorted(draw(st.sets(st.integers(1, len(roles)), max_size=3)))
    contexts = [{"start": 0, "kept": [], "summary_index": None, "reason": ""}]
    for start in starts:
        kept = draw(st.lists(st.integers(0, start - 1), unique=True))
        contexts.append({"start": start, "kept": kept, "summary_index": None, "reason": "x"})
    infos = [
        {"role": role, "turn": draw(st.integers(0, 2)), "synthetic": draw(st.booleans())}
        for role in roles
    ]
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    return {"messages": messages, "message_info": infos, "contexts": contexts}


@given(rows())
def test_every_message_of_the_policy_is_trained_exactly_once(row: dict[str, Any]) -> None:
    samples = list(samples_of(row))
    wanted = Counter(
        m["content"]
        for m, info in zip(row["messages"], row["message_info"], strict=True)
        if m["role"] == "assistant" and info["turn"] and not info["synthetic"]
    )
    assert Counter(c for s in samples for c in trained(s)) == wanted
    in_pieces = Counter(
        m["content"]
        for s in samples
        for p in pieces(s)
        for m in p.completion
        if m["role"] == "assistant"
    )
    assert in_pieces == wanted
