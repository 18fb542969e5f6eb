"""A bug and hidden tests: `hermes-rl env process docs/examples/fix_repository.py`."""

import json
import random
from collections.abc import Iterator

from hermes_rl.rl import (
    CannotJudge,
    EnvConfig,
    Environment,
    Rewards,
    Rollout,
    RolloutContext,
    Task,
    make_task,
    part,
)

SOUND = '''\
def clamp(value, low, high):
    """value, but not below low and not above high."""
    if value < low:
        return low
    if value > high:
        return high
    return value
'''

BUGS = (
    ("value < low", "value <= high"),
    ("value > high", "value < high"),
    ("return low", "return low + 1"),
    ("return high", "return value - high"),
)

CASES = {"5 0 10": "5", "-1 0 10": "0", "11 0 10": "10", "0 0 10": "0", "10 0 10": "10"}
"""Call -> the right result. Only the calls go into the grading sandbox, where the agent's code runs
and can read all files."""

ASK = """\
import json, os, subprocess, sys

CALL = "import sys; sys.path.insert(0, sys.argv[1]); import shapes; "
CALL += "print(shapes.clamp(*map(int, sys.argv[2].split())))"
results = []
for case in sys.argv[2:]:  # the agent's code runs in a process that cannot write the report
    command = [sys.executable, "-I", "-c", CALL, sys.argv[1], case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    results.append(done.stdout.strip()[:20])
os.write(3, json.dumps(results).encode())
"""


class FixRepository(Environment[EnvConfig]):
    """One wrong line in a small package; the tests that judge are never in the sandbox."""

    name = "fix_repository"

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Ends: every bug once, in an order of its own for each seed."""
        bugs = list(enumerate(BUGS))
        random.Random(f"{split} {seed}").shuffle(bugs)
        for number, (right, wrong) in bugs:
            yield make_task(
                "clamp() in shapes.py gives wrong results. Find the bug and fix it.",
                id=f"clamp-{number}",
                files={"shapes.py": SOUND.replace(right, wrong, 1)},
                setup="git init -q . && git add . && git -c user.name=a -c user.email=a@b commit "
                "-qm start",
                oracle=f"sed -i 's/{wrong}/{right}/' shapes.py",
                requires=["git", "python3"],
            )

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """1 when all hidden tests pass; what else is known goes into the metrics."""
        try:
            left = await ctx.grading.read_file("shapes.py")  # bytes, as the agent left them
        except OSError:
            return Rewards([part("tests", 0.0)])
        calls = " ".join(f"'{case}'" for case in CASES)
        result = await ctx.grading.run(
            f'exec python3 -I "$VERIFY/ask.py" "$WORKSPACE" {calls}',
            files={"ask.py": ASK},
            timeout_s=60,
        )
        if result.exit_code == 127:
            raise CannotJudge("no python3 in the grading sandbox")  # no reward, not 0
        results = json.loads(result.report) if result.ok else []
        passed = sum(a == b for a, b in zip(results, CASES.values(), strict=False))
        solved = passed == len(CASES)
        return Rewards([part("tests", solved)], {"passed": float(passed), "bytes": len(left)})
