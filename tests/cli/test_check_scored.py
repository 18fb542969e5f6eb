"""`check --run` on rows with `score`: oracles are answers, forged answers earn 0."""

import json
from pathlib import Path

from cli_runner import ORACLE, run_cli, write_rows

from hermes_rl.store import load_run


def test_forged_answers_are_played(tmp_path: Path) -> None:
    prompt = "Is the sky red or blue? Answer: blue or red"
    sound = {"type": "includes", "target": "blue", "excludes": ["red"]}
    rows = [
        {"id": "sound", "prompt": prompt, "score": sound, "oracle": "It is blue, isn't it?"},
        {"id": "open", "prompt": prompt, "score": {"type": "includes", "target": "blue"}},
        {"id": "judged", "prompt": prompt, "score": {"type": "judge", "rubric": "Is it?"}},
    ]
    write_rows(tmp_path / "qa.jsonl", *rows)
    result = run_cli("check", "qa.jsonl", "--run", "--json", cwd=tmp_path)
    found = result.json()
    assert result.code == 2
    assert (found["bad"], found["verified"], found["oracles"]) == ([], 3, 1)
    played = found["played"]
    assert (played["oracle"]["wrong"], played["no-op"]["wrong"]) == ([], [])
    assert played["forged answers"]["tasks"] == 2, "judges cost money: they are left out"
    assert played["forged answers"]["wrong"] == [
        "open (repeats the prompt): reward 1.0, wanted 0.0"
    ]


def test_a_bad_score_is_reported_with_its_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "qa.jsonl", {"prompt": "x", "score": {"type": "exakt", "target": "y"}})
    result = run_cli("check", "qa.jsonl", cwd=tmp_path)
    assert result.code == 2
    assert result.error.startswith("error: qa.jsonl:1: 'score.type' is 'exakt' (known: exact, ")


def test_rows_that_no_answer_or_any_answer_solves_are_named(tmp_path: Path) -> None:
    rows = [
        *({"type": "math", "target": target} for target in (r"\frac{1}{", "1=2", "x=2")),
        *({"type": "code", "tests": tests} for tests in ("assert True", "# later", "f() or True")),
    ]
    lines = [json.dumps({"prompt": f"p{n}", "score": score}) for n, score in enumerate(rows)]
    lines += ['{"prompt": "a", "metadata": {"k": 1, "k": 2}}', '{"prompt": "a", "prompt": "b"}']
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    result = run_cli("check", "qa.jsonl", cwd=tmp_path)
    assert result.code == 2
    why = "is not an expression that can be read"
    assert result.err.splitlines() == [
        rf"error: qa.jsonl:1: the target '\\frac{{1}}{{' of 'score' (math) {why}",
        f"error: qa.jsonl:2: the target '1=2' of 'score' (math) {why}",
        "error: qa.jsonl:4: 'score.tests' do not use the answer: any code would pass them",
        "error: qa.jsonl:5: 'score.tests' do not use the answer: any code would pass them",
        "error: qa.jsonl:7: duplicate key 'k'. Remove one of the two",
        "error: qa.jsonl:8: duplicate key 'prompt'. Remove one of the two",
    ]
    refused = run_cli("eval", "qa.jsonl", "--model", "noop", cwd=tmp_path)
    assert refused.error == "error: qa.jsonl:7: duplicate key 'k'. Remove one of the two"
    (tmp_path / "qa.jsonl").write_text(lines[-1])
    run_cli("run", "qa.jsonl", *ORACLE, "--toolsets", "none", cwd=tmp_path)
    (error,) = load_run(tmp_path / "runs/qa-oracle").failures.error
    assert error.endswith("qa.jsonl:1: duplicate key 'prompt'. Remove one of the two")
