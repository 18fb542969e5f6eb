"""Attempts that were cut: their rows, folded from what the journal kept of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hermes_rl.events import AttemptKey, Begun, Ended, Event
from hermes_rl.store.dispatch import DISPATCH_FILE, Dispatched
from hermes_rl.store.journal import LiveLine
from hermes_rl.store.lines import payloads
from hermes_rl.store.rows import Finished
from hermes_rl.store.rundir import sequence_of
from hermes_rl.trajectory import fold

_decode_live = msgspec.json.Decoder(LiveLine).decode
_decode_dispatch = msgspec.json.Decoder(Dispatched).decode


@dataclass
class Lost:
    """Finds the lost attempts in journal folders and makes one row of each.

    Args:
        recorded: whether an attempt already has its row.
        cause: `driver_lost` or `worker_lost`.
        run_id, config_hash: for rows of attempts that never began.
        sound: False takes damaged lines for absent (repair).
    """

    recorded: Callable[[AttemptKey], bool]
    cause: str
    run_id: str
    config_hash: str
    sound: bool = True
    found: set[AttemptKey] = field(default_factory=set)
    """Keys of all attempts that were given a row."""

    def live(self, path: Path) -> Iterator[Finished]:
        """Rows of the lost attempts of one live file. Raises: DamagedFile."""
        at = path.stat().st_mtime
        for events in self._attempts(path):
            begun = events[0]
            assert isinstance(begun, Begun)
            yield self._row(begun, events, at)

    def dispatched(self, path: Path) -> Iterator[Finished]:
        """Rows of attempts that were sent and left no live line. Raises: DamagedFile."""
        for payload in payloads(path, sound=self.sound):
            line = _decode_dispatch(payload)
            if line.key not in self.found and not self.recorded(line.key):
                yield self.never_begun(line)

    def never_begun(self, line: Dispatched) -> Finished:
        """The row of an attempt of which only the dispatch is known."""
        begun = line.begun(self.run_id, self.config_hash)
        return self._row(begun, [begun], line.at)

    def _row(self, begun: Begun, events: list[Event], at: float) -> Finished:
        from hermes_rl.segments import with_segments  # few starts have such a row to make

        self.found.add(begun.key)
        # An end without its `done` line was never reported: the attempt counts as cut.
        kept = [e for e in events if not isinstance(e, Ended)]
        row, segments = with_segments(kept, fold(kept, lost=self.cause, at=at))
        return Finished(key=begun.key, row=row, segments=segments)

    def _attempts(self, path: Path) -> Iterator[list[Event]]:
        attempts: dict[int, list[Event]] = {}
        for payload in payloads(path, sound=self.sound):
            try:
                line = _decode_live(payload)
            except msgspec.ValidationError:
                continue  # a sound line with a value that JSON cannot hold, such as NaN
            if isinstance(line.e, Begun):
                if line.e.key not in self.found and not self.recorded(line.e.key):
                    attempts[line.a] = [line.e]
            elif line.a in attempts:
                attempts[line.a].append(line.e)
        yield from attempts.values()


def journal_files(folder: Path, kind: str) -> list[Path]:
    """The `done`, `live`, `asked` or `dispatch` files of a journal folder, in order of their
    numbers. Other files are not ours: a file system may leave some (`.nfs...`)."""
    if kind == "dispatch":
        path = folder / DISPATCH_FILE
        return [path] if path.exists() else []
    found = [p for p in folder.glob(f"{kind}-*.jsonl") if re.fullmatch(r".*-\d+", p.stem)]
    return sorted(found, key=sequence_of)
