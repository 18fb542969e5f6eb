"""Every backend passes the shipped suite; bubblewrap as root and as an ordinary user."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl.sandboxes import conformance
from hermes_rl.sandboxes.base import Sandbox
from hermes_rl.sandboxes.bubblewrap import Bubblewrap
from hermes_rl.sandboxes.conformance import CHECKS, Check, tells_a_host_fault
from hermes_rl.sandboxes.leased import BubblewrapSandbox
from hermes_rl.sandboxes.none import Subprocess

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
async def test_bubblewrap(bubblewrap: Bubblewrap, check: Check) -> None:
    await check(bubblewrap)


@every_check
async def test_none(plain: Subprocess, check: Check) -> None:
    await check(plain)


@every_check
def test_bubblewrap_of_an_ordinary_user(
    as_ordinary_user: Callable[[Path, str], None], check: Check
) -> None:
    as_ordinary_user(Path(conformance.__file__), check.__name__)


async def test_a_host_fault_is_not_the_agents_deed(bubblewrap: Bubblewrap) -> None:
    def strike(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BubblewrapSandbox)
        os.kill(sandbox.host_pid, signal.SIGKILL)

    await tells_a_host_fault(bubblewrap, strike)
