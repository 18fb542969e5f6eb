"""Output of `check RUN --tokens` and `--masks`: verdicts, the warning, several templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import check, rewrite_table, run_scripts, start_engine

from batch_runner import exact_lines
from hermes_rl.store import Ledger, Summary, compute_stats

SCRIPTS: list[list[Any]] = [
    [{"text": "look", "run": "echo some words"}, {"text": "again", "run": "echo more"}, "done"],
    [{"text": "one"}],
]
REFUSES = "{{ raise_exception('roles must alternate') }}"
OTHERWISE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
"""The generation prompt differs from the turn that it renders later, so no mask can be found."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explained")


@pytest.fixture
async def finished_run(folder: Path) -> Path:
    """A run by chat on an engine that samples canonical tokens; made once."""
    run = folder / "run"
    if not run.exists():
        async with start_engine(folder, split="canonical") as engine:
            await run_scripts(engine, folder, SCRIPTS, "chat")
    return run


def template(folder: Path, into: Path, source: str | None) -> str:
    """Copy the tokenizer, with another template unless `source` is None."""
    into.mkdir()
    for path in (folder / "tokenizer").iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    if source is not None:
        (into / "chat_template.jinja").write_text(source, encoding="utf-8")
    return str(into)


async def test_canonical_histories_are_identical(finished_run, capsys):
    code, out, err = check(finished_run, "--tokens", capsys=capsys)
    assert (code, err) == (0, "")
    *rows, total = out.splitlines()
    first, second = sorted(rows)
    assert first.startswith("t0 #0 branch 0 (main): turns 1-3")
    assert second.startswith("t1 #0 branch 0 (main): turn 1")
    assert first.endswith("ids trained, identical")
    assert second.endswith("ids trained, identical")
    assert "0 of 2 histories forked (0.0%)" in total
    code, out, _ = check(finished_run, "--tokens", "--json", capsys=capsys)
    tokens = json.loads(out)["tokens"]
    assert [row["verdict"] for row in tokens["rows"]] == ["identical", "identical"]
    assert tokens["fork_rate"] == 0.0


def forked(followed: int, of: int) -> Any:
    def change(rows: list[Any]) -> None:
        for row in rows:
            known = {pair["name"]: pair["value"] for pair in row["metrics"]}
            known |= {"followed_calls": 0.0, "forked_calls": 0.0}
            if row["task_id"] == "t0":
                known |= {"followed_calls": float(of), "forked_calls": float(followed)}
            row["metrics"] = [{"name": n, "value": v} for n, v in sorted(known.items())]

    return change


@pytest.mark.parametrize(("forks", "of"), [(1, 20), (5, 100), (1, 19), (51, 1000)])
async def test_more_than_five_percent_of_forks_cause_a_warning(
    finished_run, forks, of, tmp_path, capsys
):
    run = rewrite_table(finished_run, tmp_path / "run", "trajectories", forked(forks, of))
    code, out, err = check(run, "--tokens", capsys=capsys)
    assert code == 0
    assert f"{forks} of {of:,} histories forked" in out
    warned = "warning: more than 5% of histories forked\n"
    assert err == (warned if forks / of > 0.05 else "")
    counts = {"captured_calls": of, "followed_calls": of, "forked_calls": forks}
    stats = compute_stats(Summary(counts=counts), Ledger(), {})
    lines = exact_lines(stats["exact_tokens"], "runs/rl")
    assert any("many histories drift" in line for line in lines) == (forks / of > 0.05)


async def test_masks_of_several_templates_each_have_a_line(finished_run, folder, tmp_path, capsys):
    sampled, refuses = str(folder / "tokenizer"), template(folder, tmp_path / "refuses", REFUSES)
    arguments = (str(finished_run), "--masks", "--tokenizer", sampled, "--tokenizer", refuses)
    code, out, err = check(*arguments, capsys=capsys)
    assert code == 2
    assert err == (
        f"error: {refuses}: 4 of 4 messages: the chat template refuses this conversation: "
        "TemplateError: roles must alternate\n"
    )
    recorded, first, second = out.splitlines()
    assert recorded.startswith("recorded ids: 100.0% masked in")
    assert recorded.endswith("4 of 4 messages, 4 compared by text; no faults")
    assert first.startswith(f"{sampled}: 100.0% masked in")
    assert first.endswith("no faults")
    assert second.startswith(f"{refuses}: no assistant tokens, 0 of 0 assistant tokens, 0 of 4")
    assert second.endswith("1 faults")


async def test_a_template_with_empty_masks_is_an_error(finished_run, folder, tmp_path, capsys):
    bare = template(folder, tmp_path / "bare", OTHERWISE)
    code, _, err = check(finished_run, "--masks", "--tokenizer", bare, capsys=capsys)
    assert code == 2
    assert f"error: {bare}: no assistant token is masked in: training learns nothing" in err


async def test_an_invalid_or_absent_template_is_reported_in_one_line(
    finished_run, folder, tmp_path, capsys
):
    broken = template(folder, tmp_path / "broken", "{% for m in messages %}")
    for arguments in (["--tokenizer", broken], ["--tokenizer", str(tmp_path / "absent")]):
        code, out, err = check(finished_run, "--masks", *arguments, capsys=capsys)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1


async def test_rows_of_two_models_need_both_tokenizers(finished_run, folder, tmp_path, capsys):
    """Rows of another tokenizer than the named ones are an error."""
    sampled = folder / "tokenizer"
    other = tmp_path / "other"
    template(folder, other, None)
    text = (sampled / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text + "\n", encoding="utf-8")  # another hash
    hashes = {place: _hash(place) for place in (sampled, other)}

    def change(rows: list[Any]) -> None:
        for row in rows:
            row["tokenizer_hash"] = hashes[sampled if row["task_id"] == "t0" else other]

    run = rewrite_table(finished_run, tmp_path / "run", "segments", change)
    both = ("--tokenizer", str(sampled), "--tokenizer", str(other))
    for look in ("--tokens", "--masks"):
        code, out, err = check(run, look, *both, capsys=capsys)
        assert (code, err) == (0, ""), out
    code, _, err = check(run, "--tokens", *both[:2], capsys=capsys)
    assert code == 2
    assert err == (
        "error: t1 #0: branch 0 was made with another tokenizer than those that are named\n"
    )
    code, _, err = check(run, "--masks", *both[:2], capsys=capsys)
    assert code == 2
    assert err.startswith("error: recorded ids: 1 of 4 messages: made with another tokenizer")


def _hash(folder: Path) -> str:
    from hermes_rl.models.tokens import load_renderer

    return load_renderer(folder).tokenizer_hash
