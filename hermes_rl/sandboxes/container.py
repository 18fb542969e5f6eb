"""One container of docker or podman: its processes, and what a lease holds."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import posixpath
import secrets
import signal
import socket
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxDied, SandboxStartError, TaskFault
from hermes_rl.sandboxes import limits, processes, recipe
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.box import Inside, gone
from hermes_rl.sandboxes.engine import Engine, EngineError
from hermes_rl.sandboxes.grading import MAX_BYTES
from hermes_rl.sandboxes.shell import Sink
from hermes_rl.sandboxes.slots import trusted_folder
from hermes_rl.sandboxes.snapshots import unpack
from hermes_rl.sandboxes.watchdog import (
    CONTAINERS,
    remove_container,
    remove_containers,
    remove_tree,
)

_ENDED_S = 10.0
_NOT_FOUND = 404
_HEADERS = 1 << 20
"""Bytes of an archive of one file beside its content, at most."""
KILLED = 137
"""Exit code of a process that SIGKILL ended."""
KILLED_INSIDE = 247
"""By which process 1 says that of the shell: only who is outside can send it a SIGKILL."""
_EXEC_S = 10.0
"""How long the engine's own program may take to become process 1."""
_GRADED = "hermes-rl-graded"
"""Repository of the images that are graded, each of which lives as long as its grading."""
REMOVED = 2
"""How an engine marks a path that was removed; 0 is changed, 1 added."""
_FOLDER = 1 << 31
"""The bit of a mode that Go's os.FileMode has for folders."""
_NOT_REGULAR = _FOLDER | 1 << 27 | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""The same for all that is not a regular file."""


class ContainerTree(Inside):
    """A started container."""

    in_group = True

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__()
        self.name = name
        self._groups: list[str] = []
        self._out_of_memory = False
        self._engine = engine
        self.workspace = -1
        """The session's workspace, open: it stays after the container's end."""
        self.uid = 0
        """The host's id of its user."""
        self.reachable = True
        """We may signal its processes and see its files from the host."""
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
            while tag.encode() not in arguments and time.monotonic() < deadline:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                time.sleep(0 if tag.encode() in arguments else 0.005)
        except (FileNotFoundError, ProcessLookupError):
            return  # it has ended already
        if tag.encode() not in arguments:
            raise SandboxStartError(
                f"{engine} runs on another machine, or this process in a container of its own: "
                "sandboxes need an engine of the same machine"
            )
        with contextlib.suppress(ProcessLookupError):  # then it has ended already
            self.uid = os.stat(f"/proc/{pid}").st_uid
            self._groups = limits.memory_groups(pid)
            self._found(pid, os.pidfd_open(pid))
            self.reachable = os.access(f"/proc/{pid}/root", os.R_OK)

    def send(self, processes_: Iterable[processes.Proc], number: int) -> None:
        """See `processes.Send`: the engine does it for an ordinary user, who may not."""
        alive = list(processes_)
        if self.reachable:
            processes.signal_all(alive, number)
            return
        pids = [str(pid) for proc in alive if (pid := processes.inside_pid(proc.pid)) > 1]
        if not pids:
            return
        script = f"kill -{number} {' '.join(pids)}"
        body = {"Cmd": ["/bin/bash", "-c", script], "User": "0", "WorkingDir": "/"}
        with contextlib.suppress(EngineError):  # it has ended, or has no process left: look again
            made = self._engine.request("POST", f"/containers/{self.name}/exec", body)
            self._engine.request("POST", f"/exec/{made['Id']}/start", {"Detach": True})

    def open_workspace(self) -> None:
        """Open the workspace, now that the session runs, if we may. Raises: OSError."""
        if not self.reachable:
            return
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

    def others_run(self) -> bool:
        """Whether anything runs beside the shell, and what passes the channel on."""
        alive = processes.snapshot(self._children()[2:], below=False).alive
        return bool(alive or processes.children(self.supervisor()))

    def end_process(self, inside: int) -> None:
        """See `processes.Tree`."""
        processes.end_inside(self.init, inside, self.send)

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
        if not (self.init and self.reachable):
            self._kill_by_engine()
        else:
            self._end_init()

    def _kill_by_engine(self) -> None:
        """Also one that somebody paused: it takes no signal until it resumes."""
        for verb in ("unpause", "kill"):
            with contextlib.suppress(EngineError):
                self._engine.request("POST", f"/containers/{self.name}/{verb}")

    async def held_from_outside(self) -> str | None:
        """See `Inside`."""
        try:
            paused = (await in_thread(self._show))["State"].get("Paused")
        except EngineError as error:
            return str(error)
        return f"container {self.name} was paused from outside" if paused else None

    def close(self) -> None:
        """Close our descriptors. Idempotent."""
        super().close()
        if self.workspace >= 0:
            os.close(self.workspace)
        self.workspace = -1
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
        trusted_folder(self._memory / name.partition("/")[0], 0o755)
        return trusted_folder(self._memory / name, 0o755)

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

    def pass_on(self, path: str, sink: Sink) -> bool:
        """Give a sink the content of a regular file of the running container.

        Returns: False, and the sink has nothing, for what is none, is too large or changes
            meanwhile.

        Raises: FileNotFoundError; OSError of the sink.
        """
        try:
            found, most = self.found(path), sink.limit or 0
            if int(found["mode"]) & _NOT_REGULAR or int(found["size"]) > most:
                return False
            with self._archive("s", path, most + _HEADERS) as packed, tarfile.open(packed) as tar:
                member = tar.next()
                file = tar.extractfile(member) if member is not None and member.isreg() else None
                if member is None or file is None:
                    return False
                if packed.stat().st_size < member.offset_data + member.size:
                    return False
                while data := file.read(1 << 20):
                    sink.feed(data)
                return True
        except EngineError as error:
            if error.status == _NOT_FOUND:
                raise FileNotFoundError(f"{path}: no such file") from error
        except (ValueError, KeyError, TypeError, tarfile.TarError):
            pass
        return False

    def listed_changes(self) -> tuple[list[str], list[str]]:
        """Paths that the session changed or added, folders first; and those that it removed."""
        listed = sorted((path.strip("/"), kind) for path, kind in self.changes().items())
        changed = [path for path, kind in listed if kind != REMOVED and path]
        return changed, [path for path, kind in listed if kind == REMOVED]

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
    def _archive(self, name: str, path: str, most: int | None = None) -> Iterator[Path]:
        """An archive of what a container has at a path. Raises: EngineError."""
        archive = self.home / f"{name}-{secrets.token_hex(4)}.tar"
        where = f"/containers/{self._container(name)}/archive"
        try:
            self.engine.request("GET", where, query={"path": path}, into=archive, most=most)
            yield archive
        finally:
            archive.unlink(missing_ok=True)

    def fetch_workspace(self) -> Path:
        """Copy what the session left in its workspace. Returns the folder. Raises: OSError."""
        folder = self.home / "left"
        folder.mkdir(mode=0o700)
        try:
            with self._archive("s", recipe.WORKSPACE, MAX_BYTES) as archive:
                unpack(archive, folder, None)
        except EngineError as error:
            raise OSError(f"the workspace cannot be read: {error}") from error
        return folder / recipe.WORKSPACE[1:]

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
