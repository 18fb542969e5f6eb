"""Skills: folders with instructions that the agent reads when a task needs them.

A skill has the open form of https://agentskills.io/specification: a folder whose `SKILL.md` begins
with YAML that has `name` (that of the folder) and `description`; scripts, references and assets may
lie beside it. The system prompt lists names and descriptions. `skill_view` reads a file and puts
the skill's folder into the sandbox, so that its scripts can be run. What `skill_manage` changes is
kept in a folder of the user, or in the state of one rollout, with which it ends.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.errors import ToolError, UserError
from hermes_rl.identity import digest
from hermes_rl.locks import exchange
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
        with self._locked(shared=True):
            for path in self._places():
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
        else:
            with self._locked(shared=True):
                if files := self._read(name):
                    return files
        names = ", ".join(skill.name for skill in self.listed(state)) or "there are none"
        raise ToolError(f"no skill {name!r} (skills: {names})")

    def left_out(self, name: str) -> list[str]:
        """The files of a skill's folder that are not part of it, each with the reason."""
        place = self._place(name)
        return [] if place is None else _files_of(place)[1]

    def notes(self) -> list[str]:
        """A line for each file that is left out of a skill, for people."""
        places = self._places()
        return [f"skill {p.name}: without {left}" for p in places for left in _files_of(p)[1]]

    def keep(
        self, state: dict[str, Any], name: str, files: Files | None, before: Files | None = None
    ) -> None:
        """Make or replace a skill, or with None delete it: at once, also if this process is killed.

        Args:
            before: its files as they were read; None where there was no such skill.

        Raises: ToolError, for a skill that another agent has changed since it was read, too.
        """
        if self._writable is None:
            kept = {path: b64encode(data).decode() for path, data in (files or {}).items()}
            state[SKILLS] = {**state.get(SKILLS, {}), name: None if files is None else kept}
            return
        place, new = self._writable / name, self._writable / f".{name}.new"
        try:
            self._writable.mkdir(parents=True, exist_ok=True)
            with self._locked():
                _restore(self._writable)
                if self._read(name) != before:
                    raise ToolError(
                        f"another agent changed the skill {name!r} meanwhile; nothing was written. "
                        "Read it again with skill_view, then repeat your change"
                    )
                shutil.rmtree(new, ignore_errors=True)
                if files is None:
                    if not place.is_dir():
                        raise ToolError(
                            f"the skill {name!r} is not one of yours, and stays as it is"
                        )
                    place.rename(new)
                else:
                    _write(new, files)
                    _put(new, place)
                shutil.rmtree(new, ignore_errors=True)
        except OSError as error:
            raise ToolError(f"the skill could not be written: {error.strerror}") from None

    @contextmanager
    def _locked(self, shared: bool = False) -> Iterator[None]:
        """No agent changes the skills meanwhile. Raises: OSError."""
        path = None if self._writable is None else self._writable / ".lock"
        if path is None or (shared and not path.exists()):  # then no agent has written yet
            yield
            return
        with path.open("r" if shared else "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield

    def _places(self) -> list[Path]:
        """The folder of each skill."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            for path in _skill_folders(folder):
                found.setdefault(path.name, path)
        return [*found.values()]

    def _place(self, name: str) -> Path | None:
        if not _NAME.fullmatch(name):
            return None
        places = (folder / name for folder in self._folders)
        return next((place for place in places if (place / MAIN).is_file()), None)

    def _read(self, name: str) -> Files | None:
        place = self._place(name)
        return None if place is None else _files_of(place)[0]

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
    if writable is not None:
        _restore(writable)
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
    """Raises: UserError."""
    if path.is_symlink():
        raise UserError(f"{path} is a link, and links in skills are not followed. Copy the file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path} has {len(data):,} bytes, and at most {MAX_FILE_BYTES:,} fit")
    return data.decode("utf-8", "replace")


def _files_of(folder: Path) -> tuple[Files, list[str]]:
    """The files of a skill, and what is left out: links may lead out of it."""
    files: Files = {}
    left: list[str] = []
    for path in sorted(folder.rglob("*"), key=lambda path: (path != folder / MAIN, path)):
        name, why = path.relative_to(folder).as_posix(), None
        if path.is_symlink():
            why = "a link"
        elif not path.is_file() or "__pycache__" in path.parts:
            continue
        elif (size := path.stat().st_size) > MAX_FILE_BYTES:
            why = f"{size:,} bytes, at most {MAX_FILE_BYTES:,} fit"
        elif len(files) == MAX_FILES:
            why = f"a skill has at most {MAX_FILES} files"
        if why is None:
            files[name] = path.read_bytes()
        else:
            left.append(f"{name} ({why})")
    return files, left


def _write(folder: Path, files: Files) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _put(new: Path, place: Path) -> None:
    """Put a folder in the place of another one, which `new` may be afterwards. Raises: OSError."""
    if not place.exists():
        new.rename(place)
        return
    try:
        exchange(new, place)
    except OSError:  # NFS and others cannot: `_restore` ends what a kill between these two leaves
        old = place.with_name(f".{place.name}.old")
        place.rename(old)
        new.rename(place)
        shutil.rmtree(old, ignore_errors=True)


def _restore(folder: Path) -> None:
    """End a replacement that was interrupted between its two renames."""
    for old in folder.glob(".*.old"):
        place = folder / old.name[1 : -len(".old")]
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(place)
