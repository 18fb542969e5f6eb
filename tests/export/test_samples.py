"""One sample per context, each assistant message trained once."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import told
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.export import Sample, before_untrained, fingerprint, pieces, samples_of, without_tail


def row_of(story: Sequence[Any]) -> dict[str, Any]:
    row = msgspec.to_builtins(told.finished(0, story).row)
    row["messages"] = [msgspec.json.decode(text) for text in row["messages"]]
    return row


def trained(sample: Sample) -> list[str]:
    return [
        m["content"] or m["tool_calls"][0]["id"]
        for m, own in zip(sample.messages, sample.trained, strict=True)
        if own
    ]


def test_a_context_shows_what_it_kept_and_trains_only_what_is_new() -> None:
    first, second = samples_of(row_of(told.compacted()))
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


def test_a_summary_from_before_the_context_stands_after_what_was_kept() -> None:
    row = row_of(told.compacted())
    row["contexts"][1] = {"start": 6, "kept": [0], "summary_index": 5, "reason": "compacted"}
    _, second = samples_of(row)
    assert [m["content"] for m in second.messages] == [
        "Long work.",
        "Summary: one was done.",
        "Done after all.",
    ]


def test_the_harness_and_the_prompt_are_never_trained() -> None:
    (sample,) = samples_of(row_of(told.nudged()))
    assert trained(sample) == ["First own words.", "d"]
    (sample,) = samples_of(row_of(told.quoted()))
    assert trained(sample) == ["Four."]


def test_pieces_part_where_an_assistant_message_must_not_be_trained() -> None:
    (sample,) = samples_of(row_of(told.nudged()))
    one, two = pieces(sample)
    assert [m["content"] for m in one.prompt] == ["Go."]
    assert [m["content"] for m in one.completion] == ["First own words."]
    assert [m["content"] for m in two.prompt] == ["Go.", "First own words.", "(empty)", "Go on."]
    assert [m["tool_calls"][0]["id"] for m in two.completion] == ["d"]


def test_what_trains_everything_is_cut_before_what_must_not_be() -> None:
    (sample,) = samples_of(row_of(told.nudged()))
    assert [m["content"] for m in before_untrained(sample).messages] == ["Go.", "First own words."]
    (sample,) = samples_of(row_of(told.quoted()))
    assert before_untrained(sample).messages == []
    assert len(without_tail(next(samples_of(row_of(told.nudged())))).messages) == 5


def test_fingerprints_see_no_ids_of_calls() -> None:
    def seen(name: str, command: str = "ls", trained: bool = True, tools: int = 2) -> bytes:
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
            row={"tools": told.TOOLS[:tools]},
            context=0,
            contexts=1,
            messages=messages,
            infos=[{}, {}],
            trained=[trained, False],
            copied=[False, False],
        )
        return fingerprint(sample)

    assert seen("a") == seen("b")
    others = {seen("a"), seen("a", "cat"), seen("a", trained=False), seen("a", tools=1)}
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
def test_every_own_message_is_trained_exactly_once(row: dict[str, Any]) -> None:
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
    assert sum(p.trained for s in samples for p in pieces(s)) == wanted.total()
