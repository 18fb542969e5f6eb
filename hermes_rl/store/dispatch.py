"""The driver's own journal: which attempt was sent to which writer."""

from __future__ import annotations

import time

import msgspec

from hermes_rl.events import AttemptKey, Begun
from hermes_rl.ports import WorkItem
from hermes_rl.store.disk import AppendFile
from hermes_rl.store.rundir import RunDir

DISPATCH_FILE = "dispatch.jsonl"


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """One line of dispatch.jsonl: enough to name an attempt that never began."""

    key: AttemptKey
    writer: str
    at: float
    """Unix time, seconds."""
    group_id: str
    repeat: int
    row_index: int
    task_id: str
    task_hash: str
    seed: int

    def begun(self, run_id: str, config_hash: str) -> Begun:
        """The beginning of an attempt of which nothing else is known."""
        return Begun(
            key=self.key,
            started_at=self.at,
            run_id=run_id,
            group_id=self.group_id,
            member=self.repeat,
            repeat=self.repeat,
            row_index=self.row_index,
            task_id=self.task_id,
            task_hash=self.task_hash,
            config_hash=config_hash,
            seed=self.seed,
            prompt="",
            model="",
            api_mode="",
            endpoint="",
        )


class DispatchJournal:
    """Appends dispatches; the file is made at the first one."""

    def __init__(self, run_dir: RunDir, driver: str) -> None:
        self._run_dir = run_dir
        self._folder = run_dir.writer_path(driver)
        self._file: AppendFile | None = None

    def append(self, item: WorkItem, writer: str) -> Dispatched:
        """Step 1: note an attempt before it is sent. Raises: DiskFull."""
        if self._file is None:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / DISPATCH_FILE
            self._file = AppendFile(path, self._run_dir.crash, "attempt-1-dispatch")
        line = Dispatched(
            key=AttemptKey(unit_id=item.unit_id, epoch=item.epoch, attempt=item.attempt),
            writer=writer,
            at=time.time(),
            group_id=item.group_id,
            repeat=item.repeat,
            row_index=item.row_index,
            task_id=item.task_id,
            task_hash=item.task_hash,
            seed=item.seed,
        )
        self._file.append(msgspec.json.encode(line))
        return line

    def close(self, clean: bool) -> None:
        """Close it; a clean end leaves nothing behind."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if clean:
                (self._folder / DISPATCH_FILE).unlink()
        if clean and self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()
