"""Checks that every environment must pass."""

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


class Attempt(NamedTuple):
    """A solution of a task, and the reward that it must get."""

    name: str
    solution: Solution
    wanted: float
    shown: Callable[[Task], str | None] = lambda task: None
    """Output of a tool that proves that the solution ran."""


PROGRAMS = (".py", ".sh", "Makefile")
CHANGED = {
    **dict.fromkeys(("exit-zero", "forged-report"), PROGRAMS),
    **dict.fromkeys(("patched-verifier", "peeking", "equal-to-all"), (".py",)),
}
"""Cheat -> suffixes of the files that it changes."""


def applies(name: str, task: Task) -> bool:
    """Whether a task meets the needs of a cheat. Most cheats need nothing."""
    if name == "git-history":
        return "git init" in (task.setup or "")
    if name in ("hard-coded-tests", "skip-all"):
        return any("test" in path and path.endswith(".py") for path in task.files)
    if name == "unreadable-files":
        return bool(task.files)
    return name not in CHANGED or any(path.endswith(CHANGED[name]) for path in task.files)


def cheats(*names: str, tasks: int = 1) -> list[Attempt]:
    """Return attempts of all shipped cheats, or of the named ones, on so many tasks each.

    Each must leave traces on tasks to which it applies.
    """
    return [
        Attempt(f"cheat {name}, task {n}", _same_script(traced(name)), 0.0, _trace_of(name))
        for n in range(tasks)
        for name in names or CHEATS
    ]


def _same_script(script: str) -> Solution:
    return lambda task: script


def _trace_of(name: str) -> Callable[[Task], str | None]:
    return lambda task: f"left by {name}" if applies(name, task) else None


def failed_attempts(env: str, attempts: Sequence[Attempt], **how: Any) -> dict[str, object]:
    """Return attempts with another reward than they must get, or that did not run -> the result.

    Each runs on its own task, all concurrently, in real sandboxes.
    """
    must: dict[str, str | None] = {}

    def solution(task: Task) -> str:
        attempt = attempts[task.metadata["position"]]
        must[attempt.name] = attempt.shown(task)
        return attempt.solution(task)

    rows = run_trial(env, "oracle", tasks=len(attempts), solution=solution, **how)
    assert len(rows) == len(attempts) == len(must)
    found: dict[str, object] = {}
    for attempt, row in zip(attempts, rows, strict=True):
        results = [text for text in row.messages if text.startswith('{"role":"tool"')]
        if row.cause or row.reward != attempt.wanted:
            found[attempt.name] = row.error or row.reward
        elif must[attempt.name] and not any(str(must[attempt.name]) in text for text in results):
            found[attempt.name] = f"did not run: {results}"
    return found


def content(task: Task) -> str:
    """Hash everything in a task except its id."""
    form = msgspec.to_builtins(hashed(msgspec.structs.replace(task, id="")))
    return hashlib.sha256(msgspec.json.encode(form, order="deterministic")).hexdigest()


def stream_digest(tasks: Sequence[Task]) -> str:
    """Hash all bytes of some tasks."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(msgspec.msgpack.encode(task))
    return found.hexdigest()


SPLITS = ("train", "eval")
COMPARED_TASKS = 60
"""Tasks of each stream that another process makes too."""
STREAM_SCRIPT = """
import sys
from checks import SPLITS, first_tasks, stream_digest
for seed in sys.argv[3:]:
    for split in SPLITS:
        tasks = first_tasks(sys.argv[1], int(sys.argv[2]), split=split, seed=int(seed))
        print(seed, split, stream_digest(tasks))
"""


@contextmanager
def in_other_process(
    env: str, count: int, seeds: Sequence[int]
) -> Iterator[Callable[[], list[str]]]:
    """Compute digests of the first tasks of each stream in another process with another hash seed.

    Yields: a function that waits for one line per seed and split.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", STREAM_SCRIPT, env, str(count), *map(str, seeds)],
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
    env: str, count: int = 300, seeds: Sequence[int] = (0, 2026), *, endless: bool = True
) -> None:
    """Check that streams have no repeats, are the same in another process, and that splits are
    disjoint for all seeds.

    Args:
        endless: seeds give other tasks; otherwise they only change the order.
    """
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    first: dict[str, set[tuple[str, ...]]] = {split: set() for split in SPLITS}
    digests = []
    with in_other_process(env, COMPARED_TASKS, seeds) as lines:
        for seed in seeds:
            for split in SPLITS:
                tasks = first_tasks(env, count, split=split, seed=seed)
                names = [content(task) for task in tasks]
                assert len(set(names)) == len(names), f"{split} {seed} has a task twice"
                assert len(names) == count or not endless
                assert len({task.id for task in tasks}) == len(tasks)
                seen[split].update(names)
                first[split].add(tuple(names[:20]))
                digests.append(f"{seed} {split} {stream_digest(tasks[:COMPARED_TASKS])}")
        assert lines() == digests
    assert seen["train"].isdisjoint(seen["eval"])
    for split in SPLITS:
        assert len(first[split]) == len(seeds), "each seed has its own order"
