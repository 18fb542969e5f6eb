"""The files of each format: their rows, filters, and the counts of the report."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import rollouts
from rollouts import message, model_call, read

from hermes_rl import events as ev
from hermes_rl.errors import UserError
from hermes_rl.export import FORMATS, LEFT_OUT, LOST, ExportOptions, export_run, whole_file
from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage
from hermes_rl.store import Finished

OF_MESSAGES = [name for name in FORMATS if FORMATS[name].unit == "messages"]
IMAGE = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
]


def with_tool_result(result: str, arguments: str = '{"command": "x"}') -> list[ev.Event]:
    """One tool call with this result, and an answer."""
    call = rollouts.call("a", arguments)
    return [
        message(UserMessage(content="Go 🙂 \u2028 \x00."), 0),
        *model_call(1),
        message(AssistantMessage(tool_calls=(call,)), 1),
        message(ToolMessage(tool_call_id="a", name="terminal", content=result), 1),
        *model_call(2),
        message(AssistantMessage(content="Done 🙂."), 2),
    ]


def with_image() -> list[ev.Event]:
    """An image in the prompt, and reasoning."""
    answer = AssistantMessage(content="A dot.", reasoning_content="So small.")
    return [message(UserMessage(content=IMAGE), 0), *model_call(1), message(answer, 1)]


def with_quoted_calls() -> list[ev.Event]:
    """The task's prompt quotes two calls with their results."""
    calls = (rollouts.call("q", "{}"), rollouts.call("r", "[1]"))
    return [
        message(UserMessage(content="Continue."), 0),
        message(AssistantMessage(tool_calls=calls), 0),
        message(ToolMessage(tool_call_id="q", name="terminal", content=""), 0),
        message(ToolMessage(tool_call_id="r", name="terminal", content="x"), 0),
        *model_call(1),
        message(AssistantMessage(content="Gone."), 1),
    ]


def with_orphan_result() -> list[ev.Event]:
    """A tool result without a call, and no prompt."""
    return [
        message(ToolMessage(tool_call_id="none", name="", content="lost"), 0),
        *model_call(1),
        message(AssistantMessage(content="Found."), 1),
    ]


def write_one(path: Path, events: Sequence[ev.Event], **fields: Any) -> Path:
    """Write a run of one rollout; `fields` replace columns of its row."""
    made = rollouts.finished(0, events)
    row = msgspec.structs.replace(made.row, **fields)
    return rollouts.write(path, [msgspec.structs.replace(made, row=row)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each event stream twice: a group of two, with a segment each."""
    rows = []
    for number, events in enumerate(s for s in rollouts.EVENT_STREAMS for _ in range(2)):
        segments = [rollouts.segment(number, [7, 8, 9, number], [1, 3])]
        rows.append(rollouts.finished(number, events, reward=float(number % 2), segments=segments))
    return rollouts.write(tmp_path_factory.mktemp("runs") / "plain", rows)


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain and unusual rollouts; segments of the latter are of another model and tokenizer."""
    half_character = with_tool_result('{"a": "\\ud83d"}', '{"command": "\\ud83d", "\\ud83d": 1}')
    odd = [with_image(), half_character, with_quoted_calls(), with_orphan_result()]
    streams = [s for s in [*rollouts.EVENT_STREAMS, *odd] for _ in range(2)]
    rows: list[Finished] = []
    for number, events in enumerate(streams):
        other = {"model": "other", "tokenizer_hash": "u", "template_hash": "u"}
        more = other if number >= len(streams) / 2 else {}
        segments = [rollouts.segment(number, [7, 8, 9, number], [1, 3], **more)]
        rows.append(rollouts.finished(number, events, reward=float(number % 2), segments=segments))
    last = len(rows)
    no_answer = [message(UserMessage(content="Speak."), 0), *model_call(1)]
    no_tools = rollouts.finished(last + 3, rollouts.tool_calls_and_answer())
    rows += [
        rollouts.finished(last, no_answer, reward=0.0, end_reason="empty_response"),
        rollouts.finished(last + 1, with_image(), cause="sandbox_died"),
        rollouts.finished(last + 2, rollouts.tool_calls_and_answer(), reward=None),
        msgspec.structs.replace(no_tools, row=msgspec.structs.replace(no_tools.row, tools="[]")),
    ]
    return rollouts.write(tmp_path_factory.mktemp("runs") / "odd", rows)


@pytest.mark.parametrize("name", FORMATS)
def test_unusual_rollouts_are_written_or_counted(name: str, odd_run: Path, tmp_path: Path) -> None:
    form = FORMATS[name]
    options = ExportOptions(min_group=1)
    report = export_run(odd_run, name, tmp_path / f"x{form.suffix}", options)
    assert len(read(report.out)) == report.samples > 0
    assert report.rollouts == 19  # one failed
    assert report.left_out.keys() <= LEFT_OUT.keys()
    assert report.lost.keys() <= LOST.keys()
    if form.unit == "messages":
        accounted = report.samples + report.left_out.get("nothing_to_train", 0)
        accounted += report.left_out.get("untrained_before", 0)
        assert accounted >= 21  # 19 rollouts, two of them with two contexts; trl splits some
        assert report.left_out.get("nothing_to_train", 0) == (name != "atif")
    else:
        assert report.left_out["other_tokenizer"] == 8
        ungraded = int(form.rl)
        assert report.left_out["no_tokens"] == 3 - ungraded
        assert report.left_out.get("not_graded", 0) == ungraded
        assert report.trained == 16


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_run_gives_the_same_bytes(name: str, run: Path, tmp_path: Path) -> None:
    one, two = (export_run(run, name, tmp_path / f"{i}.out") for i in range(2))
    assert Path(one.out).read_bytes() == Path(two.out).read_bytes()
    assert one.samples > 0
    assert one.trained > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.out", "1.out"]


def test_filters_are_counted(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "trl", tmp_path / "x", ExportOptions(min_reward=1.0))
    assert report.rollouts == 8
    assert report.left_out == {"low_reward": 4}
    report = export_run(run, "trl", tmp_path / "x", ExportOptions(dedupe=True))
    assert report.left_out == {"duplicate": 5}  # one of the rollouts has two contexts
    options = ExportOptions(end_reasons=frozenset({"max_turns"}))
    with pytest.raises(UserError, match=r"Left out: rollouts with another ending .*: 8"):
        export_run(run, "trl", tmp_path / "x", options)
    assert export_run(run, "trl", tmp_path / "x", ExportOptions(limit=3)).rollouts == 3


def test_axolotl_marks_each_message(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "axolotl", tmp_path / "x.parquet", ExportOptions(min_reward=1.0))
    marks = [[json.loads(m)["training"] for m in row["messages"]] for row in read(report.out)]
    assert marks[1] == [False, True, False, False, True]  # the last tool result is cut
    assert report.lost["tail"] == 2
    assert marks[0] == [False, False, True, False, False, False, False, True]  # invalid arguments
    assert report.trained == sum(map(sum, marks)) == 8


def test_openai_has_weights_and_the_exact_arguments(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "openai", tmp_path / "x.jsonl", ExportOptions(min_reward=1.0))
    first, second, *_ = read(report.out)
    texts = [
        call["function"]["arguments"]
        for sent in first["messages"]
        for call in sent.get("tool_calls", [])
    ]
    assert texts == ['{"command": "ls <b>"}', '{"path":"x"}', "{never closed"]
    assert [m.get("weight") for m in second["messages"]] == [None, None, 0, None, None]
    assert first["tools"] == rollouts.TOOLS
    assert report.lost == {"reasoning": 1, "tail": 2, "rewards": 4}


@pytest.mark.parametrize("name", ["sharegpt", "trl", "verl"])
def test_calls_with_invalid_arguments_are_not_trained_on(name: str, tmp_path: Path) -> None:
    path = write_one(tmp_path / "run", rollouts.tool_calls_and_answer())
    report = export_run(path, name)
    assert report.trained == (2 if name == "trl" else 1)
    keys = ("completion", "messages", "conversations")
    trained = [next(row[key] for key in keys if key in row) for row in read(report.out)]
    assert "never closed" not in repr(trained)


def test_sharegpt_rows_have_the_statistics_of_hermes(tmp_path: Path) -> None:
    streams = [
        rollouts.tool_calls_and_answer('{"n": 1}'),
        rollouts.with_synthetic_messages(),
        *rollouts.EVENT_STREAMS[2:],
    ]
    rows = [rollouts.finished(i, events) for i, events in enumerate(streams)]
    report = export_run(rollouts.write(tmp_path / "run", rows), "sharegpt")
    row = read(report.out)[0]
    speakers = [turn["from"] for turn in row.pop("conversations")]
    assert speakers == ["system", "human", "gpt", "tool", "gpt", "tool", "gpt"]
    assert row == {
        "prompt_index": 0,
        "metadata": {"batch_num": 0, "timestamp": "1970-01-01T00:33:20", "model": "m"},
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


def test_axolotl_tokens_have_labels_where_tokens_were_sampled(run: Path, tmp_path: Path) -> None:
    rows = pq.read_table(export_run(run, "axolotl-tokens", tmp_path / "x").out).to_pylist()
    assert rows[5] == {
        "input_ids": [7, 8, 9, 5],
        "attention_mask": [1, 1, 1, 1],
        "labels": [-100, 8, -100, 5],
    }


@pytest.mark.parametrize("name", ["trl-tokens", "axolotl-tokens"])
def test_broken_and_discarded_segments_are_left_out(name: str, tmp_path: Path) -> None:
    def excluded(reason: str) -> dict[str, Any]:
        return {"trainable": False, "exclude_reason": reason}

    segments = [
        rollouts.segment(0, [1, 2], [1], logprobs=[None, 0.5]),
        rollouts.segment(0, [1, 2], [1], logprobs=[None]),
        rollouts.segment(0, [1, 2], [1], sampled_mask=[False, False]),
        rollouts.segment(0, [1, 2], []),
        rollouts.segment(0, [1, 2], [1]),
        rollouts.segment(0, [1, 3], [1], **excluded("discarded")),
        rollouts.segment(0, [1, 4], [1], **excluded("aborted")),
        rollouts.segment(0, [1, 5], [1], **excluded("unknown_logprobs")),
    ]
    made = rollouts.finished(0, rollouts.with_quoted_answer(), segments=segments)
    path = rollouts.write(tmp_path / "run", [made])
    report = export_run(path, name)
    assert report.out == str(path / "exports" / f"{name}.parquet")
    assert report.left_out == {"broken": 3, "nothing_to_train": 1, "thrown_away": 2}
    assert [row["input_ids"] for row in read(report.out)] == [[1, 2], [1, 5]]


def test_atif_marks_messages_that_the_policy_did_not_write(tmp_path: Path) -> None:
    """harbor's reader trains on each agent step without the mark of copied context."""
    streams = (rollouts.with_synthetic_messages(), rollouts.with_quoted_answer())
    rows = [rollouts.finished(n, events) for n, events in enumerate(streams)]
    documents = read(export_run(rollouts.write(tmp_path / "run", rows), "atif").out)
    steps = [
        [(s["message"], "is_copied_context" in s, s.get("llm_call_count")) for s in d["steps"]]
        for d in documents
    ]
    assert steps == [
        [
            ("Go.", False, None),
            ("First answer.", False, 1),
            ("(empty)", True, None),
            ("Continue.", False, None),
            ("", False, 1),
        ],
        [
            ("What is 2+2?", False, None),
            ("Five.", True, None),
            ("Are you sure?", False, None),
            ("Four.", False, 1),
        ],
    ]


def test_atif_has_no_ids_of_retokenized_text(tmp_path: Path) -> None:
    segments = [
        rollouts.segment(0, [7, 8, 9, 5], [2, 3], call_ids=["c1"]),
        rollouts.segment(1, [1, 2], [1], token_source="retokenized"),
        rollouts.segment(2, [1, 2], [1], call_starts=[]),
    ]
    rows = [
        rollouts.finished(n, rollouts.with_quoted_answer(), segments=segments[n : n + 1])
        for n in range(4)
    ]
    report = export_run(rollouts.write(tmp_path / "run", rows), "atif")
    first, *others = [row["steps"][-1]["metrics"] for row in read(report.out)]
    assert first["prompt_token_ids"] == [7, 8]
    assert first["completion_token_ids"] == [9, 5]
    assert first["logprobs"] == [-0.5, -0.5]
    assert first["extra"]["logprobs_kind"] == "sampling"
    assert [m.keys() & {"prompt_token_ids", "completion_token_ids"} for m in others] == [set()] * 3
    assert report.lost["ids"] == 2  # the last rollout has no tokens that could be lost


def test_results_that_json_cannot_represent_stay_text(tmp_path: Path) -> None:
    results = ['{"a": "\\ud83d"}', "[1e999]", '{"a": NaN}', "[" * 9000]
    rows = [rollouts.finished(n, with_tool_result(text)) for n, text in enumerate(results)]
    path = rollouts.write(tmp_path / "run", rows)
    assert [export_run(path, name).samples for name in OF_MESSAGES] == [4] * len(OF_MESSAGES)
    turns = [row["conversations"][3]["value"] for row in read(export_run(path, "sharegpt").out)]
    inner = [t.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>") for t in turns]
    assert [json.loads(turn)["content"] for turn in inner] == results


def tool(name: str, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", **schema}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


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
    path = write_one(tmp_path / "run", with_tool_result("x"), tools=json.dumps(tools))
    report = export_run(path, "verl")
    assert report.lost == ({lost: 1} if lost else {})
    (row,) = read(report.out)
    assert json.loads(row["tools_json"]) == tools
    assert ("tools" in row) == (lost != "tools")


def test_images_are_kept_or_counted(tmp_path: Path) -> None:
    made = rollouts.finished(0, with_image(), segments=[rollouts.segment(0, [1, 2], [1])])
    path = rollouts.write(tmp_path / "run", [made])
    lost = {
        name: export_run(path, name, options=ExportOptions(min_group=1)).lost.get("images", 0)
        for name in FORMATS
    }
    assert {name for name, count in lost.items() if not count} == {"openai", "atropos"}
    assert read(export_run(path, "openai").out)[0]["messages"][0]["content"] == IMAGE
    (row,) = read(export_run(path, "trl").out)
    assert json.loads(row["prompt"][0])["content"] == "What is it?\n[image_url]"


def test_only_additional_reward_components_are_lost(tmp_path: Path) -> None:
    plain = ev.RewardPart(name="verify", score=1.0, detail="exit 0")
    path = write_one(tmp_path / "plain", rollouts.with_two_contexts(), rewards=[plain])
    assert "reward_parts" not in export_run(path, "trl").lost
    assert export_run(path, "openai").lost["rewards"] == 1
    parts = [plain, ev.RewardPart(name="style", score=0.5, weight=0.5, turn=1)]
    events = rollouts.with_two_contexts()
    path = write_one(tmp_path / "parts", events, rewards=parts, reward=1.25)
    report = export_run(path, "trl")  # two contexts, one reward
    assert (report.samples, report.lost["reward_parts"], report.lost["turn_rewards"]) == (2, 1, 1)
    assert not {"reward_parts", "turn_rewards"} & export_run(path, "atif").lost.keys()


@pytest.mark.parametrize("name", ["trl-grpo", "verl-rl", "atropos", "prime-rl"])
def test_rewards_of_a_turn_reach_the_ids_of_that_turn_and_versions_every_row(
    tmp_path: Path, name: str
) -> None:
    parts = [
        ev.RewardPart(name="second", score=0.5, weight=0.5, turn=2),
        ev.RewardPart(name="style", score=1.0, turn=2),
        ev.RewardPart(name="whole", score=1.0),
    ]
    versions = {"policy_version_min": "7", "policy_version_max": "8"}
    tokens = rollouts.segment(0, [1, 2, 3, 4, 5, 6], [1, 2, 4, 5], **versions)
    tokens = msgspec.structs.replace(tokens, turn_ids=[0, 1, 1, 1, 2, 2])
    made = rollouts.finished(0, rollouts.with_two_contexts(), reward=2.25, segments=[tokens])
    made = msgspec.structs.replace(made, row=msgspec.structs.replace(made.row, rewards=parts))
    path = rollouts.write(tmp_path / "run", [made])
    report = export_run(path, name, options=ExportOptions(min_group=1))
    (row,) = read(report.out)
    if name in ("atropos", "prime-rl"):
        assert report.lost["turn_rewards"] == 2
        shown = row["overrides"][0] if name == "atropos" else row["traces"][0]["info"]
        assert list(shown.values())[-1] in ("8", [["7", "8"]])
        return
    assert "turn_rewards" not in report.lost
    assert row["turn_rewards"] == [None, None, None, 1.25, 1.25]
    assert (row["policy_version_min"], row["policy_version_max"]) == ("7", "8")


def test_answers_that_a_token_limit_cut_are_counted(tmp_path: Path) -> None:
    events = [
        msgspec.structs.replace(event, finish_reason="length")
        if isinstance(event, ev.CallEnded) and event.call_id == "c2"
        else event
        for event in with_tool_result("x")
    ]
    path = write_one(tmp_path / "run", events)
    for name in ("trl", "axolotl", "verl", "openai", "sharegpt"):
        assert export_run(path, name).lost["cut"] == 1


def test_unpublished_rows_are_exported_too(tmp_path: Path) -> None:
    """A batch that is finished but not published is read from the journal."""
    path = write_one(tmp_path / "run", rollouts.tool_calls_and_answer())
    published = export_run(path, "trl").samples
    rollouts.leave_unpublished(path, rollouts.finished(1, rollouts.with_synthetic_messages()))
    assert export_run(path, "trl").samples == published + 2


def test_mistakes_are_reported_in_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'trl'"):
        export_run(run, "tlr")
    with pytest.raises(UserError, match="is a folder"):
        export_run(run, "trl", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export_run(run, "trl", tmp_path / "file" / "x")
    (part,) = (run / "trajectories").iterdir()
    for out in (part, run / "journal" / "x.jsonl"):
        with pytest.raises(UserError, match="within the run itself"):
            export_run(run, "openai", out)
    assert export_run(run, "axolotl", options=ExportOptions(limit=1)).samples == 1


def test_an_export_without_rows_and_an_interrupted_one_keep_the_file(tmp_path: Path) -> None:
    path, out = rollouts.write(tmp_path / "run", []), tmp_path / "out" / "x"
    out.parent.mkdir()
    out.write_text("before", encoding="utf-8")
    for name in FORMATS:
        with pytest.raises(UserError, match="no finished rollout to export yet"):
            export_run(path, name, out)

    def interrupt() -> None:
        with whole_file(out) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert [p.name for p in out.parent.iterdir()] == ["x"]
    assert out.read_text(encoding="utf-8") == "before"


def with_long_segment(number: int, tokens: int) -> Finished:
    half = tokens // 2
    mask = [False] * half + [True] * half
    segment = msgspec.structs.replace(
        rollouts.segment(number, [1, 2], [1]),
        input_ids=list(range(1000, 1000 + tokens)),
        loss_mask=mask,
        sampled_mask=mask,
        logprobs=[None] * half + [-i / tokens for i in range(half)],
        turn_ids=[int(sampled) for sampled in mask],
        version_ids=[0] * tokens,
        prompt_len=half,
        n_sampled=half,
        call_starts=[half],
    )
    return rollouts.finished(number, rollouts.with_quoted_answer(), segments=[segment])


def test_memory_is_bounded_for_a_large_part(tmp_path: Path) -> None:
    path = rollouts.write(tmp_path / "run", [with_long_segment(n, 8_000) for n in range(40)])
    tracemalloc.start()
    try:
        report = export_run(path, "trl-tokens")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.trained == 40 * 4_000
    assert peak < 16e6  # bytes; 35 million with all rows at once
