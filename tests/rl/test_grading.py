"""Graders read and write files of a workspace as bytes, after the agent's processes ended."""

import random

import pytest
from runs import Lab

from hermes_rl.rl import arun_trial

HEAD = """
import random

def blob(size):
    return random.Random(7).randbytes(size)

SIZE = 3_000_000
ODD = "a b'c\\n\\udcff$(touch pwned).bin".encode("utf-8", "surrogateescape").decode("latin-1")
"""

ENV = """
def tasks(self, split, seed):
    yield make_task(
        "Go.",
        files={"data/in.bin": {"base64": __import__("base64").b64encode(blob(SIZE)).decode()}},
        oracle="cp data/in.bin out.bin; mkdir d; ln -s /etc/passwd link; ln -s out.bin near; "
        "echo 'half' >answer; (setsid bash -c 'while :; do echo late >>answer; sleep 0.01; done' "
        ">/dev/null 2>&1 &)",
    )

async def compute_reward(self, task, trajectory, ctx):
    grading = ctx.grading
    data = await grading.read_file("out.bin")
    assert data == blob(SIZE), "unchanged bytes, also of a large file"
    first = await grading.read_file("answer")
    for name, kind in (("none", FileNotFoundError), ("d", IsADirectoryError), ("link", OSError),
                       ("near", OSError), ("/etc/passwd", OSError), ("../x", OSError)):
        try:
            await grading.read_file(name)
        except kind:
            continue
        raise AssertionError(f"{name} was read")
    await grading.write_file(ODD, data[::-1])
    await grading.write_file("answer", "mine")
    assert await grading.read_file("answer") == b"mine"
    script = (
        'cmp "$VERIFY/back.bin" "$WORKSPACE/$(cat "$VERIFY/name")" && '
        'test "$(cat "$WORKSPACE/answer")" = mine && echo done >&3; '
        'test ! -e "$WORKSPACE/pwned" && rm "$WORKSPACE/out.bin"'
    )
    files = {"back.bin": data[::-1], "name": ODD}
    for _ in range(2):  # each run has a new sandbox with all files
        result = await grading.run(script, files=files)
        assert result.ok, result
        assert result.report == "done"
    slow = await grading.run("sleep 60", timeout_s=0.5)
    assert slow.timed_out and not slow.ok
    bad = await grading.run("exit 7")
    assert (bad.exit_code, bad.ok) == (7, False)
    assert ctx.grading.seconds > 0
    return Rewards([part("all", 1.0)], {"first": len(first)})
"""


@pytest.mark.parametrize("backend", ["none", "bubblewrap"])
async def test_grading_reads_and_writes_bytes_after_all_processes_ended(
    lab: Lab, backend: str
) -> None:
    sections = {"sandbox": {"backend": backend}, "run": {"allow_unsandboxed": True}}
    (row,) = await arun_trial(lab.write(ENV, HEAD).path, tasks=1, sections=sections)
    assert row.error is None
    assert row.reward == 1.0
    assert row.metrics["first"] >= len("half\n")
    assert row.timing.verify_s > 0.5


VERIFIED = """
def tasks(self, split, seed):
    yield make_task("a", verify="exit 0", id="yes")
    yield make_task("b", verify="exit 1", id="no")
    yield make_task("c", verify={"script": "echo reward=0.25 >&3", "score": True}, id="score")
    yield make_task("d", verify={"script": "echo cannot-judge=moon >&3", "score": True}, id="none")
    yield make_task("e", id="without")

async def compute_reward(self, task, trajectory, ctx):
    return await ctx.grading.verify(task.verify)
"""


async def test_grading_runs_the_verifier_of_a_task(lab: Lab) -> None:
    sections = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    rows = await arun_trial(lab.write(VERIFIED).path, "noop", tasks=5, sections=sections)
    rewards = {row.task_id: row.reward for row in rows}
    assert rewards == {"yes": 1.0, "no": 0.0, "score": 0.25, "none": None, "without": None}
    causes = {row.task_id: row.cause for row in rows if row.cause}
    assert causes == {"none": "verifier", "without": "verifier"}
    assert "the task has no 'verify'" in (rows[-1].error or "")


def test_the_blob_contains_every_byte() -> None:
    assert set(random.Random(7).randbytes(3_000_000)) == set(range(256))
