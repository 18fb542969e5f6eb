"""Rows that a program passes in place of a dataset's path: written to a file that a run reads."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError

_folders: set[Path] = set()
"""Temporary folders of this process, one for each rows file."""


def rows_file(rows: Iterable[Mapping[str, Any]], limit: int | None) -> str:
    """Write rows to a temporary JSONL file, named by their content, and return its path.

    The file is removed when this process ends. A run keeps a copy in its run directory.

    Args:
        limit: how many rows are read; an iterable may have no end.

    Raises: UserError for rows that are not JSON, and when the file cannot be written.
    """
    digest, number = hashlib.sha256(), 0
    try:
        folder = Path(tempfile.mkdtemp(prefix="hermes-rl-rows-"))
        _folders.add(folder)
        atexit.register(_remove, folder, os.getpid())
        with (folder / "rows.jsonl").open("wb") as file:
            for row in islice(rows, limit):
                number += 1
                line = json.dumps(row).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = Path(file.name).rename(folder / f"rows-{digest.hexdigest()[:12]}.jsonl")
    except (TypeError, ValueError) as error:
        shutil.rmtree(folder)
        raise UserError(f"dataset.path: row {number} is not JSON: {error}") from None
    except OSError as error:
        raise UserError(
            f"dataset.path: rows cannot be kept in {tempfile.gettempdir()}: {error.strerror}"
        ) from None
    return str(path)


def is_rows_file(path: str) -> bool:
    """Whether this process wrote the file with `rows_file`."""
    return Path(path).parent in _folders


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends before its parent
        shutil.rmtree(folder, ignore_errors=True)
