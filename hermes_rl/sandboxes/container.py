"""One container of docker or podman: a client of the engine's local socket, the processes of a
container, and what a lease holds.

API: https://docs.docker.com/reference/api/engine/version/v1.41/, which podman serves too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import posixpath
import shutil
import signal
import socket
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxDied, SandboxStartError, TaskFault
from hermes_rl.sandboxes import limits, processes, recipe
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.box import gone
from hermes_rl.sandboxes.watchdog import (
    CONTAINERS,
    remove_container,
    remove_containers,
    remove_tree,
)

ENGINES = ("docker", "podman")
API = "/v1.41"
_ENDED_S = 10.0
_NOT_FOUND = 404
KILLED = 137
"""Exit code of a process that SIGKILL ended."""
KILLED_INSIDE = 247
"""By which process 1 says that of the shell: only who is outside can send it a SIGKILL."""
_EXEC_S = 10.0
"""How long the engine's own program may take to become process 1."""
_GRADED = "hermes-rl-graded"
"""Repository of the images that are graded, each of which lives as long as its grading."""
_FOLDER = 1 << 31
"""The bit of a mode that Go's os.FileMode has for folders."""
_HEADER = 8
"""Bytes before each piece of a container's output: its stream, three zeros, its length."""


class EngineError(Exception):
    """An engine refused a request.

    Args:
        status: of HTTP; 0 when it did not answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class EngineImage:
    """An image as its engine knows it."""

    id: str
    root: recipe.Root

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> EngineImage:
        config = found.get("Config") or {}
        env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
        user = str(config.get("User") or "").partition(":")[0]
        workdir = config.get("WorkingDir") or None
        root = recipe.Root(
            env=env,
            workdir=None if workdir == "/" else workdir,
            superuser=user in ("", "root", "0"),
        )
        return cls(str(found["Id"]), root)


class Engine:
    """A client of one engine. Blocking, but for `attach`.

    Args:
        name: `docker` or `podman`.
        path: its socket; None finds it.
    """

    def __init__(self, name: str, path: str | None = None) -> None:
        self.name = name
        self.path = path or _find_socket(name)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, object] | None = None,
        into: Path | None = None,
    ) -> Any:
        """Make a request.

        Args:
            body: JSON, or an open file with a tar archive.
            query: parameters in the address.
            into: a file that takes the body of the answer.

        Returns the answer's JSON, or its headers where it has none. Raises: EngineError.
        """
        connection = _Connection(self.path)
        headers = {"Content-Type": "application/json"}
        if isinstance(body, io.BufferedReader | io.BytesIO):
            headers = {"Content-Type": "application/x-tar"}
            data: Any = body
        else:
            data = b"" if body is None else json.dumps(body).encode()
        try:
            connection.request(
                method, f"{API}{path}?{urlencode(query or {}, doseq=True)}", data, headers
            )
            answer = connection.getresponse()
            if answer.status < 300 and into is not None:
                with into.open("wb") as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
                return None
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(0, f"{self.name} does not answer at {self.path}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise EngineError(answer.status, _message(text))
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return dict(answer.headers) if not text else _progress(text)

    def version(self) -> str:
        """Its version. Raises: SandboxStartError when it does not answer."""
        try:
            return str(self.request("GET", "/version")["Version"])
        except EngineError as error:
            raise SandboxStartError(str(error)) from error

    def image(self, name: str) -> EngineImage:
        """An image, pulled when the engine does not have it.

        Raises: TaskFault when it cannot be had; SandboxStartError when the engine does not answer.
        """
        if (image := self.find(name)) is not None:
            return image
        repository, tag = name, "latest"
        if ":" in posixpath.basename(name) and "@" not in name:
            repository, _, tag = name.rpartition(":")
        try:
            self.request("POST", "/images/create", query={"fromImage": repository, "tag": tag})
            return EngineImage.read(self.request("GET", _image_path(name)))
        except EngineError as error:
            raise TaskFault(
                f"image {name!r} is not in {self.name} and cannot be pulled: {error}"
            ) from error

    def find(self, name: str) -> EngineImage | None:
        """An image that the engine has; None for none. Raises: SandboxStartError when it does not
        answer."""
        try:
            return EngineImage.read(self.request("GET", _image_path(name)))
        except EngineError as error:
            if error.status == 0:
                raise SandboxStartError(str(error)) from error
            return None

    def load(self, archive: Path) -> None:
        """Take over an archive of `docker save`. Raises: EngineError."""
        with archive.open("rb") as file:
            self.request("POST", "/images/load", file)

    @contextlib.asynccontextmanager
    async def attach(self, container: str) -> AsyncIterator[Attached]:
        """The standard input and output of a container that has not started yet."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.path)
        except OSError as error:
            raise EngineError(0, f"{self.name} does not answer at {self.path}: {error}") from error
        try:
            query = "stream=1&stdin=1&stdout=1&stderr=1"
            writer.write(
                f"POST {API}/containers/{container}/attach?{query} HTTP/1.1\r\nHost: engine\r\n"
                "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n".encode()
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            if head.split()[1:2] not in (["101"], ["200"]):
                raise EngineError(
                    0, f"{self.name} attaches to no container: {head.splitlines()[0]}"
                )
            yield Attached(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise EngineError(0, f"{self.name} closed a connection: {error}") from error
        finally:
            writer.close()


def _image_path(name: str) -> str:
    return f"/images/{quote(name, safe='/:@')}/json"


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket of this machine."""

    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=3600)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _find_socket(name: str) -> str:
    """The socket of a local engine. Raises: SandboxStartError."""
    named = os.environ.get("CONTAINER_HOST" if name == "podman" else "DOCKER_HOST", "")
    if named.startswith("unix://"):
        return named.removeprefix("unix://")
    if named:
        raise SandboxStartError(
            f"{named} is not on this machine: sandboxes need an engine with a local socket. "
            f"Set {'CONTAINER_HOST' if name == 'podman' else 'DOCKER_HOST'} to unix:///PATH"
        )
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    places = [f"{runtime}/{name}", f"/run/{name}"]
    suffix = "/podman.sock" if name == "podman" else ".sock"
    found = next((place + suffix for place in places if os.access(place + suffix, os.W_OK)), None)
    if found is None:
        start = "podman system service --time=0" if name == "podman" else "systemctl start docker"
        raise SandboxStartError(
            f"no {name} that you may use: none of {', '.join(p + suffix for p in places)} can be "
            f"written. Start it ({start}), or set "
            f"{'CONTAINER_HOST' if name == 'podman' else 'DOCKER_HOST'}"
        )
    return found


def _message(text: bytes) -> str:
    """What an engine says of an error, in one line."""
    try:
        found = json.loads(text)
        message = str(found.get("message") or found.get("cause") or found)
    except (ValueError, AttributeError):
        message = text.decode("utf-8", "replace")
    return " ".join(message.split())[:500]


def _progress(text: bytes) -> str:
    """What a pull or build printed, from one JSON object per line. Raises: EngineError when it
    failed."""
    printed = []
    for line in text.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                if error := found.get("error"):
                    raise EngineError(500, " ".join(str(error).split())[:500])
                printed.append(str(found.get("stream") or found.get("status") or ""))
    return "".join(printed)


class Attached:
    """Both directions of an attached container."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        """The next piece of output; empty at the end."""
        try:
            head = await self._reader.readexactly(_HEADER)
            return await self._reader.readexactly(int.from_bytes(head[4:], "big"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return b""

    async def send(self, data: bytes) -> None:
        """Write to the input. Raises: OSError."""
        self._writer.write(data)
        await self._writer.drain()


class ContainerTree:
    """A started container (see `processes.Tree`)."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._groups: list[str] = []
        self._out_of_memory = False
        self._engine = engine
        self.workspace = -1
        """The session's workspace, open: it stays after the container's end."""
        self.uid = 0
        """The host's id of its user."""
        self.init = 0
        self._pidfd = -1
        self._supervisor = 0
        self._pump: asyncio.Task[None] | None = None
        self._code: int | None = None
        self._asking = asyncio.Lock()

    async def start(self, stdio: socket.socket, tag: str) -> None:
        """Start the created container with its input and output on `stdio`.

        Raises: EngineError; SandboxStartError when its processes are out of our reach.
        """
        attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pump = asyncio.create_task(self._move(stdio, attached))
        start = f"/containers/{self.name}/start"
        try:
            await attached
        except EngineError:  # podman says why only when it is asked to start it
            await in_thread(self._engine.request, "POST", start)
            raise
        await in_thread(self._engine.request, "POST", start)
        state = (await in_thread(self._show))["State"]
        pid = int(state["Pid"])
        if pid:
            await asyncio.to_thread(self._adopt, pid, tag)

    def _adopt(self, pid: int, tag: str) -> None:
        engine = self._engine.name
        arguments: list[bytes] = []
        deadline = time.monotonic() + _EXEC_S
        try:
            os.kill(pid, 0)
            while tag.encode() not in arguments and time.monotonic() < deadline:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                time.sleep(0 if tag.encode() in arguments else 0.005)
        except (FileNotFoundError, ProcessLookupError):
            return  # it has ended already
        except PermissionError as error:
            raise SandboxStartError(
                f"containers of this {engine} belong to root, and you may not end what runs in "
                f"them: use a rootless {engine}, or start as root"
            ) from error
        if tag.encode() not in arguments:
            raise SandboxStartError(
                f"{engine} runs on another machine, or this process in a container of its own: "
                "sandboxes need an engine of the same machine"
            )
        with contextlib.suppress(ProcessLookupError):  # then it has ended already
            self._pidfd = os.pidfd_open(pid)
            self.uid = os.stat(f"/proc/{pid}").st_uid
            self._groups = limits.memory_groups(pid)
            self.init = pid

    def open_workspace(self) -> None:
        """Open the workspace, now that the session runs. Raises: OSError."""
        path = f"/proc/{self.init}/root{recipe.WORKSPACE}"
        self.workspace = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def _move(self, stdio: socket.socket, attached: asyncio.Future[None]) -> None:
        """Move lines between the channel and the container, until either ends."""
        loop = asyncio.get_running_loop()
        stdio.setblocking(False)
        with stdio:
            try:
                async with self._engine.attach(self.name) as container:
                    attached.set_result(None)

                    async def give() -> None:
                        while data := await loop.sock_recv(stdio, 1 << 16):
                            await container.send(data)

                    async def take() -> None:
                        while data := await container.receive():
                            await loop.sock_sendall(stdio, data)

                    ways = [asyncio.ensure_future(way()) for way in (give, take)]
                    try:
                        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for way in ways:
                            way.cancel()
                        await asyncio.gather(*ways, return_exceptions=True)
            except EngineError as error:
                if attached.done():
                    raise
                attached.set_exception(error)

    def _show(self) -> dict[str, Any]:
        found: dict[str, Any] = self._engine.request("GET", f"/containers/{self.name}/json")
        return found

    def supervisor(self) -> int:
        """Process 1's second child; the first one passes the channel on."""
        if not self._supervisor:
            self._supervisor = next(iter(self._children()[1:]), 0)
        return self._supervisor

    def out_of_memory(self) -> bool:
        """Whether the kernel ended one of its processes for its memory."""
        if not self._out_of_memory and self._code is None:
            self._out_of_memory = any(limits.out_of_memory(path) for path in self._groups)
        return self._out_of_memory

    def orphans(self) -> processes.Snapshot:
        """Children of process 1."""
        return processes.snapshot(self._children(), below=False)

    def has_background(self) -> bool:
        """Whether anything runs beside process 1, its helper and the supervisor."""
        children = self._children()
        return len(children) > 2 or any(map(processes.children, children[1:2]))

    def _children(self) -> list[int]:
        return processes.children(self.init) if self.init else []

    def end_process(self, inside: int) -> None:
        """See `processes.Tree`."""
        processes.end_inside(self.init, inside)

    async def ended(self) -> int:
        """Wait for the container's end. Its code; negative when it was killed from outside, which
        nothing inside can do to process 1."""
        if self._pidfd >= 0:
            await gone(self._pidfd)
        async with self._asking:
            if self._code is None:
                self._code = await in_thread(self._ask)
        return self._code

    def _ask(self) -> int:
        try:
            answer = self._engine.request("POST", f"/containers/{self.name}/wait")
            state = self._show()["State"]
        except EngineError:  # somebody removed it, or the engine has ended
            return -signal.SIGKILL
        self._out_of_memory |= bool(state.get("OOMKilled"))
        code = int(answer["StatusCode"])
        if code == KILLED and not self._out_of_memory:
            return -signal.SIGKILL
        return KILLED if code == KILLED_INSIDE else code

    async def end(self) -> int:
        """End all of it. Its code, as `ended` has it."""
        for kill in (self._kill, self._kill_by_engine):
            await in_thread(kill)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDED_S):
                    return await self.ended()
        raise SandboxDied(f"{self._engine.name} does not end container {self.name}")

    def _kill(self) -> None:
        if not self.init:
            self._kill_by_engine()
        elif self._code is None:
            with contextlib.suppress(OSError):
                os.kill(self.init, signal.SIGKILL)

    def _kill_by_engine(self) -> None:
        """Also one that somebody paused: it takes no signal until it resumes."""
        for verb in ("unpause", "kill"):
            with contextlib.suppress(EngineError):
                self._engine.request("POST", f"/containers/{self.name}/{verb}")

    def held_from_outside(self) -> str | None:
        """Why a container that does not answer is not to be blamed for it; None for nothing."""
        try:
            paused = self._show()["State"].get("Paused")
        except EngineError as error:
            return str(error)
        return f"container {self.name} was paused from outside" if paused else None

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        for fd in (self._pidfd, self.workspace):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self.workspace = -1
        if self._pump is not None:
            self._pump.cancel()


class Held:
    """What one lease holds: folders of the host, containers, images. Blocking.

    Args:
        home: its folder; names its containers.
        memory: its folder in memory, or the same.
    """

    def __init__(self, engine: Engine, home: Path, memory: Path) -> None:
        self.engine, self.home, self._memory = engine, home, memory
        self._note(engine.path)

    def _note(self, line: str) -> None:
        """For whoever cleans up after us, before there is anything to clean up."""
        with (self.home / CONTAINERS).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def tag(self, spec: SandboxSpec) -> str:
        """How the reaper knows its processes: OWNER.N:LEASE."""
        return f"{self.home.name}:{spec.lease}"

    def folder(self, name: str) -> Path:
        """A folder of the host that containers may read."""
        path = self._memory / name
        path.mkdir(mode=0o755, parents=True)
        return path

    def _container(self, name: str) -> str:
        return f"hermes-rl-{self.home.name}-{name}"

    async def start(
        self,
        name: str,
        config: dict[str, Any],
        stdio: socket.socket,
        tag: str,
        open_workspace: bool = False,
        copy_workspace: bool = False,
        shell: str | None = None,
    ) -> ContainerTree:
        """Create and start a container.

        Args:
            name: within the lease.
            open_workspace: its user is not root, and shall be able to write in the workspace.
            copy_workspace: the workspace that the session left is copied into it.
            shell: where a copy of its bash is put that can be run and not read. The kernel keeps
                all others out of the descriptors and the memory of what such a program runs in
                (proc(5), prctl(2): PR_SET_DUMPABLE), also root's without capabilities.

        Raises: SandboxStartError; TaskFault when the image holds no bash.
        """
        container = self._container(name)
        tree = ContainerTree(self.engine, container)
        try:
            await in_thread(self._create, container, config, open_workspace, copy_workspace, shell)
            await tree.start(stdio, tag)
        except EngineError as error:
            stdio.close()
            tree.close()
            if "/bin/bash" in str(error):
                raise TaskFault("the image holds no /bin/bash") from error
            if "unable to find user" in str(error):
                raise TaskFault(f"the image's USER is not in its /etc/passwd: {error}") from error
            raise SandboxStartError(f"a container cannot be started: {error}") from error
        except BaseException:
            tree.close()
            raise
        return tree

    def _create(
        self,
        container: str,
        config: dict[str, Any],
        open_workspace: bool,
        copy_workspace: bool,
        shell: str | None,
    ) -> None:
        self._note(f"/containers/{container}")
        self.engine.request("POST", "/containers/create", config, query={"name": container})
        archive, root = f"/containers/{container}/archive", {"path": "/"}
        if open_workspace:
            folder = tarfile.TarInfo(recipe.WORKSPACE[1:])
            folder.type, folder.mode = tarfile.DIRTYPE, 0o777
            self.engine.request("PUT", archive, _packed(folder), query=root)
        if copy_workspace:
            with self._archive("s", recipe.WORKSPACE) as left, left.open("rb") as file:
                self.engine.request("PUT", archive, file, query=root)
        if shell is not None:
            name = container.removeprefix(self._container(""))
            copy, data = tarfile.TarInfo(shell[1:]), self._bash(name)
            copy.mode, copy.size = 0o111, len(data)
            self.engine.request("PUT", archive, _packed(copy, data), query=root)

    def _bash(self, name: str) -> bytes:
        """The program /bin/bash of a container. Raises: TaskFault."""
        path = "/bin/bash"
        for _ in range(8):  # links, at most
            with self._archive(name, path) as packed, tarfile.open(packed) as archive:
                member = archive.next()
                if member is not None and member.issym():
                    path = posixpath.join(posixpath.dirname(path), member.linkname)
                    continue
                file = archive.extractfile(member) if member is not None else None
                if file is not None:
                    return file.read()
        raise TaskFault("the image holds no /bin/bash")

    def written(self) -> int:
        """What the session's container has written to its file system."""
        path = f"/containers/{self._container('s')}/json"
        return int(self.engine.request("GET", path, query={"size": 1}).get("SizeRw") or 0)

    def changes(self) -> dict[str, int]:
        """Path -> what the session did to it in its image: 0 changed, 1 added, 2 removed."""
        where = f"/containers/{self._container('s')}/changes"
        return {c["Path"]: int(c["Kind"]) for c in self.engine.request("GET", where) or []}

    def found(self, path: str) -> Mapping[str, Any]:
        """Size and mode of what the session left at a path. Raises: EngineError, ValueError."""
        where = f"/containers/{self._container('s')}/archive"
        headers = self.engine.request("HEAD", where, query={"path": path})
        shown = next((v for k, v in headers.items() if k.lower().endswith("path-stat")), "")
        read: Mapping[str, Any] = json.loads(base64.b64decode(shown))
        return read

    def is_folder(self, path: str) -> bool:
        """Whether the session left a folder at a path. Raises: EngineError."""
        try:
            return bool(int(self.found(path)["mode"]) & _FOLDER)
        except EngineError as error:
            if error.status != _NOT_FOUND:
                raise
        except (ValueError, KeyError, TypeError):
            pass
        return False

    def read(self, path: str) -> bytes:
        """A file that the session left; empty for no file. Raises: EngineError."""
        with self._archive("s", path) as packed, tarfile.open(packed) as archive:
            member = archive.next()
            file = archive.extractfile(member) if member is not None and member.isreg() else None
            return file.read() if file is not None else b""

    def commit(self, name: str) -> str:
        """Make an image of what the session left. Returns its id."""
        self._note(f"/images/{_GRADED}:{self.home.name}-{name}")
        made = self.engine.request(
            "POST",
            "/commit",
            {},
            query={
                "container": self._container("s"),
                "repo": _GRADED,
                "tag": f"{self.home.name}-{name}",
            },
        )
        return str(made["Id"])

    @contextlib.contextmanager
    def _archive(self, name: str, path: str) -> Iterator[Path]:
        """An archive of what a container has at a path. Raises: EngineError."""
        archive = self.home / f"{name}.tar"
        where = f"/containers/{self._container(name)}/archive"
        try:
            self.engine.request("GET", where, query={"path": path}, into=archive)
            yield archive
        finally:
            archive.unlink(missing_ok=True)

    def remove_grading(self, name: str) -> None:
        """Remove what a grading held."""
        remove_container(self.engine.path, f"/containers/{self._container(name)}")
        remove_container(self.engine.path, f"/images/{_GRADED}:{self.home.name}-{name}")
        for folder in (self._memory / name, self.home / name):
            remove_tree(folder)

    def remove(self) -> None:
        """Remove all of it."""
        remove_tree(self._memory)
        if remove_containers(str(self.home)):  # else the next start does, once the engine answers
            remove_tree(self.home)


def _packed(entry: tarfile.TarInfo, data: bytes = b"") -> io.BytesIO:
    """An archive of one entry."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(entry, io.BytesIO(data))
    packed.seek(0)
    return packed


def writable_copy(verify: Path, folder: str, under: Path) -> Path:
    """A copy of a folder of the verifier's files that everybody may write. Raises: TaskFault."""
    shown = (verify / folder).resolve()
    if not shown.is_relative_to(verify.resolve()):
        raise TaskFault(f"verify.mounts: {folder!r} is not a folder of the verifier's files")
    copied = under / "mounts" / folder
    copied.parent.mkdir(parents=True, exist_ok=True)
    if shown.is_dir():
        shutil.copytree(shown, copied)
    else:
        copied.mkdir()
    for path in (copied, *copied.rglob("*")):
        path.chmod(0o777)
    return copied
