"""Files of other programs become runs that can be shown, evaluated and exported."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import rollouts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.export import (
    ExportOptions,
    Origin,
    RolloutNamer,
    conversation,
    export_run,
    import_file,
    messages_of,
    rollouts_of,
    tools_of,
)
from hermes_rl.messages import to_openai
from hermes_rl.segments import row_faults
from hermes_rl.store import encode, load_run

ROW: dict[str, Any] = {
    "prompt_index": 3,
    "conversations": [
        {"from": "system", "value": 'Call functions.\n<tools>\n[{"name": "terminal"}]\n</tools>'},
        {"from": "human", "value": "List the files."},
        {
            "from": "gpt",
            "value": "<think>\nNeed the listing.\n</think>\nOne moment.\n<tool_call>\n"
            '{"name": "terminal", "arguments": {"command": "echo \'</tool_call>\'"}}\n</tool_call>',
        },
        {
            "from": "tool",
            "value": '<tool_response>\n{"tool_call_id": "call_1", "name": "terminal", "content": '
            '{"output": "a </tool_response> b", "exit_code": 0}}\n</tool_response>',
        },
        {"from": "gpt", "value": "<think>\n</think>\nThere is one."},
    ],
    "metadata": {"batch_num": 1, "timestamp": "2026-01-02T03:04:05", "model": "some-model"},
    "completed": True,
    "partial": False,
    "api_calls": 2,
    "toolsets_used": ["terminal"],
    "tool_stats": {"terminal": {"count": 1, "success": 1, "failure": 0}},
    "tool_error_counts": {"terminal": 0},
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_hermes_row_becomes_a_trajectory(tmp_path: Path) -> None:
    twice = {**ROW, "completed": False, "partial": True}
    file = write(tmp_path / "trajectories.jsonl", ROW, twice)
    report = import_file(file, "hermes", tmp_path / "run")
    assert report.rollouts == 2
    run = load_run(tmp_path / "run")
    one, two = run.trajectories.to_dict("records")
    assert one["messages"] == [
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "Need the listing.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {
                        "name": "terminal",
                        "arguments": {"command": "echo '</tool_call>'"},
                    },
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "name": "terminal",
            "content": '{"output": "a </tool_response> b", "exit_code": 0}',
        },
        {"role": "assistant", "content": "There is one."},
    ]
    assert (one["model"], one["end_reason"], one["turns"]) == ("some-model", "answered", 2)
    assert (two["end_reason"], two["truncated"]) == ("output_truncated", True)
    assert (one["group_id"], one["member"]) == (two["group_id"], 0)
    assert one["metadata"]["tool_stats"] == ROW["tool_stats"]
    assert str(one["started_at"]) == "2026-01-02 03:04:05+00:00"
    assert one["tools"] == [{"type": "function", "function": {"name": "terminal"}}]
    assert run.stats["units"]["done"] == 2


def test_export_and_import_keep_conversations(tmp_path: Path) -> None:
    """Exported, imported and exported again, the conversations are equal."""
    rows = [rollouts.finished(n, events) for n, events in enumerate(rollouts.EVENT_STREAMS)]
    first = export_run(rollouts.write(tmp_path / "run", rows), "sharegpt", tmp_path / "one.jsonl")
    import_file(first.out, "hermes", tmp_path / "back")
    second = export_run(tmp_path / "back", "sharegpt", tmp_path / "two.jsonl")
    one, two = (
        [json.loads(line)["conversations"] for line in Path(r.out).read_bytes().splitlines()]
        for r in (first, second)
    )
    assert one == two


texts = st.text(st.characters(codec="utf-8"), max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
plain = texts.map(str.strip).filter(lambda t: "<" not in t)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation: calls with any arguments, results with any content."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(texts)}]
    for turn in range(draw(st.integers(0, 3))):
        answer: dict[str, Any] = {"role": "assistant", "content": draw(plain)}
        if thought := draw(plain):
            answer["reasoning_content"] = thought
        calls = [
            {
                "id": f"c{turn}{number}",
                "type": "function",
                "function": {"name": "terminal", "arguments": draw(st.dictionaries(texts, values))},
            }
            for number in range(draw(st.integers(1, 2)))
        ]
        messages.append({**answer, "tool_calls": calls})
        content = draw(st.one_of(texts, values.map(json.dumps)))
        messages += [
            {"role": "tool", "tool_call_id": c["id"], "name": "terminal", "content": content}
            for c in calls
        ]
    return [*messages, {"role": "assistant", "content": draw(plain.filter(bool))}]


@settings(deadline=None)
@given(conversations())
def test_any_conversation_survives_conversion_and_parsing(messages: list[dict[str, Any]]) -> None:
    """Calls and results are read back, also if they contain tags of the format."""
    turns = conversation(messages, rollouts.TOOLS)
    back = [to_openai(m, parsed_arguments=True) for m in messages_of(turns)]
    assert [comparable(m) for m in back] == [comparable(m) for m in messages]
    assert tools_of(turns) == rollouts.TOOLS


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """A message with JSON results as values: the format does not keep their spacing."""
    if message["role"] != "tool":
        return message
    content = message["content"]
    if content.lstrip().startswith(("{", "[")):
        try:
            content = json.loads(content)
        except ValueError:
            pass
    return {**message, "content": content}


GROUP = {
    "tokens": [[1, 2, 3, 4], [1, 2, 9]],
    "masks": [[-100, 2, -100, 4], [-100, -100, 9]],
    "scores": [1, 0.25],
    "advantages": None,
    "inference_logprobs": [[1.0, -0.5, 1.0, -0.25], [1.0, 1.0, -2.0]],
    "messages": [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
    ],
    "generation_params": {"temperature": 1.0},
}


def test_an_atropos_group_becomes_a_group(tmp_path: Path) -> None:
    file = write(tmp_path / "groups.jsonl", GROUP, {**GROUP, "messages": None})
    import_file(file, "atropos", tmp_path / "run", exact=True)
    run = load_run(tmp_path / "run")
    assert list(run.trajectories["reward"]) == [1.0, 0.25, 1.0, 0.25]
    assert run.trajectories["group_id"].nunique() == 2
    assert list(run.trajectories["member"]) == [0, 1, 0, 1]
    assert list(run.trajectories["turns"]) == [2, 1, 2, 1]
    assert run.groups["n_valid"].tolist() == [2, 2]
    rows = pq.read_table(export_run(tmp_path / "run", "trl-grpo").out).to_pylist()
    assert [row["advantage"] > 0 for row in rows] == [True, False, True, False]
    report = export_run(tmp_path / "run", "atropos")
    one, two = map(json.loads, Path(report.out).read_text(encoding="utf-8").splitlines())
    for name in ("tokens", "masks", "scores", "inference_logprobs", "generation_params"):
        assert one[name] == two[name] == GROUP[name]
    assert [[m["content"] for m in s] for s in one["messages"]] == [["q", "a"], ["q", "b"]]


def test_imported_tokens_pass_the_check_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_file(write(tmp_path / "g.jsonl", GROUP), "atropos", tmp_path / "run", exact=True)
    assert main(["check", str(tmp_path / "run"), "--tokens"]) == 0
    assert "3 of 3 calls with ids, 2 segments, 2 trainable" in capsys.readouterr().out
    assert load_run(tmp_path / "run").stats["exact_tokens"]["fork_rate"] == 0.0


def test_tokens_of_unknown_origin_need_allow_retokenized_in_rl_formats(tmp_path: Path) -> None:
    import_file(write(tmp_path / "g.jsonl", GROUP), "atropos", tmp_path / "run")
    with pytest.raises(UserError, match=r"token segments that were retokenized .*: 2"):
        export_run(tmp_path / "run", "verl-rl")
    options = ExportOptions(allow_retokenized=True)
    assert export_run(tmp_path / "run", "verl-rl", options=options).samples == 2
    assert export_run(tmp_path / "run", "trl-tokens").samples == 2


@pytest.mark.parametrize(
    ("origin", "line", "message"),
    [
        ("hermes", "{", "x.jsonl:2: invalid JSON"),
        ("hermes", "[]", "x.jsonl:2: a line must be a JSON object"),
        ("hermes", '{"messages": []}', "x.jsonl:2: no 'conversations'"),
        ("hermes", '{"conversations": [{"from": "eve", "value": ""}]}', "is from 'eve'"),
        ("atropos", "{}", "x.jsonl:1: not a group"),
        ("atropos", '{"tokens": [[1]], "masks": [[]], "scores": [1]}', "1 tokens and a mask of 0"),
        ("atropos", '{"tokens": [[1]], "masks": [[1]], "scores": ["x"]}', "got `str`"),
        ("atropos", '{"tokens": [["a"]], "masks": [[1]], "scores": [1]}', r"tokens\[0\]\[0\]"),
        ("atropos", '{"tokens": [[4294967296]], "masks": [[1]], "scores": [1]}', "2147483647"),
        ("atropos", '{"tokens": [7], "masks": [[1]], "scores": [1]}', "got `int`"),
        ("atropos", '{"tokens": [[7]], "masks": [[1]], "scores": [1]}', "neither -100 nor"),
        ("atropos", '{"tokens": [[7]], "masks": [[7]], "scores": []}', "differ in length"),
        (
            "atropos",
            '{"tokens": [[7]], "masks": [[7]], "scores": [1], "messages": [[], []]}',
            "differ in length",
        ),
        (
            "atropos",
            '{"tokens": [[7]], "masks": [[7]], "scores": [1], "inference_logprobs": [["x"]]}',
            "inference_logprobs",
        ),
        ("hermes", '{"conversations": [], "metadata": "x"}', "must be an object"),
        ("hermes", '{"conversations": [], "toolsets_used": 5}', "a list"),
    ],
)
def test_a_bad_line_is_named_and_no_run_is_left(
    tmp_path: Path, origin: Any, line: str, message: str
) -> None:
    good = json.dumps(ROW) + "\n" if origin == "hermes" else ""
    (tmp_path / "x.jsonl").write_text(good + line, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        import_file(tmp_path / "x.jsonl", origin, tmp_path / "out" / "run")
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_a_line_of_invalid_utf_8_is_named(tmp_path: Path) -> None:
    line = b'{"conversations": [{"from": "human", "value": "gr\xfc\xdfe"}]}\n'
    (tmp_path / "x.jsonl").write_bytes(json.dumps(ROW).encode() + b"\n" + line)
    with pytest.raises(UserError, match=r"x\.jsonl:2: invalid JSON .*utf-8"):
        import_file(tmp_path / "x.jsonl", "hermes", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("origin", ["hermes", "atropos"])
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_rollouts_is_refused(tmp_path: Path, origin: Any, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="contains no rollout"):
        import_file(tmp_path / "x.jsonl", origin, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_lone_surrogates_of_an_imported_file_are_replaced(tmp_path: Path) -> None:
    """Escaped, in JSON inside the JSON of the line."""
    half = "\\ud83d"
    turns = [
        {"from": "human", "value": "Go."},
        {
            "from": "gpt",
            "value": f'<tool_call>\n{{"name": "t", "arguments": {{"a": "{half}"}}}}\n</tool_call>',
        },
        {
            "from": "tool",
            "value": f'<tool_response>\n{{"tool_call_id": "i", "content": "{half}"}}\n'
            "</tool_response>",
        },
    ]
    import_file(write(tmp_path / "x.jsonl", {"conversations": turns}), "hermes", tmp_path / "run")
    _, answer, result = load_run(tmp_path / "run").trajectories["messages"][0]
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}
    assert result["content"] == "\ufffd"


CHANGEABLE_GROUP: dict[str, Any] = {**GROUP, "overrides": [{}, {"a": 1}], "group_overrides": {}}
SNIPPETS = ("<tool_call>\n", "</tool_call>", "<think>", "<tools>[", '{"a": ', "assistant")
odd_text = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(SNIPPETS)
odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(odd_text, inner, max_size=2),
    max_leaves=4,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value of a row."""
    if path:
        yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from paths_of(value[key], (*path, key))


def changed(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(row)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


def import_row(origin: Origin, row: dict[str, Any], *, exact: bool = False) -> None:
    """Fold the rollouts of a row, and encode them like the journal does."""
    with suppress(UserError):
        for made in rollouts_of(row, 1, origin, RolloutNamer("c" * 64), exact):
            encode(made.row)
            for segment in made.segments:
                encode(segment)
                assert not list(row_faults(msgspec.structs.asdict(segment)))


@settings(deadline=None)
@given(st.sampled_from(list(paths_of(ROW))), odd)
@example(("metadata", "timestamp"), "9999-99-99")
def test_any_change_of_a_hermes_row_is_imported_or_refused(
    path: tuple[Any, ...], value: Any
) -> None:
    import_row("hermes", changed(ROW, path, value))


@settings(deadline=None)
@given(st.sampled_from(list(paths_of(CHANGEABLE_GROUP))), odd, st.booleans())
def test_any_change_of_an_atropos_group_is_imported_or_refused(
    path: tuple[Any, ...], value: Any, exact: bool
) -> None:
    import_row("atropos", changed(CHANGEABLE_GROUP, path, value), exact=exact)


def test_the_commands_import_and_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def hermes_rl(*arguments: str) -> tuple[int, str, str]:
        """In this process: a new one takes half a second to start."""
        code = main(arguments)
        return code, *capsys.readouterr()

    write(tmp_path / "old.jsonl", ROW)
    done = hermes_rl("import", "old.jsonl", "--from", "hermes")
    assert done[:2] == (0, "runs/old: 1 rollout. Look: hermes-rl show runs/old\n"), done
    code, _, err = hermes_rl("import", "old.jsonl", "--from", "hermes")
    assert code == 2
    assert "exists already" in err
    report = json.loads(hermes_rl("export", "runs/old", "--to", "openai", "--json")[1])
    assert report["lost"] == {"reasoning": 1}
    assert report["out"] == "runs/old/exports/openai.jsonl"
    out = hermes_rl("export", "runs/old", "--to", "openai", "--end-reason", "answered")[1]
    assert "1 sample of 1 rollout, 2 messages to train on" in out
    assert "1  messages with reasoning text" in out
    assert "prime-rl" in hermes_rl("export", "runs/old", "--to", "list")[1]
    bad = hermes_rl("export", "runs/old", "--to", "trl", "--end-reason", "bored")[2]
    assert bad.startswith("error: --end-reason: no ending 'bored'")
    bad = hermes_rl("export", "runs/old", "--to", "trl", "--advantage", "x")[2]
    assert bad.startswith("error: no advantage 'x'")
    assert hermes_rl("import", "old.jsonl", "--from", "x")[2].startswith("error: --from 'x'")
    code, out, err = hermes_rl("export", "runs/old", "--to", "trl-tokens")
    assert (code, out) == (2, "")
    assert "none of 1 rollout gives a sample" in err
    assert "Left out: rollouts without token segments: 1" in err
    assert hermes_rl("show", "runs/old")[0] == 0
    assert hermes_rl("check", "runs/old")[0] == 0
