"""GRPO through `rollouts()`: the trainer is this process, the sampler another one.

Each step takes 16 groups of 8 rollouts, updates the policy once, writes its weights to a file, lets
the sampler load them as the next version, and acknowledges the groups with the number of the step.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from environment import Numbers
from grpo import Row, loss_of, permute_advantages, rows_of
from model import Transformer, load, save
from processes import Sampler, start_sampler

from hermes_rl.rl import Policy, Selection, rollouts

SIZE, GROUPS, STEPS, RATE = 8, 16, 24, 1e-3
HELD_OUT = 128
"""Tasks of the first and the last measurement; an eighth for those between."""
PART = 32
"""Sequences in memory at once."""
EVERY = 8
"""Steps between measurements."""
CONFIG = {"model": {"max_tokens": 48, "temperature": 1.0}}


@dataclass
class Curve:
    """Held-out reward over training."""

    seed: int
    control: bool
    steps: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)
    """That each measurement averaged."""
    seconds: float = 0.0
    stale: list[int] = field(default_factory=list)
    """For each step: how many versions its oldest token is behind the weights that it updates."""


@dataclass
class Trainer:
    """The policy that learns, and where its versions are."""

    model: Transformer
    policy: Policy
    sampler: Sampler
    folder: Path
    version: int = 0

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def update(self, rows: Sequence[Row]) -> None:
        """Make one step, and let the sampler load the new weights."""
        self._optimizer.zero_grad()
        for start in range(0, len(rows), PART):
            part = rows[start : start + PART]
            (loss_of(self.model, part) * len(part) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.version += 1
        path = self.folder / f"weights-{self.version}.pt"
        save(self.model, path)
        self.sampler.load(path, self.version)

    async def measure(self, curve: Curve, tasks: int) -> None:
        """Add the mean reward on held-out tasks to a curve."""
        stream = rollouts(
            Numbers,
            self.policy,
            out=self.folder / f"held-out-{self.version}",
            split="eval",
            group_size=SIZE,
            limit=tasks,
            config=CONFIG,
        )
        rewards: list[float] = []
        async with stream:
            async for group in stream:
                rewards += [member.reward for member in group.members if member.valid]
                await group.ack()
        reward, count = sum(rewards) / len(rewards), len(rewards)
        curve.steps.append(self.version)
        curve.rewards.append(reward)
        curve.rollouts.append(count)
        print(
            f"  step {self.version:3}  held-out reward {reward:.3f}  ({count} rollouts)", flush=True
        )


async def train(
    folder: Path, tokenizer: Path, warm: Path, seed: int, first: Curve | None = None
) -> Curve:
    """Train one policy and measure it.

    Args:
        folder: for its runs and weights.
        tokenizer: folder of the tokenizer.
        warm: the weights to start from.
        first: the curve of the same warm start. This one is then its control, with advantages
            permuted within each group, and begins with the same measurement.
    """
    control = first is not None
    curve, started = Curve(seed, control), time.monotonic()
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    with start_sampler(warm) as sampler, ThreadPoolExecutor(1) as thread:
        policy = Policy(
            model="policy", base_url=sampler.base_url, tokens="vllm", tokenizer=tokenizer, version=0
        )
        trainer = Trainer(load(warm).train(), policy, sampler, folder)
        if first is None:
            await trainer.measure(curve, HELD_OUT)
        else:
            curve.steps, curve.rewards = first.steps[:1], first.rewards[:1]
            curve.rollouts = first.rollouts[:1]
        stream = rollouts(
            Numbers,
            policy,
            out=folder / "train",
            group_size=SIZE,
            concurrency=64,
            seed=seed,
            advantage="dr_grpo",
            ahead=GROUPS,
            selection=Selection(drop_equal=True),
            config=CONFIG,
        )
        async with stream:
            while trainer.version < STEPS:
                groups: list[Any] = [await anext(stream) for _ in range(GROUPS)]
                rows = []
                for group in groups:
                    rows_here = rows_of(group)
                    rows += permute_advantages(rows_here, rng) if control else rows_here
                oldest = min(version for row in rows for version in row.versions if version >= 0)
                curve.stale.append(trainer.version - oldest)
                await asyncio.get_running_loop().run_in_executor(thread, trainer.update, rows)
                await policy.set_version(trainer.version)
                for group in groups:
                    await group.ack(step=trainer.version)
                if trainer.version % EVERY == 0 and trainer.version < STEPS:
                    await trainer.measure(curve, HELD_OUT // 8)
        await trainer.measure(curve, HELD_OUT)
    curve.seconds = time.monotonic() - started
    return curve
