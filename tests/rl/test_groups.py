"""Groups of a real run: who is compared with whom, and when a row is written."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from batch_runner import run_batch
from batch_runner.pilot import Pilot
from hermes_rl.rl.advantages import EPSILON
from hermes_rl.rl.groups import group_report
from hermes_rl.store.reader import Run, load_run

# Each member draws its own fate: 0 and 1 are rewards, 2 is a verifier that cannot judge.
FATE = "echo $((RANDOM % 3)) >out.txt"
JUDGE = (
    'n=$(cat "$WORKSPACE/out.txt"); [ "$n" = 2 ] && echo cannot-judge=two >&3 || echo reward=$n >&3'
)


def config(out: Path, rows: list[dict[str, Any]], *, repeats: int = 4, **run: Any) -> Any:
    path = out.parent / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "dataset": {"path": str(path), "repeats": repeats},
        "model": {"name": "oracle"},
        "sandbox": {"backend": "none"},
        "run": {
            "out": str(out),
            "workers": 0,
            "concurrency": 8,
            "max_attempts": 1,
            "allow_unsandboxed": True,
            **run,
        },
    }


def tasks(count: int) -> list[dict[str, Any]]:
    verify = {"script": JUDGE, "score": True}
    return [
        {"id": f"t{n}", "prompt": "draw", "n": n, "oracle": FATE, "verify": verify}
        for n in range(count)
    ]


def by_hand(run: Run) -> dict[str, dict[str, Any]]:
    """Advantages recomputed from the rows alone, the dead left out."""
    found = {}
    for group, rows in run.trajectories.groupby("group_id"):
        rewards = dict(zip(rows["member"], rows["reward"], strict=True))
        valid = list(rewards.values())
        if len(valid) < 2:
            found[group] = {}
            continue
        centre, scale = statistics.fmean(valid), statistics.stdev(valid)
        found[group] = {
            m: ((r - centre) / (scale + EPSILON), (r - centre) * len(valid) / (len(valid) - 1))
            for m, r in rewards.items()
        }
    return found


def test_advantages_are_those_of_the_survivors(tmp_path: Path) -> None:
    report = run_batch(config(tmp_path / "run", tasks(12)))
    run = load_run(tmp_path / "run")
    groups, own = run.groups, by_hand(run)
    told = group_report(run)
    assert told.unjudged == report.given_up == len(run.failures)
    assert any(f"unjudged: {report.given_up} of the dropped" in line for line in told.lines())
    assert len(groups) == 12
    assert (groups["size"] == 4).all()
    assert groups["n_valid"].sum() == report.done < 48
    assert set(groups["n_valid"]) > {4} or report.given_up
    for group in groups.to_dict("records"):
        expected = own.get(group["group_id"], {})
        for member, valid, grpo, rloo in zip(
            group["members"], group["valid"], group["grpo"], group["rloo"], strict=True
        ):
            if not valid or not group["sendable"]:
                assert grpo is None or grpo != grpo  # pandas shows null as NaN
                continue
            assert (grpo, rloo) == pytest.approx(expected[member])
        assert group["sendable"] == (group["n_valid"] >= 2)
        dead = [w for w, v in zip(group["why_invalid"], group["valid"], strict=True) if not v]
        assert set(dead) <= {"verifier"}


def test_a_group_is_written_once_and_again_when_a_member_comes_back(tmp_path: Path) -> None:
    """--retry-failed fills the slot of a dead member: same slot, next attempt, newer row."""
    out = tmp_path / "run"
    run_batch(config(out, tasks(8)))
    first = load_run(out)
    again = run_batch(config(out, tasks(8)))
    assert again.given_up == 32 - len(first.trajectories)
    assert len(load_run(out).arrow("groups")) == 8, "nothing changed: no newer row"
    given_up = again.given_up
    for _ in range(40):
        if not given_up:
            break
        given_up = run_batch(config(out, tasks(8), retry_failed=True)).given_up
    run = load_run(out)
    assert list(run.groups["n_valid"]) == [4] * 8
    assert len(run.groups) == 8
    assert len(run.arrow("groups")) > 8
    members = [list(m) for m in run.groups["members"]]
    assert members == [[0, 1, 2, 3]] * 8


def test_equal_scores_are_kept_and_flagged(tmp_path: Path) -> None:
    rows = [{"id": "easy", "prompt": "do", "oracle": "true", "verify": "true"}]
    run_batch(config(tmp_path / "run", rows))
    group = load_run(tmp_path / "run").groups.iloc[0]
    assert group["equal_scores"]
    assert group["sendable"]
    assert list(group["grpo"]) == [0.0] * 4
    assert (group["mean"], group["std"]) == (1.0, 0.0)


def test_a_pilot_writes_no_group_that_is_not_whole(tmp_path: Path) -> None:
    rows = [
        {"id": f"t{n}", "prompt": "do", "n": n, "oracle": "true", "verify": "true"}
        for n in range(8)
    ]
    out = tmp_path / "run"
    assert run_batch(config(out, rows), pilot=Pilot(every=2, units=16)).done == 16
    assert set(load_run(out).groups["size"]) <= {4}
    run_batch(config(out, rows))
    assert list(load_run(out).groups["size"]) == [4] * 8


def test_a_group_with_repeats_of_its_own_waits_for_all_of_them(tmp_path: Path) -> None:
    row = {"id": "own", "prompt": "do", "oracle": "true", "verify": "true", "repeats": 6}
    out = tmp_path / "run"
    assert run_batch(config(out, [row], repeats=2), pilot=Pilot(every=2, units=3)).done == 3
    assert len(load_run(out).groups) == 0
    run_batch(config(out, [row], repeats=2))
    assert list(load_run(out).groups["size"]) == [6]


def test_single_rollouts_are_no_groups(tmp_path: Path) -> None:
    rows = [{"id": "one", "prompt": "do", "oracle": "true", "verify": "true"}]
    run_batch(config(tmp_path / "run", rows, repeats=1))
    assert len(load_run(tmp_path / "run").groups) == 0


def test_a_row_with_repeats_of_its_own_is_a_group(tmp_path: Path) -> None:
    rows = [
        {"id": "own", "prompt": "do", "oracle": "true", "verify": "true", "repeats": 3},
        {"id": "one", "prompt": "do it", "oracle": "true", "verify": "true"},
    ]
    run_batch(config(tmp_path / "run", rows, repeats=1))
    assert list(load_run(tmp_path / "run").groups["size"]) == [3]
