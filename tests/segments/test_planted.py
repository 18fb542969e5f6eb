"""The bugs that exact tokens exist against, planted into the files of a finished run.

`check RUN --tokens` has the rows and the books, the sampler's log has the truth. What only the log
can see is said here, and in docs/exact-tokens.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from run_kit import differences, engine_in, rewritten, run_on, served

from hermes_rl.cli import main
from hermes_rl.models.tokens import load_renderer
from hermes_rl.segments import runs_of
from hermes_rl.testing import Truth

Row = dict[str, Any]
Answer = list[tuple[int, float]]
"""Ids and their logprobs."""

SCRIPTS: list[list[Any]] = [
    [{"reasoning": "let me look at it", "run": "echo words"}, {"run": "echo more"}, "so it is"],
    [{"text": "two words ", "run": "echo more"}, {"text": "the end of it"}],
    [[{"run": "echo lost", "fault": "reset"}, {"run": "echo kept"}], "done with it"],
    [{"plain": "I write a sentence of my own and stop."}],
]


@dataclass
class Made:
    """A run whose histories fork, and what its engine knows of it."""

    folder: Path
    truth: list[Truth] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def renderer(self) -> Any:
        return load_renderer(self.folder / "tokenizer")


_MADE: list[Made] = []


@pytest.fixture
async def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Made once."""
    if not _MADE:
        one = Made(tmp_path_factory.mktemp("planted"))
        async with engine_in(one.folder) as engine:
            await run_on(engine, one.folder, SCRIPTS * 2, "chat")
            one.truth += engine.truth
        _MADE.append(one)
    return _MADE[0]


def spelled(rows: Sequence[Row], how: Callable[[Answer], Answer]) -> None:
    """Each trained answer in another way, and all that stands beside it in the row with it."""
    for row in rows:
        for part in reversed([run for run in runs_of(row) if run.trained]):
            place = slice(part.start, part.end)
            told = how(list(zip(row["input_ids"][place], row["logprobs"][place], strict=True)))
            for name in ("loss_mask", "sampled_mask", "turn_ids", "version_ids"):
                row[name][place] = [row[name][part.start]] * len(told)
            row["input_ids"][place] = [one for one, _ in told]
            row["logprobs"][place] = [value for _, value in told]
            more = len(told) - (part.end - part.start)
            row["call_starts"] = [s + more if s > part.start else s for s in row["call_starts"]]
        row["n_sampled"] = sum(row["sampled_mask"])


def retokenise(rows: list[Row], made: Made) -> None:
    def again(answer: Answer) -> Answer:
        ids = made.renderer.tokenizer.encode(made.renderer.decode([one for one, _ in answer]))
        return [(one, -1.0) for one in ids]

    spelled(rows, again)


def drop_the_end(rows: list[Row], made: Made) -> None:
    spelled(rows, lambda answer: answer[:-1])


def double_the_beginning(rows: list[Row], made: Made) -> None:
    for row in rows:
        for name in (*_OF_TOKENS, "logprobs"):
            row[name].insert(0, row[name][0])
        row["prompt_len"] += 1
        row["call_starts"] = [start + 1 for start in row["call_starts"]]


_OF_TOKENS = ("input_ids", "loss_mask", "sampled_mask", "turn_ids", "version_ids")


def swap_two(rows: list[Row], made: Made) -> None:
    """The answers of rollouts that were under way at the same time."""
    single = [row for row in rows if len(row["call_ids"]) == 1 and row["parent_branch"] is None]
    one = next(row for row in single if row["finish_reasons"] == ["stop"])
    other = next(row for row in single if row["n_sampled"] != one["n_sampled"])
    (mine,), (theirs,) = (
        [_answer(row, run) for run in runs_of(row) if run.trained] for row in (one, other)
    )
    spelled([one], lambda _: theirs)
    spelled([other], lambda _: mine)


def _answer(row: Row, run: Any) -> Answer:
    place = slice(run.start, run.end)
    return list(zip(row["input_ids"][place], row["logprobs"][place], strict=True))


def count_a_retry(rows: list[Row], made: Made) -> None:
    """The answer of a request that was lost, and sent again by an SDK, is counted as well."""
    lost = next(entry for entry in made.truth if entry.outcome == "cut" and entry.sampled_ids)
    before = list(zip(lost.sampled_ids, lost.raw_logprobs, strict=True))
    again = [row for row in rows if tuple(row["input_ids"][: row["prompt_len"]]) == lost.prompt_ids]
    assert again
    spelled(again[:1], lambda answer: before + answer)


def strip_control_tokens(rows: list[Row], made: Made) -> None:
    control = {token.id for token in made.renderer.tokenizer.added}
    spelled(rows, lambda answer: [pair for pair in answer if pair[0] not in control])


def train_a_beginning_twice(rows: list[Row], made: Made) -> None:
    assert any(row["loss_mask"] != row["sampled_mask"] for row in rows)
    for row in rows:
        row["loss_mask"] = row["sampled_mask"]


def shift_logprobs(rows: list[Row], made: Made) -> None:
    spelled(
        rows,
        lambda answer: [(a[0], b[1]) for a, b in zip(answer, answer[1:] + answer[:1], strict=True)],
    )


SEEN = [
    (retokenise, "sampled ids, but the server counted"),
    (drop_the_end, "sampled ids, but the server counted"),
    (double_the_beginning, "but the server counted"),
    (swap_two, "sampled ids, but the server counted"),
    (count_a_retry, "sampled ids, but the server counted"),
    (strip_control_tokens, "sampled ids, but the server counted"),
    (train_a_beginning_twice, "is trained 2 times"),
]


def checked(run: Path, *words: str, capsys: Any) -> tuple[int, str]:
    code = main(["check", str(run), "--tokens", *words])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("plant", "fault"), SEEN, ids=[plant.__name__ for plant, _ in SEEN])
async def test_the_check_of_a_finished_run_sees_it_and_so_does_the_log(
    made, plant, fault, tmp_path, capsys
):
    run = rewritten(made.run, tmp_path / "run", "segments", lambda rows: plant(rows, made))
    code, said = checked(run, capsys=capsys)  # without a tokenizer too
    assert code == 2
    assert fault in said
    assert differences(run, served(made.truth, made.run))


async def test_as_it_was_made_there_is_nothing_to_see(made, tmp_path, capsys):
    run = rewritten(made.run, tmp_path / "run", "segments", lambda rows: None)
    assert checked(run, "--tokenizer", str(made.folder / "tokenizer"), capsys=capsys)[0] == 0
    assert differences(run, served(made.truth, made.run)) == []


async def test_shifted_logprobs_are_seen_by_the_engines_log_alone(made, tmp_path, capsys):
    """Numbers that are all plausible, as many as there are ids."""
    run = rewritten(made.run, tmp_path / "run", "segments", lambda rows: shift_logprobs(rows, made))
    assert checked(run, "--tokenizer", str(made.folder / "tokenizer"), capsys=capsys)[0] == 0
    found = differences(run, served(made.truth, made.run))
    assert found
    assert all("other logprobs" in line for line in found)


async def test_a_penalty_beside_raw_logprobs_is_never_trained_and_seen_where_it_would_be(
    tmp_path, capsys
):
    """A field of the user's own for every request."""
    async with engine_in(tmp_path) as engine:
        extra = {"repetition_penalty": 1.3}
        report = await run_on(engine, tmp_path, SCRIPTS[1:2], "chat", extra_body=extra)
    told = capsys.readouterr().err
    assert "nothing will be trainable: logprobs are of the model before repetition_penalty" in told
    exact = report.stats["exact_tokens"]
    assert (exact["trainable"], exact["trained_tokens"]) == (0, 0)
    assert checked(tmp_path / "run", capsys=capsys)[0] == 0

    def train(rows: list[Row]) -> None:
        for row in rows:
            assert (row["logprobs_kind"], row["exclude_reason"]) == ("raw", "raw_logprobs")
            row["trainable"], row["exclude_reason"] = True, None

    run = rewritten(tmp_path / "run", tmp_path / "planted", "segments", train)
    code, said = checked(run, capsys=capsys)
    assert code == 2
    assert "is trainable, but shaped by repetition_penalty" in said
