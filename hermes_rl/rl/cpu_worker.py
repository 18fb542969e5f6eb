"""A process that calls functions for its parent: `python -m hermes_rl.rl.cpu_worker`.

Frames on stdin and stdout are 8 bytes of length, then a pickle. The process, which leads a session,
ends when stdin closes, even during a call, or when its parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import Any, BinaryIO

HEAD = struct.Struct(">Q")
_SET_PDEATHSIG = 1
NICENESS = 5
"""The parent's event loop has priority."""


def frame(value: Any) -> bytes:
    """Encode a value as a frame. Raises: what pickle raises."""
    data = pickle.dumps(value)
    return HEAD.pack(len(data)) + data


def resolve(module: str, name: str) -> Any:
    """Return a function by import name. Raises: ImportError, AttributeError."""
    found: Any = importlib.import_module(module)
    for step in name.split("."):
        found = getattr(found, step)
    return found


def _read(stream: BinaryIO, jobs: queue.SimpleQueue[bytes]) -> None:
    """Put frames into the queue; exit at the end of the stream."""
    while True:
        head = stream.read(HEAD.size)
        data = stream.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else b""
        if not data:
            os.killpg(0, signal.SIGKILL)  # with what the function has started
        jobs.put(data)


def _call(data: bytes) -> bytes:
    """Run one job; the answer is ("ok", value) or ("error", text, pickled exception or b"")."""
    try:
        modules, module, name, args = pickle.loads(data)
        if any(name not in sys.modules for name, _ in modules):
            from hermes_rl.rl.loading import load_module

            for loaded, file in modules:  # what the parent loaded from paths
                load_module(loaded, file)
        return frame(("ok", resolve(module, name)(*pickle.loads(args))))
    except BaseException as error:  # a boundary: the parent gets every error
        text = "".join(traceback.format_exception(error))[-4000:]
        try:
            return frame(("error", text, pickle.dumps(error)))
        except Exception:  # an exception that does not pickle
            return frame(("error", text, b""))


def main() -> None:
    """Serve until stdin closes."""
    os.nice(NICENESS)
    # A function that holds the interpreter would keep `_read` from ending the process.
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    # Output of the functions must not get between the frames.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, jobs), daemon=True).start()
    while True:
        out.write(_call(jobs.get()))


if __name__ == "__main__":
    main()
