"""Keys that do not live long: a command of the user's prints the present one.

It is run when a run starts, again when the endpoint refuses the key that it printed, and shortly
before a key ends that says when (a JSON Web Token). All calls of a process share one `LiveKey`, so
many refusals at once are one run of the command.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hermes_rl.errors import AuthError, UserError
from hermes_rl.text import SECRETS, decode_json, scrub

LIMIT_S = 60.0
"""A command that takes longer is ended."""
LEAST_S, MOST_S = 1.0, 30.0
"""From one run of a command to the next, in one process: doubled by each run whose key is not
accepted yet, up to the larger."""
AHEAD_S = 120.0
"""A key whose end is known is replaced so long before it, and asked for so seldom: four times."""
_LIKE_A_KEY = re.compile(r"(?=[\w.+=~-]*\d)(?=[\w.+=~-]*[A-Za-z])[\w.+=~-]{20,}", re.ASCII)
"""A failing command may print a key to stderr, also one that is unknown here."""
_SAID = 400
_FOREVER = 1e15
"""Seconds; a number beyond that is no time (and may be too large for a float)."""


class KeyRenewed(AuthError):
    """A key was refused, and there is a new one: the same account may be asked again at once."""


class NoNewKey(AuthError):
    """A key that used to work was refused, and its command has no other yet."""

    transient = True


@dataclass(frozen=True)
class KeyCommand:
    """A command that prints a key. Text forms show neither."""

    name: str
    """The variable that the key would stand in."""
    command: str = field(repr=False)
    """For `/bin/sh`, with this process's environment."""
    limit_s: float = LIMIT_S

    def run(self) -> str:
        """The key that it prints. Blocking.

        Raises: UserError, one line without the key: it failed, took too long, or printed none.
        """
        with self._started() as process:
            return self._read(process)

    async def arun(self) -> str:
        """`run`, off the loop. A cancelled one leaves no process behind."""
        with self._started() as process:
            return await asyncio.to_thread(self._read, process)

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[str]]:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # no shell, too many files, a zero byte
            why = getattr(error, "strerror", None) or error
            raise self._fault(f"could not be started ({why})") from None
        try:
            yield process
        finally:
            # Its id is its own, and its group's, until it was waited for: also when it has ended
            # and only what it started still holds the pipes.
            if process.returncode is None:
                _end(process)
                process.wait()

    def _read(self, process: subprocess.Popen[str]) -> str:
        try:
            printed, said = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)  # what is left in the pipes, and its end
            raise self._fault(f"did not end within {self.limit_s:g} s") from None
        key = printed.strip()
        if process.returncode:
            lines = [line for line in said.splitlines() if line.strip()]
            why = f": {_harmless(lines[0], printed)}" if lines else ""
            raise self._fault(f"ended with exit code {process.returncode}{why}")
        if not key:
            raise self._fault("printed nothing")
        if not all("!" <= c <= "~" for c in key):
            raise self._fault("printed more than a key (lines, spaces or letters beyond ASCII)")
        return key

    def _fault(self, what: str) -> UserError:
        what = what.rstrip(".")
        return UserError(f"the key command of {self.name} {what}. Fix that command")


def _harmless(line: str, printed: str) -> str:
    """What a command said, without what it printed and what looks like a key."""
    words = [word for word in printed.split()[:100] if len(word) >= 4]
    return _LIKE_A_KEY.sub("***", scrub(line[:_SAID], words))


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class LiveKey:
    """The present key of one command, for all calls of a process.

    Args:
        key: as the command printed it at the run's start.
    """

    def __init__(self, command: KeyCommand, key: str) -> None:
        self._command = command
        self._key, self._ends = key, ends_at(key)
        self._seen = {key: None}
        self._proven, self._unused = False, 0
        self._lock = asyncio.Lock()
        self._runs, self._fault = 0, ""
        self._ran = -math.inf

    @property
    def seen(self) -> tuple[str, ...]:
        """All keys that there were, for what no record may show."""
        return tuple(self._seen)

    async def current(self) -> str:
        """The key for the next request; a new one when this one is about to end."""
        due = self._ends is not None and time.time() > self._ends - AHEAD_S
        if due and time.monotonic() > self._ran + AHEAD_S / 4 and not self._lock.locked():
            await self._renew(self._key)
        return self._key

    def accepted(self) -> None:
        """Note that a request was answered: a refusal from now on says that the key has ended."""
        self._proven, self._unused = True, 0

    async def refused(self, key: str, error: AuthError) -> AuthError:
        """What a refusal means, after a look for a new key.

        Args:
            key: that the refused request was sent with.

        Returns: KeyRenewed, NoNewKey, or an AuthError where no key of this command ever worked.
        """
        if not _may_have_ended(error):
            return error
        if await self._renew(key):
            told = _with(KeyRenewed, error, "its command has printed a new key")
            told.transient = self._proven
            return told
        kind = NoNewKey if self._proven else AuthError
        return _with(kind, error, self._fault or "its command prints the same key again")

    async def _renew(self, old: str) -> bool:
        """Whether there is another key than `old`, after a run of the command where there is not.
        Those who come while it runs share what it finds."""
        runs = self._runs
        async with self._lock:
            if self._key == old and self._runs == runs:
                pause = min(MOST_S, LEAST_S * 2**self._unused)
                await asyncio.sleep(max(0.0, self._ran + pause - time.monotonic()))
                await self._run()
            return self._key != old

    async def _run(self) -> None:
        try:
            self._key, self._fault = await self._command.arun(), ""
            SECRETS.learn(self._command.name, self._key)
            self._ends = ends_at(self._key)
            self._seen[self._key] = None
        except (UserError, OSError) as error:
            self._fault = scrub(str(error), self._seen)
        self._runs, self._ran = self._runs + 1, time.monotonic()
        self._unused += 1


def _may_have_ended(error: AuthError) -> bool:
    """Whether a refusal may be for the key's age: 403 is for many things."""
    if error.reason not in ("auth", "auth_permanent"):
        return False
    return error.status in (None, 401) or "expire" in str(error).lower()


def _with(kind: type[AuthError], error: AuthError, more: str) -> AuthError:
    return kind(
        f"{str(error).rstrip('.')} ({more})",
        status=error.status,
        request_id=error.request_id,
        retry_after_s=error.retry_after_s,
        rate_limit=error.rate_limit,
        served=error.served,
        reason="auth",
    )


def ends_at(key: str) -> float | None:
    """When a key ends, in Unix seconds, where it says so itself (the claim `exp` of a JSON Web
    Token, RFC 7519)."""
    parts = key.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = decode_json(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return None
    ends = claims.get("exp") if isinstance(claims, dict) else None
    return float(ends) if isinstance(ends, int | float) and abs(ends) < _FOREVER else None
