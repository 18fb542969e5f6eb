"""Instructions of a project for agents: `AGENTS.md` and the like, read from the workspace.

They are read inside the sandbox, as the agent itself would, once for each conversation, and become
part of the system prompt, so that the record has them.
"""

from __future__ import annotations

from hermes_rl.errors import SandboxDied, SandboxKilled
from hermes_rl.sandboxes import Sandbox
from hermes_rl.text import clean, cut_middle

CONTEXT_FILES = ("AGENTS.md", "CLAUDE.md", ".hermes.md", ".cursorrules")
"""Of each folder the first that exists."""
MAX_FILE_CHARS = 20_000
MAX_CONTEXT_CHARS = 40_000
INTRODUCTION = (
    "Instructions for the project you are working on. The files come from its folders, the most "
    "specific one last; where they contradict each other, follow the last one. The user's request "
    "takes precedence over them."
)

_FIND = r"""
top=; folder=$PWD; list=$PWD
while [ -n "$folder" ]; do
  if [ -e "$folder/.git" ]; then top=$list; break; fi
  folder=${folder%/*}; list="${folder:-/}
$list"
done
printf '%s\n' "${top:-$PWD}" | while IFS= read -r folder; do
  for name in NAMES; do
    if [ -f "${folder%/}/$name" ]; then printf '%s\0' "${folder%/}/$name"; break; fi
  done
done
""".replace("NAMES", " ".join(CONTEXT_FILES))
_SECONDS = 20.0


async def context_files(sandbox: Sandbox) -> str:
    """The project's instructions as a text for the system prompt; empty without any.

    Files count from the top of the repository, or without one of the working directory alone, down
    to the working directory. What cannot be read is left out.

    Raises: SandboxDied.
    """
    try:
        found = await sandbox.run(f"( {_FIND} )", timeout_s=_SECONDS)
        paths = [path for path in found.output.split("\0") if path.startswith("/")]
        parts, left = list[str](), MAX_CONTEXT_CHARS
        for path in reversed(paths):  # the most specific one first, as long as there is space
            text = await _read(sandbox, path)
            if text and left > 0:
                text = cut_middle(text, min(MAX_FILE_CHARS, left))
                left -= len(text)
                parts.append(f"<file path={path.rsplit('/', 1)[1]!r}>\n{text}\n</file>")
    except SandboxKilled as error:
        raise SandboxDied(f"the sandbox ended while context files were read: {error}") from None
    return "\n\n".join([INTRODUCTION, *reversed(parts)]) if parts else ""


async def _read(sandbox: Sandbox, path: str) -> str:
    try:
        return clean((await sandbox.read_file(path)).decode("utf-8", "replace")).strip()
    except OSError:
        return ""
