"""What a trainer must be given, from the engine's log alone.

A digest describes the loss terms of one row: for each trained token the ids before it, its own id
and its logprob of sampling.
"""

import hashlib
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.store import load_run

Term = tuple[bytes, int, float]
"""The digest of the ids before a token, the token, its logprob."""


@dataclass
class GroupTruth:
    """The rows of a group."""

    digests: Counter[str] = field(default_factory=Counter)
    """Of each row, with the reward of its rollout before the colon."""
    tokens: int = 0
    rollouts: int = 0
    forked: int = 0


def context(ids: Iterable[int]) -> bytes:
    """Digest ids."""
    return hashlib.sha256(b"".join(struct.pack("<q", token) for token in ids)).digest()


def row_digest(terms: Iterable[Term], reward: float) -> str:
    """Digest the loss terms of a row, in the order of the row."""
    found = hashlib.sha256()
    for before, token, logprob in terms:
        found.update(before + struct.pack("<qf", token, logprob))
    return f"{reward}:{found.hexdigest()}"


def read_truth(folder: Path, run: Path) -> dict[str, GroupTruth]:
    """Group id -> what the engine sampled for it, with a new row wherever a prompt does not start
    with the ids of the last row."""
    lines = (folder / "truth.jsonl").read_text(encoding="utf-8").splitlines()
    log = {entry["call_id"]: entry for entry in map(json.loads, lines)}
    groups: dict[str, GroupTruth] = defaultdict(GroupTruth)
    for row in load_run(run).arrow("trajectories").to_pylist():
        group = groups[row["group_id"]]
        rows: list[tuple[list[int], list[Term]]] = []
        for call in row["calls"]:
            entry = log[call["call_id"]]
            prompt, sampled = entry["prompt_ids"], entry["sampled_ids"]
            if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
                rows.append(([], []))
            ids = prompt + sampled
            for at, (token, p) in enumerate(zip(sampled, entry["raw_logprobs"], strict=True)):
                rows[-1][1].append((context(ids[: len(prompt) + at]), token, p))
            rows[-1][0][:] = ids
            group.tokens += len(sampled)
        group.digests.update(row_digest(terms, row["reward"]) for _, terms in rows)
        group.rollouts += 1
        group.forked += len(rows) > 1
    return groups
