"""Groups, rewards and advantages in formats for RL trainers."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rollouts
import scripted_rows
from rollouts import read

from hermes_rl.errors import UserError
from hermes_rl.export import FORMATS, ExportOptions, export_run
from hermes_rl.identity import trajectory_id
from hermes_rl.rl import grpo
from hermes_rl.store import Derived, Finished, Group, JournalWriter, Publisher, open_run

REWARDS = (1.0, 0.0, None, 0.5, None, None, 1.0, None)
"""Of two groups of four: the first has three valid members, the second has one."""

RL = [name for name in FORMATS if FORMATS[name].rl]


def name_of(number: int) -> str:
    return trajectory_id(rollouts.unit(number), 1, 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Members without a reward failed, so they have no row in `trajectories`."""
    rows = []
    for number, reward in enumerate(REWARDS):
        segments = [rollouts.segment(number, [5, 6, 7, number], [2, 3], reward=reward)]
        cause = "sandbox_died" if reward is None else None
        rows.append(
            rollouts.finished(
                number,
                rollouts.with_quoted_answer(),
                reward=reward,
                cause=cause,
                segments=segments,
                size=4,
            )
        )
    return rollouts.write(tmp_path / "run", rows)


def group(number: int, rewards: tuple[float | None, ...], at: int = 1) -> Group:
    """A row of table `groups` as the batch runner writes it."""
    members = range(4 * number, 4 * number + 4)
    valid = [r is not None for r in rewards]
    known = iter(grpo([r for r in rewards if r is not None]))
    return scripted_rows.make_group(
        number,
        at,
        group_id=rollouts.unit(10**6 + number),
        size=4,
        n_valid=sum(valid),
        members=list(range(4)),
        unit_ids=[rollouts.unit(m) for m in members],
        trajectory_ids=[name_of(m) if REWARDS[m] is not None else None for m in members],
        rewards=list(rewards),
        valid=valid,
        why_invalid=[None if ok else "sandbox_died" for ok in valid],
        sendable=sum(valid) > 1,
        grpo=[next(known) if ok else None for ok in valid],
        rloo=[9.0 if ok else None for ok in valid],
        dr_grpo=[None] * 4,
    )


def publish(run: Path, *groups: Group) -> None:
    async def add() -> None:
        async with await open_run(run, rollouts.IDENTITY) as driver:
            await driver.publish(Derived(groups=groups))

    asyncio.run(add())


@pytest.mark.parametrize("name", RL)
def test_groups_with_one_valid_member_are_not_sent(name: str, run: Path) -> None:
    report = export_run(run, name)
    assert report.left_out == {"small_group": 1}
    assert report.trained == 2 * 3
    assert report.lost == {"no_advantage": 3}
    alone = export_run(run, name, options=ExportOptions(min_group=1))
    assert alone.trained == 2 * 4


def test_the_groups_table_gives_rewards_and_advantages(run: Path) -> None:
    publish(run, group(0, (1.0, 0.0, None, 0.5)))
    publish(run, group(0, (0.75, 0.25, None, 0.5), at=2))  # graded again: the newest counts
    report = export_run(run, "trl-grpo")
    made = read(report.out)
    assert [r["reward"] for r in made] == [0.75, 0.25, 0.5]
    assert [r["advantage"] for r in made] == pytest.approx(grpo([0.75, 0.25, 0.5]))
    assert report.lost == {}
    other = export_run(run, "verl-rl", options=ExportOptions(advantage="rloo"))
    assert [r["advantage"] for r in read(other.out)] == [9.0, 9.0, 9.0]
    assert [r["reward_score"] for r in read(other.out)] == [0.75, 0.25, 0.5]
    assert [r["response_ids"] for r in read(other.out)] == [[7, 0], [7, 1], [7, 3]]


def test_members_that_only_a_regrade_could_grade_are_reported(run: Path) -> None:
    graded = group(0, (1.0, 0.0, 0.25, 0.5))
    known = [name_of(member) for member in range(4)]
    publish(run, msgspec.structs.replace(graded, trajectory_ids=known))
    report = export_run(run, "trl-grpo")
    assert report.left_out == {"judged_later": 1, "small_group": 1}
    assert "judged_later" not in export_run(run, "trl-tokens").left_out


def test_groups_of_several_workers_are_in_the_order_of_the_dataset(
    tmp_path: Path,
) -> None:
    """Two workers wrote twelve batches each: a group is complete after a few of them."""

    async def write() -> None:
        async with await open_run(tmp_path / "run", rollouts.IDENTITY) as driver:
            for worker in range(2):
                async with JournalWriter(driver.run_dir, driver.epoch, worker) as journal:
                    publisher = Publisher(journal)
                    for batch in range(12):
                        await journal.finish(made(2 * batch + worker))
                        await publisher.drain()

    def made(number: int) -> Finished:
        segments = [rollouts.segment(number, [5, 6, 7, number], [2, 3], reward=1.0)]
        return rollouts.finished(
            number, rollouts.with_quoted_answer(), reward=1.0, segments=segments, size=2
        )

    asyncio.run(write())
    assert len(list((tmp_path / "run/segments").iterdir())) == 24
    sent = read(export_run(tmp_path / "run", "atropos").out)
    assert [[ids[-1] for ids in one["tokens"]] for one in sent] == [
        [2 * task, 2 * task + 1] for task in range(12)
    ]


def test_rewards_of_a_regrade_are_filtered_by_and_written(run: Path) -> None:
    publish(run, group(0, (0.25, 0.75, None, 0.5), at=2))  # graded again
    report = export_run(run, "trl", options=ExportOptions(min_reward=0.5))
    assert [row["reward"] for row in read(report.out)] == [0.75, 0.5, 1.0]


def test_an_atropos_line_contains_the_whole_group(run: Path) -> None:
    publish(run, group(0, (1.0, 0.0, None, 0.5)), group(1, (None, None, 1.0, None)))
    report = export_run(run, "atropos")
    (line,) = read(report.out)
    assert line["scores"] == [1.0, 0.0, 0.5]
    assert line["tokens"] == [[5, 6, 7, n] for n in (0, 1, 3)]
    assert line["masks"] == [[-100, -100, 7, n] for n in (0, 1, 3)]
    assert line["inference_logprobs"] == [[1.0, 1.0, -0.5, -0.5]] * 3
    wanted = [[a] * 4 for a in grpo([1.0, 0.0, 0.5])]
    assert line["advantages"] == [pytest.approx(a) for a in wanted]
    assert line["group_overrides"] == {"group_size": 3}


@pytest.mark.parametrize("name", RL)
def test_filters_make_groups_smaller(name: str, run: Path) -> None:
    report = export_run(run, name, options=ExportOptions(min_reward=0.5))
    assert report.trained == 2 * 2
    with pytest.raises(
        UserError, match=r"Left out: rollouts below .*: 2; rollouts of groups .*: 2"
    ):
        export_run(run, name, options=ExportOptions(min_reward=0.75))


@pytest.mark.parametrize("name", RL)
def test_a_member_without_exact_tokens_makes_its_group_smaller(name: str, tmp_path: Path) -> None:
    """A trainer would take its reward for its advantage."""
    made = []
    for number in range(4):
        more: dict[str, Any] = {"token_source": "retokenized"} if number == 1 else {}
        segment = rollouts.segment(number, [1, 2], [1], **more)
        made.append(rollouts.finished(number, rollouts.with_quoted_answer(), segments=[segment]))
    report = export_run(rollouts.write(tmp_path / "run", made), name)
    assert report.trained == 2
    assert report.left_out == {"small_group": 1, "retokenized": 1}


def test_the_recipe_of_the_training_page_draws_one_branch_per_rollout(tmp_path: Path) -> None:
    """In proportion to its trained tokens, so that over the epochs none of them is dropped."""
    page = Path(__file__).parents[2] / "docs/training.md"
    (code,) = re.findall(r"```python\n(import random\n.*?)```", page.read_text(), re.DOTALL)
    recipe: dict[str, Any] = {}
    exec(code, recipe)
    made = []
    for number in range(2):
        forked = {"n_branches": 2, "parent_branch": 0, "branch_kind": "fork"}
        later = rollouts.segment(number, [1, 5, 2, 2, 2, 3], [2, 3, 4], branch_index=1, **forked)
        segments = [rollouts.segment(number, [1, 2], [1], n_branches=2), later]
        made.append(rollouts.finished(number, rollouts.with_quoted_answer(), segments=segments))
    report = export_run(rollouts.write(tmp_path / "run", made), "trl-grpo")
    import datasets

    data = datasets.Dataset.from_parquet(str(report.out), cache_dir=str(tmp_path / "cache"))
    drawn = [recipe["one_branch_each"](data, seed) for seed in range(200)]
    assert all(len(set(rows["trajectory_id"])) == len(rows) == 2 for rows in drawn)
    later_share = sum(sum(rows["branch_index"]) for rows in drawn) / 400
    assert later_share == pytest.approx(3 / 4, abs=0.08)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trl-grpo", "has no table segments, so no tokens at all"),
        ("trl", "trl leaves no such tokens out. Drop it, or choose "),
        ("trl-tokens", "trl-tokens leaves no such tokens out"),
    ],
)
def test_allow_retokenized_is_refused_if_it_changes_nothing(
    name: str, why: str, tmp_path: Path
) -> None:
    run = rollouts.write(tmp_path / "run", [rollouts.finished(0, rollouts.tool_calls_and_answer())])
    with pytest.raises(UserError, match=f"^--allow-retokenized changes nothing: .*{why}"):
        export_run(run, name, options=ExportOptions(allow_retokenized=True))


@pytest.mark.parametrize("name", RL)
def test_only_exact_tokens_with_logprobs_go_to_rl_trainers(name: str, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"token_source": "retokenized", "trainable": False, "logprobs": [None, None]},
        {"trainable": False, "exclude_reason": "raw_logprobs"},
        {"logprobs": [None, None]},
        {},
    ]
    made = [
        rollouts.finished(
            n,
            rollouts.with_quoted_answer(),
            segments=[rollouts.segment(n, [1, 2], [1], **more)],
            size=len(kinds),
        )
        for n, more in enumerate(kinds)
    ]
    run = rollouts.write(tmp_path / "run", made)
    report = export_run(run, name, options=ExportOptions(min_group=1))
    assert report.trained == 1
    assert report.left_out == {"retokenized": 1, "not_trainable": 1, "no_logprobs": 1}
    requested = ExportOptions(min_group=1, allow_retokenized=True)
    report = export_run(run, name, options=requested)
    assert report.trained == 2
    text = json.dumps(read(report.out))
    assert "-0.5" not in text or name != "atropos"  # one without: its whole group has none
