"""What the pages of the viewer are made from."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import forks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_runs import HOSTILE, STEPS, finished_attempt, picture
from served import Served, serving

from hermes_rl import load_run
from hermes_rl.evals import summary
from hermes_rl.models.tokens import load_tokenizer
from hermes_rl.store import JournalWriter, Publisher, open_run
from hermes_rl.viewer import RunIndex, diff_attempts


def units(served: Served, run: str = "small-model", **wanted: Any) -> list[dict[str, Any]]:
    """All rows that pass; requests are repeated while texts are searched."""
    while (found := served.get("units", run=run, **wanted))["unsearched"]:
        pass
    rows: list[dict[str, Any]] = found["rows"]
    assert found["found"] == len(rows)
    return rows


def test_the_list_has_each_run_with_its_state(served: Served) -> None:
    rows = {row["run"]: row for row in served.get("runs")["runs"]}
    assert set(rows) == {"small-model", "large-model", "hostile", "rl/exact", "broken"}
    small = rows["small-model"]
    stats = load_run(served_path(served) / "small-model").stats
    assert (small["state"], small["units"], small["done"], small["given_up"]) == (
        "finished", 40, 36, 4,
    )  # fmt: skip
    assert small["solved"] == stats["reward"]["solved"] > 0
    assert small["unpriced_calls"] == stats["calls"]["unpriced"]
    assert rows["broken"]["state"] == "damaged"
    assert "epochs/1.json is damaged" in rows["broken"]["error"]


def served_path(served: Served) -> Path:
    return Path(served.get("runs")["folder"])


def test_filters_choose_the_rows_that_the_frames_have(served: Served) -> None:
    run = load_run(served_path(served) / "small-model")
    frame, failed = run.trajectories, run.failures
    every = units(served)
    assert len(every) == len(frame) + len(failed) == 40
    assert {row["trajectory_id"] for row in every} == {*frame.trajectory_id, *failed.trajectory_id}
    assert len(units(served, reward="solved")) == (frame.reward >= 1).sum()
    assert len(units(served, reward="failed")) == (frame.reward <= 0).sum()
    assert len(units(served, reward="none")) == len(failed)
    assert len(units(served, reward="0.5..")) == (frame.reward >= 0.5).sum()
    assert {row["cause"] for row in units(served, cause="content_filter")} == {"content_filter"}
    assert len(units(served, end="answered")) == (frame.end_reason == "answered").sum()
    assert len(units(served, status="failed")) == len(failed)
    assert {row["task_id"] for row in units(served, task="NEVER")} == {"never-0", "never-1"}
    assert {row["task_id"] for row in units(served, errors="1")} == {"never-0", "never-1"}
    assert len(units(served, task="never", reward="solved")) == 0
    (one,) = units(served, task=every[7]["unit_id"][:12])
    assert one == every[7]


def test_texts_are_found_in_messages_output_and_grading(served: Served) -> None:
    assert {row["task_id"] for row in units(served, q="I could NOT do")} == {"never-0", "never-1"}
    assert {row["task_id"] for row in units(served, q="no such file")} == {"never-0", "never-1"}
    wrong = units(served, q="OUT.txt is not 1")  # the output of the verifier
    assert [row["trajectory_id"] for row in wrong] == [
        row["trajectory_id"] for row in units(served, reward="failed")
    ]
    assert {row["task_id"] for row in units(served, q="content_filter")} == {"refused"}
    assert units(served, q="tool_call_id") == []  # the name of a field is not text
    assert len(units(served, run="hostile", q=HOSTILE[:80])) == 2


@pytest.mark.parametrize("column", ["reward", "total_tokens", "total_s", "end_reason", "task_id"])
def test_rows_are_sorted_with_nulls_last(served: Served, column: str) -> None:
    for sign in ("", "-"):
        values = [row[column] for row in units(served, sort=sign + column)]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=bool(sign))
        assert values == known + [None] * (len(values) - len(known))


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ({"sort": "x"}, "sort=x"),
        ({"offset": "-1"}, "offset=-1"),
        ({"offset": "9" * 40}, "offset=9"),
        ({"reward": "a..b"}, "reward=a..b"),
    ],
)
def test_a_wrong_query_names_its_place(served: Served, query: dict[str, str], place: str) -> None:
    from urllib.parse import urlencode

    target = f"/api/units?run=small-model&{urlencode(query)}"
    answer = served.ask(target, {"Authorization": f"Bearer {served.token}"})
    assert answer.status == 400
    assert place in answer.json()["error"]


def test_a_trajectory_is_shown_as_it_was_recorded(served: Served) -> None:
    row = units(served, task="sort-1")[0]
    stored = load_run(served_path(served) / "small-model").trajectories.set_index("trajectory_id")
    record = stored.loc[row["trajectory_id"]]
    head = served.get("unit", run="small-model", id=row["trajectory_id"])
    found = served.get("messages", run="small-model", id=row["trajectory_id"])
    assert [one["message"] for one in found["messages"]] == record["messages"]
    assert found["count"] == head["count"] == len(record["messages"])
    assert [call["turn"] for call in head["calls"]] == [1, 2, 3]
    assert head["calls"][0]["input_tokens"] > 0
    assert (
        head["rewards"][0]["detail"].endswith("right\n") or "right" in head["rewards"][0]["detail"]
    )
    assert {one["repeat"] for one in head["others"]} == {0, 1, 2, 3}
    assert head["seed"] == str(record["seed"])
    later = served.get("messages", run="small-model", id=row["trajectory_id"], **{"from": 2})
    assert later["messages"] == found["messages"][2:]


def test_long_texts_are_cut_until_the_message_is_requested(served: Served) -> None:
    row = units(served, run="hostile")[0]
    place = {"run": "hostile", "id": row["trajectory_id"]}
    last = served.get("messages", **place)["messages"][-1]
    cut = last["message"]["content"]
    assert len(cut["text"]) == 20_000
    assert cut["cut"] > 60_000
    (whole,) = served.get("messages", whole=1, **place, **{"from": last["at"]})["messages"]
    assert len(whole["message"]["content"]) == cut["cut"]
    assert "THE END" in whole["message"]["content"]


def test_only_images_of_the_record_are_served(served: Served) -> None:
    row = units(served, run="hostile")[0]
    place = f"run=hostile&id={row['trajectory_id']}"
    key = {"Authorization": f"Bearer {served.token}"}
    answer = served.ask(f"/api/image?{place}&n=0", key)
    assert (answer.body, answer.headers["content-type"]) == (picture(), "image/png")
    for number in ("1", "7", "x"):
        assert served.ask(f"/api/image?{place}&n={number}", key).status == 400
    parts = served.get("messages", run="hostile", id=row["trajectory_id"])["messages"][1]
    shown = [part for part in parts["message"]["content"] if part["type"] == "image"]
    assert shown == [
        {"type": "image", "image": 0},
        {"type": "image", "address": "http://192.0.2.1/far.png"},
    ]


def test_groups_have_the_advantages_of_the_table(served: Served) -> None:
    frame = load_run(served_path(served) / "small-model").groups.set_index("group_id")
    found = served.get("groups", run="small-model")
    assert found["found"] == len(frame) == len(STEPS)
    for row in found["rows"]:
        stored = frame.loc[row["group_id"]]["grpo"]
        assert row["grpo"] == [None if math.isnan(value) else value for value in stored]
        assert row["trajectory_ids"] == list(frame.loc[row["group_id"]]["trajectory_ids"])
    (one,) = served.get("groups", run="small-model", task="refused")["rows"]
    assert one["valid"] == [False] * 4
    equal = served.get("groups", run="small-model", equal=1)
    assert equal["found"] == frame.equal_scores.sum()


def test_segments_are_shown_token_by_token(served: Served) -> None:
    frame = load_run(served_path(served) / "rl/exact").segments
    for row in units(served, run="rl/exact"):
        stored = frame[frame.trajectory_id == row["trajectory_id"]]
        head = served.get("unit", run="rl/exact", id=row["trajectory_id"])
        assert len(head["segments"]) == len(stored) > 0
        for n, record in enumerate(stored.sort_values("branch_index").to_dict("records")):
            where = {"run": "rl/exact", "id": row["trajectory_id"], "branch": n}
            shown = served.get("tokens", **where)
            starts = range(0, len(record["input_ids"]), shown["page"])
            pages = [served.get("tokens", **where, **{"from": start}) for start in starts]
            for column in ("input_ids", "loss_mask", "sampled_mask", "turn_ids"):
                assert [one for page in pages for one in page[column]] == list(record[column])
            assert shown["trained"] == sum(record["loss_mask"]) > 0
            texts = [text for page in pages for text in page["texts"]]
            tokenizer = load_tokenizer(served_path(served).parent / "tokenizer")
            assert len(texts) == len(record["input_ids"])
            assert "".join(filter(None, texts)) == tokenizer.decode(list(record["input_ids"]))


def test_two_attempts_are_compared_message_by_message(served: Served) -> None:
    rows = {(row["task_id"], row["repeat"]): row["trajectory_id"] for row in units(served)}
    other = {(row["task_id"], row["repeat"]): row for row in units(served, run="large-model")}
    a, b = rows["sort-0", 0], other["sort-0", 0]["trajectory_id"]
    found = served.get("diff/units", run="small-model", id=a, run2="large-model", id2=b)
    first, *rest = found["steps"]
    assert first["op"] == "equal"
    assert first["count"] >= 4  # system, task, the first call and its output
    assert [step["side"] for step in rest if step["op"] == "only"] == ["a"]  # one turn more
    assert [head["turns"] for head in found["heads"]] == [3, 2]


def test_a_change_late_in_a_long_text_is_found_and_what_is_left_out_is_counted(runs: Path) -> None:
    index = RunIndex(runs / "small-model")
    row = index.row(index.table["trajectory_id"][0].as_py())
    index.close()

    def changed(**messages: Any) -> list[list[str]]:
        sides = [
            {**row, "messages": [json.dumps({"role": "tool", **m})]} for m in messages.values()
        ]
        (step,) = diff_attempts(*sides)["steps"]
        lines: list[list[str]] = step["lines"]
        return lines

    numbers = list(map(str, range(10_000)))
    other = [*numbers[:9_000], "new " + 5_000 * "x", *numbers[9_001:]]
    near = [[" ", str(n)] for n in (8_997, 8_998, 8_999, 9_001, 9_002, 9_003)]
    lines = changed(a={"content": "\n".join(numbers)}, b={"content": "\n".join(other)})
    assert lines == [
        *(["…", "8,997 equal lines"], *near[:3], ["-", "9000"]),
        *(["+", f"new {1_996 * 'x'}… 3,004 more characters"], *near[3:]),
        ["…", "996 equal lines"],
    ]
    texts = ["\n".join(f"{side}{n}" for n in range(3_000)) for side in "ab"]
    lines = changed(a={"content": texts[0]}, b={"content": texts[1]})
    assert (len(lines), lines[-1]) == (4_001, ["…", "2,000 lines not compared"])
    lines = changed(a={"content": "x", "name": "one"}, b={"content": "x", "name": "two"})
    assert [text.strip() for sign, text in lines if sign != " "] == [
        '"name": "one",',
        '"name": "two",',
    ]


def test_two_runs_are_compared(served: Served) -> None:
    found = served.get("diff/runs", run="small-model", run2="large-model")
    settings = {one["name"]: (one["a"], one["b"]) for one in found["settings"]}
    assert settings["agent.limits.max_turns"] == (4, 2)
    assert settings["model.name"] == ("small-model", "large-model")
    assert not [name for name in settings if name.startswith("versions")]
    counts = {"only_a": 0, "only_b": 0, "edited": 0}
    alone: dict[str, list[str]] = {name: [] for name in counts}
    assert found["tasks"] == {"common": 10, **alone, "counts": counts}
    assert (found["prompt"], found["tools"]) == ([], [])
    assert [one["done"] for one in found["results"]] == [36, 36]
    other = served.get("diff/runs", run="small-model", run2="rl/exact")
    assert len(other["tasks"]["only_a"]) == other["tasks"]["counts"]["only_a"] == 10
    assert any(sign == "+" for sign, _ in other["prompt"])
    unit = served.get("units", run="small-model")["rows"][0]["trajectory_id"]
    for page in ("runs?run=small-model", f"units?run=small-model&id={unit}&run2=small-model"):
        answer = served.ask(f"/api/diff/{page}", {"Authorization": f"Bearer {served.token}"})
        assert "no second part to compare with (run2, id2)" in answer.json()["error"]


async def test_rows_of_a_run_in_progress_appear_before_they_are_published(tmp_path: Path) -> None:
    """Its `done` file is read from where the last reading ended, but for an incomplete line."""
    with serving(tmp_path) as server:
        async with (
            await open_run(tmp_path / "live", {"model": {"name": "toy"}}) as driver,
            JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
        ):
            await journal.finish(finished_attempt(1, "the first answer"))
            wait_for(server, 1)
            await journal.finish(finished_attempt(2, "nothing"))
            ((_, done),) = driver.run_dir.journals("done")
            size = done.stat().st_size
            with done.open("ab") as file:
                file.write(b'500 00000000 {"row": ')
            wait_for(server, 2)
            (row,) = units(server, run="live", q="the FIRST")
            place = {"run": "live", "id": row["trajectory_id"]}
            assert "the first answer" in json.dumps(server.get("messages", **place))
            (listed,) = server.get("runs")["runs"]
            assert (listed["state"], listed["done"], listed["units"]) == ("running", 2, None)
            os.truncate(done, size)
            await Publisher(journal).drain()
            assert "the first answer" in json.dumps(server.get("messages", **place))
            assert len(units(server, run="live")) == 2
        while server.get("runs")["runs"][0]["state"] != "killed":  # no statistics were written
            pass


def wait_for(server: Served, rows: int) -> None:
    while len(units(server, run="live")) < rows:
        pass


def test_lone_surrogates_and_numbers_that_json_lacks_reach_the_browser() -> None:
    from hermes_rl.viewer import encode_answer

    value = {"a": "x\ud800y", "b": [float("nan"), 1.5]}
    assert json.loads(encode_answer(value)) == {"a": "x\ud800y", "b": [None, 1.5]}
    assert json.loads(encode_answer({"b": float("inf")})) == {"b": None}


def test_a_copy_of_a_run_has_the_state_of_the_run(runs: Path, tmp_path: Path) -> None:
    for name in ("copied", "killed"):
        copy = Path(shutil.copytree(runs / "small-model", tmp_path / name))
        os.utime(copy / "stats.json", (0, 0))  # many programs set the time of copying
    stats = json.loads((tmp_path / "killed/stats.json").read_text())
    stats["units"]["done"] -= 1  # a commit came after it
    (tmp_path / "killed/stats.json").write_text(json.dumps(stats))
    os.utime(tmp_path / "killed/stats.json", (0, 0))
    with serving(tmp_path) as server:
        found = {row["run"]: (row["state"], row["done"]) for row in server.get("runs")["runs"]}
    assert found == {"copied": ("finished", 36), "killed": ("killed", 36)}


def test_a_hostile_or_damaged_run_hides_and_stops_no_other(runs: Path, tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(runs / "small-model", tmp_path / name))

    os.mknod(copied("good") / "tmp/ctl.sock", stat.S_IFSOCK | 0o600)  # as while it runs
    (tmp_path / "link").symlink_to("link")
    for name in ("manifest.json", "stats.json", "LOCK"):
        folder = copied(f"pipe-{name}")
        (folder / name).unlink()
        os.mkfifo(folder / name)
    endless = copied("endless") / "stats.json"
    endless.unlink()
    endless.symlink_to("/dev/zero")
    manifests = {"deep": "[" * 100_000, "list": '{"starts": [1], "identity": {"model": "x"}}'}
    for name, text in manifests.items():
        (copied(name) / "manifest.json").write_text(text)
    cut = next((copied("cut") / "failures").iterdir())
    os.truncate(cut, cut.stat().st_size - 1)
    part = next((copied("other") / "trajectories").iterdir())
    pq.write_table(pa.table({"a": [1]}), part)
    with serving(tmp_path) as server:
        rows = {row["run"]: row for row in server.get("runs")["runs"]}
        states = {name: row["state"] for name, row in rows.items()}
        bearer = {"Authorization": f"Bearer {server.token}"}
        for name in states:
            for path in ("run", "units", "groups"):
                answer = server.ask(f"/api/{path}?run={name}", bearer)
                assert name != "good" or answer.status == 200
                assert answer.status == 200 or answer.json()["error"]
    pipes = [name for name in states if name.startswith(("pipe", "endless"))]
    assert {states[name] for name in [*pipes, "cut", "other"]} == {"damaged"}
    assert f"{cut} has " in rows["cut"]["error"]
    assert f"were committed. See hermes-rl check {tmp_path / 'cut'}" in rows["cut"]["error"]
    assert rows["cut"]["done"] == 36
    assert (len(pipes), states["good"]) == (4, "finished")
    code, _, errors = forks.call(["diff", "good", "other"], tmp_path)
    assert (code, errors.count("\n")) == (2, 1), errors
    for name in ("status", "show"):
        lost = next(iter((copied(name) / "trajectories").iterdir()))
        lost.unlink()
        assert str(summary(load_run(tmp_path / name))).endswith("; 36 units still open")
        code, out, errors = forks.call([name, str(tmp_path / name)], tmp_path)
        assert code == 0, errors
        line = (
            f"{lost} is missing, but its batch is committed. See hermes-rl check {lost.parents[1]}"
        )
        assert line in (out + errors).splitlines()
