"""Bad input gets one line that names the place and the fix, and exit code 2; never a traceback."""

import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from doors_kit import PLAYED, hermes, process, scripted, write

RUN = "runs/smoke-oracle"
OUT = ("--out", "run")
PLACES = {
    "{played}": " ".join(PLAYED),
    "{keyed}": "--model m --base-url https://example.invalid/v1 --workers 0",
    "{long}": "x" * 300,
    "{shown}": "x" * 80,
}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


def refused(name: str) -> tuple[list[str], str]:
    """A command line of `refused.yaml`, and what the one line of its error says."""
    arguments, line = REFUSED[name]["command"], REFUSED[name]["says"]
    for place, text in PLACES.items():
        arguments, line = arguments.replace(place, text), line.replace(place, text)
    return shlex.split(arguments), line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    write(made / "good.jsonl", {"prompt": "x"})
    write(made / "question.jsonl", {"question": "x", "answer": "y"})
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, folder: Path) -> None:
    arguments, line = refused(name)
    said = hermes(*arguments, cwd=folder)
    assert said.code == 2
    assert line in said.error
    assert said.out.count("\n") <= (arguments[0] == "demo"), "the demo names its first part"
    assert (folder / "other/thesis.tex").read_text() == "precious"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", ["missing file", "unknown option", "unknown command"])
def test_a_process_says_the_same(name: str, folder: Path) -> None:
    arguments, _ = refused(name)
    assert process(*arguments, cwd=folder) == hermes(*arguments, cwd=folder)


def test_every_bad_row_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "good"}\n{broken\n{"prompt": 3}\n{"prompt": "x", "verify": {"scrip": "a"}}\n'
        '{"prompt": "x", "setup": "if true"}\n{"prompt": "x", "limits": {"max_trns": 3}}\n'
    )
    said = hermes("check", "bad.jsonl", cwd=tmp_path)
    assert said.code == 2
    lines = said.err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [f"bad.jsonl:{n}" for n in range(2, 7)]
    assert "not valid JSON" in lines[0]
    assert "'setup' is not a bash script" in lines[3]
    assert "max_trns" in lines[4]
    assert said.out.startswith("bad.jsonl: 6 rows, 5 bad")


def test_another_configuration_is_refused_with_what_differs(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    said = hermes("run", "smoke", *PLAYED, "--temperature", "1", cwd=tmp_path)
    assert said.code == 2
    assert said.error == (
        f"error: {RUN} was made with temperature none, now 1.0. Keep none, or choose --out {RUN}-2"
    )
    several = hermes("run", "smoke", *PLAYED, "--max-turns", "3", "--seed", "4", cwd=tmp_path)
    assert several.code == 2
    assert "max_turns" in several.err
    assert "seed" in several.err
    assert hermes("run", "smoke", *PLAYED, cwd=tmp_path).code == 0


def test_ids_that_name_no_unit_or_several(finished: Path) -> None:
    none = hermes("show", RUN, "zzz", cwd=finished)
    assert none.code == 2
    assert (
        none.error == f"error: {RUN}: nothing begins with 'zzz'. `hermes-rl show {RUN}` lists ids"
    )
    several = hermes("show", RUN, "", cwd=finished)
    assert several.code == 2
    assert "names 10 units" in several.error


RUN_AGAIN = ", then run the same command. (exit 3)"


@pytest.mark.parametrize(
    ("fault", "words", "hint"),
    [
        ("auth", (), "Name the variable that holds the key (--api-key-env NAME)"),
        ("auth", ("--api-key-env", "MY_KEY"), "Set MY_KEY"),
        ("billing", (), "Fix the billing of the account"),
        ("not_found", (), "Correct --model or --base-url"),
    ],
)
def test_a_refusing_endpoint_stops_the_run_at_once(
    fault: str, words: tuple[str, ...], hint: str, tmp_path: Path, base_url: str
) -> None:
    rows = [scripted(f"t{n}", {"text": "", "fault": fault}) for n in range(4)]
    write(tmp_path / "my.jsonl", *rows)
    endpoint = ("--model", "m", "--base-url", base_url, "--workers", "0", *words)
    key = {"MY_KEY": "sk-not-the-right-one"}
    said = hermes("run", "my.jsonl", *endpoint, *OUT, cwd=tmp_path, env=key)
    assert said.code == 3
    last = said.out.splitlines()[-1]
    assert re.match(r"stopped: 40\d from 127\.0\.0\.1:\d+ .*, \d units tried\. ", last)
    assert last.endswith(f". {hint}{RUN_AGAIN}")
    assert key["MY_KEY"] not in said.out + said.err
    status = hermes("status", "run", "--json", cwd=tmp_path).json()
    assert (status["done"], status["given_up"]) == (0, 0)
