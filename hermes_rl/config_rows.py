"""Rows that a program gives in place of a dataset's path: kept in a file, as a run reads a file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError


def rows_file(rows: Iterable[Mapping[str, Any]], limit: int | None) -> str:
    """The path of a JSONL file with these rows, named by their content: the same rows resume the
    same run, and the `run.yaml` of the run can be used again.

    Args:
        limit: how many rows are read; an iterable may have no end.

    Raises: UserError for rows that are not JSON, and when the file cannot be written.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "hermes_rl" / "rows"
    digest, number = hashlib.sha256(), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as file:
            for row in islice(rows, limit):
                number += 1
                line = json.dumps(row).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = folder / f"rows-{digest.hexdigest()[:12]}.jsonl"
        os.replace(file.name, path)
    except (TypeError, ValueError) as error:
        Path(file.name).unlink(missing_ok=True)
        raise UserError(f"dataset.path: row {number} is not JSON: {error}") from None
    except OSError as error:
        raise UserError(
            f"dataset.path: rows cannot be kept in {folder}: {error.strerror}"
        ) from None
    return str(path)
