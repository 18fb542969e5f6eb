"""Problems by seed, numbers as people write them, and what earns a reward."""

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
from env_kit import Play, cheats, check_stream, wrong
from fake_hub import fake_hub
from hypothesis import given
from hypothesis import strategies as st

from environments.gsm8k_python.answers import same, stated
from environments.gsm8k_python.problems import FAMILIES, problems, written
from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.rl import Task, rewards_of, settle_env
from hermes_rl.store import load_run

NAME = "gsm8k_python"
RUN = [sys.executable, "-m", f"environments.{NAME}", "process", "--model", "oracle", "--limit", "1"]


def says(*steps: object) -> str:
    return json.dumps(list(steps))


def off_by_one(task: Task) -> str:
    return says(f"#### {Fraction(task.metadata['answer']) + 1}")


def ran(code: str) -> dict[str, object]:
    return {"calls": [{"name": "python", "arguments": {"code": code}}]}


def test_only_the_right_number_in_the_last_answer_earns_a_reward() -> None:
    def answer(task: Task) -> str:
        return str(task.metadata["answer"])

    plays = [
        Play("oracle", lambda t: str(t.oracle), 1.0),
        Play("written as people do", lambda t: says(f"So:\n #### ${answer(t)} in all."), 1.0),
        Play("corrected", lambda t: says(f"#### 7\nno:\n#### {answer(t)}"), 1.0),
        Play("computed and never said", lambda t: says(ran(f"print({answer(t)})"), "Done."), 0.0),
        Play("printed with the mark", lambda t: says(ran(f"print('#### {answer(t)}')"), "See."), 0),
        Play("halfway", lambda t: says("The first step is done, the second one is not."), 0.0),
        Play("off by one", off_by_one, 0.0),
        Play("two numbers", lambda t: says(f"#### {answer(t)} or 12"), 0.0),
        Play("the number without its mark", lambda t: says(f"It is {answer(t)}."), 0.0),
        Play("a program that fails", lambda t: says(ran("1/0"), "#### NUMBER"), 0.0),
        *cheats(tasks=2),
    ]
    assert wrong(NAME, plays, config={"toolsets": ["terminal"]}) == {}


def test_the_oracle_solves_what_is_held_out_too() -> None:
    assert rewards_of(NAME, "oracle", tasks=10, split="eval") == [1.0] * 10


def test_doing_nothing_earns_nothing() -> None:
    assert rewards_of(NAME, "noop", tasks=2, split="eval") == [0.0, 0.0]


@pytest.mark.slow
def test_a_thousand_problems_per_seed() -> None:
    check_stream(NAME)


def test_every_kind_of_problem_is_drawn_and_its_answer_can_be_written() -> None:
    stream = problems("train", 3)
    drawn = [next(stream) for _ in range(400)]
    assert {p.family for p in drawn} == set(FAMILIES)
    assert all(same(stated(f"#### {written(p.answer)}"), p.answer) for p in drawn)
    assert all(p.answer >= 0 for p in drawn)


@given(st.fractions(-(10**9), 10**9, max_denominator=1), st.integers(0, 99))
def test_a_written_number_is_read_back(whole: Fraction, cents: int) -> None:
    value = whole + Fraction(cents, 100)
    grouped = f"{float(value):,.2f}"
    assert stated(f"#### {written(value)}") == value
    assert stated(f"The answer:\n  ####{grouped}.") == value


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    stated(text)
    stated(f"#### {text}")


def test_a_minus_is_one_however_it_is_written() -> None:
    assert stated("#### -5") == stated("#### \N{MINUS SIGN}5") == Fraction(-5)


@pytest.mark.parametrize("text", ["", "12", "####", "#### 1/2", "#### 1e5", "#### 12 13", "#### x"])
def test_what_states_no_number(text: str) -> None:
    assert stated(text) is None or not same(stated(text), Fraction(12))


def test_without_a_hub_one_line_says_what_to_do(tmp_path: Path) -> None:
    """As a user types it, `python -m` too."""
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


def test_only_the_generated_problems_have_no_end() -> None:
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
        ("What is left?", "Nobody knows.\n#### none"),
        ("How cold is it?", "Below.\n#### -10"),
    ],
    "socratic/train": [("Another one?", "#### 1")],
}


def repository() -> dict[str, bytes]:
    """Files as in the real data set."""
    files = {"README.md": CARD}
    for name, rows in ROWS.items():
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([{"question": q, "answer": a} for q, a in rows]), file)
        files[f"{name}-00000-of-00001.parquet"] = file.getvalue()
    return files


@pytest.mark.slow
def test_the_real_data_set_is_read_from_a_hub(tmp_path: Path) -> None:
    """A row without a number is left out; numbers are read as people write them."""
    found = {}
    with fake_hub("openai/gsm8k", repository()) as address:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": address}
        for mode in ("process", "evaluate"):
            out = tmp_path / mode
            where = ("--set", "env.config.source=hub", "--out", str(out), "--workers", "0")
            asked = [*RUN[:3], mode, "--model", "oracle", *where]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=180, env=env)
            assert done.returncode == 0, done.stderr
            found[mode] = load_run(out).trajectories
    assert list(found["process"]["task_id"]) == ["train-0"] * 4
    assert set(found["process"]["task_prompt"].str.partition("\n")[0]) == {"How much is 2 + 2?"}
    held = found["evaluate"].sort_values("row_index")
    assert list(held["task_id"]) == ["eval-0", "eval-1", "eval-3"]
    assert list(held["final_response"]) == ["#### 1005", "#### 3.5", "#### -10"]
    assert set(held["reward"]) == set(found["process"]["reward"]) == {1.0}
