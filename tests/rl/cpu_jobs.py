"""Functions that test_cpu.py runs in other processes."""

import os
import signal
import sys
from typing import Any


def add(a: int, b: int) -> int:
    return a + b


def print_and_upper(text: str) -> str:
    print(text * 1000)
    sys.stdout.flush()
    os.write(1, b"to the descriptor itself")
    return text.upper()


def fail(text: str) -> None:
    raise KeyError(text)


class UnpicklableError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("odd")


def raise_unpicklable() -> None:
    raise UnpicklableError(1, 2)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_process() -> None:
    sys.exit(3)


def get_pid() -> int:
    return os.getpid()


def return_unpicklable() -> Any:
    return lambda: 1


def block_forever(path: str) -> int:
    """Write the process id, then wait to be killed."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    signal.pause()
    return 0
