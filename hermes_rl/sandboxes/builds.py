"""Builds of the images that tasks need: a few at a time, each once, whoever asks for them."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hermes_rl.errors import HermesError, UserError
from hermes_rl.locks import lock_within
from hermes_rl.sandboxes.apptainer import SifImages
from hermes_rl.sandboxes.engine import ENGINES, Engine
from hermes_rl.sandboxes.images import BuildOptions, ImageStore, find_program
from hermes_rl.sandboxes.programs import BuildFailed

if TYPE_CHECKING:
    from hermes_rl.task_folders import BuildContext

_LOOK_S = 0.2


class ImageTaker(Protocol):
    """What has images beside the store: an engine, or apptainer."""

    def find(self, name: str) -> object | None:
        """An image that it has; None for none. Raises: SandboxStartError."""

    def load(self, archive: Path) -> None:
        """Take over an archive of `docker save`. Raises: EngineError, BuildFailed,
        SandboxStartError."""


def image_taker(backend: str) -> ImageTaker | None:
    """What takes the images of a kind of sandbox; None is the store. Raises: SandboxStartError."""
    if backend == "apptainer":
        return SifImages()
    return Engine(backend) if backend in ENGINES else None


def build_options(names: Iterable[str], *, certificates: bool = False) -> BuildOptions:
    """What builds may use of this machine.

    Args:
        names: of variables of our own environment.

    Raises: UserError for a variable that is not set.
    """
    found: dict[str, str] = {}
    for name in names:
        if not name.isidentifier() or not name.isascii():
            raise UserError(f"build variable {name}: no name of a variable. Leave the value out")
        if name not in os.environ:
            raise UserError(f"build variable {name}: not set. Export it")
        found[name] = os.environ[name]
    return BuildOptions(certificates=certificates, env=found)


def missing_images(
    contexts: Mapping[str, BuildContext], taker: ImageTaker | None = None
) -> dict[str, BuildContext]:
    """Those of the images that the store, or a taker, lacks. Blocks.

    Raises: SandboxStartError when an engine does not answer.
    """
    store = ImageStore()
    there = store.find if taker is None else taker.find
    return {name: context for name, context in contexts.items() if there(name) is None}


class ImageBuilds:
    """Builds images that the store lacks. Several processes may build the same images: one of them
    does, and the others wait for it. `close` it.

    Args:
        contexts: what each image is built from, by its name.
        aliases: name in `FROM` -> a local OCI layout or archive.
        jobs: builds at a time.
        taker: takes what is built, in place of the store.
    """

    def __init__(
        self,
        contexts: Mapping[str, BuildContext],
        options: BuildOptions | None = None,
        aliases: Mapping[str, Path] | None = None,
        jobs: int = 2,
        taker: ImageTaker | None = None,
    ) -> None:
        self.store = ImageStore()
        self.contexts = contexts
        self._options = options or BuildOptions()
        self._aliases = aliases or {}
        self._taker = taker
        self._building = threading.Semaphore(jobs)
        # While as many others are built, finished images are stored.
        self._pool = ThreadPoolExecutor(2 * jobs, thread_name_prefix="image-build")

    def open(self) -> None:
        """Once, before the first build: look for buildah, and give it the local images. Blocks.

        Raises: UserError, BuildFailed.
        """
        find_program("buildah")
        for name, local in self._aliases.items():
            self.store.alias(name, local)

    def build(self, image: str) -> Future[None]:
        """Build one of the images. Its future fails with one line that names the log."""
        return self._pool.submit(self._build, self.contexts[image])

    def stop(self) -> None:
        """End the builds that run; those that wait will fail. For any thread."""
        self.store.stop()

    def close(self) -> None:
        """End all builds, and wait for that. Blocks."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)

    def _build(self, context: BuildContext) -> None:
        store, name = self.store, context.image
        try:
            with open(store.lock_file(name), "w") as lock:
                while not lock_within(lock.fileno(), _LOOK_S):
                    if store.stopped:
                        raise BuildFailed(f"cannot build {name}: interrupted")
                if self._taker is None and store.find(name) is not None:
                    return
                with tempfile.TemporaryDirectory() as folder:
                    archive = Path(folder, "image") if self._taker is not None else None
                    store.build(
                        context.folder,
                        name,
                        dockerfile=context.dockerfile,
                        timeout_s=context.timeout_s,
                        options=self._options,
                        archive=archive,
                        turn=self._building,
                    )
                    if self._taker is not None and archive is not None:
                        self._taker.load(archive)
        except (HermesError, OSError) as error:
            if store.stopped:
                raise
            log = store.keep_log(name, self._unshown(f"{getattr(error, 'log', '')}\n{error}\n"))
            text = self._unshown(f"{context.task}: {error}. Log: {log}")
            raise BuildFailed(text) from error

    def _unshown(self, text: str) -> str:
        """A text without the values of variables, of which some are secrets."""
        for name, value in self._options.env.items():
            text = text.replace(value, f"[{name}]") if value else text
        return text
