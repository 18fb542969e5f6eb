"""What starts workers: this process, or Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from batch_runner.local import LocalFactory
from batch_runner.plan import open_reader
from batch_runner.ports import WorkerFactory
from batch_runner.settings import (
    SMALL_S,
    SMALL_UNITS,
    Settings,
    choose_workers,
    may_be_small,
    settle,
)
from batch_runner.wire import WorkerSpec
from hermes_rl.config import RunConfig
from hermes_rl.models.rate.coordinator import Coordinator
from hermes_rl.models.tokens.plan import TokenPlan
from hermes_rl.store.driver import Driver


@contextmanager
def open_factory(
    settings: Settings, spec: WorkerSpec, coordinator: Coordinator
) -> Iterator[WorkerFactory]:
    """Open what starts a run's workers: this process without Ray, or a Ray cluster."""
    workers = settings.workers
    if not workers:
        yield LocalFactory(spec, coordinator, settings.keys, settings.hosts)
        return
    from batch_runner.pool import RayFactory, connected

    with connected(workers) as warden:
        yield RayFactory(spec, workers, coordinator, warden, settings.keys)


@contextmanager
def ray_on_this_thread(config: RunConfig) -> Iterator[None]:
    """Where a loop is running, the run goes to another thread, and Ray is to start on this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    settings = settle(config)
    workers = choose_workers(settings, may_be_small(settings) and _is_small(settings))
    if workers == 0:
        yield
        return
    from batch_runner.pool import connected

    with connected(workers):
        yield


def _is_small(settings: Settings) -> bool:
    """Whether the whole dataset is small, whatever of it is done."""
    reader = open_reader(settings)
    return len(reader.take(SMALL_UNITS, SMALL_S)) < SMALL_UNITS and reader.ended


def spec_of(settings: Settings, driver: Driver, tokens: TokenPlan | None) -> WorkerSpec:
    """What every worker of a run is told."""
    run = settings.config.run
    return WorkerSpec(
        run_path=str(driver.run_dir.path.resolve()),
        run_id=driver.run_id,
        epoch=driver.epoch,
        worker=0,
        capacity=settings.concurrency,
        lease_s=run.lease_s,
        publish_every_s=run.publish_every_s,
        config=settings.config.model_dump_json().encode(),
        config_hash=settings.config_hash,
        tokens=tokens,
    )
