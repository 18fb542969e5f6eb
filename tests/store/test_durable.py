"""I3 of the commit protocol: `done` goes only when the commit is on disk, name and all."""

from pathlib import Path

import pytest
from scripted_rows import Play

from hermes_rl.store import CrashHook, RunDir, Storage, publish_batch


class RecordingStorage(Storage):
    """Notes which folders were made durable while `done` was still there."""

    def __init__(self, root: Path, done: Path) -> None:
        super().__init__(root, CrashHook.from_environment())
        self.done = done
        self.synced: list[str] = []

    def sync_path(self, path: Path) -> None:
        super().sync_path(path)
        if self.done.exists():
            self.synced.append(path.name)


@pytest.mark.parametrize("step", ["publish-8-written", "publish-8-renamed", "publish-8-durable"])
def test_a_redo_makes_the_commit_durable_first(play: Play, run_path: Path, step: str) -> None:
    assert play(path=run_path, crash_at=step) == -9
    done = run_path / "journal" / "1-0" / "done-0.jsonl"
    run_dir = RunDir(run_path)
    storage = run_dir.storage = RecordingStorage(run_path, done)
    publish_batch(run_dir, done, "1-0-0")
    assert storage.synced[-1] == "commits"
    assert not done.exists()
    assert run_dir.committed("1-0-0")
