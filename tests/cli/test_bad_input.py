"""Bad input gets exit code 2 and one line with the place and the fix, never a traceback."""

import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cli_runner import ORACLE, run_cli, run_process, scripted_task, write_rows

RUN = "runs/smoke-oracle"
OUT = ("--out", "run")
PLACEHOLDERS = {
    "{oracle}": " ".join(ORACLE),
    "{keyed}": "--model m --base-url https://example.invalid/v1 --workers 0",
    "{long}": "x" * 300,
    "{shown}": "x" * 80,
}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused_commands.yaml").read_text())


def fill_placeholders(text: str) -> str:
    for name, value in PLACEHOLDERS.items():
        text = text.replace(name, value)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    write_rows(made / "good.jsonl", {"prompt": "x"})
    write_rows(made / "question.jsonl", {"question": "x", "answer": "y"})
    (made / "empty.jsonl").touch()
    (made / "garbage.parquet").write_bytes(b"PAR1 and no more")
    pq.write_table(pa.table({"prompt": ["x" * 100] * 999}), made / "damaged.parquet")
    whole = (made / "damaged.parquet").read_bytes()
    (made / "damaged.parquet").write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    (made / "plain.jsonl.gz").write_bytes(b'{"prompt": "x"}\n')
    (made / "flat.yaml").write_text("temperature: 1\n")
    (made / "typo.yaml").write_text("agent:\n  seed: 1\n  limits:\n    max_truns: 3\n")
    (made / "kind.yaml").write_text("run:\n  concurrency: many\n")
    (made / "broken.yaml").write_text("model: [1\n")
    (made / "deep.yaml").write_text(f"model: {'[' * 3000}{']' * 3000}\n")
    (made / "list.yaml").write_text("endpoint: [1]\n")
    (made / "other").mkdir()
    (made / "other/thesis.tex").write_text("precious")
    return made


@pytest.mark.parametrize("command", REFUSED)
def test_bad_command_lines_get_one_error_line(command: str, folder: Path) -> None:
    result = run_cli(*shlex.split(fill_placeholders(command)), cwd=folder)
    assert result.code == 2
    assert fill_placeholders(REFUSED[command]) in result.error
    assert result.out.count("\n") <= command.startswith("demo"), "the demo prints its first title"
    assert (folder / "other/thesis.tex").read_text() == "precious"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("command", ["check absent.jsonl", "run --repeat 2", "shwo"])
def test_a_process_prints_the_same_as_main(command: str, folder: Path) -> None:
    arguments = command.split()
    assert run_process(*arguments, cwd=folder) == run_cli(*arguments, cwd=folder)


def test_check_reports_each_bad_row_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "good"}\n{broken\n{"prompt": 3}\n{"prompt": "x", "verify": {"scrip": "a"}}\n'
        '{"prompt": "x", "setup": "if true"}\n{"prompt": "x", "limits": {"max_trns": 3}}\n'
    )
    result = run_cli("check", "bad.jsonl", cwd=tmp_path)
    assert result.code == 2
    lines = result.err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [f"bad.jsonl:{n}" for n in range(2, 7)]
    assert "not valid JSON" in lines[0]
    assert "'setup' is not a bash script" in lines[3]
    assert "max_trns" in lines[4]
    assert result.out.startswith("bad.jsonl: 6 rows, 5 bad")


def test_resume_with_another_configuration_lists_the_differences(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    result = run_cli("run", "smoke", *ORACLE, "--temperature", "1", cwd=tmp_path)
    assert result.code == 2
    assert result.error == (
        f"error: {RUN} was made with temperature none, now 1.0. Keep none, or choose --out {RUN}-2"
    )
    several = run_cli("run", "smoke", *ORACLE, "--max-turns", "3", "--seed", "4", cwd=tmp_path)
    assert several.code == 2
    assert "max_turns" in several.err
    assert "seed" in several.err
    assert run_cli("run", "smoke", *ORACLE, cwd=tmp_path).code == 0


def test_show_refuses_unknown_and_ambiguous_ids(finished: Path) -> None:
    none = run_cli("show", RUN, "zzz", cwd=finished)
    assert none.code == 2
    assert (
        none.error == f"error: {RUN}: nothing begins with 'zzz'. `hermes-rl show {RUN}` lists ids"
    )
    several = run_cli("show", RUN, "", cwd=finished)
    assert several.code == 2
    assert "names 10 units" in several.error


RUN_AGAIN = ", then run the same command. (exit 3)"


@pytest.mark.parametrize(
    ("fault", "arguments", "hint"),
    [
        ("auth", (), "Name the variable that holds the key (--api-key-env NAME)"),
        ("auth", ("--api-key-env", "MY_KEY"), "Set MY_KEY"),
        ("billing", (), "Fix the billing of the account"),
        ("not_found", (), "Correct --model or --base-url"),
    ],
)
def test_permanent_endpoint_errors_stop_the_run_with_a_hint(
    fault: str, arguments: tuple[str, ...], hint: str, tmp_path: Path, base_url: str
) -> None:
    rows = [scripted_task(f"t{n}", {"text": "", "fault": fault}) for n in range(4)]
    write_rows(tmp_path / "my.jsonl", *rows)
    endpoint = ("--model", "m", "--base-url", base_url, "--workers", "0", *arguments)
    key = {"MY_KEY": "sk-not-the-right-one"}
    result = run_cli("run", "my.jsonl", *endpoint, *OUT, cwd=tmp_path, env=key)
    assert result.code == 3
    last = result.out.splitlines()[-1]
    assert re.match(r"stopped: 40\d from 127\.0\.0\.1:\d+ .*, \d units tried\. ", last)
    assert last.endswith(f". {hint}{RUN_AGAIN}")
    assert key["MY_KEY"] not in result.out + result.err
    status = run_cli("status", "run", "--json", cwd=tmp_path).json()
    assert (status["done"], status["given_up"]) == (0, 0)
