"""Scores of runs, paired comparisons, and infrastructure failures outside of scores."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hermes_rl import evals
from hermes_rl.errors import UserError
from hermes_rl.evals import NotCompared, compare, compare_all, grouped, pass_at, summary


@dataclass
class Frames:
    """The tables of a run that statistics read."""

    path: Path
    trajectories: pd.DataFrame
    failures: pd.DataFrame
    unfinished: str | None = None
    runs: pd.DataFrame | None = None

    def frame(self, table: str, columns: list[str]) -> pd.DataFrame:
        return getattr(self, table)[columns]


def run(name: str, rewards: dict[str, list[float | None]], failed: int = 0) -> Frames:
    rows = [
        {
            "task_id": task,
            "task_hash": f"h-{task}",
            "unit_id": f"{task}-{number}",
            "reward": reward,
            "turns": 2,
            "truncated": number == 1,
            "attempt": number % 2,
            "metadata": {"repository": task[0]},
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


def test_the_task_is_the_sampling_unit() -> None:
    # 100 repeats of one task are one observation: they must not outvote the other task.
    result = summary(run("r", {"a": [1.0] * 100, "b": [0.0]}))
    assert result.solved.mean == 0.5
    assert (result.tasks, result.units) == (2, 101)


def test_summaries_of_few_tasks_contain_no_nan() -> None:
    nothing = summary(run("r", {"a": [None]}, failed=2))
    assert str(nothing) == "r: nothing was graded; 2 attempts left out"
    one = run("r", {"a": [1.0]})
    assert str(summary(one)) == "r: solved 100% over 1 task, 1 unit; 0 attempts left out"
    assert str(compare(one, one)) == "r less r: +0% over 1 common task: no difference shown"


def test_scores_of_runs_that_are_not_complete_are_marked() -> None:
    a, b = run("a", {"x": [1.0]}), run("b", {"x": [1.0]})
    a, c = replace(a, unfinished="12 units still open"), run("c", {"y": [1.0]})
    assert str(summary(a)).endswith("; 12 units still open")
    assert (
        str(summary(a, tasks=["h-x"])) == "a: solved 100% over 1 task, 1 unit; 0 attempts left out"
    )
    nothing = replace(run("n", {"x": [None]}), unfinished="1 unit still open")
    assert str(summary(nothing)).endswith("; 0 attempts left out; 1 unit still open")
    assert str(compare(b, a)).endswith("no difference shown; a: 12 units still open")
    with pytest.warns(NotCompared, match="not compared: . and c have no graded task in common"):
        pairs = compare_all([a, b, c])
    assert [(pair.a, pair.b) for pair in pairs] == [("a", "b")]


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
    text = "b less a: -100% over 1 common task: no difference shown"
    assert str(result) == f"{text}; left out: 1 task only in a, 1 task only in b"
    with pytest.raises(UserError, match="c: nothing was graded, so there is nothing to compare"):
        compare(a, run("c", {"x": [None]}))


def test_few_differing_tasks_give_no_verdict() -> None:
    def runs(tasks: int) -> tuple[Frames, Frames]:
        names = [f"t{i}" for i in range(tasks)]
        return run("a", {n: [0.0] for n in names}), run("b", {n: [1.0] for n in names})

    five, six = compare(*runs(5)), compare(*runs(6))
    assert (five.verdict, five.p_value, five.test) == ("undecided", 2 / 2**5, "exact McNemar")
    assert (six.verdict, six.p_value) == ("b", 2 / 2**6)
    a, b = (
        run(name, {t: [float(t in solved)] for t in "uvwxyz"})
        for name, solved in (("a", ""), ("b", "uvwxy"))
    )
    five = compare(a, b)
    assert str(five).endswith("no difference shown (p = 0.062, exact McNemar)")


def test_no_winner_below_the_detectable_difference() -> None:
    # 8 of 1,000 tasks differ, all for b: significant, but no smaller than what chance often gives.
    a = run("a", {f"t{i}": [0.0] for i in range(1_000)})
    b = run("b", {f"t{i}": [float(i < 7)] for i in range(1_000)})
    result = compare(a, b)
    assert result.p_value < 0.05
    assert abs(result.difference.mean) < result.detectable
    assert result.verdict == "undecided"
    assert "tasks would show one of this size" in str(result)


def test_many_comparisons_are_adjusted() -> None:
    runs = [
        run(f"m{m}", {f"t{i}": [float(i < 10 + more)] for i in range(40)})
        for m, more in enumerate((0, 2, 4, 7))
    ]
    pairs = compare_all(runs)
    assert [(pair.a, pair.b) for pair in pairs][:2] == [("m0", "m1"), ("m0", "m2")]
    alone = compare(runs[0], runs[3])
    adjusted = next(pair for pair in pairs if (pair.a, pair.b) == ("m0", "m3"))
    assert (alone.p_value, adjusted.p_value) == (2 / 2**7, 6 * 2 / 2**7)
    assert (alone.verdict, adjusted.verdict) == ("b", "undecided")


def test_groups_truncation_and_retries_are_counted() -> None:
    result = summary(run("r", {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 1.0], "d": [1.0]}))
    assert (result.all_solved, result.all_failed) == (1 / 3, 1 / 3)
    assert (result.truncated, result.retried) == (3 / 7, 3 / 7)
    assert result.shares == (
        "r: 43% of units truncated, 43% retried; "
        "of tasks with repeats 33% always failed, 33% always solved"
    )
    assert summary(run("r", {"a": [1.0]})).shares.endswith("retried")
    assert result.variance.within == pytest.approx(0.5 / 3)


def test_pass_at_k_and_pass_hat_k() -> None:
    result = run("r", {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0] * 4, "c": [1.0]})
    with pytest.warns(UserWarning, match="leaves out 1 of 3 tasks"):
        assert pass_at(result, 2).mean == pytest.approx((0.5 + 1) / 2)
    with pytest.warns(UserWarning, match="fewer than 2 graded units"):
        assert pass_at(result, 2, every=True).mean == pytest.approx((0 + 1) / 2)
    with pytest.raises(UserError, match="no task has 5 graded units"):
        pass_at(result, 5)


def test_errors_are_clustered_by_a_column() -> None:
    rewards = {f"{repo}{i}": [float(repo in "ab")] for repo in "abcd" for i in range(25)}
    alone, clustered = summary(run("r", rewards)), summary(run("r", rewards), by="repository")
    assert clustered.solved.mean == alone.solved.mean == 0.5
    assert alone.solved.low > 0.39
    assert clustered.solved.low < 0.1, "four repositories, not a hundred tasks"
    with pytest.raises(UserError, match="100 tasks without 'author' in the metadata"):
        summary(run("r", rewards), by="author")


def test_scores_by_the_values_of_a_column() -> None:
    rewards = {"a1": [1.0, 0.0], "a2": [1.0, 1.0], "a3": [0.0, 0.0], "b1": [1.0]}
    found = grouped(run("r", rewards), "repository").set_index("repository")
    assert found[["tasks", "units", "solved"]].values.tolist() == [[3, 6, 0.5], [1, 1, 1.0]]
    by_task = [0.5, 1.0, 0.0]
    assert found.solved_stderr["a"] == pytest.approx(np.std(by_task, ddof=1) / 3**0.5)
    alone = summary(run("r", {t: r for t, r in rewards.items() if t != "b1"})).solved
    assert (found.solved_low["a"], found.solved_high["a"]) == (alone.low, alone.high)
    chosen = grouped(run("r", rewards), "repository", tasks=["h-a2"])
    assert chosen.solved.tolist() == [1.0]


def test_a_verdict_is_clustered_by_a_column() -> None:
    # All tasks of one repository change: that is one observation, not twelve.
    names = [f"{repository}{n}" for repository in "pq" for n in range(12)]
    a = run("a", {name: [0.0] for name in names})
    b = run("b", {name: [float(name[0] == "p")] for name in names})
    assert compare(a, b).verdict == "b"
    clustered = compare(a, b, by="repository")
    assert clustered.difference.low < 0 < clustered.difference.high
    assert clustered.verdict == "undecided"
    assert clustered.p_value == 1.0
    assert clustered.detectable > 0.5
    assert str(clustered).endswith("; 216 tasks would show one of this size"), "18 repositories"


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_differences_have_an_interval_with_a_width(reward: float) -> None:
    names = [f"t{n}" for n in range(30)]
    found = compare(run("a", {t: [0.0] for t in names}), run("b", {t: [reward] for t in names}))
    low, high = found.difference[1:]
    assert low < reward - 0.05
    assert high == pytest.approx(1.0) if reward else high > 0.05


def test_partial_rewards_are_summarised_and_compared_by_their_mean() -> None:
    a = run("a", {f"t{n}": [0.1 * (n % 3)] for n in range(30)})
    b = run("b", {f"t{n}": [0.1 * (n % 3) + 0.3 + 0.1 * (n % 2)] for n in range(30)})
    assert "solved 0% (95 % interval 0% to 12%), mean reward 0.1 (0.069 to 0.131) o" in str(
        summary(a)
    )
    assert "mean" not in str(summary(run("r", {"x": [1.0], "y": [0.0]})))
    assert compare(a, b).verdict == "undecided"
    (pair,) = compare_all([a, b], score="reward")
    assert (pair.verdict, pair.per_task.columns[1]) == ("b", "reward_a")
    text = "b less a: mean reward +0.35 (95 % interval +0.331 to +0.369) over 30 common tasks: b is"
    assert str(pair).startswith(text)
    far = run("far", {f"t{n}": [100.0 * n] for n in range(30)})
    assert compare(a, far, score="reward").difference.high > 1_000
    axes = evals.plot_difference(pair).figure.axes[0]
    assert axes.get_title(loc="left") == "b less a: +0.35 (+0.331 to +0.369 over tasks)"
    for one in (a, b, far):
        one.runs = pd.DataFrame([{"done": 30, "cost_usd": 3.0, "unpriced_calls": 0,
            "input_tokens": 1, "output_tokens": 1}])  # fmt: skip
    for plot in (evals.plot_scores, evals.plot_cost):
        figure, frame = plot(a, b, far, score="reward")
        assert dict(zip(frame["run"], frame["reward"], strict=True))["far"] == 1_450
        (axes,) = figure.axes
        assert axes.get_title(loc="left").startswith("Mean reward")
        assert max(*axes.get_xlim(), *axes.get_ylim()) > 1_450
    # 0.1 + 0.2 + 0.3 depends on the order of the terms: no difference.
    orders = ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])
    same = [run(str(i), {f"t{n}": values for n in range(30)}) for i, values in enumerate(orders)]
    found = compare(*same, score="reward")
    assert (found.p_value, found.verdict) == (1, "undecided")
    assert "mean reward +0 (" in str(found)


def test_sums_that_differ_from_0_by_rounding_need_no_tasks() -> None:
    thirds = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    for order in ([1, 0, 3, 2], [2, 3, 1, 0], [3, 2, 0, 1]):
        a = run("a", {f"t{n}": thirds[n] for n in range(4)})
        b = run("b", {f"t{n}": thirds[order[n]] for n in range(4)})
        found = compare(a, b)
        assert found.tasks_needed is None
        assert str(found).endswith("no difference shown")


def test_a_summary_of_200_000_units_takes_seconds() -> None:
    units = 200_000
    rows = pd.DataFrame(
        {
            "task_id": [f"t{n // 4}" for n in range(units)],
            "task_hash": [f"{n // 4:064d}" for n in range(units)],
            "unit_id": [f"{n:032d}" for n in range(units)],
            "reward": np.random.default_rng(3).integers(0, 2, units).astype(float),
            "turns": 3,
            "truncated": False,
            "attempt": 0,
        }
    )
    failures = run("r", {"x": [1.0]}).failures
    began = time.process_time()
    result = summary(Frames(Path("r"), rows, failures))
    assert time.process_time() - began < 5
    assert (result.tasks, result.units) == (50_000, units)
