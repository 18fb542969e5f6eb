"""Sandboxes of apptainer (or singularity), for machines that have nothing else for containers.

One `apptainer exec` per lease, held open: it runs the supervisor of `shell` over its standard input
and output. The image stays as it is; what is written goes to an overlay folder of the lease, and
workspace, /tmp and control directory are folders of the host that are bound into the container.

A container of apptainer has the rights of whoever starts it, so root may not start one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hermes_rl.aio import in_thread
from hermes_rl.errors import (
    SandboxDied,
    SandboxKilled,
    SandboxStartError,
    SnapshotLost,
    TaskFault,
)
from hermes_rl.sandboxes import grading, limits, processes, recipe
from hermes_rl.sandboxes.base import (
    GradingResult,
    GradingSpec,
    SandboxLimits,
    SandboxSpec,
)
from hermes_rl.sandboxes.box import Outer, exited, gone
from hermes_rl.sandboxes.disks import Storage
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.grading import Packing, pack_in_thread
from hermes_rl.sandboxes.host import HostBackend, HostSandbox
from hermes_rl.sandboxes.image_changes import Upper
from hermes_rl.sandboxes.images import SIF_FOLDER, TASK_PREFIX, ImageStore
from hermes_rl.sandboxes.programs import Programs
from hermes_rl.sandboxes.session import (
    save_folder,
    start_shell,
)
from hermes_rl.sandboxes.shell import (
    Shell,
    ShellPaths,
    supervisor_text,
)
from hermes_rl.sandboxes.slots import Home, Launch, start
from hermes_rl.sandboxes.snapshots import ROOT, WORKSPACE, unpack
from hermes_rl.sandboxes.watchdog import remove_tree

PROGRAMS = ("apptainer", "singularity")
_PASSED_ON = ("PATH", "HOME", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "XDG_RUNTIME_DIR")
"""Of our environment; the container sees it in /proc/1."""
_NOT_OF_IMAGE = (
    "APPTAINER",
    "SINGULARITY",
    "HOME",
    "PWD",
    "SHLVL",
    "PS1",
    "PROMPT_COMMAND",
    "LANG",
    "_",
)
"""Variables of a container that are not its image's."""
_IS_NAMESPACE = "read -r _ _ hx </proc/self/uid_map; ((hx == 4294967295)) ||"
"""Else a limit of processes would be one of all that its user has."""


def find_program() -> str:
    """The program. Raises: SandboxStartError."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        raise SandboxStartError("no apptainer: install the package apptainer, version 1.1 or newer")
    return found


@dataclass(frozen=True)
class Sif:
    """An image that was built for task folders.

    Args:
        path: the file that apptainer starts.
        workdir: where commands start; None is the workspace.
    """

    path: str
    workdir: str | None = None


class SifImages:
    """The images of task folders in apptainer's format, beside those of the store. Blocking.

    Args:
        program: the apptainer that converts them; None takes the one on PATH.
    """

    def __init__(self, program: str | None = None) -> None:
        self._program = program
        self._store = ImageStore()
        self.folder = self._store.root / SIF_FOLDER

    def find(self, name: str) -> Sif | None:
        """The image of a name; None when it is not built. It stays while we live."""
        path = self._path(name)
        try:
            workdir = json.loads(path.with_suffix(".json").read_bytes())["workdir"]
            os.utime(path)
        except FileNotFoundError:
            return None
        self._store.hold()
        return Sif(str(path), workdir)

    def load(self, archive: Path) -> None:
        """Convert an archive of `docker save`. Raises: BuildFailed, SandboxStartError."""
        with tarfile.open(archive) as tar:
            (image,) = _member(tar, "manifest.json")
            config = _member(tar, image["Config"]).get("config") or {}
        path = self._path(image["RepoTags"][0].removeprefix("docker.io/library/"))
        self._store.prepare()
        self.folder.mkdir(exist_ok=True)
        made = path.with_suffix(".new")
        command = [self._program or find_program(), "build", "--force"]
        try:
            Programs().run(
                [*command, str(made), f"docker-archive:{archive}"], f"cannot make {path}"
            )
            made.rename(path)
        finally:
            made.unlink(missing_ok=True)
        workdir = config.get("WorkingDir")
        made.write_text(json.dumps({"workdir": None if workdir in ("", "/") else workdir}))
        made.rename(path.with_suffix(".json"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{quote(name, safe='')}.sif"


def _member(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    assert file is not None
    return json.load(file)


@dataclass(frozen=True)
class Folders:
    """What one lease has on the host."""

    home: Path
    memory: Path
    """Its small files that every command writes."""

    @property
    def control(self) -> Path:
        """The control directory."""
        return self.memory / "ctl"

    @property
    def workspace(self) -> Path:
        """The workspace."""
        return self.home / "ws"

    @property
    def upper(self) -> Path:
        """What was written over the image."""
        return self.home / "over" / "upper"

    def make(self) -> None:
        """Make all of them."""
        for path in (self.control, self.memory / "state", self.workspace, *self.temporary):
            path.mkdir(mode=0o700)
        make_overlay(self.home / "over")

    def binds(self) -> list[str]:
        """Where the container finds them."""
        return [
            f"{self.control}:{recipe.CONTROL}:ro",
            f"{self.memory / 'state'}:{recipe.STATE}",
            f"{self.workspace}:{recipe.WORKSPACE}",
            *temporary_binds(self.temporary),
        ]

    @property
    def temporary(self) -> list[Path]:
        """Its temporary folders, on the disk: apptainer's own are not bounded."""
        return [self.home / name for name in ("tmp", "shm")]

    def remove(self) -> None:
        """Remove all of them. Blocks."""
        remove_tree(self.memory)
        remove_tree(self.home)


def temporary_binds(folders: Sequence[Path]) -> list[str]:
    """Where a container finds its temporary folders."""
    return [f"{path}:{place}" for path, place in zip(folders, ("/tmp", "/dev/shm"), strict=True)]


def make_overlay(folder: Path) -> None:
    """An empty overlay, as apptainer wants it."""
    for path in (folder, folder / "upper", folder / "work"):
        path.mkdir(mode=0o755)


def arguments(
    image: str,
    binds: Sequence[str],
    overlays: Sequence[str],
    command: Sequence[str],
    *,
    network: bool,
) -> list[str]:
    """The command line behind the program's name."""
    return [
        *("exec", "--containall", "--cleanenv", "--no-home", "--no-mount", "bind-paths"),
        *(() if network else ("--net", "--network", "none")),
        *(part for overlay in overlays for part in ("--overlay", overlay)),
        *(part for bind in binds for part in ("--bind", bind)),
        *("--pwd", "/"),
        image,
        *command,
    ]


def inside(script: str, most: SandboxLimits, *rest: str) -> list[str]:
    """The command in the container: a bash that bounds itself, runs a script and ends with it.

    Args:
        script: its path in the container.
        rest: its arguments; the last one names the lease to the reaper.
    """
    _, processes_, *bounds = recipe.ulimits(most)
    text = (
        f"{_IS_NAMESPACE} ulimit -u {processes_} || exit 125; unset hx; "
        f"ulimit {' '.join(bounds)} || exit 125; "
        "unset ${!APPTAINER*} ${!SINGULARITY*} PROMPT_COMMAND LD_LIBRARY_PATH; "
        f"export LANG={recipe.LANG} SHELL=/bin/bash; {recipe.START_SCRIPT}"
    )
    return ["/bin/bash", "--norc", "--noprofile", "-c", text, script, *rest]


class Container(Outer):
    """A started `apptainer exec`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process, -1)
        self._first = 0
        """The first shell in it."""
        self.variables: Mapping[str, str] = {}
        """Those that the image brings."""
        self._ending: asyncio.Task[int] | None = None

    async def follow(self) -> None:
        """Find the inside, and end it with apptainer, which it would outlive. Raises: OSError."""
        await asyncio.to_thread(self.attach)
        self._ending = asyncio.create_task(self._ended())

    def attach(self) -> None:
        """See `Outer`. Blocks."""
        below = [proc.pid for proc in processes.descendants(self.process.pid)]
        inits = [pid for pid in below if processes.inside_pid(pid) == 1]
        if not inits:
            raise OSError("its process 1 cannot be found")
        self._found(inits[0], os.pidfd_open(inits[0]))
        # apptainer's own process 1, if there is one, has our bash as its child.
        bashes = [pid for pid in (self.init, *processes.children(self.init)) if _is_bash(pid)]
        if not bashes:
            raise OSError("its first shell cannot be found")
        self._first = bashes[0]
        self.variables = self._variables()

    def supervisor(self) -> int:
        """The first child of the first shell."""
        if not self._supervisor and self._first:
            self._supervisor = next(iter(processes.children(self._first)), 0)
        return self._supervisor

    def _variables(self) -> dict[str, str]:
        data = Path(f"/proc/{self._first}/environ").read_bytes().decode("utf-8", "replace")
        pairs = (text.partition("=")[::2] for text in data.split("\0") if "=" in text)
        return {
            name: value
            for name, value in pairs
            if not name.startswith(_NOT_OF_IMAGE[:2])
            and name not in _NOT_OF_IMAGE
            and not value.startswith("/.singularity.d/")
        }

    @property
    def in_namespace(self) -> bool:
        """It has a user namespace of its own, in which the number of processes is bounded."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._first}/uid_map").read_text().split()[2:] != ["4294967295"]
        return False

    def orphans(self) -> processes.Snapshot:
        """Children of process 1, but the first shell."""
        found = [pid for pid in self._children() if pid != self._first]
        return processes.snapshot(found, below=False)

    async def ended(self) -> int:
        """Wait until all of it is gone. Its code; negative when apptainer was ended from outside,
        which is when its container was still there."""
        return await (self._ended() if self._ending is None else asyncio.shield(self._ending))

    async def _ended(self) -> int:
        code = await exited(self.process)
        if self._end_init():
            await gone(self._pidfd)
            return code
        return 128 - code if code < 0 and self.init else code


def _is_bash(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/bin/bash\0--norc\0")
    return False


class Apptainer(HostBackend):
    """The backend: one per process.

    Args:
        state_dir: where sandboxes' folders go; None is a folder of this user below the machine's
            temporary folder.
        program: the apptainer to use; None takes the one on PATH.
    """

    name = "apptainer"

    def __init__(self, *, state_dir: Path | None = None, program: str | None = None) -> None:
        super().__init__(state_dir)
        self.program = program
        self._images: SifImages | None = None

    def _prepare(self) -> Home:
        """See `HostBackend`."""
        if os.geteuid() == 0:
            raise SandboxStartError(
                "apptainer gives root's containers root's rights: start the run as an ordinary "
                "user, or use --sandbox bubblewrap"
            )
        self.program = self.program or find_program()
        home = super()._prepare()
        if any(mark in str(home.root) for mark in ":,"):
            home.close()
            raise SandboxStartError(f"{home.root}: apptainer binds no folder with ':' or ','")
        return home

    def start(self, argv: Sequence[str], stdio: socket.socket) -> Container:
        """Start an apptainer; `stdio` is closed here. Raises: SandboxStartError."""
        assert self.program is not None
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with stdio:
            try:
                return Container(start(Launch([self.program, *argv], self.program, env=env), stdio))
            except OSError as error:
                raise SandboxStartError(f"cannot start {self.program}: {error}") from error

    async def lease(self, spec: SandboxSpec) -> ApptainerSandbox:
        """Start a container.

        Raises: SandboxStartError, also for a network that is a list of hosts; TaskFault when no
            image is named, or it cannot be had.
        """
        if spec.image is None:
            raise TaskFault(
                "an apptainer sandbox needs an image: name a .sif file, a root file system or "
                "docker://NAME with --image, or as the row's"
            )
        if not isinstance(spec.network, bool):
            raise SandboxStartError(
                "--sandbox apptainer cannot limit the network to hosts: use --network off or on, "
                "or --sandbox bubblewrap"
            )
        home = await self._open()
        image = await asyncio.to_thread(self._image, spec.image)
        made = home.new_box()
        try:
            folders = Folders(made, home.memory_folder(made))
            return await self._lease(spec, image, folders)
        except OSError as error:
            raise SandboxStartError(f"a sandbox cannot be made: {error}") from error

    def _image(self, name: str) -> Sif:
        if not name.startswith(TASK_PREFIX):
            return Sif(name)
        if self._images is None:
            self._images = SifImages(self.program)
        image = self._images.find(name)
        if image is None:
            raise TaskFault(f"image {name!r} is not built on this machine for apptainer")
        return image

    async def _lease(self, spec: SandboxSpec, image: Sif, folders: Folders) -> ApptainerSandbox:
        try:
            await asyncio.to_thread(folders.make)
            if spec.snapshot is not None:
                await self._put_back(folders, spec.snapshot.folder)
            tree, shell = await self._start(spec, image, folders)
        except BaseException:
            await asyncio.shield(in_thread(folders.remove))
            raise
        sandbox = ApptainerSandbox(self, spec, image, folders, (tree, shell))
        return await self.admit(sandbox, str(spec.image), sandbox.variables)

    async def _put_back(self, folders: Folders, saved: Path) -> None:
        try:
            await in_thread(unpack, saved / WORKSPACE, folders.workspace, None)
            await in_thread(unpack, saved / ROOT, folders.upper, None)
        except OSError as error:
            raise SnapshotLost(f"a snapshot cannot be put back: {error}") from error

    async def _start(
        self, spec: SandboxSpec, image: Sif, folders: Folders
    ) -> tuple[Container, Shell]:
        control = folders.control
        variables = recipe.environment(recipe.WORKSPACE, spec.env)
        if "PATH" not in spec.env:
            del variables["PATH"]  # the image's
        cwd = spec.cwd or image.workdir
        (control / "env").write_text(recipe.environment_file(variables, recipe.WORKSPACE, cwd))
        (control / "supervisor").write_text(supervisor_text())
        tag = f"{folders.home.name}:{spec.lease}"
        command = inside(
            f"{recipe.CONTROL}/supervisor", spec.limits, recipe.CONTROL, recipe.STATE, tag
        )
        argv = arguments(
            image.path,
            folders.binds(),
            [str(folders.upper.parent)],
            command,
            network=spec.network is True,
        )

        async def launch(stdio: socket.socket) -> Container:
            return self.start(argv, stdio)

        paths = ShellPaths(control, recipe.CONTROL, recipe.STATE)
        return await start_shell(paths, launch, partial(explain, image.path), Container.follow)

    async def grade(self, sandbox: ApptainerSandbox, spec: GradingSpec, name: str) -> GradingResult:
        """Run a verifier over what a sandbox left. Raises: SandboxStartError, SandboxDied,
        TaskFault; Unpackable; OSError."""
        folders = sandbox.folders
        stage = folders.home / name
        if spec.image is None:
            changes, places = Upper(folders.upper), (*spec.mounts, recipe.WORKSPACE)
            await in_thread(grading.check_image, sandbox.relied, changes, places)
        image = sandbox.image
        if spec.image is not None:
            image = await asyncio.to_thread(self._image, spec.image)
        try:
            stage.mkdir(mode=0o700)
            work = partial(self._stage, sandbox, spec, image, stage)
            argv = await pack_in_thread(folders.workspace, work)

            async def launch(stdio: socket.socket) -> Container:
                return self.start(argv, stdio)

            return await grading.judge(spec, stage / "ctl", launch, Container.follow)
        finally:
            await asyncio.shield(in_thread(remove_tree, stage))

    def _stage(
        self,
        sandbox: ApptainerSandbox,
        spec: GradingSpec,
        image: Sif,
        stage: Path,
        packing: Packing,
    ) -> list[str]:
        """Everything that a grading container needs; its command line. Blocks."""
        control, verify, home = (stage / name for name in ("ctl", "verify", "home"))
        temporary = [stage / name for name in ("tmp", "shm")]
        for path in (control, verify, home, *temporary):
            path.mkdir(mode=0o700)
        variables = dict(sandbox.variables) if spec.image is None else {}
        if image.workdir is not None:
            variables["WORKDIR"] = image.workdir
        grading.write_stage(control, verify, spec, variables=variables)
        packing.copy(stage / "ws")
        make_overlay(stage / "over")
        binds = [
            f"{control}:{recipe.CONTROL}:ro",
            f"{verify}:{grading.VERIFY}:ro",
            f"{home}:{grading.HOME}",
            f"{stage / 'ws'}:{recipe.WORKSPACE}",
            *temporary_binds(temporary),
        ]
        for number, (place, folder) in enumerate(spec.mounts.items()):
            shown = grading.writable_copy(verify, folder, stage / f"mount{number}")
            binds.append(f"{shown}:{place}")
        # The agent's changes of its own image are below what the verifier writes.
        below = [f"{sandbox.folders.upper.parent}:ro"] if spec.image is None else []
        tag = f"{sandbox.folders.home.name}:{sandbox.spec.lease}"
        return arguments(
            image.path,
            binds,
            [*below, str(stage / "over")],
            inside(f"{recipe.CONTROL}/start", sandbox.spec.limits, tag),
            network=False,
        )


def explain(image: str, message: str) -> str:
    """Why a container did not start, in one line."""
    lines = [line for line in message.splitlines() if "WARNING" not in line and line.strip()]
    last = " ".join((lines or [message])[-1].split())[:300]
    if "network" in last.lower():
        return f"apptainer cannot cut the network here ({last}): use --network on"
    return f"apptainer did not start {image}: {last}"


class ApptainerSandbox(HostSandbox):
    """See `base.Sandbox`."""

    _tree: Container
    _backend: Apptainer

    def __init__(
        self,
        backend: Apptainer,
        spec: SandboxSpec,
        image: Sif,
        folders: Folders,
        running: tuple[Container, Shell],
    ) -> None:
        tree, _ = running
        most = spec.limits
        bounds: dict[str, object] = {
            "address_space_bytes_per_process": most.memory_bytes,
            "file_bytes": most.file_bytes,
            "workspace_bytes": most.workspace_bytes,
            "workspace_files": most.workspace_files,
            "workspace_held_by": "watching",
        }
        if tree.in_namespace:
            bounds["processes"] = most.processes
        super().__init__(backend, spec, running, bounds, Beneath(folders.workspace))
        self.image = image
        self.folders = folders
        self.variables = tree.variables
        self._storage = Storage(folders.home, None, most)

    @property
    def host_pid(self) -> int:
        """The process id of apptainer: what an operator, or a test, may kill."""
        return self._tree.process.pid

    async def look(self) -> None:
        """Hold it against the limits of what it may write. Raises: SandboxKilled; OSError."""
        if self._shell.lost.is_set():
            return
        folders = [self.folders.workspace, *self.folders.temporary, self.folders.upper]
        usage = await asyncio.to_thread(
            limits.measure,
            self._storage,
            [Beneath(path) for path in folders],
            self._tree.init,
            (),
        )
        if (excess := usage.excess(self.spec.limits)) is not None:
            await self._end(SandboxKilled(f"the sandbox exceeded its limits: {excess}"))

    async def _save_files(self, folder: Path) -> None:
        """See `ShellSandbox`."""
        await super()._save_files(folder)
        await save_folder(self.folders.upper, folder / ROOT)

    def _changes(self) -> Path:
        """See `FolderSandbox`."""
        return self.folders.upper

    def _check_workspace(self) -> None:
        if not self.folders.workspace.is_dir():
            raise SandboxDied("the workspace vanished")

    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        return await self._backend.grade(self, spec, name)

    def _remove(self) -> None:
        """See `HostSandbox`."""
        self.folders.remove()
