"""The tools of the toolset `skills`: list, read, and change what `skill_folders` has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from hermes_rl.errors import ToolError, UserError
from hermes_rl.leaks import find_leaks
from hermes_rl.sandboxes import Sandbox
from hermes_rl.text import to_json
from hermes_rl.tools import matching
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.skill_folders import (
    BUNDLED_SKILLS,
    MAIN,
    MAX_FILE_CHARS,
    MAX_FILES,
    SKILLS,
    Files,
    Skills,
    read_head,
)

SKILL_VIEW = "skill_view"


def _skills(ctx: ToolContext) -> Skills:
    return ctx.services.skills or Skills([BUNDLED_SKILLS])


@tool(name="skills_list", **schema("skills_list"), toolset=SKILLS, parallel=True)
async def _skills_list(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {skills: [{name, description}]}."""
    listed = _skills(ctx).listed(ctx.state)
    fields = {"skills": [{"name": s.name, "description": s.description} for s in listed]}
    return ToolResult(text=to_json(fields), data=fields)


@tool(name=SKILL_VIEW, **schema(SKILL_VIEW), toolset=SKILLS, parallel=True)
async def _skill_view(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {skill, file, content, files, left_out?, folder?}."""
    name, path = args["name"], args.get("file") or MAIN
    skills = _skills(ctx)
    files = skills.files(ctx.state, name)
    if path not in files:
        raise ToolError(f"the skill {name!r} has no file {path!r} (files: {', '.join(files)})")
    content = files[path].decode("utf-8", "replace")[:MAX_FILE_CHARS]
    fields: dict[str, Any] = {"skill": name, "file": path, "content": content, "files": [*files]}
    if name not in ctx.state.get(SKILLS, {}) and (left := skills.left_out(name)):
        fields["left_out"] = left
    if ctx.sandbox is not None and len(files) > 1:
        fields["folder"] = await _put_into(ctx.sandbox, name, files)
    return ToolResult(text=to_json(fields), data=fields)


async def _put_into(sandbox: Sandbox, name: str, files: Mapping[str, bytes]) -> str:
    """Write a skill into the sandbox; its folder there."""
    folder = f"{sandbox.scratch}/skills/{name}"
    try:
        for path, data in files.items():
            await sandbox.write_file(f"{folder}/{path}", data)
    except OSError as error:
        raise ToolError(f"the skill's files could not be written to {folder}: {error}") from None
    return folder


@tool(name="skill_manage", **schema("skill_manage"), toolset=SKILLS)
async def _skill_manage(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {skill, files}."""
    skills, name, action = _skills(ctx), args["name"], args["action"]
    before = None if action == "create" else skills.files(ctx.state, name)
    files: Files | None = dict(before or {})
    assert files is not None
    path = _inside(args.get("file") or MAIN)
    content = args.get("content") or ""
    match action:
        case "create":
            if any(skill.name == name for skill in skills.listed(ctx.state)):
                raise ToolError(f"there is a skill {name!r} already; change it with write or patch")
            path, files = MAIN, {MAIN: content.encode()}
        case "write":
            files[path] = content.encode()
        case "patch":
            if path not in files:
                raise ToolError(f"the skill {name!r} has no file {path!r}")
            files[path] = _patched(files[path], args.get("old_text") or "", content).encode()
        case "remove":
            if path == MAIN or path not in files:
                raise ToolError(f"{path!r} cannot be removed from {name!r}")
            del files[path]
        case "delete":
            files = None
    if files is not None:
        _check(name, files, path)
    skills.keep(ctx.state, name, files, before)
    fields = {"skill": name, "files": [*files] if files is not None else None}
    return ToolResult(text=to_json(fields), data=fields)


def _patched(data: bytes, old: str, new: str) -> str:
    """Raises: ToolError unless the file is text and has `old` once."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ToolError("the file is not text, so it cannot be patched") from None
    found = matching.find(text, old) if old.strip() else None
    if found is None or len(found.spans) != 1:
        raise ToolError("old_text must be a part of the file that it has exactly once")
    return matching.replace(text, found, old, new)


def _inside(path: str) -> str:
    """A path in a skill. Raises: ToolError for one that leads out of it."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise ToolError(f"file must be a relative path in the skill's folder, not {path!r}")
    return str(PurePosixPath(path))


def _check(name: str, files: Files, changed: str) -> None:
    """Raises: ToolError for an invalid skill, or a changed file with too much or with a secret."""
    try:
        read_head(
            files.get(MAIN, b"").decode("utf-8", "replace"), name, f"skill {name!r}", strict=True
        )
    except UserError as error:
        raise ToolError(str(error)) from None
    if len(files) > MAX_FILES:
        raise ToolError(f"a skill has at most {MAX_FILES} files")
    text = files.get(changed, b"").decode()
    if len(text) > MAX_FILE_CHARS:
        raise ToolError(
            f"{changed} has {len(text):,} characters, and at most {MAX_FILE_CHARS:,} fit"
        )
    if find_leaks(text):
        raise ToolError(f"{changed} looks like it has a secret, which a skill must not keep")


skills_list = replace(_skills_list, needs_sandbox=False)
skill_view = replace(_skill_view, needs_sandbox=False)
skill_manage = replace(_skill_manage, needs_sandbox=False)
