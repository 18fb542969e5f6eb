"""What stands in the files: row by row, filtered, counted, the same bytes each time."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import told

from hermes_rl.errors import UserError
from hermes_rl.export import FORMATS, ExportOptions, export_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each story twice: a group of two, with a segment each."""
    path = tmp_path_factory.mktemp("runs") / "told"
    rows = []
    for number, story in enumerate(s for s in told.STORIES for _ in range(2)):
        segments = [told.segment(number, [7, 8, 9, number], [1, 3])]
        rows.append(
            told.finished(number, story, reward=float(number % 2), segments=segments, size=2)
        )
    return told.write(path, rows)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_run_gives_the_same_bytes(name: str, run: Path, tmp_path: Path) -> None:
    one, two = (export_run(run, name, tmp_path / f"{i}.out") for i in range(2))
    assert Path(one.out).read_bytes() == Path(two.out).read_bytes()
    assert one.samples > 0
    assert one.trained > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.out", "1.out"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_says_what_it_is(name: str) -> None:
    form = FORMATS[name]
    assert form.name == name
    assert (form.suffix == ".parquet") == (form.columns is not None)


def test_filters_are_counted(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "trl", tmp_path / "x", ExportOptions(min_reward=1.0))
    assert report.rollouts == 8
    assert report.left_out == {"low_reward": 4}
    report = export_run(run, "trl", tmp_path / "x", ExportOptions(dedupe=True))
    assert report.left_out == {"duplicate": 5}  # one of the stories has two contexts
    options = ExportOptions(end_reasons=frozenset({"max_turns"}))
    with pytest.raises(UserError, match="Left out: 8 rollouts with another ending"):
        export_run(run, "trl", tmp_path / "x", options)
    assert export_run(run, "trl", tmp_path / "x", ExportOptions(limit=3)).rollouts == 3


def test_axolotl_marks_each_message(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "axolotl", tmp_path / "x.parquet", ExportOptions(min_reward=1.0))
    rows = pq.read_table(report.out).to_pylist()
    marks = [[json.loads(m)["training"] for m in row["messages"]] for row in rows]
    assert marks[1] == [False, True, False, False, True]  # nudged; its tail is cut
    assert report.lost["tail"] == 2
    assert marks[0] == [False, False, True, False, False, False, False, True]  # arguments no JSON
    assert report.trained == sum(map(sum, marks)) == 8


def test_openai_has_weights_and_the_exact_arguments(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "openai", tmp_path / "x.jsonl", ExportOptions(min_reward=1.0))
    simple, nudged, *_ = lines(report.out)
    texts = [
        call["function"]["arguments"]
        for message in simple["messages"]
        for call in message.get("tool_calls", [])
    ]
    assert texts == ['{"command": "ls <b>"}', '{"path":"x"}', "{never closed"]
    assert [m.get("weight") for m in nudged["messages"]] == [None, None, 0, None, None]
    assert simple["tools"] == told.TOOLS
    assert report.lost == {"reasoning": 1, "tail": 2, "rewards": 4}


@pytest.mark.parametrize("name", ["sharegpt", "trl", "verl"])
def test_arguments_that_nobody_said_are_not_trained_on(name: str, tmp_path: Path) -> None:
    path = told.write(tmp_path / "run", [told.finished(0, told.simple())])
    report = export_run(path, name, tmp_path / "out")
    assert report.trained == (2 if name == "trl" else 1)
    read = pq.read_table(report.out).to_pylist() if name != "sharegpt" else lines(report.out)
    taught = [row.get("completion", row.get("messages", row.get("conversations"))) for row in read]
    assert "never closed" not in repr(taught)


def test_sharegpt_rows_have_the_statistics_of_hermes(tmp_path: Path) -> None:
    stories = [told.simple('{"n": 1}'), told.nudged(), *(s for s in told.STORIES[2:])]
    rows = [told.finished(i, story, reward=1.0) for i, story in enumerate(stories)]
    report = export_run(told.write(tmp_path / "run", rows), "sharegpt", tmp_path / "x.jsonl")
    row = lines(report.out)[0]
    speakers = [turn["from"] for turn in row.pop("conversations")]
    assert speakers == ["system", "human", "gpt", "tool", "gpt", "tool", "gpt"]
    assert row == {
        "prompt_index": 0,
        "metadata": {"batch_num": 0, "timestamp": "1970-01-01T00:33:20", "model": "told"},
        "completed": True,
        "partial": False,
        "api_calls": 3,
        "toolsets_used": ["terminal"],
        "tool_stats": {
            "terminal": {"count": 2, "success": 2, "failure": 0},
            "read_file": {"count": 1, "success": 1, "failure": 0},
        },
        "tool_error_counts": {"terminal": 0, "read_file": 0},
    }
    assert report.left_out == {"untrained_before": 2}
    assert report.lost["cut_before_untrained"] == 1


def test_tokens_are_labelled_where_they_were_sampled(run: Path, tmp_path: Path) -> None:
    rows = pq.read_table(export_run(run, "axolotl-tokens", tmp_path / "x").out).to_pylist()
    assert rows[5] == {
        "input_ids": [7, 8, 9, 5],
        "attention_mask": [1, 1, 1, 1],
        "labels": [-100, 8, -100, 5],
    }


def test_broken_segments_are_left_out(tmp_path: Path) -> None:
    bad = [
        told.segment(0, [1, 2], [1], logprobs=[None, 0.5]),
        told.segment(0, [1, 2], [1], logprobs=[None]),
        told.segment(0, [1, 2], [1], sampled_mask=[False, False]),
        told.segment(0, [1, 2], []),
        told.segment(0, [1, 2], [1]),
    ]
    path = told.write(tmp_path / "run", [told.finished(0, told.simple(), segments=bad)])
    report = export_run(path, "trl-tokens")
    assert report.out == str(path / "exports" / "trl-tokens.parquet")
    assert report.left_out == {"broken": 3, "nothing_to_train": 1}
    assert report.samples == 1


@pytest.mark.parametrize("name", ["trl-tokens", "axolotl-tokens"])
def test_answers_that_were_thrown_away_are_not_taught(tmp_path: Path, name: str) -> None:
    segments = [
        told.segment(0, [1, 2], [1]),
        told.segment(0, [1, 3], [1], trainable=False, exclude_reason="discarded"),
        told.segment(0, [1, 4], [1], trainable=False, exclude_reason="aborted"),
        told.segment(0, [1, 5], [1], trainable=False, exclude_reason="unknown_logprobs"),
    ]
    path = told.write(tmp_path / "run", [told.finished(0, told.simple(), segments=segments)])
    report = export_run(path, name, tmp_path / "out")
    assert [row["input_ids"] for row in pq.read_table(report.out).to_pylist()] == [[1, 2], [1, 5]]
    assert report.left_out == {"thrown_away": 2}


def test_atif_keeps_from_training_what_the_policy_did_not_write(tmp_path: Path) -> None:
    """harbor's reader trains on each agent step without the mark of copied context."""
    rows = [told.finished(n, story) for n, story in enumerate((told.nudged(), told.quoted()))]
    run = told.write(tmp_path / "run", rows)
    documents = lines(export_run(run, "atif").out)
    marks = [
        [(s["message"], "is_copied_context" in s, s.get("llm_call_count")) for s in d["steps"]]
        for d in documents
    ]
    assert marks == [
        [
            ("Go.", False, None),
            ("First own words.", False, 1),
            ("(empty)", True, None),
            ("Go on.", False, None),
            ("", False, 1),
        ],
        [
            ("What is 2+2?", False, None),
            ("Five.", True, None),
            ("Are you sure?", False, None),
            ("Four.", False, 1),
        ],
    ]


def test_atif_tells_no_ids_that_were_made_again_from_text(tmp_path: Path) -> None:
    plain = told.segment(0, [7, 8, 9, 5], [2, 3], call_ids=["c1"])
    rows = [
        told.finished(0, told.quoted(), segments=[plain]),
        told.finished(
            1, told.quoted(), segments=[told.segment(1, [1, 2], [1], token_source="retokenized")]
        ),
        told.finished(2, told.quoted(), segments=[told.segment(2, [1, 2], [1], call_starts=[])]),
        told.finished(3, told.quoted()),
    ]
    report = export_run(told.write(tmp_path / "run", rows), "atif")
    first, *others = [line["steps"][-1]["metrics"] for line in lines(report.out)]
    assert first["prompt_token_ids"] == [7, 8]
    assert first["completion_token_ids"] == [9, 5]
    assert first["logprobs"] == [-0.5, -0.5]
    assert first["extra"]["logprobs_kind"] == "sampling"
    assert [m.keys() & {"prompt_token_ids", "completion_token_ids"} for m in others] == [set()] * 3
    assert report.lost["ids"] == 2  # the last has none that could be lost


def test_rows_that_wait_for_their_part_are_exported_too(tmp_path: Path) -> None:
    """A batch that is finished but not published is read from the journal."""
    path = told.write(tmp_path / "run", [told.finished(0, told.simple())])
    published = export_run(path, "trl").samples
    told.leave_unpublished(path, told.finished(1, told.nudged()))
    assert export_run(path, "trl").samples == published + 2


def test_mistakes_are_told_in_a_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'trl'"):
        export_run(run, "tlr")
    with pytest.raises(UserError, match="is a folder"):
        export_run(run, "trl", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export_run(run, "trl", tmp_path / "file" / "x")
