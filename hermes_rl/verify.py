"""From the state that a rollout left to a reward.

The verifier runs in the grading box, a fresh sandbox over the workspace (DESIGN 5.9). Its output is
never
read for a reward: the exit code is, or with `score` the one line on descriptor 3.
"""

from __future__ import annotations

import math

from hermes_rl.errors import SandboxDied, SandboxStartError, VerifierFault
from hermes_rl.events import Graded, RewardPart
from hermes_rl.sandboxes import GradingResult, GradingSpec, Sandbox
from hermes_rl.tasks import Verify

BOXES = 3
"""A verifier that cannot judge, or a box that dies, gets this many boxes on the same workspace. The
rollout is never rolled again for it."""

_SIGNALLED = 128
"""Exit codes above it tell of a signal."""
_DETAIL_CHARS = 2_000
_SCRIPT_CHARS = 300


async def verify(sandbox: Sandbox, verifier: Verify | None) -> Graded:
    """Judge the workspace that a rollout left.

    Args:
        sandbox: the rollout's sandbox; its processes are ended by the first grading box.
        verifier: the task's verifier; None gives a null reward.

    Returns: the event, with the reward and how long all boxes took.

    Raises: VerifierFault when no box could judge.
    """
    if verifier is None:
        return Graded(reward=None)
    spec = GradingSpec(
        script=verifier.script,
        files=verifier.files,
        timeout_s=verifier.timeout_s,
        score=verifier.score,
        image=verifier.image,
    )
    seconds = 0.0
    faults: list[str] = []
    for _ in range(BOXES):
        try:
            result = await sandbox.grade(spec)
            seconds += result.seconds
            reward = judge(result, score=verifier.score)
        except (VerifierFault, SandboxDied, SandboxStartError) as fault:
            faults.append(f"{type(fault).__name__}: {fault}")
            continue
        part = RewardPart(name="verify", score=reward, detail=_detail(verifier, result))
        return Graded(reward=reward, rewards=(part,), seconds=seconds)
    raise VerifierFault(f"no verdict in {BOXES} grading boxes; the last: {faults[-1]}")


def judge(result: GradingResult, *, score: bool) -> float:
    """The reward that a grading box stands for.

    Exit 0 is 1.0; any other exit or a timeout is 0.0, since the policy can cause those. With
    `score` the
    report on descriptor 3 decides; a box that failed without one, or was killed, is 0.0 as well.

    Raises: VerifierFault for `cannot-judge=...`, a report that is not one such line, or success
    without one.
    """
    if result.timed_out:
        return 0.0
    if not score:
        return 1.0 if result.exit_code == 0 else 0.0
    if result.exit_code > _SIGNALLED:
        return 0.0  # killed: what it had written may not be its last word
    if not result.report.strip():
        if result.exit_code != 0:
            return 0.0
        raise VerifierFault("the verifier succeeded without writing reward=... to descriptor 3")
    return _parse_report(result.report)


def _parse_report(report: bytes) -> float:
    lines = report.decode("utf-8", "replace").strip().splitlines()
    key, _, value = lines[0].partition("=")
    if len(lines) != 1:
        raise VerifierFault(f"descriptor 3 took {len(lines)} lines; it takes one")
    if key == "cannot-judge":
        raise VerifierFault(f"the verifier cannot judge: {value[:200]}")
    try:
        reward = float(value) if key == "reward" else math.nan
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise VerifierFault(f"descriptor 3 said {lines[0][:80]!r}; it takes reward=<finite number>")
    return reward


def _detail(verifier: Verify, result: GradingResult) -> str:
    """What ran, how it ended, the end of what was printed: for people, never for a reward."""
    script = " ; ".join(line for line in verifier.script.strip().splitlines() if line.strip())
    ending = "timed out" if result.timed_out else f"exit {result.exit_code}"
    printed = result.output.strip()[-_DETAIL_CHARS:]
    first = f"{script[:_SCRIPT_CHARS]}  -> {ending}"
    return f"{first}\n{printed}" if printed else first
