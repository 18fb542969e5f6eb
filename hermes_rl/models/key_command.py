"""Short-lived API keys, printed by a command of the user.

The command runs when a run starts, when the endpoint refuses the key, and shortly before the expiry
of a JSON Web Token. All calls of a process share one `RenewableKey`, so many simultaneous refusals
run the command once.
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
"""A command that takes longer is killed."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 30.0
"""Interval between two runs of a command in one process. It doubles with each key that is not yet
accepted, up to the maximum."""
RENEW_BEFORE_S = 120.0
"""A key with a known expiry is renewed this long before it, in up to four attempts."""
_LIKE_A_KEY = re.compile(r"(?=[\w.+=~-]*\d)(?=[\w.+=~-]*[A-Za-z])[\w.+=~-]{20,}", re.ASCII)
"""A failing command may print a key to stderr, even an unknown one."""
_MAX_ERROR_CHARS = 400
_MAX_UNIX_TIME = 1e15
"""A larger number is not a time, and may exceed a float."""


class KeyRenewed(AuthError):
    """A key was refused, and a new one is available: the account can be used at once."""


class KeyNotRenewed(AuthError):
    """A key that worked before was refused, and its command prints no other yet."""

    transient = True


@dataclass(frozen=True)
class KeyCommand:
    """A command that prints a key. Its repr shows neither."""

    name: str
    """The variable that would otherwise contain the key."""
    command: str = field(repr=False)
    """For `/bin/sh`, with this process's environment."""
    limit_s: float = LIMIT_S

    def run(self) -> str:
        """Return the key that the command prints. Blocking.

        Raises: UserError, without the key, if the command failed, timed out, or printed no key.
        """
        with self._started() as process:
            return self._read(process)

    async def arun(self) -> str:
        """`run` in a thread. Cancellation kills the process."""
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
            # The process and group IDs stay reserved until the process is waited for, even if only
            # its children still hold the pipes.
            if process.returncode is None:
                _end(process)
                process.wait()

    def _read(self, process: subprocess.Popen[str]) -> str:
        try:
            printed, error_output = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)  # reap it, with what is left in the pipes
            raise self._fault(f"did not end within {self.limit_s:g} s") from None
        key = printed.strip()
        if process.returncode:
            lines = [line for line in error_output.splitlines() if line.strip()]
            why = f": {_redact(lines[0], printed)}" if lines else ""
            raise self._fault(f"ended with exit code {process.returncode}{why}")
        if not key:
            raise self._fault("printed nothing")
        if not all("!" <= c <= "~" for c in key):
            raise self._fault("printed more than a key (lines, spaces or letters beyond ASCII)")
        return key

    def _fault(self, what: str) -> UserError:
        what = what.rstrip(".")
        return UserError(f"the key command of {self.name} {what}. Fix that command")


def _redact(line: str, printed: str) -> str:
    """Return a line of stderr without the command's output and anything that looks like a key."""
    printed_secrets = [text for text in printed.split()[:100] if len(text) >= 4]
    return _LIKE_A_KEY.sub("***", scrub(line[:_MAX_ERROR_CHARS], printed_secrets))


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a command and its children."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class RenewableKey:
    """The current key of one command, shared by all calls of a process.

    Args:
        key: as printed at the start of the run.
    """

    def __init__(self, command: KeyCommand, key: str) -> None:
        self._command = command
        self._key, self._expires_at = key, read_key_expiry(key)
        self._seen = {key: None}
        self._accepted_before, self._unaccepted_keys = False, 0
        self._lock = asyncio.Lock()
        self._runs, self._fault = 0, ""
        self._last_run = -math.inf

    @property
    def seen(self) -> tuple[str, ...]:
        """All keys so far, which no record may show."""
        return tuple(self._seen)

    async def current(self) -> str:
        """Return the key for the next request; renew it shortly before its expiry."""
        due = self._expires_at is not None and time.time() > self._expires_at - RENEW_BEFORE_S
        if (
            due
            and time.monotonic() > self._last_run + RENEW_BEFORE_S / 4
            and not self._lock.locked()
        ):
            await self._renew(self._key)
        return self._key

    def accepted(self) -> None:
        """Note that a request was answered: a later refusal means that the key has expired."""
        self._accepted_before, self._unaccepted_keys = True, 0

    async def refused(self, key: str, error: AuthError) -> AuthError:
        """Try to renew a refused key, and return the error to raise.

        Args:
            key: of the refused request.

        Returns: KeyRenewed, KeyNotRenewed, or AuthError if no key of this command ever worked.
        """
        if not _may_have_expired(error):
            return error
        if await self._renew(key):
            renewed_error = _extend_error(KeyRenewed, error, "its command has printed a new key")
            renewed_error.transient = self._accepted_before
            return renewed_error
        kind = KeyNotRenewed if self._accepted_before else AuthError
        return _extend_error(kind, error, self._fault or "its command prints the same key again")

    async def _renew(self, old: str) -> bool:
        """Return whether there is a newer key than `old`, after running the command if needed.
        Concurrent callers share one run."""
        runs = self._runs
        async with self._lock:
            if self._key == old and self._runs == runs:
                pause = min(MAX_INTERVAL_S, MIN_INTERVAL_S * 2**self._unaccepted_keys)
                await asyncio.sleep(max(0.0, self._last_run + pause - time.monotonic()))
                await self._run()
            return self._key != old

    async def _run(self) -> None:
        try:
            self._key, self._fault = await self._command.arun(), ""
            SECRETS.learn(self._command.name, self._key)
            self._expires_at = read_key_expiry(self._key)
            self._seen[self._key] = None
        except (UserError, OSError) as error:
            self._fault = scrub(str(error), self._seen)
        self._runs, self._last_run = self._runs + 1, time.monotonic()
        self._unaccepted_keys += 1


def _may_have_expired(error: AuthError) -> bool:
    """Return whether a refusal may mean that the key has expired: 403 has many causes."""
    if error.reason not in ("auth", "auth_permanent"):
        return False
    return error.status in (None, 401) or "expire" in str(error).lower()


def _extend_error(kind: type[AuthError], error: AuthError, more: str) -> AuthError:
    return kind(
        f"{str(error).rstrip('.')} ({more})",
        status=error.status,
        request_id=error.request_id,
        retry_after_s=error.retry_after_s,
        rate_limit=error.rate_limit,
        served=error.served,
        reason="auth",
    )


def read_key_expiry(key: str) -> float | None:
    """Return the expiry of a JSON Web Token (claim `exp`, RFC 7519) in Unix seconds, if it has
    one."""
    parts = key.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = decode_json(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return None
    expires = claims.get("exp") if isinstance(claims, dict) else None
    return (
        float(expires)
        if isinstance(expires, int | float) and abs(expires) < _MAX_UNIX_TIME
        else None
    )
