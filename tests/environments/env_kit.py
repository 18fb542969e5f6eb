"""What must hold of every environment, and how it is shown."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from hermes_rl.rl import Task, first_tasks, hashed, run_trial
from hermes_rl.testing import CHEATS, traced

Solution = Callable[[Task], str]


class Play(NamedTuple):
    """One way of going at a task, and what it must earn."""

    name: str
    solution: Solution
    wanted: float
    shown: Callable[[Task], str | None] = lambda task: None
    """What a tool must have printed, which shows that it was done."""


PROGRAMS = (".py", ".sh", "Makefile")
CHANGED = {
    **dict.fromkeys(("exit-zero", "forged-report"), PROGRAMS),
    **dict.fromkeys(("patched-verifier", "peeking", "equal-to-all"), (".py",)),
}
"""Cheat -> how the names of what it changes end."""


def works(name: str, task: Task) -> bool:
    """Whether a task has what a cheat needs. Most need nothing."""
    if name == "git-history":
        return "git init" in (task.setup or "")
    if name in ("hard-coded-tests", "skip-all"):
        return any("test" in path and path.endswith(".py") for path in task.files)
    if name == "unreadable-files":
        return bool(task.files)
    return name not in CHANGED or any(path.endswith(CHANGED[name]) for path in task.files)


def cheats(*names: str, tasks: int = 1) -> list[Play]:
    """Every shipped cheat, or those that are named, played with a shell on so many tasks each.

    Each must have left its traces, wherever it has something to work on.
    """
    return [
        Play(f"cheat {name}, task {n}", _always(traced(name)), 0.0, _shown(name))
        for n in range(tasks)
        for name in names or CHEATS
    ]


def _always(script: str) -> Solution:
    return lambda task: script


def _shown(name: str) -> Callable[[Task], str | None]:
    return lambda task: f"left by {name}" if works(name, task) else None


def wrong(env: str, plays: Sequence[Play], **how: Any) -> dict[str, object]:
    """Plays that did not earn what they must: name -> the reward, or what ended the attempt. Those
    that were not done, as their traces show, too.

    Each goes at a task of its own, all at once, in real sandboxes.
    """
    must: dict[str, str | None] = {}

    def solution(task: Task) -> str:
        play = plays[task.metadata["position"]]
        must[play.name] = play.shown(task)
        return play.solution(task)

    rows = run_trial(env, "oracle", tasks=len(plays), solution=solution, **how)
    assert len(rows) == len(plays) == len(must)
    found: dict[str, object] = {}
    for play, row in zip(plays, rows, strict=True):
        told = [text for text in row.messages if text.startswith('{"role":"tool"')]
        if row.cause or row.reward != play.wanted:
            found[play.name] = row.error or row.reward
        elif must[play.name] and not any(str(must[play.name]) in text for text in told):
            found[play.name] = f"was not done: {told}"
    return found


def content(task: Task) -> str:
    """Names a task by all that an agent could see, and by how it is judged; not by its id."""
    form = msgspec.to_builtins(hashed(msgspec.structs.replace(task, id="")))
    return hashlib.sha256(msgspec.json.encode(form, order="deterministic")).hexdigest()


def stream_digest(tasks: Sequence[Task]) -> str:
    """sha256 over everything in some tasks, byte by byte."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(msgspec.msgpack.encode(task))
    return found.hexdigest()


SPLITS = ("train", "eval")
COMPARED = 200
"""Tasks of each stream that are made in another process too."""
ELSEWHERE = """
import sys
from env_kit import SPLITS, first_tasks, stream_digest
for seed in sys.argv[3:]:
    for split in SPLITS:
        tasks = first_tasks(sys.argv[1], int(sys.argv[2]), split=split, seed=int(seed))
        print(seed, split, stream_digest(tasks))
"""


@contextmanager
def elsewhere(env: str, count: int, seeds: Sequence[int]) -> Iterator[Callable[[], list[str]]]:
    """The digests of the streams' beginnings, made in another process with other hash seeds while
    this one goes on: a line for each seed and split."""
    process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, env, str(count), *map(str, seeds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )

    def lines() -> list[str]:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return out.splitlines()

    try:
        yield lines
    finally:
        process.kill()
        process.wait()


def check_stream(
    env: str, count: int = 1_000, seeds: Sequence[int] = (0, 2026), *, endless: bool = True
) -> None:
    """So many tasks per seed and split without a repeat, the first of them the same bytes in
    another process, and nothing in common between train and eval, whatever the seeds.

    Args:
        endless: the tasks of other seeds are others; else they are the same in another order.
    """
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    first: dict[str, set[tuple[str, ...]]] = {split: set() for split in SPLITS}
    digests = []
    with elsewhere(env, COMPARED, seeds) as lines:
        for seed in seeds:
            for split in SPLITS:
                tasks = first_tasks(env, count, split=split, seed=seed)
                names = [content(task) for task in tasks]
                assert len(set(names)) == len(names), f"{split} {seed} has a task twice"
                assert len(names) == count or not endless
                assert len({task.id for task in tasks}) == len(tasks)
                seen[split].update(names)
                first[split].add(tuple(names[:20]))
                digests.append(f"{seed} {split} {stream_digest(tasks[:COMPARED])}")
        assert lines() == digests
    assert seen["train"].isdisjoint(seen["eval"])
    for split in SPLITS:
        assert len(first[split]) == len(seeds), "each seed has an order of its own"
