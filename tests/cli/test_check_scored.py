"""`check --run` on rows with `score`: oracles are answers, forged answers earn 0."""

from pathlib import Path

from cli_runner import run_cli, write_rows


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
