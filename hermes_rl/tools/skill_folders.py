"""Skills: folders with instructions that the agent reads when a task needs them.

A skill has the open form of https://agentskills.io/specification: a folder whose `SKILL.md` begins
with YAML that has `name` (that of the folder) and `description`; scripts, references and assets may
lie beside it. The system prompt lists names and descriptions. `skill_view` reads a file and puts
the skill's folder into the sandbox, so that its scripts can be run. What `skill_manage` changes is
kept in a folder of the user, or in the state of one rollout, with which it ends.
"""

from __future__ import annotations

import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.errors import ToolError, UserError
from hermes_rl.identity import digest
from hermes_rl.text import clean, cut_middle, one_line

SKILLS = "skills"
"""Name of the toolset; where the state of a rollout has changed skills."""
BUNDLED_SKILLS = Path(__file__).with_name("bundled_skills")
INTRODUCTION = (
    "Skills are instructions for certain kinds of tasks. Before you begin a task that one of these "
    "fits, read it with skill_view and follow it."
)
MAX_SKILLS = 200
MAX_FILES = 100
MAX_FILE_CHARS = 100_000
MAX_FILE_BYTES = 2**20
MAIN = "SKILL.md"
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_MAX_NAME, _MAX_DESCRIPTION = 64, 1024
_HEAD = re.compile(r"^---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)

Files = dict[str, bytes]
"""Path in the skill -> content."""


@dataclass(frozen=True)
class Skill:
    """A skill as it is listed."""

    name: str
    description: str


class Skills:
    """The skills of an agent.

    Args:
        folders: have a folder for each skill; of several with one name the first counts.
        writable: where `skill_manage` keeps skills, which count before those of `folders`; None
            keeps them in the state of the rollout.
    """

    def __init__(self, folders: Sequence[Path] = (), writable: Path | None = None) -> None:
        self._folders = [*([writable] if writable is not None else []), *folders]
        self._writable = writable

    def listed(self, state: Mapping[str, Any]) -> list[Skill]:
        """All skills by name. Raises: UserError for an invalid skill."""
        found: dict[str, Skill] = {}
        for folder in self._folders:
            for path in _skill_folders(folder):
                if path.name not in found:
                    found[path.name] = read_head(_text_of(path / MAIN), path.name, str(path))
        for name, files in state.get(SKILLS, {}).items():
            found.pop(name, None)
            if files is not None:
                found[name] = read_head(b64decode(files[MAIN]).decode(), name, name)
        return [found[name] for name in sorted(found)][:MAX_SKILLS]

    def index(self, state: Mapping[str, Any]) -> str:
        """The part of the system prompt; empty without skills. Raises: UserError."""
        lines = [f"- {skill.name}: {skill.description}" for skill in self.listed(state)]
        return "\n".join([INTRODUCTION, *lines]) if lines else ""

    def files(self, state: Mapping[str, Any], name: str) -> Files:
        """The files of a skill by their paths in it. Raises: ToolError when there is none."""
        changed = state.get(SKILLS, {})
        if name in changed:
            if changed[name] is not None:
                return {path: b64decode(text) for path, text in changed[name].items()}
        elif _NAME.fullmatch(name):
            for folder in self._folders:
                if (folder / name / MAIN).is_file():
                    return dict(_files_of(folder / name))
        names = ", ".join(skill.name for skill in self.listed(state)) or "there are none"
        raise ToolError(f"no skill {name!r} (skills: {names})")

    def keep(self, state: dict[str, Any], name: str, files: Files | None) -> None:
        """Make or replace a skill, or with None delete it. Raises: ToolError."""
        if self._writable is None:
            kept = {path: b64encode(data).decode() for path, data in (files or {}).items()}
            state[SKILLS] = {**state.get(SKILLS, {}), name: None if files is None else kept}
            return
        place = self._writable / name
        try:
            if files is None:
                if not place.is_dir():
                    raise ToolError(f"the skill {name!r} is not one of yours, and stays as it is")
                shutil.rmtree(place)
                return
            new = self._writable / f".{name}.new"
            shutil.rmtree(new, ignore_errors=True)
            for path, data in files.items():
                (new / path).parent.mkdir(parents=True, exist_ok=True)
                (new / path).write_bytes(data)
            if place.exists():
                shutil.rmtree(place)
            new.rename(place)
        except OSError as error:
            raise ToolError(f"the skill could not be written: {error.strerror}") from None

    def digest(self) -> str:
        """Of the content of all skills. Raises: UserError."""
        contents = {
            skill.name: {k: v.hex() for k, v in self.files({}, skill.name).items()}
            for skill in self.listed({})
        }
        return digest(contents)


def open_skills(folders: Iterable[str | Path], writable: Path | None = None) -> Skills:
    """The skills of some folders, and the bundled ones where there are no others.

    Raises: UserError for a folder that does not exist, or has an invalid skill.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(
                f"skills: no folder {path}. Give a folder with one folder for each skill"
            )
    skills = Skills(paths or [BUNDLED_SKILLS], writable)
    skills.listed({})
    return skills


def read_head(text: str, name: str, place: str, *, strict: bool = False) -> Skill:
    """The name and the description of a `SKILL.md`.

    Args:
        strict: refuse a description that is longer than the specification allows, as published
            skills have; otherwise it is cut.

    Raises: UserError that names the place.
    """
    head = _HEAD.match(text)
    try:
        fields = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError as error:
        raise UserError(
            f"{place}: the YAML of {MAIN} cannot be read: {one_line(str(error))}"
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"{place}: {MAIN} must begin with YAML between two lines of ---")
    if fields.get("name") != name:
        raise UserError(f"{place}: 'name' must be {name!r}, the name of the folder")
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise UserError(
            f"{place}: a name has up to {_MAX_NAME} lower-case letters, digits and single hyphens"
        )
    description = fields.get("description")
    if (
        not isinstance(description, str)
        or not (length := len(description.strip()))
        or (strict and length > _MAX_DESCRIPTION)
    ):
        raise UserError(f"{place}: 'description' must have 1 to {_MAX_DESCRIPTION:,} characters")
    return Skill(name, cut_middle(one_line(clean(description)), _MAX_DESCRIPTION))


def _skill_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if (p / MAIN).is_file() and p.name[0] != ".")


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes()[:MAX_FILE_BYTES].decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _files_of(folder: Path) -> Iterable[tuple[str, bytes]]:
    """The regular files of a skill; links may lead out of it, and are left out."""
    places = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()]
    inside = [
        p
        for p in places
        if folder.resolve() in p.resolve().parents and "__pycache__" not in p.parts
    ]
    for path in inside[:MAX_FILES]:
        if path.stat().st_size <= MAX_FILE_BYTES:
            yield path.relative_to(folder).as_posix(), path.read_bytes()
