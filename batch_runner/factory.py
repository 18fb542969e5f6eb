"""What starts workers, and their governor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batch_runner.governing import GovernorHost, LocalGovernor
from batch_runner.local import LocalFactory
from batch_runner.ports import WorkerFactory
from batch_runner.progress import Progress
from batch_runner.settings import Settings
from batch_runner.wire import WorkerSpec
from hermes_rl.models.limits.governor_wire import Charter


@contextmanager
def open_factory(
    settings: Settings, spec: WorkerSpec, charter: Charter, progress: Progress
) -> Iterator[tuple[WorkerFactory, GovernorHost]]:
    """Both for a run: this process without Ray, or a Ray cluster."""
    if settings.workers == 0:
        governor = LocalGovernor(charter)
        yield LocalFactory(spec, governor.line(), settings.keys, settings.hosts), governor
        return
    from batch_runner.governor_ray import RayGovernor
    from batch_runner.pool import RayFactory, connected

    def lost() -> None:
        progress.note("the governor was lost; its workers tell a new one what they know")

    with connected(settings.workers) as warden:
        watch = warden.watch if warden is not None else _watch_nothing
        host = RayGovernor(charter, spec.governor, watch=watch, lost=lost)
        yield RayFactory(spec, settings.workers, warden, settings.keys), host


def _watch_nothing(pid: int) -> None:
    """A cluster that was there before looks after its own processes."""
