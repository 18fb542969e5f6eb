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
    SandboxKilled,
    SandboxStartError,
    TaskFault,
)
from hermes_rl.sandboxes import grading, recipe, snapshots
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxSpec
from hermes_rl.sandboxes.container import (
    KILLED,
    KILLED_INSIDE,
    REMOVED,
    ContainerTree,
    Held,
)
from hermes_rl.sandboxes.engine import Engine, EngineImage
from hermes_rl.sandboxes.files import DOWNLOAD_MAX, Beneath
from hermes_rl.sandboxes.grading import Unpackable
from hermes_rl.sandboxes.host import HostBackend, HostSandbox
from hermes_rl.sandboxes.image_changes import Replaced
from hermes_rl.sandboxes.session import (
    open_way_out,
    start_shell,
    variables_of,
)
from hermes_rl.sandboxes.shell import (
    HeadTail,
    IntoFile,
    Shell,
    ShellPaths,
    Sink,
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
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""What package managers and `su` need inside a container; no other is left to its root."""

_PLACES = (recipe.WORKSPACE, recipe.CONTROL, recipe.STATE)
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


class Containers(HostBackend):
    """The backends `docker` and `podman`: one per process.

    Args:
        name: `docker` or `podman`.
        socket_path: the engine's socket; None takes `DOCKER_HOST` (podman: `CONTAINER_HOST`), or
            the user's, or the machine's.
        state_dir: where control directories go; None is a folder of this user below the machine's
            temporary folder.
    """

    watch_s = 5.0

    def __init__(
        self, name: str, *, socket_path: str | None = None, state_dir: Path | None = None
    ) -> None:
        super().__init__(state_dir)
        self.name = name
        self._socket_path = socket_path
        self._images: dict[str, asyncio.Task[EngineImage]] = {}

    def _prepare(self) -> Home:
        """See `HostBackend`."""
        self.engine = Engine(self.name, self._socket_path)
        self.engine.version()
        return super()._prepare()

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
        return await self.admit(sandbox, image.id, image.root.env)

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

    async def grade(self, sandbox: ContainerSandbox, spec: GradingSpec, name: str) -> GradingResult:
        """Run a verifier over what a sandbox left. Raises: SandboxStartError, SandboxDied,
        TaskFault when its image is missing."""
        held = sandbox.held
        # Commits and archives write the holes of files too.
        if (excess := await sandbox.excess()) is not None:
            raise Unpackable(f"the agent's sandbox {excess}")
        if spec.image is not None:
            if not await in_thread(held.is_folder, recipe.WORKSPACE):
                raise Unpackable(f"the agent replaced {recipe.WORKSPACE}")
            return await self._judge(sandbox, spec, name, await self.image(spec.image))
        changes, places = await in_thread(Changes, held), (*spec.mounts, *_PLACES)
        await in_thread(grading.check_image, sandbox.relied, changes, places)
        try:
            return await self._judge(sandbox, spec, name, None)
        except (SandboxStartError, TaskFault):
            # Does it start in the image without the agent's changes, but not with them?
            await self._judge(sandbox, replace(spec, script="exit 0"), name, sandbox.image)
        try:
            return await self._judge(sandbox, spec, name, None)
        except (SandboxStartError, TaskFault) as error:
            why = f"no grading sandbox starts over what the agent left: {error}"
            raise Unpackable(why) from error

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
                copied = held.home / name / "mounts" / folder
                shown = await in_thread(grading.writable_copy, verify, folder, copied)
                host["Binds"].append(f"{shown}:{place}")

            async def launch(stdio: socket.socket) -> ContainerTree:
                copied = spec.image is not None
                return await held.start(
                    name, config, stdio, tag, copy_workspace=copied, shell=shell
                )

            return await grading.judge(spec, control, launch, any_user=True)
        except OSError as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error
        finally:
            await asyncio.shield(in_thread(held.remove_grading, name))


class ContainerSandbox(HostSandbox):
    """See `base.Sandbox`."""

    _tree: ContainerTree
    _backend: Containers

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
        folder = Path(f"/proc/self/fd/{tree.workspace}")
        files = Beneath(folder, tree.uid if os.geteuid() == 0 else None)
        super().__init__(backend, spec, (tree, shell), bounds, files)
        self.image, self.held = image, held
        self._fetched = False

    @property
    def container(self) -> str:
        """The container's name: what an operator, or a test, may kill."""
        return self._tree.name

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

    async def _inside(
        self, script: str, path: str, sink: Sink, stdin: bytes | Path | None = None
    ) -> None:
        """See `ShellSandbox`. While the shell runs a command, the engine passes on files of the
        workspace that we may not see. It reads them as root, so not for another user."""
        beneath, root_reads = super()._beneath(path), stdin is None and self.image.root.superuser
        if beneath and root_reads and not (self._tree.reachable or self._shell.idle):
            whole = f"{recipe.WORKSPACE}/{beneath}"
            try:
                if await in_thread(self.held.pass_on, whole, sink):
                    return
            except FileNotFoundError:
                if not self._shell.lost.is_set():
                    raise
        await super()._inside(script, path, sink, stdin)

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

    def _out_of_memory(self) -> bool:
        """See `HostSandbox`."""
        return self._tree.out_of_memory()

    def _check_workspace(self) -> None:
        """It lies in the container, which only the host can remove."""

    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        return await self._backend.grade(self, spec, name)

    def _remove(self) -> None:
        """See `HostSandbox`."""
        self.held.remove()


def _is_mounted(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in _MOUNTED)


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
