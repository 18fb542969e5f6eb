"""Rows as they come: half characters, odd schemas, no rows at all, and what the report says."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import told

from hermes_rl import events as ev
from hermes_rl.errors import UserError
from hermes_rl.export import FORMATS, ExportOptions, export_run, whole_file
from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage
from hermes_rl.store import Finished

OF_MESSAGES = [name for name in FORMATS if FORMATS[name].unit == "messages"]


def answered(result: str) -> list[ev.Event]:
    """One call with this result, and an answer."""
    call = told.call("a", '{"command": "x"}')
    return [
        told.said(UserMessage(content="Go."), 0),
        *told.model_call(1),
        told.said(AssistantMessage(tool_calls=(call,)), 1),
        told.said(ToolMessage(tool_call_id="a", name="terminal", content=result), 1),
        *told.model_call(2),
        told.said(AssistantMessage(content="Done."), 2),
    ]


def graded(story: Sequence[ev.Event], *parts: ev.RewardPart, reward: float = 1.0) -> Finished:
    """A rollout whose reward has these components."""
    made = told.finished(0, story, reward=reward)
    row = msgspec.structs.replace(made.row, rewards=list(parts))
    return msgspec.structs.replace(made, row=row)


def with_tools(*tools: dict[str, Any]) -> Finished:
    made = told.finished(0, answered("x"))
    return msgspec.structs.replace(
        made, row=msgspec.structs.replace(made.row, tools=json.dumps(tools))
    )


def tool(name: str, **subject: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "string", **subject}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_a_result_that_json_cannot_say_again_stays_text(tmp_path: Path) -> None:
    results = ['{"a": "\\ud83d"}', "[1e999]", '{"a": NaN}', "[" * 9000]
    rows = [told.finished(n, answered(result)) for n, result in enumerate(results)]
    path = told.write(tmp_path / "run", rows)
    assert [export_run(path, name).samples for name in OF_MESSAGES] == [4] * len(OF_MESSAGES)
    text = Path(export_run(path, "sharegpt").out).read_text(encoding="utf-8")
    turns = [json.loads(line)["conversations"][3]["value"] for line in text.splitlines()]
    inner = [t.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>") for t in turns]
    assert [json.loads(turn)["content"] for turn in inner] == results


@pytest.mark.parametrize(
    ("tools", "lost"),
    [
        ([tool("a", enum=["s", 1])], "tools"),
        ([tool("a", default="s"), tool("b", default=5)], "tools"),
        ([tool("a", maximum=2**64 - 1)], "tools"),
        ([tool("a", minimum=0), tool("b", minimum=0.5)], "null_keys"),
        ([tool("a"), tool("b", enum=["s"])], "null_keys"),
        ([{"type": "function", "function": {"name": "a", "parameters": {}}}], "null_keys"),
        ([tool("a"), tool("b")], None),
    ],
)
def test_verl_gets_every_schema_exactly(tools: Any, lost: str | None, tmp_path: Path) -> None:
    report = export_run(told.write(tmp_path / "run", [with_tools(*tools)]), "verl")
    assert report.lost == ({lost: 1} if lost else {})
    (row,) = pq.read_table(report.out).to_pylist()
    assert json.loads(row["tools_json"]) == tools
    assert ("tools" in row) == (lost != "tools")


def test_images_are_kept_or_counted(tmp_path: Path) -> None:
    shown = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    story = [told.said(UserMessage(content=shown), 0), *answered("x")[1:]]
    segment = told.segment(0, [1, 2], [1])
    path = told.write(tmp_path / "run", [told.finished(0, story, segments=[segment])])
    lost = {
        name: export_run(path, name, options=ExportOptions(min_group=1)).lost.get("images", 0)
        for name in FORMATS
    }
    assert {name for name, count in lost.items() if not count} == {"openai", "atropos"}
    text = Path(export_run(path, "openai").out).read_text(encoding="utf-8")
    assert json.loads(text)["messages"][0]["content"] == shown
    (row,) = pq.read_table(export_run(path, "trl").out).to_pylist()
    assert json.loads(row["prompt"][0])["content"] == "What is it?\n[image_url]"


def test_a_plain_reward_is_no_lost_component(tmp_path: Path) -> None:
    plain = ev.RewardPart(name="verify", score=1.0, detail="exit 0")
    path = told.write(tmp_path / "plain", [graded(told.compacted(), plain)])
    assert "reward_parts" not in export_run(path, "trl").lost
    assert export_run(path, "openai").lost["rewards"] == 1
    parts = (plain, ev.RewardPart(name="style", score=0.5, weight=0.5, turn=1))
    path = told.write(tmp_path / "parts", [graded(told.compacted(), *parts, reward=1.25)])
    report = export_run(path, "trl")  # two contexts, one reward
    assert (report.samples, report.lost["reward_parts"]) == (2, 2)
    assert "reward_parts" not in export_run(path, "atif").lost


def test_answers_that_a_limit_cut_are_counted(tmp_path: Path) -> None:
    story = [
        msgspec.structs.replace(event, finish_reason="length")
        if isinstance(event, ev.CallEnded) and event.call_id == "c2"
        else event
        for event in answered("x")
    ]
    path = told.write(tmp_path / "run", [told.finished(0, story)])
    for name in ("trl", "axolotl", "verl", "openai", "sharegpt"):
        assert export_run(path, name).lost["cut"] == 1


def test_where_there_is_nothing_to_write_what_stands_there_stays(tmp_path: Path) -> None:
    path, out = told.write(tmp_path / "run", []), tmp_path / "out" / "x"
    out.parent.mkdir()
    out.write_text("before", encoding="utf-8")
    for name in FORMATS:
        with pytest.raises(UserError, match="no finished rollout to export yet"):
            export_run(path, name, out)
    assert [p.name for p in out.parent.iterdir()] == ["x"]
    assert out.read_text(encoding="utf-8") == "before"


def test_failed_attempts_are_not_exported(tmp_path: Path) -> None:
    rows = [told.finished(0, told.simple(), cause="sandbox_died"), told.finished(1, told.quoted())]
    report = export_run(told.write(tmp_path / "run", rows), "trl")
    assert (report.rollouts, report.trained) == (1, 1)


def test_no_export_goes_among_the_parts_of_a_run(tmp_path: Path) -> None:
    path = told.write(tmp_path / "run", [told.finished(0, told.simple())])
    (part,) = (path / "trajectories").iterdir()
    for out in (part, path / "journal" / "x.jsonl"):
        with pytest.raises(UserError, match="within the run itself"):
            export_run(path, "openai", out)
    assert export_run(path, "openai", path / "train.jsonl").samples == 1
    assert export_run(path, "axolotl", options=ExportOptions(limit=1)).samples == 1


def long(number: int, tokens: int) -> Finished:
    """A rollout with a long segment."""
    half = tokens // 2
    mask = [False] * half + [True] * half
    segment = msgspec.structs.replace(
        told.segment(number, [1, 2], [1]),
        input_ids=list(range(1000, 1000 + tokens)),
        loss_mask=mask,
        sampled_mask=mask,
        logprobs=[None] * half + [-i / tokens for i in range(half)],
        turn_ids=[int(own) for own in mask],
        version_ids=[0] * tokens,
        prompt_len=half,
        n_sampled=half,
        call_starts=[half],
    )
    return told.finished(number, told.quoted(), segments=[segment])


def test_memory_does_not_grow_with_the_rows_of_a_part(tmp_path: Path) -> None:
    path = told.write(tmp_path / "run", [long(n, 8_000) for n in range(40)])
    tracemalloc.start()
    try:
        report = export_run(path, "trl-tokens")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.trained == 40 * 4_000
    assert peak < 16e6  # bytes; 35 million with all rows at once


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "x"
    out.write_text("before", encoding="utf-8")

    def interrupted() -> None:
        with whole_file(out) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert out.read_text(encoding="utf-8") == "before"
