"""Sandboxes in containers of docker or podman, over the engine's local socket.

A container runs the supervisor of `shell`, once for all its commands: they cost what they cost in
bubblewrap, not what `docker exec` costs. The control directory is bound into the container; the
channel is the container's standard input and output, attached. Process 1 ends when the channel
does, and with it the container: an agent never outlives the worker that leased it.

Processes are watched and ended from the host, by the ids that the host knows them by. So the engine
runs on this machine. Where we may not signal what it starts, as ordinary users of a rootful engine,
it does so for us, and it passes files on.

Grading runs the verifier in a new container of a commit of the agent's one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import shutil
import socket
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_rl.aio import in_thread
from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxStartError,
    TaskFault,
)
from hermes_rl.sandboxes import grading, recipe, snapshots
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.container import (
    KILLED,
    KILLED_INSIDE,
    REMOVED,
    ContainerTree,
    Held,
)
from hermes_rl.sandboxes.engine import Engine, EngineError, EngineImage
from hermes_rl.sandboxes.files import DOWNLOAD_MAX, Beneath
from hermes_rl.sandboxes.image_changes import (
    Relied,
    Replaced,
    listing_script,
    read_listing,
    replaced,
)
from hermes_rl.sandboxes.session import (
    FolderSandbox,
    encode,
    open_way_out,
    restored,
    start_shell,
    variables_of,
)
from hermes_rl.sandboxes.shell import (
    Ended,
    HeadTail,
    IntoFile,
    Shell,
    ShellLost,
    ShellPaths,
    supervisor_text,
)
from hermes_rl.sandboxes.slots import Home

if TYPE_CHECKING:
    from hermes_rl.sandboxes.egress import EgressProxy

_MOUNTED = tuple(path.lstrip("/") for path in (recipe.CONTROL, recipe.STATE, "/tmp", "/dev"))
"""Folders of a container that belong to other file systems."""
_log = logging.getLogger(__name__)

_REMOVED = "removed"
"""The file of a snapshot that names what was removed of the image."""
_ENDED_S = 10.0
"""How long a container may take to end after its shell."""
WATCH_S = 5.0
"""Between two looks at the size of containers in which a command runs."""
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""What package managers and `su` need inside a container; no other is left to its root."""

_PLACES = (recipe.WORKSPACE, recipe.CONTROL, recipe.STATE, grading.HOME, grading.VERIFY)
"""Where grading has folders of its own, or the agent's workspace."""

_INIT = f"""\
exec 2>&1
trap 'exit 143' TERM
trap '' HUP INT QUIT USR1 USR2
pass_on() {{ while IFS= read -r line; do printf '%s\\n' "$line"; done; kill -TERM 1; }}
exec 3<&0 5< <(exec <&3 2>/dev/null 3<&-; pass_on)
. "$0" <&5 3<&- 5<&- &
exec <&- >&- 2>&- 3<&- 5<&-
wait $!
code=$?
exit $((code == {KILLED} ? {KILLED_INSIDE} : code))
"""
"""Process 1: passes the channel's lines on, and ends, with all others, at the channel's end."""


class Containers:
    """The backends `docker` and `podman`: one per process.

    Args:
        name: `docker` or `podman`.
        socket_path: the engine's socket; None takes `DOCKER_HOST` (podman: `CONTAINER_HOST`), or
            the user's, or the machine's.
        state_dir: where control directories go; None is a folder of this user below the machine's
            temporary folder.
    """

    def __init__(
        self, name: str, *, socket_path: str | None = None, state_dir: Path | None = None
    ) -> None:
        self.name = name
        self._socket_path = socket_path
        self._state_dir = state_dir
        self._home: Home | None = None
        self._opening = asyncio.Lock()
        self._images: dict[str, asyncio.Task[EngineImage]] = {}
        self._relied: dict[str, Relied] = {}
        self._live: set[ContainerSandbox] = set()
        self._watcher: asyncio.Task[None] | None = None

    async def _open(self) -> Home:
        async with self._opening:
            if self._home is None:
                self._home = await asyncio.to_thread(self._prepare)
                self._watcher = asyncio.create_task(self._watch())
            return self._home

    def _prepare(self) -> Home:
        self.engine = Engine(self.name, self._socket_path)
        self.engine.version()
        home = Home(self._state_dir)
        home.guard()
        return home

    async def image(self, name: str) -> EngineImage:
        """An image; pulled when it is missing. Raises: TaskFault, SandboxStartError."""
        await self._open()
        if name not in self._images:
            self._images[name] = asyncio.create_task(in_thread(self.engine.image, name))
        try:
            return await asyncio.shield(self._images[name])
        except (TaskFault, SandboxStartError):
            self._images.pop(name, None)  # it may be there the next time
            raise

    async def lease(self, spec: SandboxSpec) -> ContainerSandbox:
        """Start a container.

        Raises: SandboxStartError; TaskFault when no image is named, or it cannot be had.
        """
        if spec.image is None:
            raise TaskFault(
                f"a {self.name} sandbox needs an image: name one with --image, or as the row's"
            )
        home = await self._open()
        image = await self.image(spec.image)
        folder = home.new_box()
        try:
            memory = home.memory_folder(folder)
            held = Held(self.engine, folder, memory)
            return await self._lease(spec, image, held)
        except OSError as error:
            raise SandboxStartError(f"a sandbox cannot be made: {error}") from error

    async def _lease(self, spec: SandboxSpec, image: EngineImage, held: Held) -> ContainerSandbox:
        try:
            control = held.folder("ctl")
            variables = recipe.environment(recipe.WORKSPACE, variables_of(spec), image.root)
            cwd = spec.cwd or image.root.workdir
            (control / "env").write_text(recipe.environment_file(variables, recipe.WORKSPACE, cwd))
            (control / "supervisor").write_text(supervisor_text())
            for name in ("env", "supervisor"):
                (control / name).chmod(0o644)
            limits = spec.limits
            # Processes and memory are bounded by the container's control group.
            bounds = ("-f", str(limits.file_bytes >> 10), "-n", str(recipe.OPEN_FILES), "-c", "0")
            command = [f"{recipe.CONTROL}/supervisor", recipe.CONTROL, recipe.STATE, *bounds]
            config = self._config(spec, image.id, held.tag(spec), [*command, held.tag(spec)])
            host = config["HostConfig"]
            host["Binds"] = [f"{control}:{recipe.CONTROL}:ro"]
            host["NetworkMode"] = "bridge" if spec.network is True else "none"
            tree, shell, egress = await self._start(held, control, config, spec, image)
        except BaseException:
            await asyncio.shield(in_thread(held.remove))
            raise
        sandbox = ContainerSandbox(self, spec, image, held, tree, shell)
        sandbox.egress = egress
        self._live.add(sandbox)
        try:
            sandbox.relied = await self._relied_of(image, sandbox)
        except BaseException:
            await asyncio.shield(sandbox.aclose())
            raise
        if spec.snapshot is not None:
            await restored(sandbox, spec.snapshot)
        return sandbox

    async def _start(
        self,
        held: Held,
        control: Path,
        config: dict[str, Any],
        spec: SandboxSpec,
        image: EngineImage,
    ) -> tuple[ContainerTree, Shell, EgressProxy | None]:
        egress = None

        async def launch(stdio: socket.socket) -> ContainerTree:
            return await held.start("s", config, stdio, held.tag(spec), not image.root.superuser)

        paths = ShellPaths(control, recipe.CONTROL, recipe.STATE, any_user=True)

        async def settle(tree: ContainerTree) -> None:
            await asyncio.to_thread(tree.open_workspace)
            nonlocal egress
            egress = await open_way_out(spec, tree.init, None)

        def explain(message: str) -> str:
            return f"the shell did not start: {message}"

        tree, shell = await start_shell(paths, launch, explain, settle)
        return tree, shell, egress

    def _config(
        self, spec: SandboxSpec, image: str, tag: str, command: Sequence[str]
    ) -> dict[str, Any]:
        """What a container of any kind is created with."""
        limits = spec.limits
        return {
            "Image": image,
            "Entrypoint": ["/bin/bash", "--norc", "--noprofile", "-c", _INIT],
            "Cmd": list(command),
            # A bash without SHELL asks the C library, which loads what /etc/nsswitch.conf names.
            "Env": [f"LANG={recipe.LANG}", "SHELL=/bin/bash"],
            "Hostname": "sandbox",
            "WorkingDir": recipe.WORKSPACE,
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {"hermes-rl.lease": tag},
            **dict.fromkeys(("OpenStdin", "StdinOnce"), True),
            **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr"), True),
            "HostConfig": {
                "NetworkMode": "none",
                "CapDrop": ["ALL"],
                "CapAdd": _CAPABILITIES,
                "SecurityOpt": ["no-new-privileges"],
                "PidsLimit": limits.processes,
                "Memory": limits.memory_bytes,
                "MemorySwap": limits.memory_bytes,
                "ShmSize": limits.shm_bytes,
                "Tmpfs": {
                    "/tmp": f"exec,mode=1777,size={limits.tmp_bytes}",
                    recipe.STATE: f"mode=0777,size={recipe.RUN_BYTES}",
                },
                "NanoCpus": round((limits.cpus or 0) * 1e9),  # 0: unlimited
                "LogConfig": {"Type": "none"},
                "Init": False,
            },
        }

    async def _relied_of(self, image: EngineImage, sandbox: ContainerSandbox) -> Relied:
        """What verifiers rely on of an image, before an agent can change any of it."""
        if image.id not in self._relied:
            self._relied[image.id] = await sandbox.relied_on(image.root.env)
        return self._relied[image.id]

    async def grade(self, sandbox: ContainerSandbox, spec: GradingSpec, name: str) -> GradingResult:
        """Run a verifier over what a sandbox left. Raises: SandboxStartError, SandboxDied,
        TaskFault when its image is missing."""
        held = sandbox.held
        try:
            # Commits and archives write the holes of files too.
            if (excess := await sandbox.excess()) is not None:
                return grading.refused(f"the agent's sandbox {excess}")
            if spec.image is not None:
                if not await in_thread(held.is_folder, recipe.WORKSPACE):
                    return grading.refused(f"the agent replaced {recipe.WORKSPACE}")
                named = await self.image(spec.image)
                return await self._judge(sandbox, spec, name, named)
            changes = await in_thread(Changes, held)
            found = await in_thread(replaced, sandbox.relied, changes, (*spec.mounts, *_PLACES))
            if found is not None:
                return grading.refused(f"the agent replaced {found}, which grading relies on")
        except EngineError as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error
        try:
            return await self._judge(sandbox, spec, name, None)
        except (SandboxStartError, TaskFault):
            # Does it start in the image without the agent's changes, but not with them?
            await self._judge(sandbox, replace(spec, script="exit 0"), name, sandbox.image)
        try:
            return await self._judge(sandbox, spec, name, None)
        except (SandboxStartError, TaskFault) as error:
            return grading.refused(f"no grading sandbox starts over what the agent left: {error}")

    async def _judge(
        self,
        sandbox: ContainerSandbox,
        spec: GradingSpec,
        name: str,
        over: EngineImage | None,
    ) -> GradingResult:
        """Run a verifier in an image; None is what the agent left. Raises: SandboxStartError,
        SandboxDied, TaskFault."""
        held, of_agent = sandbox.held, sandbox.spec
        try:
            root = (over or sandbox.image).root
            image = await in_thread(held.commit, name) if over is None else over.id
            control, verify = held.folder(f"{name}/ctl"), held.folder(f"{name}/verify")
            variables = dict(root.env)
            if root.workdir is not None:
                variables["WORKDIR"] = root.workdir
            shell = f"/.hermes-rl-{secrets.token_hex(8)}"
            paths = grading.Paths(
                recipe.CONTROL, grading.HOME, grading.VERIFY, recipe.WORKSPACE, shell
            )
            grading.write_stage(control, verify, spec, paths, variables)
            tag = held.tag(of_agent)
            config = self._config(of_agent, image, tag, [f"{recipe.CONTROL}/start", tag])
            config["WorkingDir"] = "/"
            host = config["HostConfig"]
            host["CapAdd"] = []
            size = of_agent.limits.tmp_bytes
            host["Tmpfs"][grading.HOME] = f"exec,mode=0777,size={size}"
            host["Binds"] = [f"{control}:{recipe.CONTROL}:ro", f"{verify}:{grading.VERIFY}:ro"]
            for place, folder in spec.mounts.items():
                if not folder:
                    host["Tmpfs"][place] = f"exec,mode=0777,size={size}"
                    continue
                shown = await in_thread(_writable_copy, verify, folder, held.home / name)
                host["Binds"].append(f"{shown}:{place}")

            async def launch(stdio: socket.socket) -> ContainerTree:
                copied = spec.image is not None
                return await held.start(
                    name, config, stdio, tag, copy_workspace=copied, shell=shell
                )

            return await grading.judge(spec, control, launch, any_user=True)
        except EngineError as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error
        except OSError as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error
        finally:
            await asyncio.shield(in_thread(held.remove_grading, name))

    async def _watch(self) -> None:
        """Look at containers in which something runs: a limit may be exceeded at any time."""
        while True:
            await asyncio.sleep(WATCH_S)
            for sandbox in [*self._live]:
                with contextlib.suppress(SandboxError, EngineError):
                    await sandbox.look()

    def forget(self, sandbox: ContainerSandbox) -> None:
        """A sandbox is closed."""
        self._live.discard(sandbox)

    async def aclose(self) -> None:
        """End all sandboxes of this process."""
        await asyncio.gather(*(sandbox.aclose() for sandbox in [*self._live]))
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
            self._home = None


class ContainerSandbox(FolderSandbox):
    """See `base.Sandbox`."""

    _tree: ContainerTree

    def __init__(
        self,
        backend: Containers,
        spec: SandboxSpec,
        image: EngineImage,
        held: Held,
        tree: ContainerTree,
        shell: Shell,
    ) -> None:
        limits = spec.limits
        bounds: dict[str, object] = {
            "processes": limits.processes,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "workspace_bytes": limits.workspace_bytes,
            "workspace_held_by": "watching",
            "tmp_bytes": limits.tmp_bytes,
            "shm_bytes": limits.shm_bytes,
        }
        if limits.cpus:
            bounds["cpus"] = limits.cpus
        info = SandboxInfo(backend.name, spec.image, bounds)
        folder = Path(f"/proc/self/fd/{tree.workspace}")
        files = Beneath(folder, tree.uid if os.geteuid() == 0 else None)
        super().__init__(info, tree, shell, recipe.WORKSPACE, files)
        self.spec, self.image, self.held = spec, image, held
        self.relied = Relied((), (), (), ())
        self._backend = backend
        self._fetched = False

    @property
    def container(self) -> str:
        """The container's name: what an operator, or a test, may kill."""
        return self._tree.name

    async def relied_on(self, env: Mapping[str, str]) -> Relied:
        """What verifiers rely on of the image, whose variables are `env`."""
        sink = HeadTail(1 << 17)
        await self._execute("i", encode(listing_script(env)), sink, 60.0)
        return read_listing(sink.text())

    async def _save_files(self, folder: Path) -> None:
        """See `ShellSandbox`. All that was changed of the image, the workspace among it, packed
        inside: a commit would leave images behind."""
        listed = await in_thread(self.held.listed_changes)
        changed, removed = ([path for path in paths if not _is_mounted(path)] for paths in listed)
        if any("\n" in path for path in (*changed, *removed)):
            raise OSError(errno.EINVAL, "a name with a line break cannot be saved")
        names, archive = folder / "changed", folder / snapshots.ROOT
        names.write_text("".join(f"{path}\n" for path in changed))
        script = "cd / && tar --no-recursion -cf - -T - 2>/dev/null"
        code = await self._script(script, IntoFile(archive, DOWNLOAD_MAX), self._passed(names))
        if code != 0:
            raise OSError(f"the container's files cannot be archived (tar: exit {code})")
        (folder / _REMOVED).write_text("".join(f"{path}\n" for path in removed))

    async def restore(self, folder: Path) -> None:
        """See `ShellSandbox`."""
        copied = self._shell.inputs / "root"
        for name, script in (
            (_REMOVED, 'cd / && while IFS= read -r p; do rm -rf -- "$p" || exit; done'),
            (snapshots.ROOT, "cd / && tar -xpf -"),
        ):
            await asyncio.to_thread(shutil.copyfile, folder / name, copied)
            printed = HeadTail(4096)
            if await self._script(script, printed, copied):
                raise OSError(f"the container's files cannot be restored: {printed.text().strip()}")
        await super().restore(folder)

    def _passed(self, file: Path) -> Path:
        """A file, moved to where commands find their input."""
        return Path(shutil.move(file, self._shell.inputs / "names"))

    def _beneath(self, path: str) -> str | None:
        """See `ShellSandbox`. Files that we may not see are read and written inside."""
        return super()._beneath(path) if self._tree.reachable or self._fetched else None

    async def read_left(self, path: str) -> bytes:
        """See `base.Sandbox.read_left`."""
        await self._fetch_left()
        return await super().read_left(path)

    async def pack_left(self, local: Path) -> None:
        """See `base.Sandbox.pack_left`."""
        try:
            await self._fetch_left()
        except OSError as error:  # as of files with holes, which the engine fills
            _log.warning("what a rollout left is not kept: %s", error)
            return
        await super().pack_left(local)

    async def _fetch_left(self) -> None:
        """Get a copy of the workspace from the engine, where we may not see it. Raises: OSError."""
        await self._end_session()
        if not (self._tree.reachable or self._fetched):
            self._files = Beneath(await in_thread(self.held.fetch_workspace))
            self._fetched = True

    def _others_run(self) -> bool:
        """See `ShellSandbox`: process 1 has a child that passes the channel on."""
        return self._tree.others_run()

    async def look(self) -> None:
        """Hold it against the limits that its control group does not hold. Raises: SandboxKilled,
        EngineError."""
        if self._shell.lost.is_set() or not (self._shell.busy or self._tree.others_run()):
            return
        if (excess := await self.excess()) is not None:
            await self._end(SandboxKilled(f"the sandbox {excess}"))

    async def excess(self) -> str | None:
        """Which limit of the disk it exceeds; None for none. Raises: EngineError."""
        written, limit = await in_thread(self.held.written), self.spec.limits.workspace_bytes
        return f"exceeded its limits: {written} bytes written" if written > limit else None

    async def _after(self, ended: Ended) -> None:
        if ended.exit_code and self._tree.out_of_memory():
            await self._end(SandboxKilled("the sandbox ran out of memory"))
        self._raise_if_dead()

    def _check_workspace(self) -> None:
        """It lies in the container, which only the host can remove."""

    async def _classify(self, lost: ShellLost) -> SandboxError:
        if lost.vanished:  # it is read-only in the sandbox
            error: SandboxError = SandboxDied("the folders of the sandbox vanished")
            await self._end(error)
            return error
        try:
            async with asyncio.timeout(_ENDED_S if self._shell.lost.is_set() else 0):
                code = await self._tree.ended()
        except TimeoutError:
            error = SandboxKilled(f"the shell of the sandbox no longer answers: {lost}")
            if (why := await in_thread(self._tree.held_from_outside)) is not None:
                error = SandboxDied(why)
            await self._end(error)
            return error
        if self._tree.out_of_memory():
            return SandboxKilled("the sandbox ran out of memory")
        if code < 0:
            return SandboxDied(f"container {self.container} was ended from outside")
        return SandboxKilled(f"the shell of the sandbox was killed (exit {code})")

    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        return await self._backend.grade(self, spec, name)

    async def _give_back(self) -> None:
        await in_thread(self.held.remove)
        self._backend.forget(self)


def _is_mounted(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in _MOUNTED)


def _writable_copy(verify: Path, folder: str, under: Path) -> Path:
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


class Changes:
    """What an agent changed of an image (see `image_changes.replaced`).

    Raises: EngineError.
    """

    def __init__(self, held: Held) -> None:
        self._held, self._listed = held, held.changes()
        self._below: dict[str, dict[str, bool]] = {}
        for path, kind in self._listed.items():
            folder, _, name = path.rpartition("/")
            self._below.setdefault(folder or "/", {})[name] = kind == REMOVED

    def names(self, folder: str, *, opaque_too: bool) -> Mapping[str, bool]:
        """Changed entries of a folder -> whether it was removed. Raises: Replaced."""
        path = ""
        for part in folder.split("/"):
            path += f"/{part}"
            kind = self._listed.get(path)
            if kind == REMOVED or (kind is not None and not self._held.is_folder(path)):
                raise Replaced(path)
        return self._below.get(path, {})

    def read(self, path: str, limit: int) -> bytes:
        """See `image_changes.Changes`. Raises: EngineError."""
        with contextlib.suppress(ValueError, KeyError, tarfile.TarError):
            if int(self._held.found(f"/{path}")["size"]) <= limit:
                return self._held.read(f"/{path}")
        raise Replaced(f"/{path}")
