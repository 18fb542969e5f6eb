"""A server that forks commands: a start costs milliseconds instead of the imports of a run.

Each connection to its Unix socket starts one process. The client sends a
request, a line of JSON, with descriptors for its output. It receives two lines: the id of the
process, and its exit code once it has ended, negative after a signal. The server ends with its
standard input.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import termios
import time
import traceback
from functools import cache
from typing import Any, NoReturn

import aiohttp
import pandas
import pyarrow.compute
import pyarrow.dataset
import pyarrow.pandas_compat
import pyarrow.parquet

from batch_runner import arun_batch
from hermes_rl.cli import main, run_command
from hermes_rl.models import ModelClient
from hermes_rl.models.transports import HttpTransport
from hermes_rl.sandboxes import Bubblewrap, Subprocess
from hermes_rl.store import PartWriter

LOADED = (aiohttp, pandas, pyarrow, arun_batch, run_command, ModelClient, Bubblewrap, Subprocess)
LOADED += (HttpTransport, PartWriter)
REQUEST_BYTES = 1 << 20


def run(request: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Be `hermes-rl ARGUMENTS`, in a session and process group of its own.

    Args:
        request: `arguments`, `cwd` and `env`, all of it. `HERMES_TEST_CLOCK=SECONDS` makes the
            time of day jump by so many seconds after a second.
        outputs: for standard output and standard error, after one for standard input if it has any.
            A terminal there becomes its controlling terminal.
    """
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
        nothing = os.open(os.devnull, os.O_RDONLY)
        for standard, descriptor in enumerate([nothing, *outputs][-3:]):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace", buffering=1)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        if jump := float(os.environ.pop("HERMES_TEST_CLOCK", "0")):
            jump_clock(jump)
        code = main(request["arguments"])
    except SystemExit as ended:  # after a signal
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def jump_clock(seconds: float) -> None:
    """Let `time.time` jump in this process, but not the monotonic clock."""
    now, begun = time.time, time.monotonic()
    time.time = lambda: now() + (seconds if time.monotonic() - begun > 1.0 else 0.0)


@cache
def load_s3() -> None:
    """Each session reads 2 MB of JSON that never change."""
    import botocore.session
    import s3fs  # noqa: F401

    botocore.session.create_loader = cache(botocore.session.create_loader)
    session = botocore.session.get_session()
    session.create_client("s3", "us-east-1")


def fork(client: socket.socket) -> tuple[int, int]:
    """Start the run of a request. Returns its id and a descriptor that is readable at its end."""
    request, outputs, _, _ = socket.recv_fds(client, REQUEST_BYTES, 3)
    while not request.endswith(b"\n"):
        request += client.recv(REQUEST_BYTES)
    wanted = json.loads(request)
    # For this process and the next ones.
    if "RAY_ADDRESS" in wanted["env"]:
        import ray  # noqa: F401  # half a second
    if wanted["arguments"][0] == "chat":
        import prompt_toolkit.patch_stdout  # noqa: F401

        from hermes_rl import AIAgent  # noqa: F401
    if wanted["arguments"][0] in ("api", "env"):
        from hermes_rl.rl import run_api  # noqa: F401  # one second
    if "AWS_ENDPOINT_URL" in wanted["env"]:
        load_s3()  # one second
    pid = os.fork()
    if pid == 0:
        run(wanted, outputs)
    for descriptor in outputs:
        os.close(descriptor)
    client.sendall(b"%d\n" % pid)
    return pid, os.pidfd_open(pid)


def serve(listener: socket.socket) -> None:
    """Fork runs and report their ends, until standard input ends."""
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    waiting.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                client, _ = listener.accept()
                pid, end = fork(client)
                waiting.register(end, selectors.EVENT_READ, (pid, client))
                continue
            pid, client = key.data
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            waiting.unregister(key.fileobj)
            os.close(key.fd)
            with client:
                try:
                    client.sendall(b"%d\n" % code)
                except OSError:  # the client has ended
                    continue


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        print("listening", flush=True)
        serve(listening)
