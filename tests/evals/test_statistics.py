"""Coverage of intervals, paired comparisons, and infrastructure failures outside of scores."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hermes_rl.errors import UserError
from hermes_rl.evals import bootstrap, compare, summary, wilson


@dataclass
class Frames:
    """The tables of a run that statistics read."""

    path: Path
    trajectories: pd.DataFrame
    failures: pd.DataFrame


def run(name: str, rewards: dict[str, list[float | None]], failed: int = 0) -> Frames:
    rows = [
        {
            "task_id": task,
            "task_hash": f"h-{task}",
            "unit_id": f"{task}-{number}",
            "reward": reward,
            "turns": 2,
        }
        for task, values in rewards.items()
        for number, reward in enumerate(values)
    ]
    failure = {
        "task_id": "x",
        "task_hash": "h-x",
        "unit_id": "x-0",
        "owner": "infrastructure",
        "cause": "rate_limit",
        "error": "429",
    }
    columns = list(failure)
    return Frames(
        path=Path(name),
        trajectories=pd.DataFrame(rows),
        failures=pd.DataFrame([failure] * failed, columns=columns),
    )


def test_the_interval_has_its_nominal_coverage() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for trial in range(300):
        data = random.random(60) < 0.4
        _, low, high = bootstrap(data.astype(float).tolist(), seed=trial)
        hits += low <= 0.4 <= high
    assert 0.91 <= hits / 300 <= 0.98


def test_the_interval_does_not_depend_on_the_order_of_the_values() -> None:
    values = [1.0] * 13 + [0.0] * 7 + [0.1, 0.7]
    shuffled = np.random.default_rng(1).permutation(values).tolist()
    assert bootstrap(values) == bootstrap(values[::-1]) == bootstrap(shuffled)


def test_few_tasks_give_no_bounds() -> None:
    assert np.isnan(bootstrap([]).mean)
    one = bootstrap([1.0])
    assert one.mean == 1.0
    assert np.isnan(one.low)


def test_the_task_is_the_sampling_unit() -> None:
    # 100 repeats of one task are one observation: they must not outvote the other task.
    result = summary(run("r", {"a": [1.0] * 100, "b": [0.0]}))
    assert result.solved.mean == 0.5
    assert (result.tasks, result.units) == (2, 101)


def test_summaries_of_few_tasks_contain_no_nan() -> None:
    nothing = summary(run("r", {"a": [None]}, failed=2))
    assert str(nothing) == "r: nothing was graded; 2 attempts left out"
    one = run("r", {"a": [1.0]})
    assert str(summary(one)) == "r: solved 100% over 1 tasks, 1 units; 0 attempts left out"
    assert str(compare(one, one)) == "r less r: +0% over 1 common tasks: no difference shown"


def test_infrastructure_failures_are_left_out_and_counted() -> None:
    result = summary(run("r", {"a": [1.0, None], "b": [0.5]}, failed=3))
    assert result.solved.mean == 0.5
    assert result.reward.mean == 0.75
    assert result.failed_attempts == 3
    assert set(result.failures["cause"]) == {"rate_limit"}


def test_ungraded_units_give_bounds_of_the_score() -> None:
    # Task a: one of two units solved, one lost; task x: its only unit failed three times.
    result = summary(run("r", {"a": [1.0, 0.0, None], "b": [1.0]}, failed=3))
    assert result.never_graded == 2
    assert result.bounds.low == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert result.bounds.high == pytest.approx((2 / 3 + 1 + 1) / 3)
    whole = summary(run("r", {"a": [1.0, 0.0]}))
    assert (whole.never_graded, whole.bounds) == (0, (0.5, 0.5))


def test_the_interval_of_a_share_is_the_wilson_interval() -> None:
    # Values of Newcombe, Statistics in Medicine 17 (1998), table I: 81/263, 15/148, 0/20, 1/29.
    for solved, tried, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(solved, tried) == pytest.approx((solved / tried, low, high), abs=5e-5)
    assert np.isnan(wilson(0, 0).mean)


def test_paired_differences_detect_small_improvements() -> None:
    a = run("a", {f"t{i}": [float(i % 2)] for i in range(40)})
    b = run("b", {f"t{i}": [1.0 if i % 4 == 0 else float(i % 2)] for i in range(40)})
    result = compare(a, b)
    assert result.difference.mean == pytest.approx(0.25)
    assert result.verdict == "b"
    assert compare(b, a).verdict == "a"
    assert compare(a, a).verdict == "undecided"


def test_only_common_tasks_are_compared() -> None:
    a, b = run("a", {"x": [1.0], "y": [1.0]}), run("b", {"y": [0.0], "z": [1.0]})
    result = compare(a, b)
    assert (result.tasks, result.only_a, result.only_b) == (1, ["x"], ["z"])
    with pytest.raises(UserError, match="no graded task in common"):
        compare(a, run("c", {"q": [1.0]}))


def test_few_differing_tasks_give_no_verdict() -> None:
    def runs(tasks: int) -> tuple[Frames, Frames]:
        names = [f"t{i}" for i in range(tasks)]
        return run("a", {n: [0.0] for n in names}), run("b", {n: [1.0] for n in names})

    assert compare(*runs(5)).verdict == "undecided"
    assert compare(*runs(6)).verdict == "b"
