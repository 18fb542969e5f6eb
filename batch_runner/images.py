"""Units whose image is not built yet wait for it, while the others run."""

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
    """The images that units of this start need and that were not stored."""

    wanted: int = 0
    """As far as the dataset was read."""
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
    """The builds of one start of a run. A build begins when a unit needs its image; two units never
    wait for two builds of one image. What could not be built is not tried again in this start: its
    units run, and fail for want of it.

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
        """Before anything is paid. Raises: UserError where nothing can be built here."""
        await asyncio.to_thread(self._builds.open)

    def hold(self, item: WorkItem, release: Release) -> bool:
        """Keep a unit until its image is there; False where it need not wait."""
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
        """End all builds, for a run that ends; its units stay open."""
        self._builds.stop()

    async def aclose(self) -> None:
        """End all builds, and wait for that."""
        await asyncio.to_thread(self._builds.close)


def find_missing(settings: Settings) -> ImageBuilds | None:
    """What of the images of a dataset's task folders is not built yet; None for nothing. Blocks.

    Raises: UserError for a variable of `sandbox.build.env` that is not set, and for a kind of
        sandbox that has no use of images built here.
    """
    dataset, sandbox = settings.config.dataset, settings.config.sandbox
    path = Path(dataset.path).expanduser()
    if settings.opened is not None or sandbox.backend == "none" or not path.is_dir():
        return None
    from hermes_rl.sandboxes import ENGINES, Engine, ImageBuilds, build_options, missing_images
    from hermes_rl.task_folders import build_contexts

    contexts = build_contexts(path, dataset.limit)
    if sandbox.backend not in ("bubblewrap", *ENGINES):
        if contexts:
            raise UserError(
                f"--sandbox {sandbox.backend} cannot play task folders with a Dockerfile: their "
                "images are built for bubblewrap, docker and podman on this machine"
            )
        return None
    engine = Engine(sandbox.backend) if sandbox.backend in ENGINES else None
    missing = missing_images(contexts, engine)
    if not missing:
        return None
    how = sandbox.build
    aliases = {name: Path(local).expanduser() for name, local in how.aliases.items()}
    options = build_options(how.env, certificates=how.ca)
    return ImageBuilds(missing, options, aliases, how.jobs, engine)
