"""Bad input gets one line that names the place and the fix, and exit code 2; never a traceback."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doors_kit import PLAYED, hermes, process, scripted, write

RUN = "runs/smoke-oracle"
OUT = ("--out", "run")
KEYED = ("--model", "m", "--base-url", "https://example.invalid/v1", "--workers", "0")

REFUSED: dict[str, tuple[list[str], str]] = {
    "missing file": (
        ["run", "absent.jsonl", *PLAYED],
        "error: absent.jsonl: no such file or dataset. Check the path (bundled: smoke, terminal_",
    ),
    "missing file to check": (["check", "absent.jsonl"], "error: absent.jsonl: no such file or "),
    "missing file to play": (["play", "absent.jsonl", "1"], "error: absent.jsonl: no such file"),
    "nearly a file": (
        ["run", "goood.jsonl", *PLAYED],
        "error: goood.jsonl: no such file or dataset (did you mean 'good.jsonl'?)",
    ),
    "a file without its ending": (
        ["check", "question"],
        "error: question: no such file or dataset (did you mean 'question.jsonl'?)",
    ),
    "nearly a bundled dataset": (
        ["run", "smoek", *PLAYED],
        "error: smoek: no such file or dataset (did you mean 'smoke'?)",
    ),
    "no run to check": (["check", "runs/missing"], "error: runs/missing: no such file or dataset."),
    "nothing in a folder that is there": (["check", "other/x"], "error: other/x: no such file or "),
    "no rows": (["check", "empty.jsonl"], "error: empty.jsonl: the dataset holds no rows. "),
    "a folder of something else": (
        ["check", "other"],
        "error: other: holds no file of a dataset (.jsonl, .ndjson, .json, .csv, .parquet; all but",
    ),
    "not Parquet": (
        ["check", "garbage.parquet"],
        "error: garbage.parquet: not a readable Parquet file: ",
    ),
    "not gzip": (["check", "plain.jsonl.gz"], "error: plain.jsonl.gz: cannot be read (Not a gzip"),
    "no dataset": (["run", "--model", "oracle"], "error: no dataset. Name one: hermes-rl run "),
    "no model": (["run", "good.jsonl"], "error: no model. Name one: hermes-rl run "),
    "no prompt column": (
        ["run", "question.jsonl", *PLAYED],
        "error: question.jsonl:1: no column 'prompt' (found: question, answer). Try --map prompt=",
    ),
    "map that is no pair": (
        ["check", "good.jsonl", "--map", "prompt"],
        "error: --map prompt: write --map prompt=COLUMN",
    ),
    "map of a column that is nearly one": (
        ["run", "question.jsonl", *PLAYED, "--map", "prompt=qestion"],
        "error: question.jsonl:1: no column 'qestion' (did you mean 'question'?). Fix --map ",
    ),
    "unknown toolset": (
        ["run", "good.jsonl", *PLAYED, "--toolsets", "termnal"],
        "error: unknown toolset 'termnal' (did you mean 'terminal'?)",
    ),
    "a toolset like no other": (
        ["run", "good.jsonl", *PLAYED, "--toolsets", "xyz"],
        "error: unknown toolset 'xyz' (known: terminal, file, ",
    ),
    "unknown distribution": (
        ["run", "good.jsonl", *PLAYED, "--distribution", "defualt"],
        "error: unknown distribution 'defualt' (did you mean 'default'?)",
    ),
    "unknown preset": (
        ["run", "good.jsonl", *PLAYED, "--preset", "datgen"],
        "error: --preset datgen: must be 'interactive', 'datagen' or 'rl', not 'datgen' "
        "(did you mean 'datagen'?)",
    ),
    "unknown sandbox": (
        ["run", "good.jsonl", *PLAYED, "--sandbox", "dockr"],
        "error: --sandbox dockr: must be 'bubblewrap' or 'none', not 'dockr'",
    ),
    "unknown provider": (
        ["run", "good.jsonl", "--model", "m", "--provider", "opnai"],
        "error: unknown provider 'opnai' (did you mean 'openai'?). Add it under 'providers'",
    ),
    "nearly a model of ours": (
        ["run", "good.jsonl", "--model", "orcale"],
        "error: no key: the variable OPENAI_API_KEY is not set. Set it, then run again "
        "(did you mean --model oracle?)",
    ),
    "no weights": (
        ["run", "good.jsonl", "--model", "local", "--model-path", "nothere.gguf"],
        "error: --model-path nothere.gguf: No such file or directory",
    ),
    "no image": (
        ["run", "good.jsonl", *PLAYED, "--image", "/nothere"],
        "error: --image /nothere: no such image: /nothere. Name a root file system directory",
    ),
    "no sandbox": (
        ["run", "good.jsonl", *PLAYED, "--sandbox", "none"],
        "Use the default sandbox, or add --allow-unsandboxed",
    ),
    "unknown key of the configuration": (
        ["run", "good.jsonl", *PLAYED, "--set", "model.temprature=1"],
        "error: --set model.temprature=1: unknown key 'model.temprature' (did you mean "
        "'model.temperature'?)",
    ),
    "unknown section, hidden by a missing model": (
        ["run", "good.jsonl", "--set", "modle.name=oracle"],
        "error: --set modle.name=oracle: unknown key 'modle' (did you mean 'model'?)",
    ),
    "a key outside its section": (
        ["run", "good.jsonl", *PLAYED, "--config", "flat.yaml"],
        "error: flat.yaml:1: unknown key 'temperature' (did you mean 'model.temperature'?)",
    ),
    "unknown key in a file": (
        ["run", "good.jsonl", *PLAYED, "--config", "typo.yaml"],
        "error: typo.yaml:4: unknown key 'agent.limits.max_truns' (did you mean 'agent.limits.max_",
    ),
    "unknown key in a file for doctor": (
        ["doctor", "models", "--config", "typo.yaml"],
        "error: typo.yaml:4: unknown key 'agent.limits.max_truns'",
    ),
    "unknown key in a file for an environment": (
        ["env", "process", "gsm8k_python", "--model", "oracle", "--config", "typo.yaml"],
        "error: typo.yaml:4: unknown key 'agent.limits.max_truns'",
    ),
    "wrong value in a file": (
        ["run", "good.jsonl", *PLAYED, "--config", "kind.yaml"],
        "error: kind.yaml:2: 'run.concurrency' must be a whole number, not 'many'",
    ),
    "not YAML": (
        ["run", "good.jsonl", *PLAYED, "--config", "broken.yaml"],
        "error: broken.yaml:2: not valid YAML. Fix that line",
    ),
    "setting that is no pair": (
        ["run", "good.jsonl", *PLAYED, "--set", "foo"],
        "error: --set foo: write --set section.key=value",
    ),
    "missing configuration": (
        ["run", "good.jsonl", *PLAYED, "--config", "none.yaml"],
        "error: none.yaml: no such file or directory. Check --config",
    ),
    "nearly a configuration": (
        ["run", "good.jsonl", *PLAYED, "--config", "typpo.yaml"],
        "error: typpo.yaml: no such file or directory (did you mean 'typo.yaml'?). Check --config",
    ),
    "an endpoint that is not a section": (
        ["doctor", "models", "--config", "list.yaml"],
        "error: list.yaml: 'endpoint' is not a section. Put its keys below it",
    ),
    "number out of range": (
        ["run", "good.jsonl", *PLAYED, "--repeats", "0"],
        "error: --repeats 0: must be 1 or more, not 0",
    ),
    "negative temperature": (
        ["run", "good.jsonl", *PLAYED, "--temperature", "-1"],
        "error: --temperature -1.0: must be 0 or more, not -1.0",
    ),
    "text for a number": (
        ["run", "good.jsonl", *PLAYED, "--repeats", "x"],
        "error: Invalid value for '--repeats': must be a whole number. See hermes-rl run --help",
    ),
    "unknown option": (
        ["run", "good.jsonl", *PLAYED, "--repeat", "2"],
        "error: No such option: --repeat",
    ),
    "unknown command": (["shwo"], "error: no command 'shwo' (did you mean 'show'?). See hermes-rl"),
    "unknown option of no command": (
        ["--verison"],
        "error: no option '--verison' (did you mean '--version'?). See hermes-rl --help",
    ),
    "unknown command of env": (
        ["env", "evalute", "x"],
        "error: No such command 'evalute'. Did you mean 'evaluate'? See hermes-rl env --help",
    ),
    "unknown environment": (
        ["env", "process", "gsm8k", "--model", "oracle"],
        "error: unknown environment 'gsm8k' (did you mean 'gsm8k_python'?). Give package.module:",
    ),
    "unknown format": (
        ["export", "nothere", "--to", "shargpt"],
        "error: unknown format 'shargpt' (did you mean 'sharegpt'?)",
    ),
    "missing argument": (["show"], "error: Missing argument 'RUN'. See hermes-rl show --help"),
    "no run to show": (["show", "nothere"], "error: nothere is no run directory"),
    "no rows to check": (
        ["check", "good.jsonl", "--limit", "-1"],
        "error: Invalid value for '--limit': must be at least 1. See hermes-rl check --help",
    ),
    "no lines to show": (
        ["show", RUN, "--limit", "-1"],
        "error: Invalid value for '--limit': must be at least 0. See hermes-rl show --help",
    ),
    "a section as a value": (
        ["run", "good.jsonl", *PLAYED, "--set", "model=oracle"],
        "error: --set model=oracle: write --set section.key=value, such as model.name=NAME",
    ),
    "nearly a task to play": (
        ["play", "smoke", "write-notes"],
        "error: smoke: no task 'write-notes' (did you mean 'write-note'?)",
    ),
    "no toolset at all": (
        ["run", "good.jsonl", *PLAYED, "--toolsets", ","],
        "error: --toolsets names no toolset. Use none for an agent without tools",
    ),
    "YAML that is nested too deep": (
        ["run", "good.jsonl", *PLAYED, "--config", "deep.yaml"],
        "error: deep.yaml: nested too deep. Check --config",
    ),
    "a name that no file can have": (
        ["check", "x" * 300],
        f"error: {'x' * 80}…: file name too long. Check the path",
    ),
    "a run that no folder can be": (
        ["run", "good.jsonl", *PLAYED, "--out", "x" * 300],
        "file name too long. ",
    ),
    "workers of a demo": (
        ["demo", "--workers", "x"],
        "error: --workers x: must be a whole number from 0 on, or auto, not 'x'",
    ),
    "a Parquet page that is damaged": (
        ["check", "damaged.parquet"],
        "error: damaged.parquet: cannot be read (",
    ),
    "no run to grade again": (
        ["env", "regrade", "other"],
        "error: other is no run directory (no run.yaml). Give the path of a run",
    ),
    "no run to follow": (["status", "nothere"], "error: nothere is no run directory"),
    "unknown order": (["show", RUN, "--sort", "xx"], "error: --sort xx: choose one of row, "),
    "unknown subject": (
        ["doctor", "modls"],
        "error: Invalid value for 'subject': 'modls' is not one of 'all', 'sandboxes', 'models', "
        "'tools' (did you mean 'models'?). See hermes-rl doctor --help",
    ),
    "unknown task": (
        ["play", "smoke", "nosuch"],
        "error: smoke: no task 'nosuch' (there are: write-note, ",
    ),
    "no key named": (
        ["run", "good.jsonl", *KEYED],
        "error: no key for example.invalid: name the variable that holds it with --api-key-env",
    ),
    "key not set": (
        ["run", "good.jsonl", *KEYED, "--api-key-env", "MY_KEY"],
        "error: no key: the variable MY_KEY is not set. Set it, then run again",
    ),
    "out is a file": (
        ["run", "good.jsonl", *PLAYED, "--out", "good.jsonl"],
        "error: good.jsonl cannot be written: ",
    ),
    "out cannot be made": (
        ["run", "good.jsonl", *PLAYED, "--out", "/proc/run"],
        "error: /proc/run cannot be written: ",
    ),
    "out holds other files": (
        ["run", "good.jsonl", *PLAYED, "--out", "other"],
        "error: other holds other files (thesis.tex) and is no run directory. Choose another --out",
    ),
    "demo with somebody's key": (
        ["demo", "--model", "gpt-5-mini"],
        "error: --model gpt-5-mini: say where it is with --base-url URL, or name the variable",
    ),
}


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
    words, line = REFUSED[name]
    said = hermes(*words, cwd=folder)
    assert said.code == 2
    assert line in said.error
    assert said.out.count("\n") <= (words[0] == "demo"), "the demo names its first part"
    assert (folder / "other/thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("name", ["missing file", "unknown option", "unknown command"])
def test_a_process_says_the_same(name: str, folder: Path) -> None:
    words, _ = REFUSED[name]
    assert process(*words, cwd=folder) == hermes(*words, cwd=folder)


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


def test_a_bad_row_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "good"}\n{broken\n')
    said = hermes("run", "bad.jsonl", *PLAYED, *OUT, cwd=tmp_path)
    assert said.code == 1
    assert "run: 1/2 units done, not graded, 1 given up" in said.out
    assert "1 bad rows: see run/failures, or hermes-rl check" in said.out
    assert (
        "bad.jsonl:2: not valid JSON"
        in hermes("show", "run", "--failed", "--json", cwd=tmp_path).out
    )


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


def test_a_run_of_a_newer_version(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    epoch = tmp_path / RUN / "epochs/1.json"
    epoch.write_text(json.dumps({**json.loads(epoch.read_text()), "schema_version": 99}))
    for words in (["run", "smoke", *PLAYED], ["show", RUN], ["status", RUN], ["check", RUN]):
        said = hermes(*words, cwd=tmp_path)
        assert said.code == 2
        assert said.error.startswith("error: ")
        assert f"{RUN} was written by a newer hermes_rl (schema 99" in said.error
        assert "Upgrade hermes_rl" in said.error


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
    ("fault", "words", "mend"),
    [
        ("auth", (), "Name the variable that holds the key (--api-key-env NAME)"),
        ("auth", ("--api-key-env", "MY_KEY"), "Set MY_KEY"),
        ("billing", (), "Fix the billing of the account"),
        ("not_found", (), "Correct --model or --base-url"),
    ],
)
def test_a_refusing_endpoint_stops_the_run_at_once(
    fault: str, words: tuple[str, ...], mend: str, tmp_path: Path, base_url: str
) -> None:
    rows = [scripted(f"t{n}", {"text": "", "fault": fault}) for n in range(4)]
    write(tmp_path / "my.jsonl", *rows)
    endpoint = ("--model", "m", "--base-url", base_url, "--workers", "0", *words)
    key = {"MY_KEY": "sk-not-the-right-one"}
    said = hermes("run", "my.jsonl", *endpoint, *OUT, cwd=tmp_path, env=key)
    assert said.code == 3
    last = said.out.splitlines()[-1]
    assert re.match(r"stopped: 40\d from 127\.0\.0\.1:\d+ .*, \d units tried\. ", last)
    assert last.endswith(f". {mend}{RUN_AGAIN}")
    assert key["MY_KEY"] not in said.out + said.err
    status = hermes("status", "run", "--json", cwd=tmp_path).json()
    assert (status["done"], status["given_up"]) == (0, 0)
