"""Attempts that a kill cut: what was sampled until then is kept, and never trained on."""

from test_segments import Story

from hermes_rl.store import JournalWriter, load_run, open_run


async def test_the_next_start_keeps_the_tokens_of_a_lost_attempt(tmp_path):
    story = Story().call("one", 1, [1, 2], [3, 4], version="6").start("two", 2)
    key = story.events[0].key
    async with (
        await open_run(tmp_path / "run", {}) as driver,
        JournalWriter(driver.run_dir, driver.epoch, "w0") as journal,
    ):
        recorder = journal.recorder(key)
        for event in story.events:
            recorder.record(event)
    async with await open_run(tmp_path / "run", {}) as driver:
        assert driver.report.lost == [key]
    run = load_run(tmp_path / "run")
    (failure,) = run.arrow("failures").to_pylist()
    (segment,) = run.arrow("segments").to_pylist()
    assert failure["cause"] == "driver_lost"
    assert segment["trajectory_id"] == failure["trajectory_id"]
    assert segment["input_ids"] == [1, 2, 3, 4]
    assert segment["logprobs"] == [None, None, -0.5, -0.5]
    assert segment["version_ids"] == [-1, -1, 6, 6]
    assert (segment["trainable"], segment["exclude_reason"]) == (False, "failed")
    assert run.stats["exact_tokens"]["trained_tokens"] == 0
