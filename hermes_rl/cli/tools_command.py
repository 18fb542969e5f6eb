"""`hermes-rl tools`: what agents can be given, and what is missing on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.errors import ExitCode, HermesError, UserError

if TYPE_CHECKING:
    from hermes_rl.config import RunConfig
    from hermes_rl.tools import Catalogue


def command(
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML of a run: its toolsets, distributions and MCP servers, each of which is "
            "started and asked",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON object")] = False,
) -> int:
    """Tools, toolsets and distributions, and what is missing on this machine.

    \b
    hermes-rl tools
    hermes-rl tools --config run.yaml
    hermes-rl run tasks.jsonl --toolsets terminal,file,todo ...
    hermes-rl run tasks.jsonl --distribution development ...
    """
    from hermes_rl.tools import Catalogue

    catalogue, faults = Catalogue(), list[str]()
    servers: dict[str, list[str]] = {}
    if config is not None:
        read = _read(config)
        try:
            catalogue = _catalogue(read)
        except UserError as error:
            faults.append(f"{config}: {error}")
        servers, lines = _ask_servers(read)
        faults += [f"{config}: {line}" for line in lines]
    if as_json:
        print(json.dumps({**_found(catalogue), "mcp": servers, "faults": faults}))
    else:
        _show(catalogue, servers, faults)
    return ExitCode.BAD_INPUT if faults else ExitCode.DONE


def _read(path: Path) -> RunConfig:
    """What a configuration says of tools; the rest of it may be absent. Raises: UserError."""
    from hermes_rl.config import load_config, parse_config

    data = load_config(path)
    parts = {name: data[name] for name in ("agent", "mcp", "sandbox", "run") if data.get(name)}
    least = {"dataset": {"path": "smoke"}, "model": {"name": "any"}}
    return parse_config({**least, **parts}, str(path))


def _catalogue(config: RunConfig) -> Catalogue:
    """Raises: UserError for a wrong definition, or a toolset that units have and that is not."""
    from hermes_rl.definitions import catalogue_of, toolsets_in

    catalogue = catalogue_of(config.agent)
    catalogue.tool_names(toolsets_in(config.agent))
    return catalogue


def _ask_servers(config: RunConfig) -> tuple[dict[str, list[str]], list[str]]:
    """The tools of each MCP server, by the names that models see; a line for each that fails."""
    from hermes_rl.aio import run_sync

    return run_sync(_offers(config)) if config.mcp else ({}, [])


async def _offers(config: RunConfig) -> tuple[dict[str, list[str]], list[str]]:
    from hermes_rl.config_agent import read_variables
    from hermes_rl.tools import OpenParts, mcp_tools
    from hermes_rl.wiring import backend_of, with_offers

    found: dict[str, list[str]] = {}
    faults = []
    backend = backend_of(config)
    try:
        for name, section in config.mcp.items():
            if section.disabled:
                continue
            one = {name: section.model_copy(update={"offered": None})}
            alone = config.model_copy(update={"mcp": one})
            try:
                variables = read_variables(one)
                servers = (await with_offers(alone, variables, backend)).mcp
                found[name] = [*mcp_tools(servers, variables, OpenParts())]
            except HermesError as error:
                faults.append(str(error))
    finally:
        await backend.aclose()
    return found, faults


def _found(catalogue: Catalogue) -> dict[str, Any]:
    from hermes_rl.tools import TOOLS

    missing = catalogue.missing(catalogue.toolsets)
    return {
        "tools": {
            name: {"toolset": tool.toolset, "missing": missing.get(name)}
            for name, tool in TOOLS.items()
        },
        "toolsets": {
            name: {
                "description": one.description,
                "tools": sorted(catalogue.tool_names([name])),
                "missing": sorted(catalogue.tool_names([name]) & missing.keys()),
            }
            for name, one in catalogue.toolsets.items()
        },
        "distributions": {name: dict(one) for name, one in catalogue.distributions.items()},
    }


def _show(catalogue: Catalogue, servers: dict[str, list[str]], faults: list[str]) -> None:
    from hermes_rl.cli.render import columns
    from hermes_rl.tools import TOOLS

    def names(toolset: str) -> str:
        found = catalogue.tool_names([toolset])
        return " ".join(name for name in TOOLS if name in found) or "-"

    rows = [(name, one.description, names(name)) for name, one in catalogue.toolsets.items()]
    print(columns(("toolset", "for", "tools"), rows))
    missing, empty = (catalogue.missing(catalogue.toolsets), catalogue.empty(catalogue.toolsets))
    lines = [f"  {name}: {why}" for name, why in missing.items()]
    lines += [f"  {name}: the toolset has no tools" for name in empty]
    print("\n".join(["\nnot offered here", *lines]) if lines else "")
    shares = [
        (name, ", ".join(f"{toolset} {percent:g}" for toolset, percent in one.items()))
        for name, one in catalogue.distributions.items()
    ]
    print()
    print(columns(("distribution", "percentage of units with each toolset"), shares))
    if servers:
        print()
        offered = [(name, " ".join(tools) or "-") for name, tools in servers.items()]
        print(columns(("MCP server", "tools"), offered))
    for fault in faults:
        typer.echo(f"error: {fault}", err=True)
