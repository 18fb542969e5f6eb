"""The settings that a configuration leaves open: run directory, workers, concurrency."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hermes_rl.aio import run_sync
from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS, RunConfig, parse_config
from hermes_rl.config_endpoint import EnvSection
from hermes_rl.definitions import adapt_identity, adapt_switches, changed_tools, missing_tools
from hermes_rl.errors import StoreError, UserError
from hermes_rl.identity import digest
from hermes_rl.input_errors import nearest
from hermes_rl.models.providers import collect_keys
from hermes_rl.models.rate import JointLimits
from hermes_rl.sources import dataset_name
from hermes_rl.store import RunDir, url_of, working_copy
from hermes_rl.wiring import identity_of, with_offers

if TYPE_CHECKING:
    from hermes_rl.rl import Host, Opened

CONCURRENCY = 64
LOCAL_CONCURRENCY = 4
"""With the embedded model: it computes on this machine."""

ROLLOUTS_PER_WORKER = 32

SMALL_UNITS = 200
SMALL_CONCURRENCY = 64
"""Fewer units with at most this concurrency run in this process, since Ray takes seconds to
start."""

REMOTE_PUBLISH_S = 30.0
"""`run.publish_every_s` of a run at a URL, unless it is set: what a lost machine takes with it."""

SMALL_S = 2.0
"""Time to find out whether a run is small; a slow stream counts as large."""


class Hosts:
    """Environments of one process and event loop. Each is set up once, shared by all users, and
    closed at the end. Made by `open_hosts`."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._open: dict[str, Host] = {}
        self._lock = asyncio.Lock()  # no environment is set up twice

    @asynccontextmanager
    async def open(self, section: EnvSection) -> AsyncIterator[Host]:
        """Like `hermes_rl.rl.episodes.open_host`, but open environments are shared and stay open.

        Raises: UserError when its code cannot be loaded, or `setup` fails.
        """
        from hermes_rl.rl import open_host

        name = section.model_dump_json()
        async with self._lock:
            if name not in self._open:
                self._open[name] = await self._stack.enter_async_context(open_host(section))
        yield self._open[name]


@asynccontextmanager
async def open_hosts(shared: Hosts | None = None) -> AsyncIterator[Hosts]:
    """Use the environments of the caller, or new ones that are closed at the end."""
    if shared is not None:
        yield shared
        return
    async with AsyncExitStack() as stack:
        yield Hosts(stack)


class Joint(Protocol):
    """What runs at the same time share; see `batch_runner.joint`."""

    runs: int
    limits: JointLimits

    def add(self, member: Any) -> None:
        """Add a run that begins."""

    def ray(self, workers: int) -> AbstractContextManager[Any]:
        """Like `connect_ray`."""


@dataclass(frozen=True)
class Settings:
    """A configuration with all settings resolved."""

    config: RunConfig
    """With `run.out` and `run.concurrency` filled in."""
    out: Path
    workers: int | None
    """None until the number of open units is known; see `choose_workers`."""
    concurrency: int
    identity: dict[str, Any]
    config_hash: str
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """API keys by the variable that holds them."""
    opened: Opened | None = None
    """The environment whose tasks are run, if any."""
    hosts: Hosts | None = None
    """Environments of this process, after the start of the run."""
    joint: Joint | None = None
    """Runs at the same time, if any."""
    url: str | None = None
    """Of a run on an object store; `out` is its working copy."""

    @property
    def place(self) -> str:
        """The run directory, for people."""
        return self.url or str(self.out)

    @property
    def resume(self) -> str:
        """The command that resumes this run."""
        env = self.config.env
        if env is not None and env.mode == "live":
            return "the same program"
        if self.joint is not None:
            return "the same command"
        command = "run" if env is None else f"env {env.mode}"
        return f"hermes-rl {command} --config {shlex.quote(f'{self.out}/run.yaml')}"


def as_config(config: object) -> RunConfig:
    """Convert a `RunConfig`, or the same as plain data.

    Raises: UserError.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, Mapping):
        return parse_config(config, "run_batch")
    raise UserError(
        f"run_batch takes a RunConfig or a mapping, not {type(config).__name__}. "
        "Give RunConfig(...), or {'dataset': {'path': ...}, 'model': {'name': ...}}"
    )


def resolve_settings(config: RunConfig) -> Settings:
    """Resolve all settings of a configuration, and refuse those that cannot work.

    Raises: UserError for an absent key, for toolsets, distributions or images that do not exist,
    and for an environment that cannot be opened; StoreError for a run whose beginning is damaged,
    or whose units were offered tools that this machine lacks, or has now.
    """
    config, opened = _resolve_env(config)
    local = config.model.name in LOCAL_MODELS
    keys = _keys(config)
    url = url_of(config.run.out or "")
    out = working_copy(url) if url else RunDir(config.run.out or default_out(config)).path
    before = _identity_at(out)
    missing_tools(config)
    config = adapt_switches(config, before)
    if why := changed_tools(config, before):
        raise StoreError(
            f"{out} was made {why}. What models are offered must not change within a run: undo "
            "that, or choose another --out"
        )
    if config.mcp:
        config = run_sync(with_offers(config, keys))
    identity = identity_of(config)
    if opened is not None:
        identity["env"] = opened.identity
    if before:
        identity = adapt_identity(before, identity)
    concurrency = config.run.concurrency or (LOCAL_CONCURRENCY if local else CONCURRENCY)
    workers = None if config.run.workers == "auto" else min(config.run.workers, concurrency)
    changes: dict[str, Any] = {"out": str(out), "concurrency": concurrency}
    if url and "publish_every_s" not in config.run.model_fields_set:
        changes["publish_every_s"] = REMOTE_PUBLISH_S
    run = config.run.model_copy(update=changes)
    return Settings(
        config=config.model_copy(update={"run": run}),
        out=out,
        url=url,
        workers=workers,
        concurrency=concurrency,
        identity=identity,
        config_hash=digest(identity),
        keys=keys,
        opened=opened,
    )


def may_be_small(settings: Settings) -> bool:
    """Whether the number of units decides between this process and Ray."""
    cluster = bool(os.environ.get("RAY_ADDRESS") or settings.config.run.runtime_env)
    return settings.workers is None and settings.concurrency <= SMALL_CONCURRENCY and not cluster


def choose_workers(settings: Settings, small: bool) -> int:
    """The number of Ray workers of a run; 0 is this process.

    Args:
        small: there are fewer than `SMALL_UNITS` units to run.
    """
    if settings.workers is not None:
        return settings.workers
    if small and may_be_small(settings):
        return 0
    return min(_cores(), math.ceil(settings.concurrency / ROLLOUTS_PER_WORKER))


def _keys(config: RunConfig) -> dict[str, str]:
    """Raises: UserError for a key that is not set, with the name of a similar local model."""
    try:
        return collect_keys(config)
    except UserError as error:
        near = nearest(config.model.name, (*PLAYED_MODELS, *LOCAL_MODELS), 0.75)
        where = config.endpoint
        if near is None or where.provider or where.base_url:
            raise
        raise UserError(f"{error} (did you mean --model {near}?)") from None


def _identity_at(out: Path) -> dict[str, Any]:
    """The identity of an existing run; empty for a new one. Raises: StoreError."""
    run_dir = RunDir(out)
    epochs = run_dir.epochs()
    return run_dir.epoch(epochs[0]).identity if epochs else {}


def _resolve_env(config: RunConfig) -> tuple[RunConfig, Opened | None]:
    """Complete a configuration from its environment, whose code is imported only if there is
    one."""
    if config.env is None:
        return config, None
    from hermes_rl.rl import settle_env

    return settle_env(config)


def default_out(config: RunConfig) -> str:
    """`runs/<dataset>-<model>`; for an environment `runs/<name>-<model>`, and `-eval` behind it."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", config.model.name.rpartition("/")[2]).strip("-.")
    name, end = dataset_name(config.dataset.path), ""
    if config.env is not None:
        where = Path(config.env.name.partition(":")[0]).name
        name = where.removesuffix(".py").rpartition(".")[2]
        end = "-eval" if config.env.mode == "evaluate" else ""
    return f"runs/{name}-{model or 'model'}{end}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
