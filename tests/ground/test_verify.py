"""The rewards of grading results."""

import pytest

from hermes_rl.errors import VerifierFault
from hermes_rl.sandboxes import GradingResult
from hermes_rl.verify import judge


def grading_result(exit_code: int = 0, report: bytes = b"", **more: bool) -> GradingResult:
    timed_out = more.get("timed_out", False)
    return GradingResult(
        exit_code=exit_code, timed_out=timed_out, output="reward=1.0\n", report=report
    )


@pytest.mark.parametrize(
    ("result", "score", "reward"),
    [
        (grading_result(0), False, 1.0),
        (grading_result(1), False, 0.0),
        (grading_result(0, timed_out=True), False, 0.0),
        (grading_result(0, b"reward=0.25\n"), True, 0.25),
        (grading_result(1, b"reward=0.25\n"), True, 0.25),
        (grading_result(1), True, 0.0),
        (grading_result(0, b"reward=1\n", timed_out=True), True, 0.0),
    ],
)
def test_rewards(result: GradingResult, score: bool, reward: float) -> None:
    assert judge(result, score=score) == {"verify": reward}


@pytest.mark.parametrize(
    "report",
    [b"", b"reward=nan", b"reward=inf", b"reward=x", b"1.0", b"reward=1\nreward=1", b"\xff"],
)
def test_an_invalid_report_is_a_verifier_fault(report: bytes) -> None:
    with pytest.raises(VerifierFault):
        judge(grading_result(0, report), score=True)


def test_the_verifier_may_decline_to_judge() -> None:
    with pytest.raises(VerifierFault, match="cannot judge: no display"):
        judge(grading_result(0, b"cannot-judge=no display\n"), score=True)
