"""Token ids of a rollout whose texts had a secret are not kept: they would spell it."""

from pathlib import Path

import pytest
from run_kit import engine_in, run_on

from hermes_rl.models.tokens import load_renderer
from hermes_rl.store import load_run

SECRET = "qT7first-z8Qsecond"


async def test_token_ids_of_a_secret_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEGMENTS_TOKEN", SECRET)
    prints = {"run": "printf %s-%s qT7first z8Qsecond"}
    async with engine_in(tmp_path) as engine:
        await run_on(engine, tmp_path, [[prints, "Done."], ["Done."]], "vllm")
        renderer = load_renderer(str(tmp_path / "tokenizer"))
        prompts = [renderer.decode(entry.prompt_ids) for entry in engine.truth]
    run = load_run(tmp_path / "run")
    rows = {row["task_id"]: row for row in run.arrow("trajectories").to_pylist()}
    segments = run.arrow("segments").to_pylist()
    assert any(SECRET in prompt for prompt in prompts)  # the model saw the result as it was
    assert SECRET not in str(rows)
    assert "[secret SEGMENTS_TOKEN]" in str(rows["t0"]["messages"])
    assert {"name": "redacted", "value": 1.0} in rows["t0"]["metrics"]
    assert {segment["task_id"] for segment in segments} == {"t1"}
