"""Problems by seed, formats of numbers, and rewards."""

import io
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checks import Attempt, cheats, check_stream, failed_attempts
from fake_hub import fake_hub
from hypothesis import given
from hypothesis import strategies as st

from environments.gsm8k_python.answers import is_correct, parse_answer
from environments.gsm8k_python.problems import FAMILIES, format_number, problems
from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.rl import Task, rewards_of, settle_env
from hermes_rl.store import load_run

NAME = "gsm8k_python"
RUN = [sys.executable, "-m", f"environments.{NAME}", "process", "--model", "oracle", "--limit", "1"]


def oracle_steps(*steps: object) -> str:
    return json.dumps(list(steps))


def off_by_one(task: Task) -> str:
    return oracle_steps(f"#### {Fraction(task.metadata['answer']) + 1}")


def python_call(code: str) -> dict[str, object]:
    return {"calls": [{"name": "python", "arguments": {"code": code}}]}


def test_only_the_right_number_in_the_last_answer_gets_a_reward() -> None:
    def answer(task: Task) -> str:
        return str(task.metadata["answer"])

    attempts = [
        Attempt("oracle", lambda t: str(t.oracle), 1.0),
        Attempt(
            "with a currency sign", lambda t: oracle_steps(f"So:\n #### ${answer(t)} in all."), 1.0
        ),
        Attempt("corrected", lambda t: oracle_steps(f"#### 7\nno:\n#### {answer(t)}"), 1.0),
        Attempt(
            "computed and not answered",
            lambda t: oracle_steps(python_call(f"print({answer(t)})"), "Done."),
            0.0,
        ),
        Attempt(
            "printed with the mark",
            lambda t: oracle_steps(python_call(f"print('#### {answer(t)}')"), "See."),
            0,
        ),
        Attempt(
            "halfway", lambda t: oracle_steps("The first step is done, the second one is not."), 0.0
        ),
        Attempt("off by one", off_by_one, 0.0),
        Attempt("two numbers", lambda t: oracle_steps(f"#### {answer(t)} or 12"), 0.0),
        Attempt("the number without its mark", lambda t: oracle_steps(f"It is {answer(t)}."), 0.0),
        Attempt(
            "a program that fails", lambda t: oracle_steps(python_call("1/0"), "#### NUMBER"), 0.0
        ),
        *cheats(tasks=2),
    ]
    assert failed_attempts(NAME, attempts, config={"toolsets": ["terminal"]}) == {}


def test_the_oracle_solves_what_is_held_out_too() -> None:
    assert rewards_of(NAME, "oracle", tasks=10, split="eval") == [1.0] * 10


def test_doing_nothing_earns_nothing() -> None:
    assert rewards_of(NAME, "noop", tasks=2, split="eval") == [0.0, 0.0]


@pytest.mark.slow
def test_the_problem_stream_is_deterministic_and_its_splits_are_disjoint() -> None:
    check_stream(NAME)


def test_every_family_is_drawn_and_its_answers_can_be_formatted() -> None:
    stream = problems("train", 3)
    drawn = [next(stream) for _ in range(400)]
    assert {p.family for p in drawn} == set(FAMILIES)
    assert all(is_correct(parse_answer(f"#### {format_number(p.answer)}"), p.answer) for p in drawn)
    assert all(p.answer >= 0 for p in drawn)


@given(st.fractions(-(10**9), 10**9, max_denominator=1), st.integers(0, 99))
def test_a_formatted_number_is_parsed_back(whole: Fraction, cents: int) -> None:
    value = whole + Fraction(cents, 100)
    grouped = f"{float(value):,.2f}"
    assert parse_answer(f"#### {format_number(value)}") == value
    assert parse_answer(f"The answer:\n  ####{grouped}.") == value


@given(st.text())
def test_any_text_is_parsed_without_an_error(text: str) -> None:
    parse_answer(text)
    parse_answer(f"#### {text}")


def test_a_hyphen_and_a_minus_sign_are_equal() -> None:
    assert parse_answer("#### -5") == parse_answer("#### \N{MINUS SIGN}5") == Fraction(-5)


@pytest.mark.parametrize("text", ["", "12", "####", "#### 1/2", "#### 1e5", "#### 12 13", "#### x"])
def test_lines_without_exactly_one_number_are_refused(text: str) -> None:
    assert parse_answer(text) is None or not is_correct(parse_answer(text), Fraction(12))


def test_without_a_hub_one_line_names_the_remedy(tmp_path: Path) -> None:
    """The command is `python -m environments.gsm8k_python`."""
    done = subprocess.run(
        [*RUN, "--set", "env.config.source=hub", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "openai/gsm8k" in done.stderr
    assert "leave env.config.source at generated" in done.stderr


def test_only_the_generated_problems_are_endless() -> None:
    run = {"model": {"name": "oracle"}, "env": {"name": NAME}}
    with pytest.raises(UserError, match="has endless tasks"):
        settle_env(parse_config(run))
    config, _ = settle_env(
        parse_config({**run, "env": {"name": NAME, "config": {"source": "hub"}}})
    )
    assert config.dataset.limit is None


CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
ROWS = {
    "main/train": [("How much is 2 + 2?", "It is <<2+2=4>>4.\n#### 4")],
    "main/test": [
        ("How many in all?", "1,000 and 5.\n#### 1,005"),
        ("What does it cost?", "Half of 7.\n#### 3.50"),
        ("What is left?", "Unknown.\n#### none"),
        ("How cold is it?", "Below.\n#### -10"),
    ],
    "socratic/train": [("Another one?", "#### 1")],
}


def repository() -> dict[str, bytes]:
    """Files like those of the real dataset."""
    files = {"README.md": CARD}
    for name, rows in ROWS.items():
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([{"question": q, "answer": a} for q, a in rows]), file)
        files[f"{name}-00000-of-00001.parquet"] = file.getvalue()
    return files


@pytest.mark.slow
def test_the_dataset_is_read_from_a_hub(tmp_path: Path) -> None:
    """A row without a number is left out."""
    found = {}
    with fake_hub("openai/gsm8k", repository()) as address:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": address}
        for mode in ("process", "evaluate"):
            out = tmp_path / mode
            where = ("--set", "env.config.source=hub", "--out", str(out), "--workers", "0")
            command = [*RUN[:3], mode, "--model", "oracle", *where]
            done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
            assert done.returncode == 0, done.stderr
            found[mode] = load_run(out).trajectories
    assert list(found["process"]["task_id"]) == ["train-0"] * 4
    assert set(found["process"]["task_prompt"].str.partition("\n")[0]) == {"How much is 2 + 2?"}
    held = found["evaluate"].sort_values("row_index")
    assert list(held["task_id"]) == ["eval-0", "eval-1", "eval-3"]
    assert list(held["final_response"]) == ["#### 1005", "#### 3.5", "#### -10"]
    assert set(held["reward"]) == set(found["process"]["reward"]) == {1.0}
