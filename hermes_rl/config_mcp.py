"""The section `mcp`: servers of the Model Context Protocol whose tools an agent has.

It has the form of the `mcpServers` of other programs. `${NAME}` in the value of `env` or a header,
or in a URL, is read from that variable of this process and not stored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hermes_rl.config_endpoint import Seconds, Section, check_address, looks_secret
from hermes_rl.errors import UserError
from hermes_rl.identity import digest
from hermes_rl.text import SECRETS

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


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
