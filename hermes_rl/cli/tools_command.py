"""`hermes-rl tools`: what agents can be given, and what is missing on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hermes_rl.errors import ExitCode


def command(
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON object")] = False,
) -> int:
    """Tools, toolsets and distributions, and what is missing on this machine.

    \b
    hermes-rl tools
    hermes-rl run tasks.jsonl --toolsets terminal,file,todo ...
    hermes-rl run tasks.jsonl --distribution development ...
    """
    from hermes_rl.cli.render import columns
    from hermes_rl.tools import DISTRIBUTIONS, TOOLS, TOOLSETS, Catalogue, tool_names

    missing, empty = Catalogue().missing(TOOLSETS), Catalogue().empty(TOOLSETS)
    if as_json:
        found: dict[str, Any] = {
            "tools": {
                name: {"toolset": tool.toolset, "missing": missing.get(name)}
                for name, tool in TOOLS.items()
            },
            "toolsets": {
                name: {
                    "description": one.description,
                    "tools": sorted(tool_names([name])),
                    "missing": sorted(tool_names([name]) & missing.keys()),
                }
                for name, one in TOOLSETS.items()
            },
            "distributions": {name: dict(shares) for name, shares in DISTRIBUTIONS.items()},
        }
        print(json.dumps(found))
        return ExitCode.DONE
    rows = [
        (name, one.description, " ".join(n for n in TOOLS if n in tool_names([name])) or "-")
        for name, one in TOOLSETS.items()
    ]
    print(columns(("toolset", "for", "tools"), rows))
    lines = [f"  {name}: {why}" for name, why in missing.items()]
    lines += [f"  {name}: the toolset has no tools" for name in empty]
    print("\n".join(["\nnot offered here", *lines]) if lines else "")
    shares = [
        (name, ", ".join(f"{toolset} {percent:g}" for toolset, percent in one.items()))
        for name, one in DISTRIBUTIONS.items()
    ]
    print()
    print(columns(("distribution", "percentage of units with each toolset"), shares))
    return ExitCode.DONE
