"""About how many units a dataset has, long before it is read: for progress only."""

from __future__ import annotations

from pathlib import Path

from hermes_rl.config import DatasetSection
from hermes_rl.sources import BUNDLED, bundled_path

_BLOCK = 1 << 20


def estimate_units(dataset: DatasetSection) -> int | None:
    """Rows times repeats; None for what cannot be counted cheaply. Blocking.

    Rows with repeats of their own are counted with the run's.
    """
    if dataset.path.startswith("env:"):
        return dataset.limit * dataset.repeats if dataset.limit else None
    path = Path(dataset.path).expanduser()
    if dataset.path in BUNDLED and not path.exists():
        path = bundled_path(dataset.path)
    rows = _rows(path) if path.is_file() else None
    if rows is None:
        return None
    return min(rows, dataset.limit or rows) * dataset.repeats


def _rows(path: Path) -> int | None:
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    return None
