"""Join the machine's one server of an embedded model, or start it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.locks import file_lock
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.local.weights import cache_folder, ensure_weights

READY = "ready"
TAKEN = "another process is the server of this model already"
_PATH_LIMIT = 100
"""A unix socket's address has 108 bytes."""
_START_S = 180.0
"""Seconds to wait for a server in all; its start takes 2 s on an idle machine."""
_ANSWER_S = 20.0
"""Seconds in which a running server must greet and be healthy; otherwise it counts as hung."""
_POLL_S = 0.1
_ROOT = Path(__file__).resolve().parents[3]
"""The folder from which this copy of the package is imported."""
_CHILD_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""The environment variables that a server process inherits: none holds a key."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one server process serves, and where its holders connect. Nothing in it is secret."""

    socket: Path
    """In a folder that only its user can enter, and before its name is known that folder."""
    model: str
    weights: Path
    slots: int = 4
    """Number of requests that are decoded in parallel; further ones wait."""
    context: int = 4096
    """Tokens of prompt and answer together, per slot."""
    threads: int


@dataclass(frozen=True)
class LocalEndpoint(Endpoint):
    """Where the embedded model's server answers."""

    template_has_tools: bool = True
    """Whether the model's chat template renders tools."""


@contextlib.asynccontextmanager
async def local_server(
    name: str = "local",
    *,
    model_path: Path | None = None,
    env: Mapping[str, str] | None = None,
    answer_s: float = _ANSWER_S,
) -> AsyncIterator[LocalServer]:
    """Hold the machine's server of the embedded model `name`; the first holder starts it.

    The server ends about two seconds after its last holder, also when that was killed.

    Args:
        name: a model of the catalogue.
        model_path: a GGUF file to serve instead of the pinned weights.
        env: the environment; the process's own, read now, if not given.
        answer_s: a running server that does not greet within so many seconds is replaced.

    Raises:
        UserError: no such model, no engine, or it cannot be started.
        WeightsUnavailable: the weights cannot be fetched.
    """
    if find_spec("xllamacpp") is None:
        raise missing_extra()
    environ = dict(os.environ) if env is None else env
    weights = await ensure_weights(name, model_path=model_path, env=environ)
    settings = ServerSettings(
        socket=_runtime_folder(environ),
        model=name,
        weights=weights,
        threads=max(1, len(os.sched_getaffinity(0)) - 1),  # the agents need a core too
    )
    settings = msgspec.structs.replace(settings, socket=_socket_for(settings))
    server = LocalServer(settings, environ, answer_s)
    try:
        await server.endpoint()
        yield server
    finally:
        server.release()


class LocalServer:
    """A hold on the machine's one server of a model, which is replaced if it has died.

    The hold is an open connection to the server's socket.
    """

    def __init__(self, settings: ServerSettings, env: Mapping[str, str], answer_s: float) -> None:
        self._settings, self._env, self._answer_s = settings, env, answer_s
        self._held: tuple[LocalEndpoint, asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._joining = asyncio.Lock()

    @property
    def weights(self) -> Path:
        """The weights file that is served."""
        return self._settings.weights

    async def endpoint(self) -> LocalEndpoint:
        """Return where the model answers now. It is cheap: call it before each request.

        Raises: UserError when the server cannot be started.
        """
        async with self._joining:
            if self._held is None or self._held[1].at_eof():
                self.release()
                await self._join_or_start()
            assert self._held is not None
            return self._held[0]

    def release(self) -> None:
        """Release the hold."""
        if self._held is not None:
            self._held[2].close()
            self._held = None

    async def _join_or_start(self) -> None:
        path = self._settings.socket
        lock = path.with_suffix(".starting")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_S
        while loop.time() < deadline:
            if await self._join():
                return
            with file_lock(lock) as locked:
                if locked and await self._join():
                    return
                if locked:
                    await self._start(deadline - loop.time())
            await asyncio.sleep(_POLL_S)
        raise UserError(
            f"the local model's server was not ready after {_START_S:.0f} s; its log is "
            f"{path.with_suffix('.log')}; end the process that holds {lock}, or try again"
        )

    async def _join(self) -> bool:
        """Connect to the running server, and return whether there is one.

        A server that takes the connection but does not greet, or is not healthy, is ended.
        """
        try:
            with short_path(self._settings.socket) as address:
                reader, writer = await asyncio.open_unix_connection(address)
        except OSError:
            return False
        pid, _ = read_peer_ids(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(self._answer_s):
                if (line := await reader.readline()) and (endpoint := await _look_at(line)):
                    self._held = endpoint, reader, writer
                    return True
        except (TimeoutError, ConnectionError):
            pass  # hung, or gone in the meantime
        except BaseException:  # cancelled: the connection must not stay open
            writer.close()
            raise
        if not reader.at_eof():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # still connected, so this is our own server
        writer.close()
        return False

    async def _start(self, patience_s: float) -> None:
        """Start the server process and wait until it is ready. Raises: UserError."""
        log_path = self._settings.socket.with_suffix(".log")
        arguments = msgspec.json.encode(self._settings, enc_hook=str).decode()
        log = await asyncio.to_thread(log_path.open, "wb")
        with log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "hermes_rl.models.local.server", arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env={name: self._env[name] for name in _CHILD_VARIABLES if name in self._env},
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(patience_s):
                output = await process.stdout.read()
        except TimeoutError:
            output = b"it was not ready in time"
        await process.wait()
        reason = output.decode(errors="replace").strip()
        if reason not in (READY, TAKEN):
            logged = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = logged[-1][:300] if logged else "it ended without an error message"
            raise UserError(
                f"the local model cannot be started: {reason or last} (log: {log_path})"
            )


async def _look_at(greeting: bytes) -> LocalEndpoint | None:
    """Return the endpoint that a server's greeting names; None if nothing answers there."""
    import aiohttp

    endpoint = LocalEndpoint(**json.loads(greeting))
    url = endpoint.base_url.removesuffix("/v1") + "/props"
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
            session.get(url) as response,
        ):
            supports = (await response.json())["chat_template_caps"]
    except aiohttp.ClientError:
        return None
    return replace(endpoint, template_has_tools=bool(supports["supports_tools"]))


def missing_extra() -> UserError:
    """Return the error for an installation without the engine."""
    return UserError(
        "the embedded model needs the package xllamacpp: pip install 'hermes-rl[local]'"
    )


def _runtime_folder(env: Mapping[str, str]) -> Path:
    """Return the folder for sockets, which only this user can enter. Raises: UserError."""
    runtime = env.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "hermes_rl" if runtime and Path(runtime).is_dir() else None
    folder = base or cache_folder(env).parent / "run"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise UserError(f"{folder} belongs to another user; set XDG_RUNTIME_DIR to your own")
        if stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"cannot use {folder} for the local model's socket: {error.strerror}; "
            "set XDG_RUNTIME_DIR to a folder of your own"
        ) from error
    return folder


def _socket_for(settings: ServerSettings) -> Path:
    """Return the socket: one per machine, weights, server settings and version of this code.

    Args:
        settings: with the folder of sockets in place of the socket.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    stamps = [(s.st_size, s.st_mtime_ns) for s in (p.stat() for p in (settings.weights, *sources))]
    identity = repr((platform.node(), str(_ROOT), settings, stamps))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return settings.socket / f"{settings.model}-{digest}.sock"


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield an address for the unix socket at `path`, however long the path is."""
    if len(os.fsencode(path)) <= _PATH_LIMIT:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def read_peer_ids(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
