"""How tools reach files: small scripts in the sandbox's session, so that paths mean what they mean
there (working directory, home, links, permissions). No host path is ever opened.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hermes_rl.errors import ToolError
from hermes_rl.tools.base import ToolContext

FILE_TIMEOUT_S = 60.0
"""Bound of one file operation."""
WHOLE_FILE_BYTES = 8 << 20
"""Files up to this size are taken whole; of larger ones only a part."""

_ABSENT, _DIRECTORY, _SPECIAL, _UNREADABLE = 81, 82, 83, 84


_BASH_PLACE = re.compile(r"^\S*: line \d+: ", re.MULTILINE)


@dataclass(frozen=True)
class FileBytes:
    """A file as read: its path, true size and content, possibly only the beginning."""

    path: str
    """Absolute, as the sandbox's session sees it."""
    size: int
    data: bytes

    @property
    def whole(self) -> bool:
        """Whether `data` is all of it."""
        return len(self.data) == self.size


def quote(path: str) -> str:
    """A path as a shell word; a leading `~/` stays the home directory.

    Raises: ToolError when no file can have that path.
    """
    if not path or "\0" in path:
        raise ToolError("path must not be empty or contain NUL characters")
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)


@dataclass(frozen=True)
class ScriptResult:
    """What a script printed and how it ended."""

    exit_code: int
    data: bytes

    @property
    def text(self) -> str:
        """The output as text for a message, without bash's own place, at most 500 characters."""
        text = self.data.decode("utf-8", "replace").strip()
        return _BASH_PLACE.sub("", text)[:500]


async def run_script(
    ctx: ToolContext, script: str, *, stdin: bytes | None = None, max_output_bytes: int = 50_000
) -> ScriptResult:
    """Run a script in a subshell of the session: it sees its state and changes nothing of it.

    Options that the agent may have set (-e, -u, -x, noclobber, no globbing) are put back first, and
    the output is what stands between two marks: a session that traces itself prints around them.

    Raises: ToolError after a timeout or an end in the middle.
    """
    command = f"""( {{ set +xveuCf; trap - ERR DEBUG; export LC_ALL=C.UTF-8; }} 2>/dev/null
trap '_hx=$?; builtin printf "{_MARKS}"; builtin exit $_hx' EXIT
builtin printf '{_MARKS}'
{script}
)"""
    timeout_s = min(FILE_TIMEOUT_S, ctx.max_timeout_s)
    assert ctx.sandbox is not None, "the agent refuses tools that lack their sandbox"
    result = await ctx.sandbox.run(
        command, timeout_s=timeout_s, stdin=stdin, max_output_bytes=max_output_bytes + _SPARE
    )
    if result.timed_out:
        raise ToolError(f"timed out after {timeout_s:g} s")
    _, opened, rest = result.raw.partition(_MARK)
    data, closed, _ = rest.rpartition(_MARK)
    if not opened or not closed:
        raise ToolError(
            f"the shell exited before the operation finished: {result.output.strip()[-300:]}"
        )
    return ScriptResult(result.exit_code, data)


_MARK = b"\0\x01hx\x02\0"
_MARKS = r"\000\001hx\002\000"
_SPARE = 100_000
"""Bytes for what a session prints around a script."""


async def read_bytes(ctx: ToolContext, path: str, limit: int = WHOLE_FILE_BYTES) -> FileBytes:
    """A regular file of the sandbox, at most its first `limit` bytes.

    Raises: ToolError when it is absent, a directory, special or unreadable.
    """
    script = f"""f={quote(path)}
[[ -e $f ]] || exit {_ABSENT}
[[ -d $f ]] && exit {_DIRECTORY}
[[ -f $f ]] || exit {_SPECIAL}
[[ -r $f ]] || exit {_UNREADABLE}
[[ $f = /* ]] || f=$PWD/$f
builtin printf '%s\\n%s\\0' "$(command stat -Lc %s -- "$f")" "$f"
command head -c {limit} -- "$f\""""
    result = await run_script(ctx, script, max_output_bytes=limit)
    if result.exit_code in _PROBLEMS:
        raise ToolError(_PROBLEMS[result.exit_code].format(path))
    size, _, rest = result.data.partition(b"\n")
    name, found, data = rest.partition(b"\0")
    if result.exit_code or not found or not size.isdigit():
        raise ToolError(f"cannot read '{path}': {result.text}")
    return FileBytes(path=name.decode(errors="replace"), size=int(size), data=data)


_PROBLEMS = {
    _ABSENT: "file not found: '{}'",
    _DIRECTORY: "'{}' is a directory",
    _SPECIAL: "'{}' is not a regular file",
    _UNREADABLE: "permission denied: '{}'",
}


async def write_bytes(ctx: ToolContext, path: str, data: bytes) -> bool:
    """Write a file of the sandbox, making its parents; the mode of an existing file stays.

    Returns: whether the file is new.

    Raises: ToolError with the system's reason.
    """
    script = f"""f={quote(path)}
[[ -d $f ]] && {{ builtin echo "it is a directory"; exit 1; }}
new=; [[ -e $f ]] || new=new
d=${{f%/*}}
[[ $d = "$f" || -z $d || -d $d ]] || command mkdir -p -- "$d" || exit 1
command cat >"$f" || exit 1
builtin echo "$new\""""
    result = await run_script(ctx, script, stdin=data)
    if result.exit_code:
        raise ToolError(f"cannot write '{path}': {result.text}")
    return result.data.strip() == b"new"


async def names_beside(ctx: ToolContext, path: str) -> list[str]:
    """Names in the directory of a path (at most some thousands); empty when there is none."""
    script = f"""f={quote(path)}
d=${{f%/*}}; [[ $d = "$f" ]] && d=.
command ls -A -- "${{d:-/}}" 2>/dev/null"""
    result = await run_script(ctx, script)
    names = result.data.decode("utf-8", "replace").splitlines()
    return names if result.exit_code == 0 else []


async def resolve_paths(ctx: ToolContext, paths: Sequence[str]) -> list[str]:
    """What paths name in the session's working directory, links followed.

    Raises: ToolError when they cannot be resolved.
    """
    quoted = " ".join(quote(path) for path in paths)
    result = await run_script(ctx, f"command realpath -mz -- {quoted}")
    found = result.data.decode("utf-8", "surrogateescape").split("\0")[:-1]
    if result.exit_code or len(found) != len(paths):
        raise ToolError(f"cannot resolve paths: {result.text}")
    return found
