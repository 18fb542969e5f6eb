"""Environments for the `environment_factory` of TRL's `GRPOTrainer`.

    with TrlEnvironments("my_env", group_size=8) as environments:
        GRPOTrainer(
            model,
            reward_funcs=environments.rewards,
            environment_factory=environments,
            train_dataset=Dataset.from_list(environments.rows(1000)),
            ...
        ).train()

TRL generates the answers, tokenizes the conversation and calls the tools, one after the other. It
has no place for a user's reply and for rewards of whole groups; `rollouts` has.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import GenericAlias
from typing import Any, Self

from hermes_rl.aio import LoopThread
from hermes_rl.errors import ToolError, UserError
from hermes_rl.messages import ToolCall
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.guests import GuestRollout, Guests, Step, open_guests

_TYPES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "null": None,
}
_TRL_NAMES = ("reset", "get_reward")
_SECTION = re.compile(r"\b(Args|Returns|Raises):")
"""What ends a description in a docstring of Google's form."""
_log = logging.getLogger(__name__)


class TrlEnvironments:
    """An `environment_factory`. A context manager: rollouts run in it, on a thread of their own.

    Args:
        env: as `hermes-rl env` takes it.
        seed: of the task stream and of the rollouts.
        group_size: TRL's `num_generations`: `ctx.member` counts up to it.
        sections: further sections of a run's configuration, such as `{"sandbox": {...}}`.

    Raises: UserError when opened, for an environment that TRL's interface cannot hold.
    """

    def __init__(
        self,
        env: str,
        *,
        split: str = "train",
        seed: int = 0,
        group_size: int = 8,
        sections: Mapping[str, Any] | None = None,
    ) -> None:
        self._env, self._group_size = env, group_size
        self._open = open_guests(env, split=split, seed=seed, sections=sections)
        self._stack = ExitStack()
        self._rollouts: list[GuestRollout] = []
        self._opened: Guests | None = None
        self.first = Step()
        """The first request of the first task: all tasks must have its system prompt and tools."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._home = stack.enter_context(LoopThread("hermes-rl-environments"))
            guests = self._home.run(self._open.__aenter__())
            stack.callback(lambda: self._home.run(self._open.__aexit__(None, None, None)))
            stack.callback(lambda: self._home.run(self._close()))
            self._opened = guests
            self._check(type(guests.host.env))
            self.first = self.run(self._new_rollout().reset(0))
            if self.first.end is not None:
                row = self.first.end
                raise UserError(f"{self._env}: the first task fails: {row.error or row.end_reason}")
            methods = {
                name: _make_method(tool["function"])
                for tool in self.first.tools
                if (name := _usable_name(tool["function"]["name"]))
            }
            self._class = type(guests.host.env.name, (_TrlEnvironment,), methods)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened = None
        self._stack.close()

    @property
    def _guests(self) -> Guests:
        if self._opened is None:
            raise UserError(
                "not open. Use `with TrlEnvironments(...) as environments`, and train in it"
            )
        return self._opened

    def __call__(self) -> _TrlEnvironment:
        """Make an environment object: TRL makes one for each rollout of a batch."""
        number, rollout = len(self._rollouts) - 1, self._new_rollout()
        made: _TrlEnvironment = self._class(self, rollout, number)
        return made

    def member(self, number: int) -> int:
        """The index in its group of a rollout: TRL's launcher numbers the processes in `RANK`, and
        TRL gives each the next rollouts of a batch, as many as it has environments.

        Args:
            number: of its environment in this process.
        """
        rank, made = int(os.environ.get("RANK", "0")), len(self._rollouts) - 1
        return (rank * made + number) % self._group_size

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the dataset of the first tasks: `prompt` without the question, and `index`.

        Raises: UserError when there are fewer tasks.
        """
        self._guests.row(count - 1)
        prompt = [*self.first.messages[:-1], {"role": "user", "content": ""}]
        return [{"prompt": prompt, "index": index} for index in range(count)]

    def rewards(
        self, completions: Sequence[Any], environments: Sequence[_TrlEnvironment], **_: Any
    ) -> list[float | None]:
        """Grade the rollouts of a batch by their last answers: a function for `reward_funcs`.

        None for a rollout that failed: TRL leaves it out.
        """

        async def grade_all() -> list[float | None]:
            graded = (
                env._grade(messages)
                for env, messages in zip(environments, completions, strict=True)
            )
            return list(await asyncio.gather(*graded))

        return self._home.run(grade_all())

    def run(self, work: Any) -> Any:
        """Run a coroutine on the thread of the rollouts."""
        return self._home.run(work)

    def _new_rollout(self) -> GuestRollout:
        self._rollouts.append(self._guests.rollout())
        return self._rollouts[-1]

    async def _close(self) -> None:
        await asyncio.gather(*(rollout.close() for rollout in self._rollouts))

    def _check(self, env: type[Environment[Any]]) -> None:
        """Raises: UserError."""
        for method in ("reply", "score_group"):
            if getattr(env, method) is not getattr(Environment, method):
                raise UserError(
                    f"{self._env} has `{method}`, for which TRL's environment_factory has no place."
                    " Use rollout_func (examples/trl_grpo.py)"
                )


class _TrlEnvironment:
    """One rollout after the other. Subclasses have the tools: each public method is one for TRL."""

    def __init__(self, owner: TrlEnvironments, rollout: GuestRollout, number: int) -> None:
        self._owner, self._rollout, self._number = owner, rollout, number
        self._step = Step()

    def reset(self, *, index: int | None = None, **_: Any) -> str:
        """Start the rollout of a task; returns the question. TRL passes the row of the dataset."""
        if index is None:
            raise UserError(
                "the dataset has no column `index`. Make it with `environments.rows(n)`"
            )
        member = self._owner.member(self._number)
        self._step = self._owner.run(self._rollout.reset(index, member))
        if self._step.end is not None:
            return ""
        *before, last = self._step.messages
        if (before, self._step.tools) != (self._owner.first.messages[:-1], self._owner.first.tools):
            raise UserError(
                f"task {index} has another system prompt, conversation or tools than task 0, which"
                " TRL's environment_factory cannot pass on. Use rollout_func (examples/trl_grpo.py)"
            )
        return _text(last)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        call = ToolCall(
            id=f"call_{self._rollout.steps}",
            name=name,
            arguments=json.dumps(arguments, ensure_ascii=False),
        )
        if self._step.end is None:
            self._step = self._owner.run(self._rollout.step("", [call]))
        if (row := self._step.end) is not None:
            raise ToolError(f"the rollout is over: {row.error or row.end_reason}")
        return "\n".join(map(_text, self._step.messages))

    async def _grade(self, messages: Sequence[Mapping[str, Any]]) -> float | None:
        last = messages[-1] if messages else {}
        answered = last.get("role") == "assistant" and not last.get("tool_calls")
        content, reason = (_text(last), None) if answered else ("", "length")
        while self._step.end is None:
            self._step = await self._rollout.step(content, finish_reason=reason)
            content, reason = "", "length"  # TRL asks the model nothing more
        row = self._step.end
        if row.cause is not None:
            _log.warning("%s is left out: %s: %s", row.task_id, row.cause, row.error)
            return None
        return row.reward


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _usable_name(name: str) -> str:
    """Raises: UserError."""
    if not name.isidentifier() or name.startswith("_") or name in _TRL_NAMES:
        raise UserError(f"the tool {name!r} cannot be a method of TRL's environments. Rename it")
    return name


def _make_method(function: Mapping[str, Any]) -> Callable[..., str]:
    """Make a method from the schema of a tool, with what `transformers.utils.get_json_schema`
    reads: a signature with types, and a docstring of Google's form."""
    name, schema = function["name"], function.get("parameters") or {}
    required = schema.get("required", ())
    properties: dict[str, Any] = schema.get("properties", {})

    def method(self: _TrlEnvironment, **arguments: Any) -> str:
        return self._call(name, arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for argument, details in properties.items():
        default = inspect.Parameter.empty if argument in required else details.get("default")
        hint = _hint(details)
        parameters.append(inspect.Parameter(argument, keyword, default=default, annotation=hint))
    lines = [_SECTION.sub(r"\1 -", function.get("description") or name)]
    if properties:
        lines += [
            "",
            "Args:",
            *(f"    {key}: {_describe(key, properties[key])}" for key in properties),
        ]
    lines += ["", "Returns:", "    The result."]
    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join(lines)
    method.__annotations__ = {p.name: p.annotation for p in parameters[1:]} | {"return": str}
    vars(method)["__signature__"] = inspect.Signature(parameters, return_annotation=str)
    return method


def _describe(name: str, details: Mapping[str, Any]) -> str:
    text = " ".join(str(details.get("description") or f"The {name}.").split())
    text = _SECTION.sub(r"\1 -", text)
    if "enum" in details and all(isinstance(value, str) for value in details["enum"]):
        text += f" (choices: {json.dumps(details['enum'])})"
    return text


def _hint(schema: Mapping[str, Any]) -> Any:
    """The type of a JSON schema, as far as types of Python say it."""
    kind = schema.get("type")
    if isinstance(kind, list):
        found = [_hint({**schema, "type": one}) for one in kind]
        union = found[0]
        for one in found[1:]:
            union = union | one
        return union
    if kind == "array":
        return GenericAlias(list, (_hint(schema.get("items", {})),))
    return _TYPES.get(kind, Any) if isinstance(kind, str) else Any
