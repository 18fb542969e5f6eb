"""Which tools an agent has: all tools by name, named groups of them, and distributions of groups.

The one place that lists the modules of tools; nothing registers itself.
"""

from __future__ import annotations

import glob
import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from shutil import which
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown
from hermes_rl.tools.base import Tool, schema
from hermes_rl.tools.browser import BROWSER_TOOLS
from hermes_rl.tools.clarify import clarify
from hermes_rl.tools.delegate_task import delegate_task
from hermes_rl.tools.execute_code import execute_code
from hermes_rl.tools.memory import memory
from hermes_rl.tools.patch import patch
from hermes_rl.tools.process import process
from hermes_rl.tools.read_file import read_file
from hermes_rl.tools.search_files import search_files
from hermes_rl.tools.session_search import session_search
from hermes_rl.tools.skills import skill_manage, skill_view, skills_list
from hermes_rl.tools.terminal import terminal
from hermes_rl.tools.todo import todo
from hermes_rl.tools.vision import VISION_ANALYZE, vision_analyze
from hermes_rl.tools.web import web_extract, web_search
from hermes_rl.tools.write_file import write_file

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        *(terminal, process, read_file, write_file, patch, search_files),
        *(delegate_task, todo, memory, session_search, clarify),
        *(skills_list, skill_view, skill_manage, execute_code),
        *(web_search, web_extract, vision_analyze),
    )
} | BROWSER_TOOLS
"""Name -> tool, in the order in which models see them."""


@dataclass(frozen=True)
class Toolset:
    """A group of tools."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    """Other toolsets whose tools belong to this one too."""


TOOLSETS: dict[str, Toolset] = {
    "terminal": Toolset("Run commands in a shell session.", ("terminal", "process")),
    "file": Toolset(
        "Read, write, change and search files.",
        ("read_file", "write_file", "patch", "search_files"),
    ),
    "file_read": Toolset("Read and search files.", ("read_file", "search_files")),
    "coding": Toolset("Everything for work on code.", includes=("terminal", "file")),
    "delegation": Toolset("Give tasks to sub-agents.", ("delegate_task",)),
    "todo": Toolset("Keep a list of the steps of the task.", ("todo",)),
    "memory": Toolset("Keep facts between conversations.", ("memory",)),
    "session_search": Toolset("Search earlier conversations.", ("session_search",)),
    "clarify": Toolset("Ask the user.", ("clarify",)),
    "skills": Toolset(
        "Read, follow and write instructions for kinds of tasks.",
        ("skills_list", "skill_view", "skill_manage"),
    ),
    "code_execution": Toolset("Run Python that calls other tools.", ("execute_code",)),
    "browser": Toolset("Use web pages in a browser.", tuple(BROWSER_TOOLS)),
    "web": Toolset("Search the web and read its pages.", ("web_search", "web_extract")),
    "vision": Toolset("Look at images.", (VISION_ANALYZE,)),
    "image_gen": Toolset("Make images. Only a name of distributions: there is no such tool."),
    "none": Toolset("No tools: the model can only answer."),
}
DEFAULT_TOOLSETS = ("terminal", "file")
_JOINED = {"process": 3, "web_search": 3, "web_extract": 3}
"""Tool that joined a toolset which runs had -> the wording since when."""

Distribution = Mapping[str, float]
"""Toolset -> the percentage of units that have it."""
_TEXT_FILE = {"terminal": 100, "file": 100}
DISTRIBUTIONS: dict[str, Distribution] = {
    "default": {"web": 100, "vision": 100, "image_gen": 100, **_TEXT_FILE, "browser": 100},
    "image_gen": {"image_gen": 90, "vision": 90, "web": 55, "terminal": 45},
    "research": {"web": 90, "browser": 70, "vision": 50, "terminal": 10},
    "science": {
        "web": 94,
        "terminal": 94,
        "file": 94,
        "vision": 65,
        "browser": 50,
        "image_gen": 15,
    },
    "development": {"terminal": 80, "file": 80, "web": 30, "vision": 10},
    "safe": {"web": 80, "browser": 70, "vision": 60, "image_gen": 60},
    "balanced": dict.fromkeys(("web", "vision", "image_gen", "terminal", "file", "browser"), 50),
    "minimal": {"web": 100},
    "terminal_only": _TEXT_FILE,
    "terminal_web": {**_TEXT_FILE, "web": 100},
    "creative": {"image_gen": 90, "vision": 90, "web": 30},
    "reasoning": {"web": 90, "file": 60, "terminal": 20},
    "browser_use": {"browser": 100, "web": 80, "vision": 70},
    "browser_only": {"browser": 100},
    "browser_tasks": {"browser": 97, "terminal": 15, "vision": 12},
    "terminal_tasks": {
        "terminal": 97,
        "file": 97,
        "web": 97,
        "browser": 75,
        "vision": 50,
        "image_gen": 10,
    },
    "mixed_tasks": {
        "browser": 92,
        "terminal": 92,
        "file": 92,
        "web": 35,
        "vision": 15,
        "image_gen": 15,
    },
    "file_only": {"file": 100},
    "mostly_terminal": {"terminal": 95, "file": 40},
    "mostly_file": {"file": 95, "terminal": 40},
}
"""The first 17 are those of hermes-agent."""


@dataclass(frozen=True)
class Catalogue:
    """The toolsets and distributions of a run: those of this module and the user's."""

    toolsets: Mapping[str, Toolset] = field(default_factory=lambda: TOOLSETS)
    distributions: Mapping[str, Distribution] = field(default_factory=lambda: DISTRIBUTIONS)
    provided: frozenset[str] = frozenset()
    """Tools that the run makes usable, whatever they would lack without it."""

    @classmethod
    def of(
        cls,
        defined: Mapping[str, Toolset],
        distributions: Mapping[str, Distribution],
        provided: frozenset[str] = frozenset(),
    ) -> Catalogue:
        """Add those of a user. Raises: UserError for a taken name, or one that does not exist."""
        if not defined and not distributions:
            return cls(provided=provided)
        for what, names, known in (
            ("toolset", defined, TOOLSETS),
            ("distribution", distributions, DISTRIBUTIONS),
        ):
            if taken := sorted(names.keys() & known.keys()):
                raise UserError(f"the {what} {taken[0]!r} exists already. Choose another name")
        made = cls({**TOOLSETS, **defined}, {**DISTRIBUTIONS, **distributions}, provided)
        for one in defined.values():
            for name in one.tools:
                if name not in TOOLS:
                    raise UserError(unknown("tool", name, TOOLS))
        made.tool_names(defined)
        for name, shares in distributions.items():
            made.tool_names(shares)
            if not shares or not all(0 <= percent <= 100 for percent in shares.values()):
                raise UserError(f"distribution {name!r}: give toolsets with 0 to 100 percent each")
        return made

    def tool_names(self, toolsets: Iterable[str], inside: tuple[str, ...] = ()) -> set[str]:
        """Names of all tools in these toolsets. Raises: UserError that lists the known toolsets."""
        names: set[str] = set()
        for name in toolsets:
            if name not in self.toolsets:
                raise UserError(unknown("toolset", name, self.toolsets))
            if name in inside:
                raise UserError(f"the toolset {name!r} includes itself")
            one = self.toolsets[name]
            names |= {*one.tools, *self.tool_names(one.includes, (*inside, name))}
        return names

    def resolve(self, toolsets: Iterable[str]) -> dict[str, Tool]:
        """The tools of these toolsets by name, in the order of `TOOLS`, without those that lack
        something on this machine. Raises: UserError."""
        return {name: t for name, t in self.possible(toolsets).items() if not self._lacks(t)}

    def _lacks(self, tool: Tool) -> str | None:
        return None if tool.name in self.provided else lacks(tool)

    def missing(self, toolsets: Iterable[str], here: bool = True) -> dict[str, str]:
        """Tools of these toolsets that cannot work -> what they lack.

        Args:
            here: sandboxes have the programs of this machine, not those of an image.

        Raises: UserError.
        """
        tools = self.possible(toolsets).items()
        reasons = {
            name: self._lacks(tool) or (here and lacks_program(tool)) for name, tool in tools
        }
        return {name: why for name, why in reasons.items() if why}

    def possible(self, toolsets: Iterable[str]) -> dict[str, Tool]:
        """All tools of these toolsets, with those that lack something. Raises: UserError."""
        names = self.tool_names(toolsets)
        return {name: tool for name, tool in TOOLS.items() if name in names}

    def empty(self, toolsets: Iterable[str]) -> list[str]:
        """Those of these toolsets that have no tools, `none` apart. Raises: UserError."""
        return [name for name in toolsets if name != "none" and not self.tool_names([name])]

    def distribution(self, name: str) -> Distribution:
        """The definition of a distribution. Raises: UserError that lists the known ones."""
        if name not in self.distributions:
            raise UserError(unknown("distribution", name, self.distributions))
        return self.distributions[name]

    def draw(self, name: str, seed: int) -> tuple[str, ...]:
        """The toolsets of one unit: each drawn by itself; if none is drawn, the most likely one.

        Args:
            seed: the unit's seed; equal seeds draw equal toolsets, on every machine.

        Raises: UserError.
        """
        distribution = self.distribution(name)
        rng = random.Random(f"toolsets:{name}:{seed}")
        drawn = tuple(t for t, percent in distribution.items() if rng.random() * 100 < percent)
        return drawn or (max(distribution, key=lambda t: distribution[t]),)


def lacks(one: Tool) -> str | None:
    """What a tool lacks on this machine, with the remedy; None when nothing is missing."""
    return None if one.missing is None else one.missing()


def lacks_program(one: Tool) -> str | None:
    """The programs of which a tool needs one in the sandbox and this machine has none, with the
    remedy."""
    absent = one.programs and not _is_installed(one.programs)
    return f"not installed here: {one.install}" if absent else None


@cache
def _is_installed(programs: tuple[str, ...]) -> bool:
    return any(glob.glob(name) if name[0] == "/" else which(name) for name in programs)


def tool_names(toolsets: Iterable[str]) -> set[str]:
    """See `Catalogue.tool_names`."""
    return Catalogue().tool_names(toolsets)


def resolve(toolsets: Iterable[str]) -> dict[str, Tool]:
    """See `Catalogue.resolve`."""
    return Catalogue().resolve(toolsets)


def with_wording(tools: Mapping[str, Tool], wording: int) -> dict[str, Tool]:
    """Return the tools with the descriptions of that wording (see `agent.prompt.WORDINGS`), less
    those that their toolset did not have then."""
    return {
        name: replace(tool, **schema(name, wording))
        for name, tool in tools.items()
        if wording >= _JOINED.get(name, 1)
    }


def schemas(tools: Iterable[Tool]) -> tuple[dict[str, Any], ...]:
    """The OpenAI function schemas, for a request and for the record."""
    return tuple(tool.schema for tool in tools)


def schema_digest(tools: Iterable[Tool]) -> str:
    """Sha256 of the schemas that models see: part of a run's identity."""
    encoded = msgspec.json.encode(schemas(tools), order="sorted")
    return hashlib.sha256(encoded).hexdigest()
