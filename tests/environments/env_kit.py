"""What must hold of every environment, and how it is shown."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from hermes_rl.rl import Task
from hermes_rl.rl.opening import hashed
from hermes_rl.rl.trial import first_tasks, trial
from hermes_rl.testing.cheats import CHEATS

Solution = Callable[[Task], str]


class Play(NamedTuple):
    """One way of going at a task, and what it must earn."""

    name: str
    solution: Solution
    wanted: float


def cheats() -> list[Play]:
    """Every shipped cheat, played with a shell."""
    return [Play(f"cheat {name}", _always(script), 0.0) for name, script in CHEATS.items()]


def _always(script: str) -> Solution:
    return lambda task: script


def wrong(env: str, plays: Sequence[Play], **how: Any) -> dict[str, object]:
    """Plays that did not earn what they must: name -> the reward, or what ended the attempt.

    Each goes at a task of its own, all at once, in real sandboxes.
    """

    def solution(task: Task) -> str:
        return plays[task.metadata["position"]].solution(task)

    rows = trial(env, "oracle", tasks=len(plays), solution=solution, **how)
    assert len(rows) == len(plays)
    pairs = zip(plays, rows, strict=True)
    return {p.name: r.error or r.reward for p, r in pairs if r.cause or r.reward != p.wanted}


def content(task: Task) -> str:
    """Names a task by all that an agent could see, and by how it is judged; not by its id."""
    form = msgspec.to_builtins(hashed(msgspec.structs.replace(task, id="")))
    return hashlib.sha256(msgspec.json.encode(form, order="deterministic")).hexdigest()


def stream_digest(env: str, count: int, split: str, seed: int) -> str:
    """sha256 over everything in the first tasks of a stream."""
    found = hashlib.sha256()
    for task in first_tasks(env, count, split=split, seed=seed):
        found.update(msgspec.msgpack.encode(task))
    return found.hexdigest()


def elsewhere(env: str, count: int, split: str, seed: int) -> str:
    """`stream_digest` in another process, with other hash seeds."""
    code = f"from env_kit import stream_digest as d; print(d({env!r}, {count}, {split!r}, {seed}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def check_stream(env: str, count: int = 1_000) -> None:
    """A generated set: so many tasks per seed without a repeat, the same bytes in another process,
    other tasks for another seed, and nothing in common between train and eval."""
    train = [content(t) for t in first_tasks(env, count, seed=1)]
    held = [content(t) for s in (1, 2) for t in first_tasks(env, count, split="eval", seed=s)]
    assert len(set(train)) == count
    assert len(set(held[:count])) == count
    assert set(train).isdisjoint(held)
    assert [content(t) for t in first_tasks(env, 20, seed=2)] != train[:20]
    assert stream_digest(env, count, "train", 1) == elsewhere(env, count, "train", 1)
