"""A trainer's logprobs are the sampler's, token by token, over two versions of the weights.

With the programs of examples/grpo_cpu: the sampler is a process of its own, and `rollouts()` is
between it and the trainer.
"""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_cpu"
sys.path[:0] = [str(EXAMPLE), str(Path(__file__).parent)]

import parity  # noqa: E402
from processes import start_sampler  # noqa: E402


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> parity.Sampled:
    """Conversations of two turns with a small random model."""
    folder = tmp_path_factory.mktemp("parity")
    return asyncio.run(parity.sample(folder, *parity.write_small(folder)))


def test_ids_and_logprobs_are_those_of_the_sampler(sampled: parity.Sampled) -> None:
    found = sampled.compare()
    assert found.wrong_ids == 0
    assert found.largest_difference < 1e-4
    assert found.tokens == sum(len(answer["ids"]) for answer in sampled.log) > 200
    versions = Counter(v for row in sampled.rows for v in row.versions if v >= 0)
    assert set(versions) == {1, 2}
    turns = Counter(len(parity.sampled_runs(row)) for row in sampled.rows)
    assert turns[2] > 3, "conversations have two answers in one row"


@pytest.mark.parametrize("bug", [name for name in parity.BUGS if name != "as sampled"])
def test_a_bug_of_the_trainer_is_found(sampled: parity.Sampled, bug: str) -> None:
    found = sampled.compare([parity.BUGS[bug](row, sampled) for row in sampled.rows])
    assert found.wrong_ids > 50 or found.largest_difference > 0.1
    if bug == "versions swapped":
        assert found.wrong_ids == 0
        assert found.largest_difference > 0.1


def test_the_weights_of_smollm2_give_the_same(tmp_path: Path) -> None:
    sampled = asyncio.run(parity.sample(tmp_path, *parity.write_smollm2(tmp_path), group_size=2))
    found = sampled.compare()
    assert found.wrong_ids == 0
    assert found.largest_difference <= 1e-3
    assert {v for row in sampled.rows for v in row.versions} == {-1, 1, 2}
    swapped = sampled.compare([parity.swap_versions(sampled.rows[0])])
    assert swapped.largest_difference > 1e-2


def test_the_sampler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    _, weights = parity.write_small(tmp_path)
    program = (
        "import sys, time; from processes import start_sampler; from pathlib import Path\n"
        "with start_sampler(Path(sys.argv[1])) as sampler:\n"
        "    print(sampler.process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(weights[1])],
        cwd=EXAMPLE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as trainer:
        assert trainer.stdout
        assert trainer.stderr
        pid = int(trainer.stdout.readline())
        assert Path(f"/proc/{pid}/stat").exists()
        trainer.send_signal(signal.SIGKILL)
        trainer.stderr.read()  # the sampler inherited it: this ends when both have ended
        assert trainer.wait(timeout=60) == -signal.SIGKILL


def test_the_sampler_refuses_what_it_does_not_do(tmp_path: Path) -> None:
    _, weights = parity.write_small(tmp_path)
    with start_sampler(weights[1]) as sampler:
        for body in ({"prompt": [1], "top_p": 0.5}, {"prompt": [10**6]}, {"prompt": "text"}):
            request = urllib.request.Request(
                sampler.base_url + "/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert refused.value.code == 400
