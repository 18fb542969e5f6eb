"""Units wait until their image is built, while others run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_runner.settings import Settings
from hermes_rl.errors import UserError
from hermes_rl.ports import WorkItem

if TYPE_CHECKING:
    from hermes_rl.sandboxes import ImageBuilds


@dataclass
class ImageCounts:
    """Progress of the images that had to be built for this start."""

    wanted: int = 0
    """So far; the dataset is read lazily."""
    built: int = 0
    failed: int = 0

    @property
    def line(self) -> str:
        """`images: 12 of 40 built, 1 failed`; empty once all are built or none is needed."""
        if self.built + self.failed == self.wanted:
            return ""
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"images: {self.built:,} of {self.wanted:,} built{failed}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


Release = Callable[[Sequence[WorkItem]], None]


class Images:
    """The image builds of one start. A build starts when the first unit needs the image; other
    units wait for the same build. A failed build is not repeated in this start: its units run and
    fail.

    Args:
        note: takes a line for people.
    """

    def __init__(self, builds: ImageBuilds, note: Callable[[str], None]) -> None:
        self.counts = ImageCounts()
        self._builds = builds
        self._missing = set(builds.contexts)
        self._note = note
        self._units: dict[str, list[WorkItem]] = {}
        """Image -> the units that wait for it."""

    @property
    def waiting(self) -> int:
        """Units that wait."""
        return sum(map(len, self._units.values()))

    async def open(self) -> None:
        """Prepare builds before any call is made. Raises: UserError when this machine cannot
        build."""
        await asyncio.to_thread(self._builds.open)

    def hold(self, item: WorkItem, release: Release) -> bool:
        """Hold a unit until its image is built. Returns False when it need not wait."""
        image = item.task.image if item.task is not None else None
        if image is None or image not in self._missing:
            return False
        if image not in self._units:
            self._units[image] = []
            self.counts.wanted += 1
            loop = asyncio.get_running_loop()
            ended = partial(self._ended, image, release)
            self._builds.build(image).add_done_callback(
                lambda future: loop.call_soon_threadsafe(ended, future)
            )
        self._units[image].append(item)
        return True

    def _ended(self, image: str, release: Release, future: Future[None]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and self._builds.store.stopped:
            return
        self.counts.built += error is None
        self.counts.failed += error is not None
        if error is not None:
            self._note(f"error: {error}")
        self._missing.discard(image)
        release(self._units.pop(image))

    def stop(self) -> None:
        """Stop all builds; their units stay open."""
        self._builds.stop()

    async def aclose(self) -> None:
        """Stop all builds and wait for their end."""
        await asyncio.to_thread(self._builds.close)


def find_missing(settings: Settings) -> ImageBuilds | None:
    """Find the images of task folders that are not built yet; None when there are none. Blocking.

    Raises: UserError for a variable of `sandbox.build.env` that is not set, and for a kind of
        sandbox that has no use of images built here.
    """
    dataset, sandbox = settings.config.dataset, settings.config.sandbox
    path = Path(dataset.path).expanduser()
    if settings.opened is not None or sandbox.backend == "none" or not path.is_dir():
        return None
    from hermes_rl.sandboxes import (
        ENGINES,
        ImageBuilds,
        build_options,
        image_taker,
        missing_images,
    )
    from hermes_rl.task_folders import build_contexts

    contexts = build_contexts(path, dataset.limit)
    if sandbox.backend not in ("bubblewrap", "apptainer", *ENGINES):
        if contexts:
            raise UserError(
                f"--sandbox {sandbox.backend} cannot play task folders with a Dockerfile: their "
                "images are built for bubblewrap, docker, podman and apptainer on this machine"
            )
        return None
    taker = image_taker(sandbox.backend)
    missing = missing_images(contexts, taker)
    if not missing:
        return None
    how = sandbox.build
    aliases = {name: Path(local).expanduser() for name, local in how.aliases.items()}
    options = build_options(how.env, certificates=how.ca)
    return ImageBuilds(missing, options, aliases, how.jobs, taker)
