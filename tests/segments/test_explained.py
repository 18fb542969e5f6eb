"""What `check RUN --tokens` and `--masks` say: the verdicts, the warning and its bound, several
templates, and templates that fail."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_kit import engine_in, rewritten, run_on

from batch_runner import exact_lines
from hermes_rl.cli import main
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
"""It opens a turn otherwise than it writes it later: no mask can be found by what comes behind."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explained")


@pytest.fixture
async def made(folder: Path) -> Path:
    """A run by chat on an engine that samples as its tokenizer would write; made once."""
    run = folder / "run"
    if not run.exists():
        async with engine_in(folder, split="canonical") as engine:
            await run_on(engine, folder, SCRIPTS, "chat")
    return run


def checked(*words: str, capsys: Any) -> tuple[int, str, str]:
    code = main(["check", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def template(folder: Path, into: Path, source: str | None) -> str:
    """The same tokenizer, with another template where one is given."""
    into.mkdir()
    for path in (folder / "tokenizer").iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    if source is not None:
        (into / "chat_template.jinja").write_text(source, encoding="utf-8")
    return str(into)


async def test_a_history_that_a_server_renders_as_it_was_sampled_is_identical(made, capsys):
    code, out, err = checked(str(made), "--tokens", capsys=capsys)
    assert (code, err) == (0, "")
    *rows, total = out.splitlines()
    first, second = sorted(rows)
    assert first.startswith("t0 #0 branch 0 (main): turns 1-3")
    assert second.startswith("t1 #0 branch 0 (main): turn 1")
    assert first.endswith("ids trained, identical")
    assert second.endswith("ids trained, identical")
    assert "0 of 2 histories forked (0.0%)" in total
    code, out, _ = checked(str(made), "--tokens", "--json", capsys=capsys)
    told = json.loads(out)["tokens"]
    assert [row["verdict"] for row in told["rows"]] == ["identical", "identical"]
    assert told["fork_rate"] == 0.0


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
async def test_the_warning_begins_above_five_percent(made, forks, of, tmp_path, capsys):
    run = rewritten(made, tmp_path / "run", "trajectories", forked(forks, of))
    code, out, err = checked(str(run), "--tokens", capsys=capsys)
    assert code == 0
    assert f"{forks} of {of:,} histories forked" in out
    warned = "warning: more than 5% of histories forked\n"
    assert err == (warned if forks / of > 0.05 else "")
    counts = {"captured_calls": of, "followed_calls": of, "forked_calls": forks}
    stats = compute_stats(Summary(counts=counts), Ledger(), {})
    lines = exact_lines(stats["exact_tokens"], "runs/rl")
    assert any("many histories drift" in line for line in lines) == (forks / of > 0.05)


async def test_masks_of_several_templates_each_have_a_line(made, folder, tmp_path, capsys):
    own, refuses = str(folder / "tokenizer"), template(folder, tmp_path / "refuses", REFUSES)
    words = (str(made), "--masks", "--tokenizer", own, "--tokenizer", refuses)
    code, out, err = checked(*words, capsys=capsys)
    assert code == 2
    assert err == (
        f"error: {refuses}: 4 of 4 messages: the chat template refuses this conversation: "
        "TemplateError: roles must alternate\n"
    )
    recorded, first, second = out.splitlines()
    assert recorded.startswith("recorded ids: 100.0% masked in")
    assert recorded.endswith("4 of 4 messages, 4 compared by text; no faults")
    assert first.startswith(f"{own}: 100.0% masked in")
    assert first.endswith("no faults")
    assert second.startswith(f"{refuses}: no assistant tokens, 0 of 0 assistant tokens, 0 of 4")
    assert second.endswith("1 faults")


async def test_a_template_whose_masks_are_empty_teaches_nothing(made, folder, tmp_path, capsys):
    bare = template(folder, tmp_path / "bare", OTHERWISE)
    code, _, err = checked(str(made), "--masks", "--tokenizer", bare, capsys=capsys)
    assert code == 2
    assert f"error: {bare}: no assistant token is masked in: training learns nothing" in err


async def test_a_template_that_is_none_is_one_line(made, folder, tmp_path, capsys):
    broken = template(folder, tmp_path / "broken", "{% for m in messages %}")
    for words in (["--tokenizer", broken], ["--tokenizer", str(tmp_path / "absent")]):
        code, out, err = checked(str(made), "--masks", *words, capsys=capsys)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1


async def test_rows_of_two_models_are_read_with_the_tokenizer_of_each(
    made, folder, tmp_path, capsys
):
    """A run whose rows were made with two tokenizers: one of them named is not enough."""
    own = folder / "tokenizer"
    other = tmp_path / "other"
    template(folder, other, None)
    text = (own / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text + "\n", encoding="utf-8")  # of another hash
    hashes = {place: _hash(place) for place in (own, other)}

    def change(rows: list[Any]) -> None:
        for row in rows:
            row["tokenizer_hash"] = hashes[own if row["task_id"] == "t0" else other]

    run = rewritten(made, tmp_path / "run", "segments", change)
    both = ("--tokenizer", str(own), "--tokenizer", str(other))
    for look in ("--tokens", "--masks"):
        code, out, err = checked(str(run), look, *both, capsys=capsys)
        assert (code, err) == (0, ""), out
    code, _, err = checked(str(run), "--tokens", *both[:2], capsys=capsys)
    assert code == 2
    assert err == (
        "error: t1 #0: branch 0 was made with another tokenizer than those that are named\n"
    )
    code, _, err = checked(str(run), "--masks", *both[:2], capsys=capsys)
    assert code == 2
    assert err.startswith("error: recorded ids: 1 of 4 messages: made with another tokenizer")


def _hash(folder: Path) -> str:
    from hermes_rl.models.tokens import load_renderer

    return load_renderer(folder).tokenizer_hash
