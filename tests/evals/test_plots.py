"""Plots draw their frames, and report what cannot be drawn."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from hermes_rl import evals
from hermes_rl.errors import UserError


@dataclass
class Frames:
    """The tables of a run that plots read."""

    path: Path
    trajectories: pd.DataFrame
    calls: pd.DataFrame


def run(tasks: int = 3, known: bool = True) -> Frames:
    """Task n has four units, n of them solved, and n + 1 calls in each."""
    units = [(f"t{n}", f"t{n}-{r}", float(r < n), n) for n in range(tasks) for r in range(4)]
    rows = [
        {"task_id": task, "task_hash": task, "unit_id": unit, "reward": reward, "turns": n + 1}
        for task, unit, reward, n in units
    ]
    calls = [
        {
            "task_id": task,
            "unit_id": unit,
            "status": "ok",
            "purpose": "agent",
            "turn": turn + 1,
            "input_tokens": 100.0 * (turn + 1) if known else np.nan,
            "cache_read_tokens": 60.0 * turn if turn else np.nan,
            "output_tokens": 10.0 if known else np.nan,
        }
        for task, unit, _, n in units
        for turn in range(n + 1)
    ]
    return Frames(Path("runs/made-up"), pd.DataFrame(rows), pd.DataFrame(calls))


def test_plot_rewards_draws_its_frame() -> None:
    made = run()
    figure, frame = evals.plot_rewards(made)
    assert frame["task_id"].tolist() == ["t0", "t1", "t2"]
    assert frame["solved"].tolist() == [0.0, 0.25, 0.5]
    assert ((frame["low"] <= frame["solved"]) & (frame["solved"] <= frame["high"])).all()
    axes = figure.axes[0]
    dots = next(line for line in axes.lines if line.get_marker() == "o")
    assert list(dots.get_xdata()) == frame["solved"].tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["t0", "t1", "t2"]
    assert "made-up: 25% solved" in axes.get_title(loc="left")
    assert [text.get_text() for text in axes.texts[:3]] == ["0 of 4", "1 of 4", "2 of 4"]


def test_plots_of_large_runs_note_that_they_are_partial() -> None:
    axes = evals.plot_rewards(run(tasks=5), limit=2).figure.axes[0]
    assert len(axes.get_yticklabels()) == 2
    assert "5 tasks, 20 graded units; the 2 least solved are drawn" in axes.texts[-1].get_text()


def test_long_names_are_shortened_in_the_picture_only() -> None:
    made = run()
    made.path = Path("runs/" + "a-long-name-" * 9 + "end")
    for frame in (made.trajectories, made.calls):
        frame["task_id"] = "an-organisation/repository-with-a-name-" * 3 + frame["task_id"]
    for plot in (evals.plot_rewards, evals.plot_tokens):
        figure, frame = plot(made)
        axes = figure.axes[0]
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert [name[-2:] for name in names] == ["t0", "t1", "t2"]
        assert max(map(len, [*names, axes.get_title(loc="left").split(":")[0]])) <= 36
        assert frame["task_id"].str.len().min() > 100


def test_plot_tokens_per_task_and_per_turn() -> None:
    left, right = evals.plot_tokens(run()).figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["t0", "t1", "t2"]
    widths = [bar.get_width() for bar in left.patches]
    # Fresh input, cached input and output of t2: turns of 100, 200, 300 with 0, 60, 120 cached.
    assert widths[2::3] == [420.0, 180.0, 30.0]
    assert list(right.lines[0].get_ydata()) == [100.0, 200.0, 300.0]


def test_unknown_usage_is_not_drawn_as_zero() -> None:
    with pytest.raises(UserError, match="no call of known usage to plot"):
        evals.plot_tokens(run(known=False))
    mixed = run()
    mixed.calls.loc[0, ["input_tokens", "output_tokens"]] = np.nan
    note = evals.plot_tokens(mixed).figure.axes[0].texts[-1].get_text()
    assert "1 call of unknown usage left out" in note


def test_the_reward_of_a_single_unit_is_a_mark() -> None:
    class OneUnit:
        path = Path("runs/one")

        def arrow(self, table: str, columns: list[str]) -> pa.Table:
            return pa.table({"task_id": ["t"], "finished_at": [1], "reward": [0.5], "calls": [[]]})

    axes = evals.plot_progress(OneUnit()).figure.axes[0]
    assert [line.get_marker() for line in axes.lines] == [".", "o"]
    assert axes.texts[-1].get_text() == "mean of the last 1 unit"


def test_an_ungraded_run_cannot_be_plotted() -> None:
    made = run()
    made.trajectories["reward"] = np.nan
    with pytest.raises(UserError, match="runs/made-up: no graded trajectory to plot"):
        evals.plot_rewards(made)


def test_plots_without_matplotlib_name_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from hermes_rl.errors import UserError\n"
        "from hermes_rl.evals import Interval, Comparison, plot_difference\n"
        "import pandas as pd\n"
        "frame = pd.DataFrame({'task_id': ['t'], 'difference': [1.0]})\n"
        "d = Interval(1, 1, 1)\n"
        "made = Comparison('a', 'b', 1, d, 1, 'sign flips', 0, 1, 'b', frame, [], [])\n"
        "try: plot_difference(made)\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "hermes-rl[notebooks]" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


def test_importing_evals_loads_no_matplotlib() -> None:
    code = "import sys, hermes_rl.evals; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
