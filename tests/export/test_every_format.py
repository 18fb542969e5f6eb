"""Every format on a run that has a bit of everything: no traceback, all counted."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
import told

from hermes_rl import events as ev
from hermes_rl.export import FORMATS, LEFT_OUT, LOST, ExportOptions, Row, export_run
from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage
from hermes_rl.store import Finished

PICTURE = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
]


def seen() -> list[ev.Event]:
    """An image in the prompt, no system prompt, reasoning."""
    return [
        told.said(UserMessage(content=PICTURE), 0),
        *told.model_call(1),
        told.said(AssistantMessage(content="A dot.", reasoning_content="So small."), 1),
    ]


def halves() -> list[ev.Event]:
    """Halves of characters, as escapes in a call and in its result; text beyond the first plane."""
    call = told.call("h", '{"command": "echo \\ud83d", "\\ud83d": 1}')
    return [
        told.said(UserMessage(content="Halves 🙂 \u2028 \x00."), 0),
        *told.model_call(1),
        told.said(AssistantMessage(tool_calls=(call,)), 1),
        told.said(ToolMessage(tool_call_id="h", name="terminal", content='{"a": "\\ud83d"}'), 1),
        *told.model_call(2),
        told.said(AssistantMessage(content="🙂"), 2),
    ]


def silent() -> list[ev.Event]:
    """A rollout that ended before any answer: graded 0."""
    return [told.said(UserMessage(content="Speak."), 0), *told.model_call(1)]


def called_in_the_prompt() -> list[ev.Event]:
    """The task's prompt quotes a call with its result; two results stand side by side."""
    calls = (told.call("q", "{}"), told.call("r", "[1]"))
    return [
        told.said(UserMessage(content="Go on."), 0),
        told.said(AssistantMessage(tool_calls=calls), 0),
        told.said(ToolMessage(tool_call_id="q", name="terminal", content=""), 0),
        told.said(ToolMessage(tool_call_id="r", name="terminal", content="x"), 0),
        *told.model_call(1),
        told.said(AssistantMessage(content="Gone."), 1),
    ]


def orphan() -> list[ev.Event]:
    """A result whose call stands nowhere, and no prompt."""
    return [
        told.said(ToolMessage(tool_call_id="none", name="", content="lost"), 0),
        *told.model_call(1),
        told.said(AssistantMessage(content="Found."), 1),
    ]


ODD = [seen(), halves(), called_in_the_prompt(), orphan()]


def odd_run(path: Path) -> Path:
    """Two members per story; those of the second half speak another model's tokens."""
    stories = [story for story in [*told.STORIES, *ODD] for _ in range(2)]
    rows: list[Finished] = []
    for number, story in enumerate(stories):
        other = {"model": "other", "tokenizer_hash": "u", "template_hash": "u"}
        more = other if number >= len(told.STORIES) * 2 else {}
        segments = [told.segment(number, [7, 8, 9, number], [1, 3], **more)]
        made = told.finished(number, story, reward=float(number % 2), segments=segments)
        rows.append(made)
    last = len(rows)
    rows += [
        told.finished(last, silent(), reward=0.0, end_reason="empty_response"),
        told.finished(last + 1, seen(), cause="sandbox_died"),
        told.finished(last + 2, told.simple(), reward=None),
        without_tools(told.finished(last + 3, told.simple())),
    ]
    return told.write(path, rows)


def without_tools(made: Finished) -> Finished:
    return msgspec.structs.replace(made, row=msgspec.structs.replace(made.row, tools="[]"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_run(tmp_path_factory.mktemp("runs") / "odd")


def read(path: Path) -> Sequence[Row]:
    """The rows of a file, by readers that refuse what is no UTF-8 or no JSON."""
    if path.suffix == ".parquet":
        rows: list[Row] = pq.read_table(path).to_pylist()
        return rows
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


@pytest.mark.parametrize("name", FORMATS)
def test_a_bit_of_everything(name: str, run: Path, tmp_path: Path) -> None:
    form = FORMATS[name]
    options = ExportOptions(min_group=1)
    report = export_run(run, name, tmp_path / f"x{form.suffix}", options)
    assert len(read(Path(report.out))) == report.samples > 0
    assert report.rollouts == 19  # one failed
    assert report.left_out.keys() <= LEFT_OUT.keys()
    assert report.lost.keys() <= LOST.keys()
    if form.unit == "messages":
        accounted = report.samples + report.left_out.get("nothing_to_train", 0)
        accounted += report.left_out.get("untrained_before", 0)
        assert accounted >= 21  # 19 rollouts, two of them with two contexts; trl parts some
        assert report.left_out.get("nothing_to_train", 0) == (name != "atif")
    else:
        assert report.left_out["other_tokenizer"] == 8
        ungraded = int(form.rl)
        assert report.left_out["no_tokens"] == 3 - ungraded
        assert report.left_out.get("not_graded", 0) == ungraded
        assert report.trained == 16
