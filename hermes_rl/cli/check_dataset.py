"""Looking at a dataset before a token is spent: bad rows, scripts, programs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hermes_rl.errors import UserError
from hermes_rl.tasks import Task, TaskRow, Verify
from hermes_rl.tools.toolsets import get_distribution, tool_names

_SCRIPTS_AT_ONCE = 512
"""Scripts that one bash parses."""

_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)\\?([A-Za-z_]\w*)\1")


@dataclass
class Findings:
    """What a look at a dataset found."""

    rows: int = 0
    verified: int = 0
    oracles: int = 0
    repeated: int = 0
    """Rows whose content stood before: kept as units of their own."""
    faults: list[str] = field(default_factory=list)
    """`place: what is wrong`, one line each."""
    unplaced: list[str] = field(default_factory=list)
    """Places of verifiers that never name the workspace, although they start outside it."""
    requires: set[str] = field(default_factory=set)
    absent: list[str] = field(default_factory=list)


def look(rows: Iterable[TaskRow]) -> Findings:
    """Read every row: bad rows, unknown tools, scripts that bash cannot parse, needed programs, and
    ids that two different rows have."""
    found = Findings()
    seen: set[bytes] = set()
    ids: dict[str, tuple[bytes, str]] = {}
    faults: list[tuple[int, str]] = []
    kept: list[tuple[int, str, str, str]] = []
    for row in rows:
        _count(row, found, seen, faults)
        faults += [(row.index, fault) for fault in duplicate_id(row, ids)]
        faults += [(row.index, f"{row.place}: {fault}") for fault in unknown_tools(row.task)]
        kept += [(row.index, row.place, name, script) for name, script in scripts(row.task)]
        if len(kept) >= _SCRIPTS_AT_ONCE:
            faults += _unparsable(kept)
            kept.clear()
    faults += _unparsable(kept)
    found.faults = [text for _, text in sorted(faults, key=lambda fault: fault[0])]
    return found


def _count(row: TaskRow, found: Findings, seen: set[bytes], faults: list[tuple[int, str]]) -> None:
    found.rows += 1
    key = bytes.fromhex(row.task_hash[:32])
    found.repeated += key in seen
    seen.add(key)
    if row.task is None:
        faults.append((row.index, f"{row.place}: {row.error}"))
        return
    found.verified += row.task.verify is not None
    if row.task.verify is not None and not _names_workspace(row.task.verify):
        found.unplaced.append(row.place)
    found.oracles += row.task.oracle is not None
    found.requires.update(row.task.requires)


def duplicate_id(row: TaskRow, ids: dict[str, tuple[bytes, str]]) -> Iterator[str]:
    """Whether an earlier row of other content has the row's id.

    Args:
        ids: of the earlier rows: content and place of the first row with the id.
    """
    if row.task is None:
        return
    content = bytes.fromhex(row.task_hash[:32])
    first, place = ids.setdefault(row.task.id, (content, row.place))
    if first != content:
        yield f"{row.place}: id {row.task.id!r} is also that of {place}. Give each task its own id"


def _names_workspace(verifier: Verify) -> bool:
    texts = [verifier.script.encode("utf-8", "replace"), *verifier.files.values()]
    return any(b"WORKSPACE" in text or b"/workspace" in text for text in texts)


def unknown_tools(task: Task | None) -> Iterator[str]:
    """What a run would say of a row's own toolsets and distribution, which end its unit."""
    if task is None:
        return
    try:
        tool_names(task.toolsets or ())
        if task.distribution is not None:
            get_distribution(task.distribution)
    except UserError as error:
        yield str(error)


def _unparsable(kept: Iterable[tuple[int, str, str, str]]) -> Iterator[tuple[int, str]]:
    """What bash says of scripts that it refuses.

    Args:
        kept: row number, place, column and script.
    """
    kept = list(kept)
    refused = refusals(dict.fromkeys(script for *_, script in kept))
    for index, place, name, script in kept:
        if script in refused:
            yield index, f"{place}: '{name}' is not a bash script: {refused[script]}"


def refusals(many: Iterable[str]) -> dict[str, str]:
    """Script -> why `bash -n` refuses it, for those that it refuses.

    Starting bash costs more than parsing: scripts are parsed together as long as all are good.
    """
    together: list[str] = []
    alone: list[str] = []
    for script in many:
        (together if _ends_its_documents(script) else alone).append(script)
    refused = {script: why for script in alone if (why := _refusal(script))}
    groups = [together]
    while groups:
        group = groups.pop()
        # Of some errors bash only speaks, and exits with 0.
        if len(group) > 1 and _bash_reads("".join(map(_framed, group))).stderr:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        elif len(group) == 1 and (why := _refusal(group[0])):
            refused[group[0]] = why
    return refused


def _framed(script: str) -> str:
    """A script that its neighbours cannot complete: whatever it leaves open (a loop, a bracket, a
    quote) meets an end that does not fit, or a parenthesis where none may stand."""
    return f"(\nwhile :\ndo :\n{script}\n# )) ) ( }} (\ndone\n)\n: 'a (' \"b (\" `c (`\n"


def _ends_its_documents(script: str) -> bool:
    """Whether each here-document surely ends within the script: else it would swallow the next."""
    text = script.replace("<<<", "")
    begun = list(_DOCUMENT.finditer(text))
    return text.count("<<") == len(begun) and all(
        re.search(rf"^\t*{re.escape(one[2])}$", text[one.end() :], re.MULTILINE) for one in begun
    )


def _refusal(script: str) -> str | None:
    done = _bash_reads(script)
    if not done.returncode:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0].removeprefix("bash: ") if lines else "refused"


def _bash_reads(text: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-n"], input=text.encode("utf-8", "replace"), capture_output=True
    )


def scripts(task: Task | None) -> list[tuple[str, str]]:
    """A task's scripts by column."""
    if task is None:
        return []
    verify = task.verify.script if task.verify else None
    named = [("setup", task.setup), ("verify", verify), ("oracle", task.oracle)]
    return [(name, script) for name, script in named if script]


async def absent_programs(programs: Iterable[str]) -> list[str]:
    """Which of these programs the default sandbox lacks. Raises: SandboxStartError."""
    wanted = sorted(programs)
    if not wanted:
        return []
    from hermes_rl.sandboxes.base import SandboxSpec
    from hermes_rl.wiring import make_backend

    backend = make_backend("bubblewrap")
    try:
        async with await backend.lease(SandboxSpec(lease="check-requires")) as sandbox:
            missing = []
            for program in wanted:
                quoted = "'" + program.replace("'", "'\\''") + "'"
                result = await sandbox.run(f"command -v -- {quoted}", timeout_s=30.0)
                missing += [program] if result.exit_code else []
            return missing
    finally:
        await backend.aclose()
