"""Sandboxes of modal: a container in its cloud for each lease.

A container holds one sandbox, so it is the barrier itself: in it the helper of `remote` runs
commands as plain processes, over one `exec`. Who is root in a container could change whatever a
verifier would start there, so grading is a new container of the same image with a copy of the
workspace.

A container ends with its helper, and the helper when its worker is silent, so no container stays
that costs money.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxStartError,
    TaskFault,
)
from hermes_rl.sandboxes import grading
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.remote import Link, RemoteSandbox, Start

APP, TAG = "hermes-rl", "hermes-rl-lease"
LONGEST_S = 24 * 3600
"""How long a container may live: modal ends it then."""
_BLAME_S = 4.0
"""How long a container may take to end after what ran in it, when it was ended from outside."""
_LOOKS = 20
_LIST_S = 30.0
_START_S = 600.0
"""How long modal may take to start one, its image included."""
ENTRY = "sleep 90; while grep -aqs 'remote_helpe[r]' /proc/[0-9]*/cmdline; do sleep 5; done; exit 0"
"""Runs as long as a helper does."""


def modal_of(name: str) -> Any:
    """Something of modal. Raises: SandboxStartError when it is not installed."""
    try:
        import modal

        return getattr(modal, name)
    except (ImportError, AttributeError):
        raise SandboxStartError(
            "--sandbox modal needs modal: pip install 'hermes-rl[modal]'"
        ) from None


def is_configured() -> bool:
    """Whether modal is installed and somebody logged in: a look, without a connection."""
    config = os.environ.get("MODAL_CONFIG_PATH") or os.path.expanduser("~/.modal.toml")
    known = "MODAL_TOKEN_ID" in os.environ or os.path.exists(config)
    return known and importlib.util.find_spec("modal") is not None


async def running_containers() -> dict[str, str]:
    """Id of each container of the account's app that runs -> its lease. Raises:
    SandboxStartError."""
    try:
        async with asyncio.timeout(_LIST_S):
            app = await modal_of("App").lookup.aio(APP, create_if_missing=True)
            found = [one async for one in modal_of("Sandbox").list.aio(app_id=app.app_id)]
            tags = await asyncio.gather(*(one.get_tags.aio() for one in found))
    except TimeoutError:
        raise SandboxStartError(f"modal: no answer within {_LIST_S:g} s") from None
    except modal_of("Error") as error:
        raise SandboxStartError(f"modal: {_line(error)}") from error
    leases = (tag.get(TAG, "") for tag in tags)
    return dict(zip((one.object_id for one in found), leases, strict=True))


class ModalChannel:
    """A process in a container (see `remote.Channel`)."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._output = process.stdout.__aiter__()
        self._buffer = bytearray()
        self._writing = asyncio.Lock()

    async def read(self, size: int) -> bytes:
        """See `remote.Channel`."""
        while len(self._buffer) < size:
            try:
                self._buffer += await self._output.__anext__()
            except StopAsyncIteration:
                raise EOFError from None
            except modal_of("Error") as error:
                raise ConnectionResetError(str(error)) from error
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def write(self, data: bytes) -> None:
        """See `remote.Channel`."""
        try:
            async with self._writing:
                self._process.stdin.write(data)
                await self._process.stdin.drain.aio()
        except (modal_of("Error"), ValueError) as error:
            raise ConnectionResetError(str(error)) from error

    async def failure(self) -> str:
        """See `remote.Channel`."""
        with contextlib.suppress(modal_of("Error"), TimeoutError):
            async with asyncio.timeout(10):
                printed: bytes = await self._process.stderr.read.aio()
                return printed.decode("utf-8", "replace")
        return ""

    async def aclose(self) -> None:
        """See `remote.Channel`."""
        with contextlib.suppress(modal_of("Error"), ValueError):
            self._process.stdin.write_eof()
            await self._process.stdin.drain.aio()


class Modal:
    """The backend: one per process. The account is that of `modal token` or `MODAL_TOKEN_ID`."""

    name = "modal"

    def __init__(self) -> None:
        self._app: asyncio.Task[Any] | None = None
        self._images: dict[str | None, Any] = {}
        self._live: set[ModalSandbox] = set()

    async def _find_app(self) -> Any:
        if self._app is None:
            look_up = modal_of("App").lookup.aio
            self._app = asyncio.ensure_future(look_up(APP, create_if_missing=True))
        try:
            return await asyncio.shield(self._app)
        except modal_of("Error") as error:
            self._app = None
            raise SandboxStartError(f"modal: {_line(error)}") from error

    def _image(self, name: str | None) -> Any:
        if name not in self._images:
            image = modal_of("Image")
            if name is None:
                made = image.debian_slim(python_version="3.12")
            else:
                made = (image.from_id if name.startswith("im-") else image.from_registry)(name)
            self._images[name] = made
        return self._images[name]

    async def lease(self, spec: SandboxSpec) -> ModalSandbox:
        """Start a container.

        Raises: SandboxStartError, also for a network that is a list of hosts; TaskFault when its
            image cannot be had; SnapshotLost.
        """
        if not isinstance(spec.network, bool):
            raise SandboxStartError(
                "--sandbox modal cannot limit the network to hosts: use --network off or on, or "
                "--sandbox bubblewrap"
            )
        sandbox = ModalSandbox(self, spec, *await self.start(spec))
        self._live.add(sandbox)
        return sandbox

    async def start(self, spec: SandboxSpec) -> tuple[Any, Link, RemoteSandbox]:
        """Start a container with a helper, and lease its one sandbox."""
        app = await self._find_app()
        most = spec.limits
        mebibytes = most.memory_bytes >> 20
        try:
            async with asyncio.timeout(_START_S):
                container = await modal_of("Sandbox").create.aio(
                    *("sh", "-c", ENTRY),
                    app=app,
                    image=self._image(spec.image),
                    timeout=LONGEST_S,
                    cpu=most.cpus,
                    memory=(min(128, mebibytes), mebibytes),
                    block_network=not spec.network,
                    tags={TAG: spec.lease},
                )
        except TimeoutError:
            raise SandboxStartError(f"modal started no container within {_START_S:g} s") from None
        except modal_of("Error") as error:
            kind = TaskFault if "image" in str(error).lower() else SandboxStartError
            raise kind(f"modal: {_line(error)}") from error
        try:
            link = await self._link(container)
            inner = await link.lease(replace(spec, network=True), self.name)
        except BaseException:
            await asyncio.shield(_terminate(container))
            raise
        return container, link, inner

    async def _link(self, container: Any) -> Link:
        async def blame(why: str) -> SandboxError:
            code = None
            with contextlib.suppress(modal_of("Error")):
                for _ in range(_LOOKS):  # modal may learn of an end after us
                    if (code := await container.poll.aio()) is not None:
                        break
                    await asyncio.sleep(_BLAME_S / _LOOKS)
            if code in (None, 0):  # it still runs, or ended because its helper did
                return SandboxKilled(f"the agent ended the helper in its container: {why}")
            return SandboxDied(f"modal ended the container (exit {code}): {why}")

        start = Start()
        try:
            process = await container.exec.aio(*start.argv, text=False)
            channel = ModalChannel(process)
            await start.ready(channel)
            link = Link(f"modal {container.object_id}", channel, blame)
            await link.open(0, "always")
        except modal_of("Error") as error:
            raise SandboxStartError(f"modal: {_line(error)}") from error
        except SandboxStartError as error:
            raise SandboxStartError(
                f"modal: {error}. The image needs Python 3.11 or newer as python3, and bash"
            ) from error
        return link

    def forget(self, sandbox: ModalSandbox) -> None:
        """A sandbox is closed."""
        self._live.discard(sandbox)

    async def aclose(self) -> None:
        """End all containers of this process."""
        await asyncio.gather(*(sandbox.aclose() for sandbox in [*self._live]))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


async def _terminate(container: Any) -> None:
    with contextlib.suppress(modal_of("Error")):
        await container.terminate.aio()


class ModalSandbox(RemoteSandbox):
    """See `base.Sandbox`."""

    def __init__(
        self,
        backend: Modal,
        spec: SandboxSpec,
        container: Any,
        link: Link,
        inner: RemoteSandbox,
    ) -> None:
        most = spec.limits
        bounds: dict[str, object] = {
            "memory_bytes": most.memory_bytes,
            "isolation": "modal",
            "container": str(container.object_id),
            **({"cpus": most.cpus} if most.cpus else {}),
        }
        info = SandboxInfo(backend.name, spec.image, bounds)
        folders = {"workspace": inner.workspace, "scratch": inner.scratch}
        super().__init__(link, inner.number, info, folders)
        self._backend, self._spec, self._container = backend, spec, container
        self._helper = link
        self._packed: tempfile.TemporaryDirectory[str] | None = None

    async def grade(self, spec: GradingSpec) -> GradingResult:
        """See `base.Sandbox.grade`."""
        if self._packed is None:
            self._packed = tempfile.TemporaryDirectory(prefix="hermes-rl-")
            try:
                await self.pack_left(self._archive)
            except SandboxKilled as error:
                return grading.refused(error)
        if not self._archive.exists():
            return grading.refused("what the agent left cannot be packed")
        async with self._grader(spec) as grader:
            await grader.unpack(self._archive)
            return await grader.grade(replace(spec, image=None))

    @property
    def _archive(self) -> Path:
        assert self._packed is not None
        return Path(self._packed.name, "left")

    @contextlib.asynccontextmanager
    async def _grader(self, spec: GradingSpec) -> AsyncIterator[RemoteSandbox]:
        """A container in which no program of the agent ran, without network."""
        fresh = SandboxSpec(
            lease=f"{self._spec.lease}-grading",
            image=spec.image or self._spec.image,
            limits=self._spec.limits,
        )
        container, link, inner = await self._backend.start(fresh)
        try:
            yield inner
        except (OSError, SandboxKilled) as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error
        finally:
            await asyncio.shield(_terminate(container))
            await link.aclose()

    async def _close(self) -> None:
        try:
            await super()._close()
        finally:
            await _terminate(self._container)
            await self._helper.aclose()
            if self._packed is not None:
                await asyncio.to_thread(self._packed.cleanup)
            self._backend.forget(self)
