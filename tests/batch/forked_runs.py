"""A server that forks runs, so that a kill costs milliseconds and not the start of an interpreter.

Each order, a line of JSON on standard input, is `hermes-rl run ARGUMENTS --json` in a process of
its own; its exit status, negative after a signal, is the answer. What a run loads late is loaded
here already.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import aiohttp
import pandas
import pyarrow.compute
import pyarrow.dataset
import pyarrow.pandas_compat
import pyarrow.parquet

from batch_runner import arun_batch
from hermes_rl.cli import main, run_command
from hermes_rl.models import ModelClient
from hermes_rl.sandboxes import Subprocess
from hermes_rl.store import PartWriter

LOADED = (aiohttp, pandas, pyarrow, arun_batch, run_command, ModelClient, Subprocess, PartWriter)


def fork(order: dict[str, Any]) -> int:
    """Run in a forked process; returns its exit status.

    Args:
        order: `arguments`, `env` and the file `said` for all that it prints.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            said = os.open(order["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.environ.update(order["env"])
            code = main(["run", *order["arguments"], "--json"])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(fork(json.loads(line)), flush=True)
