"""Configuration of the agent: limits, prompts and switches. Identity of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hermes_rl.config_endpoint import ModelPlace, Positive, Seconds, Section, read_text_file
from hermes_rl.errors import UserError
from hermes_rl.messages import Message, SystemMessage, from_openai

Preset = Literal["interactive", "datagen", "rl"]

_EPHEMERAL, _PREFILL = "agent.ephemeral_system_prompt", "agent.prefill"


class LimitsSection(Section):
    """Bounds of one attempt. Identity."""

    max_turns: Positive = 30
    max_tokens: Positive | None = None
    """Input and output tokens of all calls together."""
    max_seconds: Seconds = 1800.0
    """Active time: tools and sandbox."""
    wall_seconds: Seconds = 14400.0
    """Wall-clock time; at the limit the attempt ends as `stalled`, an infrastructure failure."""


class ContextConfig(Section):
    """Identity: how a context that is full is compressed, where the preset does that."""

    window: Positive | None = None
    """Tokens of the model's context window; None is learned when the endpoint refuses a prompt."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the window, less `model.max_tokens`, from which on a context is compressed; None is
    0.75, and 0.5 of windows from 512,000 tokens on."""
    engine: Any = None
    """Name of a plugin (entry point group `hermes_rl.context_engines`), or for `AIAgent` an object;
    None is the default engine."""
    summary: ModelPlace | None = None
    """The model that writes summaries; None is the agent's model, which also takes its place when
    it fails."""
    seconds: Seconds = 120.0
    """How long one compression may take; not identity."""

    @field_validator("engine")
    @classmethod
    def _is_engine(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        if not all(callable(getattr(value, name, None)) for name in ("threshold", "compress")):
            raise UserError(
                f"'context.engine' is {value!r}. Give a name, or an object with the methods "
                "threshold and compress"
            )
        return value


class ToolsetSection(Section):
    """Identity: a toolset of the user's."""

    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    """Other toolsets whose tools belong to this one too."""
    description: str = ""


class AgentSection(Section):
    """Identity: how the agent behaves."""

    preset: Preset = "datagen"
    switches: dict[str, bool | int | None] = Field(default_factory=dict)
    """Changed switches of the preset, such as `continue_output: false`."""
    toolsets: tuple[str, ...] | None = None
    """Named toolsets; None is `terminal` and `file`."""
    distribution: str | None = None
    """A named distribution from which the toolsets of each unit are drawn."""
    user_toolsets: dict[str, ToolsetSection] = Field(default_factory=dict)
    """Toolsets of yours: name -> `tools`, `includes`, `description`."""
    user_distributions: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Distributions of yours: name -> toolset -> percentage of the units that have it."""
    skills: tuple[str, ...] = ()
    """Folders with skills for the toolset `skills`; none are the bundled ones."""
    memory: str | None = None
    """Folder of a memory that every unit with the toolset `memory` begins with. Units change a copy
    of their own; None begins empty."""
    system_prompt: str | None = None
    """Replaces the preset's system prompt; `@FILE` reads it from a file."""
    ephemeral_system_prompt: str | None = None
    """Appended to the system prompt of every request, but not stored in rows, which have its
    sha256. `@FILE` reads it from a file."""
    prefill: tuple[dict[str, Any], ...] = ()
    """OpenAI messages after the system prompt of every request, not stored in rows. `@FILE` reads
    them from a JSON file."""
    plugins: tuple[str, ...] = ()
    """Entry points, or paths of Python files, whose hooks are called in each rollout. Those that
    may change what the model sees are identity, by their source."""
    limits: LimitsSection = LimitsSection()
    context: ContextConfig = ContextConfig()
    seed: int | None = None
    """The seeds of all units derive from it; None is like 0, but no seed is sent to the model."""

    @property
    def base_seed(self) -> int:
        """The seed from which those of units derive."""
        return 0 if self.seed is None else self.seed

    @field_validator("skills")
    @classmethod
    def _absolute_folders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(Path(folder).expanduser().absolute()) for folder in value)

    @field_validator("memory")
    @classmethod
    def _absolute_folder(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).expanduser().absolute())

    @field_validator("plugins")
    @classmethod
    def _absolute(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Workers have other working directories."""
        return tuple(
            str(Path(name).expanduser().absolute()) if name.endswith(".py") else name
            for name in value
        )

    @field_validator("system_prompt")
    @classmethod
    def _read_file(cls, value: str | None) -> str | None:
        return _text(value, "--system-prompt", "a system prompt")

    @field_validator("ephemeral_system_prompt")
    @classmethod
    def _read_ephemeral(cls, value: str | None) -> str | None:
        text = _text(value, _EPHEMERAL, f"'{_EPHEMERAL}'")
        if text is not None and not text.strip():
            raise UserError(f"'{_EPHEMERAL}' is empty. Write a text, or leave it out")
        _check_json(text, f"'{_EPHEMERAL}'")
        return text

    @field_validator("prefill", mode="before")
    @classmethod
    def _read_prefill(cls, value: Any) -> Any:
        if value is None:
            return ()
        place, listed = f"'{_PREFILL}'", value
        if isinstance(value, str):
            place, listed = _json_file(value)
        if isinstance(listed, str) or not isinstance(listed, Sequence):
            raise UserError(f"{place} must be a list of messages, or @FILE with one. Write it so")
        _check_json(listed, place)
        check_prefill(listed, place)
        return tuple(listed)

    @property
    def prefill_messages(self) -> tuple[Message, ...]:
        """The prefill in the internal form."""
        return tuple(from_openai(form) for form in self.prefill)


def check_prefill(forms: Sequence[Any], place: str) -> None:
    """Check the messages of a prefill; their order is repaired in requests.

    Raises: UserError with the number of the first message that is not.
    """
    for number, form in enumerate(forms, 1):
        at = f"{place} message {number}"
        if not isinstance(form, Mapping):
            raise UserError(f"{at} is {form!r}: write an object with role and content")
        try:
            message = from_openai(form)
        except UserError as error:
            raise UserError(f"{at}: {error}") from None
        if isinstance(message, SystemMessage):
            raise UserError(f"{at} is a system message. Put its text into {_EPHEMERAL}")


def _check_json(value: Any, place: str) -> None:
    """Raises: UserError for values that are not JSON."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UserError(
            f"{place} is not JSON-serializable (NaN, a date, half a surrogate pair). Fix it"
        ) from None


def _text(value: str | None, check: str, what: str) -> str | None:
    """A text, or that of the file which `@FILE` names. Raises: UserError."""
    if value is None or not value.startswith("@"):
        return value
    path = value[1:]
    text = read_text_file(path, check)
    if text.startswith("@"):  # run.yaml would be read as naming another file
        raise UserError(f"{path}: {what} cannot begin with '@'. Begin it otherwise")
    return text


def _json_file(value: str) -> tuple[str, Any]:
    """(place for messages, content) of the file that `@FILE` names. Raises: UserError."""
    if not value.startswith("@"):
        raise UserError(f"'{_PREFILL}' is {value!r}: write a list of messages, or @FILE")
    path = value[1:]
    try:
        return path, json.loads(read_text_file(path, _PREFILL))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}). Fix that line"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply. Write a list of messages") from None
