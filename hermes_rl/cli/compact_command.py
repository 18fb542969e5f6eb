"""`hermes-rl compact`: the small Parquet files of a run as few large ones."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from hermes_rl.errors import ExitCode


def command(
    run: Annotated[str, typer.Argument(help="run directory or its URL", metavar="RUN")],
    keep_old: Annotated[
        float, typer.Option(min=0.0, help="seconds to keep replaced files for running readers")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> int:
    """Merge the small Parquet files of a run into files of about 256 MB.

    Each table switches in one step: readers and globs see every row once. Replaced files stay in
    RUN/.compact until the next start or `compact` after that time. A run merges files on its own
    when it ends with more than 50 files of less than 16 MB in a table.

    \b
    hermes-rl compact runs/my-run
    hermes-rl compact runs/my-run --keep-old 0    when nothing reads the run
    """
    from hermes_rl.store import changed_run, compact_run, load_run, url_of

    if url_of(run) is None:
        load_run(run)  # refuses what is not a run before a folder is made
    with changed_run(run) as opened:
        done = compact_run(opened.path, grace_s=keep_old, first_epoch=opened.first_epoch)
    for note in opened.notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(done)))
    elif done.before == done.after:
        print(f"{run}: {done.after} Parquet files, {done.size / 1e6:.1f} MB; nothing to merge")
    else:
        print(f"{run}: {done.before} Parquet files are now {done.after}, {done.size / 1e6:.1f} MB")
    return ExitCode.DONE
