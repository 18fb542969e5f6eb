"""Bugs that change tokens, injected into the files of a finished run.

`check RUN --tokens` reads the rows and the usage; the engine's log has the truth.
docs/exact-tokens.md lists the bugs that only the log shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_runs import check, differences, rewrite_table, run_scripts, served_entries, start_engine

from hermes_rl.models.tokens import load_renderer
from hermes_rl.segments import answer_spans
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
class RunWithLog:
    """A run whose histories fork, and the log of its engine."""

    folder: Path
    truth: list[Truth] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def renderer(self) -> Any:
        return load_renderer(self.folder / "tokenizer")


_CACHE: list[RunWithLog] = []


@pytest.fixture
async def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunWithLog:
    """Made once."""
    if not _CACHE:
        one = RunWithLog(tmp_path_factory.mktemp("run"))
        async with start_engine(one.folder) as engine:
            await run_scripts(engine, one.folder, SCRIPTS * 2, "chat")
            one.truth += engine.truth
        _CACHE.append(one)
    return _CACHE[0]


def rewrite_answers(rows: Sequence[Row], how: Callable[[Answer], Answer]) -> None:
    """Replace each trained answer, and the other columns of its tokens."""
    for row in rows:
        for part in reversed([run for run in answer_spans(row) if run.trained]):
            place = slice(part.start, part.end)
            tokens = how(_answer(row, part))
            for name in ("loss_mask", "sampled_mask", "turn_ids", "version_ids"):
                row[name][place] = [row[name][part.start]] * len(tokens)
            row["input_ids"][place] = [one for one, _ in tokens]
            row["logprobs"][place] = [value for _, value in tokens]
            more = len(tokens) - (part.end - part.start)
            row["call_starts"] = [s + more if s > part.start else s for s in row["call_starts"]]
        row["n_sampled"] = sum(row["sampled_mask"])


def retokenize(rows: list[Row], finished_run: RunWithLog) -> None:
    def again(answer: Answer) -> Answer:
        ids = finished_run.renderer.tokenizer.encode(
            finished_run.renderer.decode([one for one, _ in answer])
        )
        return [(one, -1.0) for one in ids]

    rewrite_answers(rows, again)


def drop_end_token(rows: list[Row], finished_run: RunWithLog) -> None:
    rewrite_answers(rows, lambda answer: answer[:-1])


def duplicate_first_token(rows: list[Row], finished_run: RunWithLog) -> None:
    for row in rows:
        for name in (*_OF_TOKENS, "logprobs"):
            row[name].insert(0, row[name][0])
        row["prompt_len"] += 1
        row["call_starts"] = [start + 1 for start in row["call_starts"]]


_OF_TOKENS = ("input_ids", "loss_mask", "sampled_mask", "turn_ids", "version_ids")


def swap_answers(rows: list[Row], finished_run: RunWithLog) -> None:
    """Swap the answers of two concurrent rollouts."""
    single = [row for row in rows if len(row["call_ids"]) == 1 and row["parent_branch"] is None]
    one = next(row for row in single if row["finish_reasons"] == ["stop"])
    other = next(row for row in single if row["n_sampled"] != one["n_sampled"])
    (one_answer,), (other_answer,) = (
        [_answer(row, run) for run in answer_spans(row) if run.trained] for row in (one, other)
    )
    rewrite_answers([one], lambda _: other_answer)
    rewrite_answers([other], lambda _: one_answer)


def _answer(row: Row, run: Any) -> Answer:
    place = slice(run.start, run.end)
    return list(zip(row["input_ids"][place], row["logprobs"][place], strict=True))


def count_lost_answer(rows: list[Row], finished_run: RunWithLog) -> None:
    """Add the lost answer of a request that was retried."""
    lost = next(
        entry for entry in finished_run.truth if entry.outcome == "cut" and entry.sampled_ids
    )
    before = list(zip(lost.sampled_ids, lost.raw_logprobs, strict=True))
    again = [row for row in rows if tuple(row["input_ids"][: row["prompt_len"]]) == lost.prompt_ids]
    assert again
    rewrite_answers(again[:1], lambda answer: before + answer)


def strip_control_tokens(rows: list[Row], finished_run: RunWithLog) -> None:
    control = {token.id for token in finished_run.renderer.tokenizer.added}
    rewrite_answers(rows, lambda answer: [pair for pair in answer if pair[0] not in control])


def train_shared_prefix_twice(rows: list[Row], finished_run: RunWithLog) -> None:
    assert any(row["loss_mask"] != row["sampled_mask"] for row in rows)
    for row in rows:
        row["loss_mask"] = row["sampled_mask"]


def shift_logprobs(rows: list[Row], finished_run: RunWithLog) -> None:
    rewrite_answers(
        rows,
        lambda answer: [(a[0], b[1]) for a, b in zip(answer, answer[1:] + answer[:1], strict=True)],
    )


def drop_end_tokens_of_answers(rows: list[Row], _: RunWithLog) -> None:
    for row in rows:
        for part in answer_spans(row):
            row["input_ids"][part.end - 1] = row["input_ids"][part.start]


def train_prompt(rows: list[Row], _: RunWithLog) -> None:
    for row in rows:
        row["loss_mask"][0] = True


def shift_start(rows: list[Row], _: RunWithLog) -> None:
    for row in rows:
        row["call_starts"][0] += 1


def remove_logprob(rows: list[Row], _: RunWithLog) -> None:
    for row in rows:
        row["logprobs"][row["prompt_len"]] = None


def change_reward(rows: list[Row], _: RunWithLog) -> None:
    for row in rows:
        row["reward"] = 0.25


DETECTED = [
    (retokenize, "sampled ids, but the server counted"),
    (drop_end_token, "sampled ids, but the server counted"),
    (duplicate_first_token, "but the server counted"),
    (swap_answers, "sampled ids, but the server counted"),
    (count_lost_answer, "sampled ids, but the server counted"),
    (strip_control_tokens, "sampled ids, but the server counted"),
    (train_shared_prefix_twice, "is trained 2 times"),
]


@pytest.mark.parametrize(
    ("inject", "fault"), DETECTED, ids=[inject.__name__ for inject, _ in DETECTED]
)
async def test_the_check_and_the_log_show_injected_bugs(
    finished_run, inject, fault, tmp_path, capsys
):
    run = rewrite_table(
        finished_run.run, tmp_path / "run", "segments", lambda rows: inject(rows, finished_run)
    )
    code, _, err = check(run, "--tokens", capsys=capsys)  # without a tokenizer too
    assert code == 2
    assert fault in err
    assert differences(run, served_entries(finished_run.truth, finished_run.run))


WITH_TOKENIZER = [
    (duplicate_first_token, "begins twice with"),
    (drop_end_tokens_of_answers, "no answer ends with an end token"),
    (train_prompt, "trained that was not sampled"),
    (shift_start, "belong to no call"),
    (remove_logprob, "has no logprob"),
    (change_reward, "has reward 0.25"),
]


@pytest.mark.parametrize(("inject", "fault"), WITH_TOKENIZER)
async def test_the_check_with_a_tokenizer_shows_changed_rows(
    finished_run, inject, fault, tmp_path, capsys
):
    def change(rows: list[Row]) -> None:
        inject(rows, finished_run)

    run = rewrite_table(finished_run.run, tmp_path / "run", "segments", change)
    tokenizer = str(finished_run.folder / "tokenizer")
    code, _, err = check(run, "--tokens", "--tokenizer", tokenizer, capsys=capsys)
    assert code == 2
    assert fault in err


async def test_an_unchanged_run_has_no_faults(finished_run, tmp_path, capsys):
    run = rewrite_table(finished_run.run, tmp_path / "run", "segments", lambda rows: None)
    assert (
        check(
            run, "--tokens", "--tokenizer", str(finished_run.folder / "tokenizer"), capsys=capsys
        )[0]
        == 0
    )
    assert differences(run, served_entries(finished_run.truth, finished_run.run)) == []


async def test_only_the_log_shows_shifted_logprobs(finished_run, tmp_path, capsys):
    """All values are plausible, and there are as many as ids."""
    run = rewrite_table(
        finished_run.run,
        tmp_path / "run",
        "segments",
        lambda rows: shift_logprobs(rows, finished_run),
    )
    assert (
        check(
            run, "--tokens", "--tokenizer", str(finished_run.folder / "tokenizer"), capsys=capsys
        )[0]
        == 0
    )
    found = differences(run, served_entries(finished_run.truth, finished_run.run))
    assert found
    assert all("other logprobs" in line for line in found)


async def test_raw_logprobs_with_a_penalty_are_not_trainable_and_are_detected(tmp_path, capsys):
    """The penalty is in `extra_body`."""
    async with start_engine(tmp_path) as engine:
        extra = {"repetition_penalty": 1.3}
        report = await run_scripts(engine, tmp_path, SCRIPTS[1:2], "chat", extra_body=extra)
    err = capsys.readouterr().err
    assert "nothing will be trainable: logprobs are of the model before repetition_penalty" in err
    exact = report.stats["exact_tokens"]
    assert (exact["trainable"], exact["trained_tokens"]) == (0, 0)
    assert check(tmp_path / "run", "--tokens", capsys=capsys)[0] == 0

    def train(rows: list[Row]) -> None:
        for row in rows:
            assert (row["logprobs_kind"], row["exclude_reason"]) == ("raw", "raw_logprobs")
            row["trainable"], row["exclude_reason"] = True, None

    run = rewrite_table(tmp_path / "run", tmp_path / "changed", "segments", train)
    code, _, err = check(run, "--tokens", capsys=capsys)
    assert code == 2
    assert "is trainable, but shaped by repetition_penalty" in err
