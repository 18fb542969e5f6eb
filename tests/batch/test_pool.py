"""A Ray that does not start: once more, then one line; nothing of it stays."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from batch_runner.pool import connected
from hermes_rl.errors import UserError


class BadRay(SimpleNamespace):
    """Stands in for the package: so many starts fail, each after a process was begun."""

    def __init__(self, failures: int) -> None:
        super().__init__(failures=failures, begun=[], asked=[], shut=0)

    def is_initialized(self) -> bool:
        return False

    def init(self, **asked: Any) -> None:
        self.asked.append(asked)
        self.begun.append(subprocess.Popen(["sleep", "600"]))
        if len(self.begun) <= self.failures:
            raise RuntimeError("The node timed out during startup.\nSee the logs.")

    def shutdown(self) -> None:
        self.shut += 1


@pytest.fixture
def bad_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadRay]:
    ray = BadRay(request.param)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield ray
    for process in ray.begun:
        process.kill()
        process.wait()


@pytest.mark.parametrize("bad_ray", [1], indirect=True)
def test_a_ray_that_was_too_slow_gets_a_second_chance(bad_ray: BadRay) -> None:
    with connected(3) as warden:
        assert warden is not None
        first, second = bad_ray.begun
        assert first.wait(30) == -9, "what the failed start left behind"
        assert second.poll() is None
        assert [asked["num_cpus"] for asked in bad_ray.asked] == [3, 3]
    assert second.wait(30) == -9


@pytest.mark.parametrize("bad_ray", [9], indirect=True)
def test_a_ray_that_never_starts_is_one_line(bad_ray: BadRay) -> None:
    with pytest.raises(UserError) as caught, connected(1):
        pass
    assert str(caught.value) == (
        "cannot start Ray: The node timed out during startup. Use --workers 0"
    )
    assert [process.wait(30) for process in bad_ray.begun] == [-9, -9]


@pytest.mark.parametrize("bad_ray", [9], indirect=True)
def test_an_address_that_is_wrong_is_tried_once(
    bad_ray: BadRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"cannot reach RAY_ADDRESS 127\.0\.0\.1:1: .* unset it"):
        connected(1).__enter__()
    assert len(bad_ray.asked) == 1
