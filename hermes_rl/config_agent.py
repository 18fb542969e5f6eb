"""Configuration of the agent: limits, prompts and switches, and MCP servers whose tools it has.
Identity of a run.

The section `mcp` has the form of the `mcpServers` of other programs. `${NAME}` in a value of `env`
or of a header, or in a URL, is read from that variable of this process and not stored."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from hermes_rl.config_endpoint import (
    ModelPlace,
    Positive,
    Seconds,
    Section,
    check_address,
    looks_secret,
    read_text_file,
)
from hermes_rl.errors import UserError
from hermes_rl.identity import digest
from hermes_rl.messages import Message, SystemMessage, from_openai
from hermes_rl.text import SECRETS

Preset = Literal["interactive", "datagen", "rl"]

_EPHEMERAL, _PREFILL = "agent.ephemeral_system_prompt", "agent.prefill"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


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
    vision: ModelPlace | None = None
    """The model that looks at images for the tool `vision_analyze`; None does not offer it."""
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


class McpTool(Section):
    """A tool as its server lists it."""

    name: str
    description: str = ""
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""

    @property
    def identity(self) -> str:
        """Sha256 of what models see."""
        return digest(self.model_dump())


class McpServer(Section):
    """A server: a program (`command`) that is spoken to by its standard input and output, or an
    address (`url`, streamable HTTP)."""

    type: Literal["stdio", "http", "streamable-http"] | None = None
    """May be left out."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the program, which has none of this process."""
    cwd: str = "."
    """Its working directory, from the workspace."""
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    where: Literal["sandbox", "host"] = "sandbox"
    """Where a program runs: in the sandbox of each rollout, or beside the harness, where it can do
    what you can."""
    shared: bool = False
    """One connection for all rollouts of a process, instead of one for each."""
    tools: tuple[str, ...] | None = None
    """Only these of its tools."""
    timeout: Seconds = 60.0
    """Of one call, and of the start of the server."""
    disabled: bool = False
    offered: tuple[McpTool, ...] | None = None
    """What the server listed when the run started; filled in by the run."""

    @property
    def variables(self) -> set[str]:
        """The variables of this process that it is passed."""
        texts = (*self.env.values(), *self.headers.values(), self.url or "")
        return {name for text in texts for name in _VARIABLE.findall(text)}

    @property
    def in_sandbox(self) -> bool:
        """Whether it is a program in the sandbox."""
        return self.command is not None and self.where == "sandbox"

    def fault(self) -> str | None:
        """Why it cannot be used, with the fix."""
        program, address = self.command is not None, self.url is not None
        if program == address:
            return "set either 'command' or 'url' (streamable HTTP)"
        if self.type is not None and (self.type == "stdio") != program:
            return f"'type: {self.type}' is not that of a {'command' if program else 'url'}"
        idle = ("headers",) if program else ("args", "env")
        if found := [name for name in idle if getattr(self, name)]:
            return f"'{found[0]}' has no effect here. Take it out"
        if self.shared and self.in_sandbox:
            return "'shared: true' needs 'where: host', since each sandbox has its own programs"
        if self.in_sandbox and self.variables:
            return (
                f"${{{min(self.variables)}}} in 'env' would bring a value of this process into the "
                "sandbox, where the agent can read it. Set 'where: host'"
            )
        if self.url is not None and "${" not in self.url:
            check_address(self.url, "url")
            if not self.url.startswith(("http://", "https://")):
                return "'url' is not an address: write http://... or https://..."
        for name, text in {**self.env, **self.headers}.items():
            if looks_secret(name, text) and not _VARIABLE.search(text):
                return f"'{name}' may be a secret, which the run would store. Write ${{VARIABLE}}"
        return None


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """A text with the values of its `${NAME}`."""
    return _VARIABLE.sub(lambda found: variables[found[1]], text)


def read_variables(
    servers: Mapping[str, McpServer], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that servers are passed. They are kept out of records from here on.

    Raises: UserError for one that is not set.
    """
    found: dict[str, str] = {}
    for server, section in servers.items():
        for name in () if section.disabled else sorted(section.variables):
            if not environ.get(name):
                raise UserError(f"'mcp.{server}': the variable {name} is not set. Set it")
            found[name] = environ[name]
            SECRETS.learn(name, environ[name])
    return found


def _servers(value: Any) -> Any:
    """The servers by name, out of `mcpServers` where that is around them."""
    if isinstance(value, Mapping) and set(value) == {"mcpServers"}:
        value = value["mcpServers"]
    return {} if value is None else value


def _check(servers: dict[str, McpServer]) -> dict[str, McpServer]:
    for name, server in servers.items():
        if not _NAME.fullmatch(name):
            raise UserError(
                f"'mcp': {name[:40]!r} cannot name a server. Use 1 to 32 letters, digits, '-', '_'"
            )
        if fault := server.fault():
            raise UserError(f"'mcp.{name}': {fault}")
    return servers


McpServers = Annotated[dict[str, McpServer], BeforeValidator(_servers), AfterValidator(_check)]


class McpSection(Section):
    """Servers by name, as `AIAgent` takes them."""

    mcp: McpServers = Field(default_factory=dict)
