"""Frames of many runs, cells of notebooks, and plots, on real runs."""

from __future__ import annotations

import io
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from made_runs import finished_attempt

from hermes_rl import evals, load_run
from hermes_rl.errors import UserError
from hermes_rl.store import JournalWriter, Run, open_run


@pytest.fixture(scope="module")
def small(runs: Path) -> Run:
    return load_run(runs / "small-model")


@pytest.fixture(scope="module")
def large(runs: Path) -> Run:
    return load_run(runs / "large-model")


def test_grains_have_the_rows_of_the_run(small: Run) -> None:
    frames = evals.frames(small)
    attempts = frames.trajectories.to_pandas()
    assert len(attempts) == len(small.trajectories) + len(small.failures)
    calls, messages = frames.calls.to_pandas(), frames.messages.to_pandas()
    for column in ("call_id", "input_tokens", "latency_s"):
        pd.testing.assert_series_equal(calls[column], small.calls[column], check_dtype=False)
    for column in ("content", "position", "role"):
        pd.testing.assert_series_equal(messages[column], small.messages[column], check_dtype=False)
    assert set(calls["run"]) == {"small-model"}
    joined = calls.merge(attempts[["run", "trajectory_id", "reward"]], how="left")
    assert len(joined) == len(calls)


def test_other_libraries_read_a_grain_of_many_runs(small: Run, large: Run) -> None:
    import duckdb  # late, like the next: they cost a second, which few processes need
    import polars as pl

    frames = evals.frames(small, large.path)
    wanted = {run.path.name: int(run.calls["output_tokens"].sum()) for run in (small, large)}
    calls = frames.calls.select("run", "output_tokens")
    by_polars = pl.DataFrame(calls).group_by("run").agg(pl.col("output_tokens").sum())
    assert dict(by_polars.iter_rows()) == wanted
    stream = calls.reader()
    assert stream is not None
    rows = duckdb.sql("SELECT run, sum(output_tokens) FROM stream GROUP BY run").fetchall()
    assert dict(rows) == wanted
    assert pa.table(calls).num_rows == len(small.calls) + len(large.calls)
    assert frames.runs["run"].tolist() == ["small-model", "large-model"]


def test_a_folder_is_all_its_runs_and_a_condition_chooses_rows(runs: Path, small: Run) -> None:
    with pytest.raises(Exception, match="damaged"):
        evals.frames(runs)  # `broken` is one of them
    failed = evals.frames(small).messages.select("task_id", "tool_ok").where(~pc.field("tool_ok"))
    assert set(failed.to_pandas()["task_id"]) == {"never-0", "never-1"}
    both = failed.where(pc.field("task_id") == "never-0").to_arrow()
    assert 0 < len(both) < len(failed.to_arrow())


def test_mistakes_name_what_exists(runs: Path, small: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'rewards_'; there are run, task_id"):
        evals.frames(small).trajectories.select("rewards_")
    with pytest.raises(UserError, match="no run in these folders"):
        evals.frames(tmp_path)
    with pytest.raises(UserError, match="no attempt 'nothing'"):
        small.trajectory("nothing")


async def test_rows_that_are_not_published_yet_are_in_the_frames(tmp_path: Path) -> None:
    async with (
        await open_run(tmp_path / "live", {}) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        await journal.finish(finished_attempt(1, "an answer"))
        frames = evals.frames(tmp_path)
        assert frames.trajectories.select("run", "final_response").to_pandas().shape == (1, 2)
        assert "an answer" in frames.messages.to_pandas()["content"].tolist()


class Page(HTMLParser):
    """Tags and texts of a cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_cells_show_runs_trajectories_and_comparisons(small: Run, large: Run) -> None:
    run = Page(small._repr_html_())
    assert {"table", "th", "td"} <= run.tags
    assert f"{small.stats['reward']['solved']} of 36" in run.texts
    row = small.trajectory("sort-1#2")
    assert (row["task_id"], row["repeat"]) == ("sort-1", 2)
    assert small.trajectory(row["unit_id"][:12]) == row
    text = "".join(Page(row._repr_html_()).texts)
    for shown in ("turn 2", "I have to write it.", "echo 1 > out.txt", "verify: 1", "right"):
        assert shown in text
    assert "toolone" in "".join(Page(small.trajectory("sort-0#0")._repr_html_()).texts)
    comparison = Page(evals.compare(small, large)._repr_html_())
    assert "large-model less small-model" in "".join(comparison.texts)


def test_hostile_texts_in_cells_are_only_text(runs: Path) -> None:
    run = load_run(runs / "hostile")
    html = run.trajectory(run.trajectories["unit_id"][0])._repr_html_()
    assert Page(html).tags <= {
        "b",
        "table",
        "tr",
        "th",
        "td",
        "div",
        "i",
        "pre",
        "details",
        "summary",
    }
    assert not set("\x00\x07\x1b\u202e\u2066\ud800") & set(html)
    html.encode()


PLOTS = {
    "plot_scores": 2, "plot_task_map": 9, "plot_pass_at_k": 16, "plot_cost": 2, "plot_endings": 3,
}  # fmt: skip
"""Function over two runs -> rows of its frame."""


@pytest.mark.parametrize("name", PLOTS)
def test_plots_of_two_runs_return_figure_and_frame(name: str, small: Run, large: Run) -> None:
    check(getattr(evals, name)(small, large), rows=PLOTS[name])


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("plot_rewards", 9), ("plot_tokens", 96), ("plot_solve_rates", 9), ("plot_tools", 1),
        ("plot_time", 36), ("plot_progress", 36), ("plot_timeline", 140),
    ],
)  # fmt: skip
def test_plots_of_one_run_return_figure_and_frame(name: str, rows: int, small: Run) -> None:
    check(getattr(evals, name)(small), rows=rows)


def check(plot: evals.Plot, rows: int) -> None:
    """A picture that is not empty, and a frame with the rows; text stays inside the picture."""
    from matplotlib.figure import Figure

    figure, frame = plot
    assert isinstance(figure, Figure)
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == rows
    assert plot._repr_png_().startswith(b"\x89PNG")
    assert any(axes.has_data() for axes in figure.axes)
    figure.savefig(io.BytesIO())
    for axes in figure.axes:
        for label in axes.get_yticklabels():
            assert label.get_window_extent().x0 >= 0


def test_pass_at_k_is_the_unbiased_estimate(small: Run) -> None:
    whole = evals.plot_pass_at_k(small).frame.set_index(["kind", "k"])
    for kind, every in (("pass@k", False), ("pass^k", True)):
        for k in (1, 3):
            drawn = whole.loc[(kind, k), ["value", "low", "high"]].tolist()
            assert drawn == list(evals.pass_at(small, k, every=every))
    frame = whole["value"]
    solved = evals.summary(small).solved.mean
    assert frame["pass@k", 1] == pytest.approx(solved)
    assert frame["pass^k", 1] == pytest.approx(solved)
    shares = evals.plot_solve_rates(small).frame["solved"]
    assert frame["pass@k", 4] == pytest.approx((shares > 0).mean())
    assert frame["pass^k", 4] == pytest.approx((shares == 1).mean())


def test_importing_evals_loads_no_arrow() -> None:
    names = "{'pyarrow', 'polars', 'matplotlib'}"
    code = f"import sys, hermes_rl.evals; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
