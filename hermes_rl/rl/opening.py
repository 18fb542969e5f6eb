"""From the section `env` of a configuration to an environment, and to what it says for the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import ValidationError

from hermes_rl.config import RunConfig, parse_config
from hermes_rl.config_env import EnvSection
from hermes_rl.errors import HermesError, UserError
from hermes_rl.identity import digest
from hermes_rl.input_errors import describe, unknown
from hermes_rl.messages import to_openai
from hermes_rl.models.providers.others import USES
from hermes_rl.rl import faults
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.loading import AnyEnvironment, Loaded, load_environment
from hermes_rl.rows import LazyRow
from hermes_rl.tasks import Task, TaskRow
from hermes_rl.tools.base import Tool


@dataclass(frozen=True)
class Opened:
    """An environment that a run names."""

    env: AnyEnvironment
    loaded: Loaded
    section: EnvSection

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its tasks and rewards: code and data by content, configuration, stream, the
        models that it asks. Blocking."""
        section, env = self.section, self.env
        return {
            "name": env.name,
            "source": self.loaded.digest,
            "config": env.config.model_dump(mode="json"),
            "split": section.split,
            "seed": section.seed,
            **{
                use: place.identity
                for use, place in (("judge", section.judge), ("user", section.user))
                if place is not None
            },
        }


def open_environment(section: EnvSection, *, to_run: bool = True) -> Opened:
    """Load the class and make the environment; `setup` is not run.

    Args:
        to_run: and not only to look at its tasks: the models that it asks must be named.

    Raises: UserError, one line: no such environment, a configuration or split that it does not
        know, a model that it asks and the run does not name or the other way round.
    """
    loaded = load_environment(section.name)
    cls = loaded.cls
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise UserError(f"{cls.__name__}: give it a name, such as `name = 'my_env'`")
    try:
        config = cls.Config.model_validate(section.config)
    except ValidationError as error:
        raise UserError(
            f"environment {name}: env.config: {describe(error.errors(), cls.Config)[1]}"
        ) from None
    except HermesError:
        raise
    except Exception as error:  # a boundary: a validator of the user's
        raise UserError(faults.said(name, cls.Config, error)) from error
    try:
        env = cls(config)
    except HermesError:
        raise
    except Exception as error:  # a boundary: code of the user's
        raise UserError(faults.said(name, cls.__init__, error)) from error
    if section.split not in env.splits:
        raise UserError(f"environment {name}: {unknown('split', section.split, env.splits)}")
    if to_run:
        _refuse_models(env, section)
    return Opened(env, loaded, section)


def _refuse_models(env: AnyEnvironment, section: EnvSection) -> None:
    """Raises: UserError for a judge or user that it asks and the run does not name, or the other
    way round."""
    for use in USES:
        named = getattr(section, use) is not None
        if use in env.uses and not named:
            raise UserError(
                f"environment {env.name} asks a model as {use}: set env.{use}.name, "
                f"for example --set env.{use}.name=MODEL"
            )
        if named and use not in (*env.uses, *env.can_use):
            raise UserError(
                f"environment {env.name} asks no model as {use} as it is configured. Leave out "
                f"env.{use} (--{use}); one that does so names it in `uses` or `can_use`"
            )


def settle_env(config: RunConfig) -> tuple[RunConfig, Opened | None]:
    """A configuration with what its environment says where the run says nothing.

    Returns: it, and the environment; the same configuration and None without one.

    Raises: UserError, as `open_environment`, and for an endless stream without a limit.
    """
    if config.env is None:
        return config, None
    opened = open_environment(config.env)
    data = config.model_dump(mode="json", exclude_unset=True)
    for dotted, value in _defaults(opened, config.env.mode).items():
        if value is not None:
            *sections, key = dotted.split(".")
            place = data
            for section in sections:
                place = place.setdefault(section, {})
            place.setdefault(key, value)
    data["env"]["name"] = opened.loaded.name
    if opened.env.endless and data["dataset"].get("limit") is None:
        raise UserError(
            f"environment {opened.env.name} has no end of tasks. Say how many with --limit"
        )
    return parse_config(data, f"environment {opened.env.name}"), opened


def _defaults(opened: Opened, mode: str) -> dict[str, Any]:
    """Key of the run's configuration -> the environment's word."""
    own = opened.env.config
    limits = own.limits.model_dump(exclude_unset=True) if own.limits is not None else {}
    toolsets = own.toolsets if own.sandboxed or own.toolsets is not None else ()
    return {
        "dataset.repeats": own.group_size if mode == "process" else 1,
        "agent.preset": "rl",
        "agent.toolsets": list(toolsets) if toolsets is not None else None,
        "agent.system_prompt": own.system_prompt,
        **{f"agent.limits.{name}": value for name, value in limits.items()},
        "sandbox.image": own.image,
        "sandbox.network": own.network or None,
    }


class _EnvRow(LazyRow, frozen=True, kw_only=True, gc=False):
    """A task of a stream."""

    task: Task | None
    error: str | None = None

    def parse(self) -> TaskRow:
        """See `LazyRow.parse`."""
        return TaskRow(
            index=self.index,
            place=self.place,
            task_hash=self.task_hash,
            task=self.task,
            error=self.error,
            raw_id=self.task.id if self.task else self.task_hash[:12],
            repeats=self.repeats,
        )


def env_rows(opened: Opened, limit: int | None = None) -> Iterator[LazyRow]:
    """The task stream of an environment as rows, lazily.

    Raises: UserError for what `tasks` raises or yields beside tasks, and for tools of the first
        task that are none (where nothing has to be set up before): environment, method, file and
        line.
    """
    bare = type(opened.env).setup is Environment.setup
    for index, task in enumerate(_stream(opened, limit)):
        if index == 0 and bare:
            tools_of(opened.env, task)
        yield _row(opened, task, index)


def _stream(opened: Opened, limit: int | None) -> Iterator[Task]:
    env, section = opened.env, opened.section
    try:
        given: Any = env.tasks(section.split, section.seed)
    except Exception as error:  # a boundary: code of the user's
        raise UserError(faults.said(env.name, env.tasks, error)) from error
    if not isinstance(given, Iterable):
        what = f"returned {type(given).__name__}; yield tasks, or return a list of them"
        raise UserError(faults.wrong(env.name, env.tasks, what))
    stream = iter(given)
    count = 0
    while limit is None or count < limit:
        try:
            task = next(stream)
        except StopIteration:
            return
        except Exception as error:  # a boundary: code of the user's
            raise UserError(faults.said(env.name, env.tasks, error)) from error
        if why := _unfit(task, {"split": section.split, "position": count}):
            frame = getattr(stream, "gi_frame", None)
            line = frame.f_lineno if frame is not None else None
            raise UserError(faults.wrong(env.name, env.tasks, why, line))
        yield task
        count += 1


def _unfit(task: object, placed: Mapping[str, Any]) -> str | None:
    """Why something that a stream yields is no task of it; None when it is.

    Args:
        placed: columns that the run sets.
    """
    if not isinstance(task, Task):
        return f"yields {type(task).__name__} instead of Task. Use make_task(...)"
    own = [name for name, value in placed.items() if task.metadata.get(name, value) != value]
    return f"yields a task with its own {own[0]!r}, which the run sets. Rename it" if own else None


def _row(opened: Opened, task: Task, index: int) -> LazyRow:
    split = opened.section.split
    place = f"{opened.env.name}/{split} task {index}"
    placed = {**task.metadata, "split": split, "position": index}
    found = msgspec.structs.replace(task, metadata=placed)
    error = None
    try:
        task_hash = digest(hashed(found))
        msgspec.msgpack.encode(found)  # what can neither be sent nor stored shows here
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as fault:
        task_hash, error = digest({"bad task": place, "why": str(fault)}), f"bad task: {fault}"
    return _EnvRow(
        index=index,
        place=place,
        task_hash=task_hash,
        repeats=task.repeats,
        quick=True,
        raw={},
        columns={},
        task=None if error else found,
        error=error,
    )


def hashed(task: Task) -> dict[str, Any]:
    """What names a task by its content: all but its oracle and its repeats, absent values left
    out. Two tasks are the same when these are."""
    form = msgspec.to_builtins(msgspec.structs.replace(task, oracle=None, repeats=None, prompt=()))
    return {**form, "prompt": [to_openai(message) for message in task.prompt]}


def tools_of(env: AnyEnvironment, task: Task) -> Mapping[str, Tool]:
    """The environment's own tools for a task, by name. Raises: UserError."""
    try:
        given = list(env.tools(task))
    except HermesError:
        raise
    except Exception as error:  # a boundary: code of the user's
        raise UserError(faults.said(env.name, env.tools, error)) from error
    tools: dict[str, Tool] = {}
    for one in given:
        if not isinstance(one, Tool):
            what = f"returned {type(one).__name__} instead of Tool. Make it with @tool(...)"
            raise UserError(faults.wrong(env.name, env.tools, what))
        if one.name in tools:
            raise UserError(faults.wrong(env.name, env.tools, f"returned {one.name!r} twice"))
        tools[one.name] = one
    return tools
