"""The one table of failures: every error has a place in it, and the right one."""

import errno

import pytest

from hermes_rl import errors as e


def classes(root: type[e.HermesError] = e.HermesError) -> list[type[e.HermesError]]:
    return [root, *(c for child in root.__subclasses__() for c in classes(child))]


def test_every_error_class_has_a_known_cause() -> None:
    assert {c.cause for c in classes()} <= set(e.CAUSES)
    assert set(e.CANCELLED) <= set(e.CAUSES)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "no space"), "disk"),
        (OSError(errno.EDQUOT, "quota"), "disk"),
        (OSError(errno.EIO, "broken"), "harness"),
        (KeyError("bug"), "harness"),
        (e.DiskFull("full"), "disk"),
        (e.StoreError("damaged"), "harness"),
        (e.RateLimited("429"), "rate_limit"),
    ],
)
def test_causes(error: Exception, cause: str) -> None:
    assert e.cause_of(error) == cause


def test_consequences_of_causes() -> None:
    """DESIGN 5.3 and 5.6, in words of their own."""
    breakers = {c for c, what in e.CAUSES.items() if what.breaker}
    assert breakers == {"auth", "billing", "model_not_found", "outage", "disk", "cost_limit"}
    uncounted = {c for c, what in e.CAUSES.items() if not what.counted}
    assert uncounted == breakers | {"worker_lost", "driver_lost", "duplicate", "interrupted"}
    assert {c for c, what in e.CAUSES.items() if not what.retry} == {
        "task",
        "verifier",
        "unit_budget",
    }
    assert [c for c, what in e.CAUSES.items() if what.owner == "task"] == ["task"]
    cut = {"max_turns", "token_limit", "time_limit", "output_truncated", "context_overflow"}
    assert {r for r, ending in e.ENDINGS.items() if ending.truncated} == cut
