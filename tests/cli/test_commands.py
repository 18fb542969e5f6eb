"""Each command, as a user types it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from cli_runner import (
    COMMAND,
    ORACLE,
    clean_environment,
    run_cli,
    run_process,
    scripted_task,
    write_rows,
)
from forks import Forked

from hermes_rl.testing import mcp_server_source

RUN = "runs/smoke-oracle"


def test_help_lists_every_command_and_each_has_an_example(tmp_path: Path) -> None:
    result = run_cli("--help", cwd=tmp_path)
    assert result == run_process("--help", cwd=tmp_path)
    commands = result.out.partition("Commands:")[2].partition("\n\n")[0]
    listed = [line.split()[0] for line in commands.splitlines() if line]
    assert "--version" in result.out
    assert {"demo", "run", "play", "show", "status", "check", "doctor"} <= set(listed)
    for name in listed:
        assert f"hermes-rl {name} " in run_cli(name, "--help", cwd=tmp_path).out.split("Options")[0]
    assert run_cli("--version", cwd=tmp_path).out.startswith("hermes-rl 0.")


def test_tools_are_listed_with_their_toolsets(tmp_path: Path) -> None:
    text = run_cli("tools", cwd=tmp_path).out
    assert re.search(r"^skills +.* skills_list skill_view skill_manage$", text, re.MULTILINE)
    assert "  image_gen: the toolset has no tools" in text
    assert re.search(r"^terminal_only +terminal 100, file 100$", text, re.MULTILINE)
    found = json.loads(run_cli("tools", "--json", cwd=tmp_path).out)
    assert found["tools"]["todo"] == {"toolset": "todo", "missing": None}
    assert found["toolsets"]["file_read"]["tools"] == ["read_file", "search_files"]
    assert len(found["distributions"]) >= 17


def test_tools_of_a_configuration_are_listed_with_a_line_for_each_fault(tmp_path: Path) -> None:
    source = ["-c", mcp_server_source()]
    config = {
        "agent": {
            "user_toolsets": {"careful": {"includes": ["file"], "tools": ["todo"]}},
            "user_distributions": {"mine": {"careful": 80}},
            "distribution": "mine",
        },
        "mcp": {
            "inside": {"command": "python3", "args": source, "tools": ["echo"]},
            "here": {"command": sys.executable, "args": source, "where": "host"},
            "hangs": {"command": "sleep", "args": ["60"], "timeout": 0.2},
            "key": {"url": "http://127.0.0.1:1/mcp", "headers": {"A": "${NO_SUCH_KEY}"}},
            "off": {"command": "nothing", "disabled": True},
        },
    }
    (tmp_path / "tools.yaml").write_text(json.dumps(config))
    result = run_cli("tools", "--config", "tools.yaml", cwd=tmp_path)
    assert result.code == 2
    assert re.search(r"^careful .* patch search_files todo$", result.out, re.MULTILINE)
    assert re.search(r"^mine +careful 80$", result.out, re.MULTILINE)
    assert re.search(r"^inside +mcp_inside_echo$", result.out, re.MULTILINE)
    assert result.err.splitlines() == [
        "error: tools.yaml: 'mcp.hangs': MCP server hangs: not ready within 0.2 s",
        "error: tools.yaml: 'mcp.key': the variable NO_SUCH_KEY is not set. Set it",
    ]
    assert re.search(r"^here +mcp_here_echo ", result.out, re.MULTILINE)
    config["agent"]["user_toolsets"]["careful"]["tools"] = ["todos"]
    (tmp_path / "tools.yaml").write_text(json.dumps({"agent": config["agent"]}))
    result = run_cli("tools", "--config", "tools.yaml", "--json", cwd=tmp_path)
    (fault,) = json.loads(result.out)["faults"]
    assert (result.code, "did you mean 'todo'" in fault) == (2, True)


@pytest.mark.parametrize("group", ["env", "images", "sandboxes", "sessions"])
def test_a_command_group_alone_prints_its_help(group: str, tmp_path: Path) -> None:
    result = run_cli(group, cwd=tmp_path)
    assert result == run_cli(group, "--help", cwd=tmp_path)
    assert result.code == 0
    assert result.err == ""
    listed = result.out.partition("Commands:")[2]
    assert "  list " in listed
    assert "..." not in listed


def test_output_is_escaped_for_an_ascii_terminal(tmp_path: Path) -> None:
    write_rows(tmp_path / "größe.jsonl", {"id": "日本 😀", "prompt": "x", "setup": "if true"})
    env = {"PYTHONIOENCODING": "ascii"}
    result = run_process("check", "größe.jsonl", cwd=tmp_path, env=env)
    assert result.code == 2
    assert result.out.startswith("gr\\u00f6\\u00dfe.jsonl: 1 row, 1 bad")
    # JSON output stays valid JSON.
    program = run_process("check", "größe.jsonl", "--json", cwd=tmp_path, env=env)
    assert program.json()["bad"][0].startswith("größe.jsonl:1: 'setup' is not")


def test_shell_completion_of_commands_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        arguments = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        env = {"_HERMES_RL_COMPLETE": "complete_bash", **arguments}
        return run_cli(cwd=tmp_path, env=env).out.split()

    assert completed("hermes-rl ru") == ["run"]
    assert completed("hermes-rl run --wor") == ["--workers"]
    assert {"list", "process", "evaluate"} <= set(completed("hermes-rl env "))
    script = run_cli("--show-completion", "bash", cwd=tmp_path)
    assert script.code == 0
    assert "complete -o default -F" in script.out


def test_env_list(tmp_path: Path) -> None:
    result = run_cli("env", "list", cwd=tmp_path)
    assert result.code == 0
    assert "terminal_tasks    The bundled terminal tasks as an environment." in result.out
    assert set(run_cli("env", "list", "--json", cwd=tmp_path).json()) >= {
        "swe_bugs",
        "gsm8k_python",
    }


def test_run_prints_results_and_paths(tmp_path: Path) -> None:
    result = run_cli("run", "smoke", *ORACLE, "--limit", "2", cwd=tmp_path)
    assert result.code == 0
    assert f"{RUN}: 2/2 units done, 2 solved, mean reward 1" in result.out
    assert f"trajectories: {RUN}/trajectories/*.parquet" in result.out
    assert len(pd.read_parquet(tmp_path / RUN / "trajectories")) == 2
    more = run_cli("run", "smoke", *ORACLE, cwd=tmp_path)
    assert f"{RUN}: 10/10 units done, 10 solved" in more.out
    again = run_cli("run", "smoke", *ORACLE, "--json", cwd=tmp_path)
    events = [json.loads(line) for line in again.out.splitlines()]
    assert [e for e in events if e["event"] == "attempt"] == []
    assert events[-1]["event"] == "report"
    assert events[-1]["exit_code"] == 0


def test_run_against_an_endpoint(tmp_path: Path, base_url: str) -> None:
    solve = scripted_task("solved", {"run": "echo 1 > a"}, "done", verify="grep 1 $WORKSPACE/a")
    write_rows(
        tmp_path / "my.jsonl", solve, scripted_task("unsolved", "no", verify="test -e $WORKSPACE/a")
    )
    endpoint = ("--model", "m", "--base-url", base_url, "--workers", "0")
    result = run_cli("run", "my.jsonl", *endpoint, cwd=tmp_path)
    assert result.code == 0
    assert "runs/my-m: 2/2 units done, 1 solved, mean reward 0.5" in result.out
    assert "cost: unpriced" in result.out
    shown = run_cli("show", "runs/my-m", "solved", cwd=tmp_path).out
    assert "$ echo 1 > a" in shown
    assert "-> exit 0" in shown


def test_show_prints_a_table(finished: Path) -> None:
    result = run_cli("show", RUN, cwd=finished)
    assert result.code == 0
    assert result.out.splitlines()[0].split() == [
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
    assert "10 of 10 solved" in result.out
    cut = run_cli("show", RUN, "--limit", "3", "--sort", "turns", cwd=finished)
    assert "... and 7 more (--limit 0 shows all)" in cut.out
    assert "solved" not in run_cli("show", RUN, "--failed", cwd=finished).out


def test_show_groups_failures_by_cause(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "mine.jsonl",
        {"id": "good", "prompt": "x"},
        {"id": "bad", "prompt": "x", "setup": "echo no such luck >&2; exit 3"},
        {"prompt": 3},
        {"prompt": "x", "limits": {"max_trns": 3}},
        {"prompt": 4},
    )
    assert run_cli("run", "mine.jsonl", *ORACLE, "--out", "run", cwd=tmp_path).code == 1
    result = run_cli("show", "run", "--failed", cwd=tmp_path)
    causes = [line for line in result.out.splitlines() if line.startswith("failed ")]
    assert re.fullmatch(r"failed 2x task: .*prompt.* \(lines 3, 5\)", causes[0])
    failed = "failed 1x task: TaskFault: setup failed with exit code 3: no such luck (row 2)"
    assert failed in causes[1:]
    assert any("max_trns" in cause and cause.endswith("(line 4)") for cause in causes[1:])
    assert "4 attempts without a verdict" in result.out
    assert "not graded, " in run_cli("show", "run", cwd=tmp_path).out
    one = run_cli("show", "run", "bad", cwd=tmp_path).out
    assert "error     TaskFault: " in one


def test_show_finds_a_trajectory_by_id_task_or_repeat(finished: Path) -> None:
    unit = run_cli("show", RUN, cwd=finished).out.splitlines()[1].split()[0]
    by_id = run_cli("show", RUN, unit, cwd=finished)
    assert by_id.code == 0
    assert "write-note #0   reward 1.0   answered   2 turns" in by_id.out
    assert run_cli("show", RUN, "write-note", cwd=finished).out == by_id.out
    assert run_cli("show", RUN, "write-note#0", cwd=finished).out == by_id.out
    several_lines = run_cli("show", RUN, "count-txt", cwd=finished).out
    assert "\n      echo" in several_lines  # the second line of a command is indented under it


def test_show_json(finished: Path) -> None:
    rows = [json.loads(x) for x in run_cli("show", RUN, "--json", cwd=finished).out.splitlines()]
    assert len(rows) == 10
    assert rows[0]["messages"][1]["role"] == "user"
    assert rows[0]["tools"][0]["function"]["name"] == "terminal"


def test_a_closed_pipe_prints_no_error(finished: Path) -> None:
    script = f"{COMMAND} show {RUN} --json | head -c 10"
    done = subprocess.run(["bash", "-c", script], cwd=finished, capture_output=True, text=True)
    assert len(done.stdout) == 10
    assert done.stderr == ""


def test_status_of_a_finished_run(finished: Path) -> None:
    line = run_cli("status", RUN, cwd=finished).out
    assert line.startswith("10/10 units  10 solved  0 given up  0 running")
    assert line.endswith("no driver\n")
    assert run_cli("status", RUN, "--follow", "--json", cwd=finished).json()["done"] == 10
    assert "no driver runs" in run_cli("status", RUN, "--stop", cwd=finished).out


def test_compact_prints_what_it_did(finished: Path) -> None:
    assert "nothing to merge" in run_cli("compact", RUN, cwd=finished).out
    done = run_cli("compact", RUN, "--keep-old", "0", "--json", cwd=finished).json()
    assert done["before"] == done["after"] > 0
    refused = run_cli("compact", "nothing", cwd=finished).error
    assert refused == "error: nothing is not a run directory (no epochs/). Give the path of a run"


@pytest.mark.slow
def test_status_stop_ends_a_run_that_can_be_resumed(tmp_path: Path, base_url: str) -> None:
    rows = [
        scripted_task(f"t{n}", *[{"run": "true", "latency_s": 0.5}] * 3, "done") for n in range(40)
    ]
    write_rows(tmp_path / "slow.jsonl", *rows)
    arguments = ["slow.jsonl", "--model", "m", "--base-url", base_url, "--workers", "0"]
    arguments += ["--toolsets", "terminal", "--out", "run"]
    driver = Forked(["run", *arguments, "--concurrency", "2"], clean_environment(), tmp_path)
    try:
        deadline = time.monotonic() + 240
        while (seen := look(tmp_path)) is None or not seen["running"]:
            assert time.monotonic() < deadline
        assert seen["driver"] == driver.pid
        second = run_cli("run", *arguments, cwd=tmp_path)
        assert second.code == 2
        assert f"run is in use by process {driver.pid}" in second.error
        assert "hermes-rl status run --stop" in second.error
        stopped = run_cli("status", "run", "--stop", cwd=tmp_path)
        assert stopped.code == 0
        assert "no driver" in stopped.out
        assert driver.wait(240) == 130
        out = driver.stdout.read()
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert "interrupted. Resume with: hermes-rl run --config run/run.yaml" in out
    assert run_cli("run", *arguments, cwd=tmp_path).code == 0
    rows_done = pd.read_parquet(tmp_path / "run/trajectories")
    assert sorted(rows_done["task_id"]) == sorted(f"t{n}" for n in range(40))


def look(folder: Path) -> dict[str, int] | None:
    result = run_cli("status", "run", "--json", cwd=folder)
    return result.json() if result.code == 0 else None


def test_check_dataset(tmp_path: Path) -> None:
    result = run_cli("check", "smoke", cwd=tmp_path)
    assert result.code == 0
    assert result.out == "smoke: 10 rows, 0 bad, 10 with a verifier, 10 with an oracle\n"
    assert run_cli("check", "smoke", "--json", cwd=tmp_path).json()["bad"] == []


def test_check_reports_ids_shared_by_different_tasks(tmp_path: Path) -> None:
    """Identical rows are repeats of one task: their id is its name."""
    twice = {"id": "a", "prompt": "x"}
    other, same = {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "x"}
    write_rows(tmp_path / "t.jsonl", twice, twice, other, same)
    result = run_cli("check", "t.jsonl", cwd=tmp_path)
    assert result.code == 2
    assert result.err == (
        "error: t.jsonl:3: id 'a' is also that of t.jsonl:1. Give each task its own id\n"
    )
    here = ("--model", "noop", "--out", "r", "--workers", "0")
    assert run_cli("run", "t.jsonl", *here, cwd=tmp_path).code == 0
    several = run_cli("show", "r", "a", cwd=tmp_path)
    assert several.code == 2
    first = several.err.rpartition(": ")[2].split(",")[0]
    assert "'a' names 3 units. Give the id of one of them: " in several.err
    assert run_cli("show", "r", first, cwd=tmp_path).code == 0


def test_check_reports_unknown_tools_and_empty_datasets(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"toolsets": ["shel"]}, {}, {"toolsets": ["image_gen"]}]
    write_rows(tmp_path / "t.jsonl", *({"prompt": "x", **one} for one in rows))
    write_rows(tmp_path / "d.jsonl", {"prompt": "x", "distribution": "mine"})
    tools = run_cli("check", "t.jsonl", cwd=tmp_path)
    assert tools.code == 2
    assert "t.jsonl:3: the toolset 'image_gen' has no tools" in tools.err
    assert tools.err.startswith("error: t.jsonl:1: unknown toolset 'shel' (known: terminal, ")
    assert "3 rows, 2 bad" in tools.out
    drawn = run_cli("check", "d.jsonl", cwd=tmp_path)
    assert drawn.code == 2
    assert drawn.err.startswith("error: d.jsonl:1: unknown distribution 'mine' (known: default, ")
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = run_cli("check", "empty.jsonl", cwd=tmp_path)
    assert empty.code == 2
    assert empty.err.startswith("error: empty.jsonl: the dataset holds no rows. ")


@pytest.mark.slow
def test_check_run_plays_oracles_no_ops_and_cheats(tmp_path: Path) -> None:
    inside, outside = 'grep -q 1 "$WORKSPACE/a"', "grep -q 1 a"
    rows = [{"id": w, "prompt": "x", "oracle": "echo 1 > a"} for w in ("good", "lost", "free")]
    rows = [{**r, "verify": v} for r, v in zip(rows, (inside, outside, "true"), strict=True)]
    scratch = {"oracle": "echo 1 > /tmp/a", "verify": "cd $WORKSPACE; grep -q 1 /tmp/a"}
    rows.append({"id": "scratch", "prompt": "x", **scratch})
    write_rows(tmp_path / "mine.jsonl", *rows)
    checked = run_cli("check", "mine.jsonl", "--run", cwd=tmp_path)
    assert checked.code == 2
    assert "2 verifiers never name the workspace (first: mine.jsonl:2)" in checked.out
    assert "  lost: reward 0.0, wanted 1.0" in checked.out
    hint = "it passes in the agent's sandbox: /tmp and services do not reach the verifier's sandbox"
    assert f"  scratch: reward 0.0, wanted 1.0 ({hint})" in checked.out
    assert "  free: reward 1.0, wanted 0.0" in checked.out
    assert "  free (daemon): reward 1.0, wanted 0.0" in checked.out
    assert "good" not in checked.out
    for name in ("oracle: 4", "oracle, verified in the agent's sandbox: 2", "no-op: 4"):
        assert f"{name} rollouts\n" in checked.err
    assert "4/4 units  " in checked.err


def test_check_run_directory(finished: Path) -> None:
    result = run_cli("check", RUN, cwd=finished)
    assert result.code == 0
    assert result.out.startswith(f"{RUN}: 10 units done, 0 given up, 20 calls")
    assert result.out.endswith("; no faults\n")
    assert run_cli("check", RUN, "--repair", cwd=finished).out == result.out
    for option in (["--run"], ["--limit", "3"], ["--map", "prompt=text"]):
        refused = run_cli("check", RUN, *option, cwd=finished)
        assert refused.code == 2
        assert f"{RUN} is a run directory; {option[0]} is for datasets" in refused.err


@pytest.mark.slow
def test_play_is_graded_and_saves_the_oracle(tmp_path: Path) -> None:
    typed = "ls docs/*.txt | wc -l\necho 3 > count.txt\nexit\n"
    result = run_cli("play", "smoke", "count-txt", "--save", "o.jsonl", cwd=tmp_path, typed=typed)
    assert result.code == 0
    assert "Count the .txt files in docs" in result.out
    assert "\n3\n" in result.out
    assert "\nreward 1.0\n" in result.out
    assert run_cli("check", "o.jsonl", "--run", cwd=tmp_path).code == 0
    idle = run_cli("play", "smoke", "1", cwd=tmp_path, typed="exit 3\nfalse\n")
    assert "\nreward 0.0\n" in idle.out
    assert "[exit 1]" in idle.out


def test_play_a_unit_of_a_run(finished: Path) -> None:
    result = run_cli("play", RUN, "delete-tmp", cwd=finished, typed="")
    assert result.code == 0
    assert "reward 0.0" in result.out


def test_play_prefers_an_id_of_digits_to_a_row_number(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "n.jsonl", {"id": "1", "prompt": "first"}, {"id": "0", "prompt": "second"}
    )
    assert "second" in run_cli("play", "n.jsonl", "0", cwd=tmp_path).out


def test_play_refuses_an_ambiguous_id(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": text} for text in ("one", "two", "two")]
    write_rows(tmp_path / "n.jsonl", {"id": "b", "prompt": "x"}, *rows)
    assert run_cli("play", "n.jsonl", "a", cwd=tmp_path).error == (
        "error: n.jsonl: 2 tasks have the id 'a' (n.jsonl:2, n.jsonl:3). "
        "Give the row number instead: 1 or 2"
    )
    assert "one" in run_cli("play", "n.jsonl", "1", cwd=tmp_path).out


def test_doctor(tmp_path: Path) -> None:
    found = run_cli("doctor", "--json", cwd=tmp_path).json()
    assert {f["subject"] for f in found} == {"machine", "sandboxes", "providers", "models", "tools"}
    assert [f for f in found if f["good"] is False] == []
    text = run_cli("doctor", "sandboxes", cwd=tmp_path)
    assert text.code == 0
    assert "bubblewrap" in text.out


def test_doctor_reports_packages_that_slow_down_ray(tmp_path: Path) -> None:
    (tmp_path / "rfc3987_syntax.py").touch()
    result = run_process("doctor", "--json", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    (found,) = [f for f in result.json() if f["name"] == "ray start"]
    assert found["good"] is None
    assert "1 s of CPU longer" in found["text"]


def test_doctor_probes_an_endpoint(tmp_path: Path, base_url: str) -> None:
    query = ("doctor", "models", "--model", "echo")
    findings = run_cli(*query, "--base-url", base_url, "--json", cwd=tmp_path).json()
    found = {f["name"]: f for f in findings if f["subject"] == "endpoint"}
    assert found["answers"]["good"] is found["streaming"]["good"] is True
    assert 1 < sum(f["subject"] == "calls" for f in findings) <= 7
    refused = run_cli(*query, "--base-url", "http://127.0.0.1:9/v1", cwd=tmp_path)
    assert refused.code == 1
    assert "Start the server" in refused.out
    assert "is not set" in run_cli(*query, "--provider", "groq", cwd=tmp_path).err
    assert "hermes-rl doctor models --model" in run_cli("doctor", "--model", "m", cwd=tmp_path).err
    assert "'endpoint.api_mode'" in run_cli(*query, "--api-mode", "morse", cwd=tmp_path).err
    config = tmp_path / "providers.yaml"
    config.write_text(f"providers: {{mine: {{base_url: '{base_url}', api_key_env: MINE}}}}\n")
    listed = run_cli("doctor", "models", "--config", config, "--json", cwd=tmp_path).json()
    assert "MINE is not set" in next(f["text"] for f in listed if f["name"] == "mine")
    mine = run_cli(*query, "--config", config, "--provider", "mine", "--json", cwd=tmp_path).json()
    assert mine[0]["text"] == "mine, chat_completions"
    (tmp_path / "key").write_text("token-12345")
    commands = "{MINE: 'cat key', YOURS: 'echo no login >&2; exit 2'}"
    config.write_text(
        config.read_text() + f"endpoint: {{provider: mine, key_commands: {commands}}}\n"
    )
    printed = run_cli("doctor", "models", "--config", config, cwd=tmp_path)
    assert "MINE comes from a command" in printed.out
    assert "MINE        its command prints a key" in printed.out
    assert "the key command of YOURS ended with exit code 2: no login" in printed.out
    assert "token-12345" not in printed.out + printed.err
    mine = run_cli(*query, "--config", config, "--json", cwd=tmp_path).json()
    assert mine[0]["text"] == "mine, chat_completions"


PRINT_CODES = """
import sys
from hermes_rl.cli import main
for line in sys.argv[1:]:
    print("code", main(line.split()))
"""


def test_check_does_not_wait_at_a_pipe_in_a_run(finished: Path, tmp_path: Path) -> None:
    pipes = [tmp_path / "a/stats.json", tmp_path / "b/trajectories/part-1-0-9.parquet"]
    for run, pipe in zip("ab", pipes, strict=True):
        shutil.copytree(finished / RUN, tmp_path / run)
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    checks = [f"check {tmp_path / run}{more}" for run in "ab" for more in ("", " --secrets")]
    command = [sys.executable, "-c", PRINT_CODES, *checks]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.stdout.count("code 2\n") == len(checks)
    for pipe in pipes:
        assert ended.stderr.count(f"{pipe} is a named pipe or a device") == 2
