"""What each command does for a user who types it."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest
from doors_kit import COMMAND, PLAYED, clean_environment, hermes, process, scripted, write

RUN = "runs/smoke-oracle"


def test_the_help_names_every_command_and_each_has_an_example(tmp_path: Path) -> None:
    said = hermes("--help", cwd=tmp_path)
    assert said == process("--help", cwd=tmp_path)
    commands = said.out.partition("Commands:")[2].partition("\n\n")[0]
    listed = [line.split()[0] for line in commands.splitlines() if line]
    assert "--version" in said.out
    assert {"demo", "run", "play", "show", "status", "check", "doctor"} <= set(listed)
    for name in listed:
        assert f"hermes-rl {name} " in hermes(name, "--help", cwd=tmp_path).out.split("Options")[0]
    assert hermes("--version", cwd=tmp_path).out.startswith("hermes-rl 0.")


def test_a_terminal_without_unicode_is_no_traceback(tmp_path: Path) -> None:
    write(tmp_path / "größe.jsonl", {"id": "日本 😀", "prompt": "x", "setup": "if true"})
    env = {"PYTHONIOENCODING": "ascii"}
    said = process("check", "größe.jsonl", cwd=tmp_path, env=env)
    assert said.code == 2
    assert said.out.startswith("gr\\u00f6\\u00dfe.jsonl: 1 rows, 1 bad")
    # JSON stays JSON.
    program = process("check", "größe.jsonl", "--json", cwd=tmp_path, env=env)
    assert program.json()["bad"][0].startswith("größe.jsonl:1: 'setup' is not")


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        env = {"_HERMES_RL_COMPLETE": "complete_bash", **words}
        return hermes(cwd=tmp_path, env=env).out.split()

    assert completed("hermes-rl r") == ["run"]
    assert completed("hermes-rl run --wor") == ["--workers"]
    assert {"list", "process", "evaluate"} <= set(completed("hermes-rl env "))
    script = hermes("--show-completion", "bash", cwd=tmp_path)
    assert script.code == 0
    assert "complete -o default -F" in script.out


def test_environments_are_listed(tmp_path: Path) -> None:
    said = hermes("env", "list", cwd=tmp_path)
    assert said.code == 0
    assert "terminal_tasks    The bundled terminal tasks as an environment." in said.out
    assert set(hermes("env", "list", "--json", cwd=tmp_path).json()) >= {"swe_bugs", "gsm8k_python"}


def test_a_run_says_what_it_did_and_where_it_is(tmp_path: Path) -> None:
    said = process("run", "smoke", *PLAYED, "--limit", "2", cwd=tmp_path)
    assert said.code == 0
    assert f"{RUN}: 2/2 units done, 2 solved, mean reward 1" in said.out
    assert f"trajectories: {RUN}/trajectories/*.parquet" in said.out
    assert len(pd.read_parquet(tmp_path / RUN / "trajectories")) == 2
    more = hermes("run", "smoke", *PLAYED, cwd=tmp_path)
    assert f"{RUN}: 10/10 units done, 10 solved" in more.out
    again = hermes("run", "smoke", *PLAYED, "--json", cwd=tmp_path)
    events = [json.loads(line) for line in again.out.splitlines()]
    assert [e for e in events if e["event"] == "attempt"] == []
    assert events[-1]["event"] == "report"
    assert events[-1]["exit_code"] == 0


def test_a_model_behind_an_endpoint(tmp_path: Path, base_url: str) -> None:
    solve = scripted("solved", {"run": "echo 1 > a"}, "done", verify="grep 1 $WORKSPACE/a")
    write(tmp_path / "my.jsonl", solve, scripted("unsolved", "no", verify="test -e $WORKSPACE/a"))
    endpoint = ("--model", "m", "--base-url", base_url, "--workers", "0")
    said = hermes("run", "my.jsonl", *endpoint, cwd=tmp_path)
    assert said.code == 0
    assert "runs/my-m: 2/2 units done, 1 solved, mean reward 0.5" in said.out
    assert "cost: unpriced" in said.out
    shown = hermes("show", "runs/my-m", "solved", cwd=tmp_path).out
    assert "$ echo 1 > a" in shown
    assert "-> exit 0" in shown


def test_show_the_table(finished: Path) -> None:
    said = hermes("show", RUN, cwd=finished)
    assert said == process("show", RUN, cwd=finished)
    assert said.code == 0
    assert said.out.splitlines()[0].split() == [
        "unit",
        "task",
        "#",
        "reward",
        "ended",
        "turns",
        "in",
        "out",
        "time",
    ]
    assert "10 of 10 solved" in said.out
    cut = hermes("show", RUN, "--limit", "3", "--sort", "turns", cwd=finished)
    assert "... and 7 more (--limit 0 shows all)" in cut.out
    assert "solved" not in hermes("show", RUN, "--failed", cwd=finished).out


def test_show_says_why_attempts_failed(tmp_path: Path) -> None:
    write(
        tmp_path / "mine.jsonl",
        {"id": "good", "prompt": "x"},
        {"id": "bad", "prompt": "x", "setup": "echo no such luck >&2; exit 3"},
        {"prompt": 3},
        {"prompt": "x", "limits": {"max_trns": 3}},
        {"prompt": 4},
    )
    assert hermes("run", "mine.jsonl", *PLAYED, "--out", "run", cwd=tmp_path).code == 1
    said = hermes("show", "run", "--failed", cwd=tmp_path)
    causes = [line for line in said.out.splitlines() if line.startswith("failed ")]
    assert re.fullmatch(r"failed 2x task: .*prompt.* \(lines 3, 5\)", causes[0])
    failed = "failed 1x task: TaskFault: setup failed with exit code 3: no such luck (row 2)"
    assert failed in causes[1:]
    assert any("max_trns" in cause and cause.endswith("(line 4)") for cause in causes[1:])
    assert "4 attempts without a verdict" in said.out
    assert "not graded, " in hermes("show", "run", cwd=tmp_path).out
    one = hermes("show", "run", "bad", cwd=tmp_path).out
    assert "error     TaskFault: " in one


def test_show_one_trajectory_by_id_task_or_repeat(finished: Path) -> None:
    unit = hermes("show", RUN, cwd=finished).out.splitlines()[1].split()[0]
    by_id = hermes("show", RUN, unit, cwd=finished)
    assert by_id.code == 0
    assert "write-note #0   reward 1.0   answered   2 turns" in by_id.out
    assert hermes("show", RUN, "write-note", cwd=finished).out == by_id.out
    assert hermes("show", RUN, "write-note#0", cwd=finished).out == by_id.out
    several_lines = hermes("show", RUN, "count-txt", cwd=finished).out
    assert "\n      echo" in several_lines  # the second line of a command is indented under it


def test_show_for_programs(finished: Path) -> None:
    rows = [json.loads(x) for x in hermes("show", RUN, "--json", cwd=finished).out.splitlines()]
    assert len(rows) == 10
    assert rows[0]["messages"][1]["role"] == "user"
    assert rows[0]["tools"][0]["function"]["name"] == "terminal"


def test_output_can_be_cut_short(finished: Path) -> None:
    script = f"{COMMAND} show {RUN} --json | head -c 10"
    done = subprocess.run(["bash", "-c", script], cwd=finished, capture_output=True, text=True)
    assert len(done.stdout) == 10
    assert done.stderr == ""


def test_status_of_a_finished_run(finished: Path) -> None:
    line = hermes("status", RUN, cwd=finished).out
    assert line.startswith("10/10 units  10 solved  0 given up  0 running")
    assert line.endswith("no driver\n")
    assert hermes("status", RUN, "--follow", "--json", cwd=finished).json()["done"] == 10
    assert "no driver runs" in hermes("status", RUN, "--stop", cwd=finished).out


@pytest.mark.slow
def test_status_stops_a_run_which_then_goes_on(tmp_path: Path, base_url: str) -> None:
    rows = [scripted(f"t{n}", *[{"run": "true", "latency_s": 0.5}] * 3, "done") for n in range(40)]
    write(tmp_path / "slow.jsonl", *rows)
    words = ["slow.jsonl", "--model", "m", "--base-url", base_url, "--workers", "0"]
    words += ["--toolsets", "terminal", "--out", "run"]
    driver = subprocess.Popen(
        [COMMAND, "run", *words, "--concurrency", "2"], cwd=tmp_path, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while (seen := look(tmp_path)) is None or not seen["running"]:
            assert time.monotonic() < deadline
        assert seen["driver"] == driver.pid
        second = hermes("run", *words, cwd=tmp_path)
        assert second.code == 2
        assert f"run is in use by process {driver.pid}" in second.error
        assert "hermes-rl status run --stop" in second.error
        stopped = hermes("status", "run", "--stop", cwd=tmp_path)
        assert stopped.code == 0
        assert "no driver" in stopped.out
        out, _ = driver.communicate(timeout=30)
    finally:
        if driver.poll() is None:
            driver.send_signal(signal.SIGKILL)
            driver.communicate()
    assert driver.returncode == 130
    assert "interrupted. Go on with: hermes-rl run --config run/run.yaml" in out
    assert hermes("run", *words, cwd=tmp_path).code == 0
    rows_done = pd.read_parquet(tmp_path / "run/trajectories")
    assert sorted(rows_done["task_id"]) == sorted(f"t{n}" for n in range(40))


def look(folder: Path) -> dict[str, int] | None:
    said = hermes("status", "run", "--json", cwd=folder)
    return said.json() if said.code == 0 else None


def test_check_a_dataset(tmp_path: Path) -> None:
    said = hermes("check", "smoke", cwd=tmp_path)
    assert said.code == 0
    assert said.out == "smoke: 10 rows, 0 bad, 10 with a verifier, 10 with an oracle\n"
    assert hermes("check", "smoke", "--json", cwd=tmp_path).json()["bad"] == []


def test_check_names_each_id_that_two_tasks_have(tmp_path: Path) -> None:
    """Identical rows are repeats of one task: their id is its name."""
    twice = {"id": "a", "prompt": "x"}
    other, same = {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "x"}
    write(tmp_path / "t.jsonl", twice, twice, other, same)
    said = hermes("check", "t.jsonl", cwd=tmp_path)
    assert said.code == 2
    assert said.err == (
        "error: t.jsonl:3: id 'a' is also that of t.jsonl:1. Give each task its own id\n"
    )
    here = ("--model", "noop", "--out", "r", "--workers", "0")
    assert hermes("run", "t.jsonl", *here, cwd=tmp_path).code == 0
    several = hermes("show", "r", "a", cwd=tmp_path)
    assert several.code == 2
    first = several.err.rpartition(": ")[2].split(",")[0]
    assert "'a' names 3 units. Give the id of one of them: " in several.err
    assert hermes("show", "r", first, cwd=tmp_path).code == 0


def test_check_finds_what_would_end_a_run_or_its_units(tmp_path: Path) -> None:
    """Names of tools that nobody knows, and datasets without rows."""
    write(tmp_path / "t.jsonl", {"prompt": "x", "toolsets": ["shel"]}, {"prompt": "x"})
    write(tmp_path / "d.jsonl", {"prompt": "x", "distribution": "mine"})
    tools = hermes("check", "t.jsonl", cwd=tmp_path)
    assert tools.code == 2
    assert tools.err.startswith("error: t.jsonl:1: unknown toolset 'shel' (known: terminal, ")
    assert "2 rows, 1 bad" in tools.out
    drawn = hermes("check", "d.jsonl", cwd=tmp_path)
    assert drawn.code == 2
    assert drawn.err.startswith("error: d.jsonl:1: unknown distribution 'mine' (known: default, ")
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = hermes("check", "empty.jsonl", cwd=tmp_path)
    assert empty.code == 2
    assert empty.err.startswith("error: empty.jsonl: the dataset holds no rows. ")


@pytest.mark.slow
def test_check_plays_a_dataset(tmp_path: Path) -> None:
    inside, outside = 'grep -q 1 "$WORKSPACE/a"', "grep -q 1 a"
    rows = [{"id": w, "prompt": "x", "oracle": "echo 1 > a"} for w in ("good", "lost", "free")]
    rows = [{**r, "verify": v} for r, v in zip(rows, (inside, outside, "true"), strict=True)]
    scratch = {"oracle": "echo 1 > /tmp/a", "verify": "cd $WORKSPACE; grep -q 1 /tmp/a"}
    rows.append({"id": "scratch", "prompt": "x", **scratch})
    write(tmp_path / "mine.jsonl", *rows)
    checked = hermes("check", "mine.jsonl", "--run", cwd=tmp_path)
    assert checked.code == 2
    assert "2 verifiers never name the workspace (first: mine.jsonl:2)" in checked.out
    assert "  lost: reward 0.0, wanted 1.0" in checked.out
    hint = "it passes in the agent's sandbox: /tmp and services do not reach the grading box"
    assert f"  scratch: reward 0.0, wanted 1.0 ({hint})" in checked.out
    assert "  free: reward 1.0, wanted 0.0" in checked.out
    assert "  free (daemon): reward 1.0, wanted 0.0" in checked.out
    assert "good" not in checked.out
    for name in ("oracle: 4", "oracle, verified in the agent's sandbox: 2", "no-op: 4"):
        assert f"{name} rollouts\n" in checked.err
    assert "4/4 units  " in checked.err


def test_check_a_run(finished: Path) -> None:
    said = hermes("check", RUN, cwd=finished)
    assert said.code == 0
    assert said.out.startswith(f"{RUN}: 10 units done, 0 given up, 20 calls")
    assert said.out.endswith("; no faults\n")
    mended = hermes("check", RUN, "--repair", cwd=finished)
    assert mended.out == said.out  # nothing to mend, nothing more to say
    for option in (["--run"], ["--limit", "3"], ["--map", "prompt=text"]):
        refused = hermes("check", RUN, *option, cwd=finished)
        assert refused.code == 2
        assert f"{RUN} is a run directory; {option[0]} is for datasets" in refused.err


@pytest.mark.slow
def test_play_is_graded_and_saves_the_oracle(tmp_path: Path) -> None:
    typed = "ls docs/*.txt | wc -l\necho 3 > count.txt\nexit\n"
    said = hermes("play", "smoke", "count-txt", "--save", "o.jsonl", cwd=tmp_path, typed=typed)
    assert said.code == 0
    assert "Count the .txt files in docs" in said.out
    assert "\n3\n" in said.out
    assert "\nreward 1.0\n" in said.out
    assert hermes("check", "o.jsonl", "--run", cwd=tmp_path).code == 0
    idle = hermes("play", "smoke", "1", cwd=tmp_path, typed="exit 3\nfalse\n")
    assert "\nreward 0.0\n" in idle.out
    assert "[exit 1]" in idle.out


def test_play_a_unit_of_a_run(finished: Path) -> None:
    said = hermes("play", RUN, "delete-tmp", cwd=finished, typed="")
    assert said.code == 0
    assert "reward 0.0" in said.out


def test_an_id_of_digits_is_an_id(tmp_path: Path) -> None:
    write(tmp_path / "n.jsonl", {"id": "1", "prompt": "first"}, {"id": "0", "prompt": "second"})
    assert "second" in hermes("play", "n.jsonl", "0", cwd=tmp_path).out


def test_play_refuses_an_id_that_several_tasks_have(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": text} for text in ("one", "two", "two")]
    write(tmp_path / "n.jsonl", {"id": "b", "prompt": "x"}, *rows)
    assert hermes("play", "n.jsonl", "a", cwd=tmp_path).error == (
        "error: n.jsonl: 2 tasks have the id 'a' (n.jsonl:2, n.jsonl:3). "
        "Give the row number instead: 1 or 2"
    )
    assert "one" in hermes("play", "n.jsonl", "1", cwd=tmp_path).out


def test_doctor(tmp_path: Path) -> None:
    found = hermes("doctor", "--json", cwd=tmp_path).json()
    assert {f["subject"] for f in found} == {"machine", "sandboxes", "providers", "models", "tools"}
    assert [f for f in found if f["good"] is False] == []
    text = hermes("doctor", "sandboxes", cwd=tmp_path)
    assert text.code == 0
    assert "bubblewrap" in text.out


def test_doctor_says_what_makes_ray_slow_to_start(tmp_path: Path) -> None:
    (tmp_path / "rfc3987_syntax.py").touch()
    said = process("doctor", "--json", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    (found,) = [f for f in said.json() if f["name"] == "ray start"]
    assert found["good"] is None
    assert "1 s of CPU longer" in found["text"]


def test_doctor_finds_out_what_an_endpoint_can_do(tmp_path: Path, base_url: str) -> None:
    asked = ("doctor", "models", "--model", "echo")
    said = hermes(*asked, "--base-url", base_url, "--json", cwd=tmp_path).json()
    found = {f["name"]: f for f in said if f["subject"] == "endpoint"}
    assert found["answers"]["good"] is found["streaming"]["good"] is True
    calls = [f for f in said if f["subject"] == "calls"]
    assert 1 < len(calls) <= 7
    nobody = hermes(*asked, "--base-url", "http://127.0.0.1:9/v1", cwd=tmp_path)
    assert nobody.code == 1
    assert "Start the server" in nobody.out
    assert "is not set" in hermes(*asked, "--provider", "groq", cwd=tmp_path).err
    assert "hermes-rl doctor models --model" in hermes("doctor", "--model", "m", cwd=tmp_path).err
    assert "'endpoint.api_mode'" in hermes(*asked, "--api-mode", "morse", cwd=tmp_path).err
    own = tmp_path / "own.yaml"
    own.write_text(f"providers: {{mine: {{base_url: '{base_url}', api_key_env: MINE}}}}\n")
    listed = hermes("doctor", "models", "--config", own, "--json", cwd=tmp_path).json()
    assert "MINE is not set" in next(f["text"] for f in listed if f["name"] == "mine")
    mine = hermes(*asked, "--config", own, "--provider", "mine", "--json", cwd=tmp_path).json()
    assert mine[0]["text"] == "mine, chat_completions"
    (tmp_path / "key").write_text("token-12345")
    commands = "{MINE: 'cat key', YOURS: 'echo no login >&2; exit 2'}"
    own.write_text(own.read_text() + f"endpoint: {{provider: mine, key_commands: {commands}}}\n")
    printed = hermes("doctor", "models", "--config", own, cwd=tmp_path)
    assert "MINE comes from a command" in printed.out
    assert "MINE        its command prints a key" in printed.out
    assert "the key command of YOURS ended with exit code 2: no login" in printed.out
    assert "token-12345" not in printed.out + printed.err
    mine = hermes(*asked, "--config", own, "--json", cwd=tmp_path).json()
    assert mine[0]["text"] == "mine, chat_completions"
