"""Checks a dataset before a run: bad rows, scripts, programs; and plays it with oracles, no-ops and
cheats."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hermes_rl.aio import run_sync
from hermes_rl.config import parse_config
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.scorers import ScorerPool, formula
from hermes_rl.sources import mapped_rows
from hermes_rl.tasks import Task, TaskRow, Verify
from hermes_rl.testing import BUNDLES, CHEATS, answer_cheats, bundle
from hermes_rl.tools import Catalogue, tool_names

_SCRIPTS_AT_ONCE = 512
"""Scripts that are parsed by one bash."""

_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)\\?([A-Za-z_]\w*)\1")


@dataclass
class Findings:
    """Findings about a dataset."""

    rows: int = 0
    verified: int = 0
    oracles: int = 0
    repeated: int = 0
    """Rows identical to an earlier one; they are separate units."""
    faults: list[str] = field(default_factory=list)
    """`place: what is wrong`, one line each."""
    unplaced: list[str] = field(default_factory=list)
    """Places of verifiers that do not name the workspace, although they start outside it."""
    requires: set[str] = field(default_factory=set)
    absent: list[str] = field(default_factory=list)


def inspect_rows(rows: Iterable[TaskRow]) -> Findings:
    """Read every row. Finds bad rows, unknown tools, scripts that bash cannot parse, required
    programs, and ids of different rows that are equal."""
    found = Findings()
    seen: set[bytes] = set()
    ids: dict[str, tuple[bytes, str]] = {}
    faults: list[tuple[int, str]] = []
    kept: list[tuple[int, str, str, str]] = []
    formulas: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        _count(row, found, seen, faults)
        faults += [(row.index, fault) for fault in find_duplicate_id(row, ids)]
        faults += [(row.index, f"{row.place}: {fault}") for fault in find_unknown_tools(row.task)]
        faults += [(row.index, f"{row.place}: {fault}") for fault in find_absent_extras(row.task)]
        faults += [(row.index, f"{row.place}: {fault}") for fault in find_missing_tools(row.task)]
        for scorer in row.task.score if row.task else ():
            if scorer.type == "math":
                formulas.setdefault(scorer.options["target"], []).append((row.index, row.place))
        kept += [(row.index, row.place, name, script) for name, script in scripts(row.task)]
        if len(kept) >= _SCRIPTS_AT_ONCE:
            faults += _script_faults(kept)
            kept.clear()
    faults += _script_faults(kept)
    for target in run_sync(find_bad_formulas(formulas)):
        why = f"the target {target[:80]!r} of 'score' (math) is not an expression that can be read"
        faults += [(index, f"{place}: {why}") for index, place in formulas[target]]
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
    found.verified += row.task.verify is not None or bool(row.task.score)
    if row.task.verify is not None and not _names_workspace(row.task.verify):
        found.unplaced.append(row.place)
    found.oracles += row.task.oracle is not None
    found.requires.update(row.task.requires)


def find_duplicate_id(row: TaskRow, ids: dict[str, tuple[bytes, str]]) -> Iterator[str]:
    """Whether an earlier row with other content has the same id.

    Args:
        ids: id -> content and place of the first row with it.
    """
    if row.task is None:
        return
    content = bytes.fromhex(row.task_hash[:32])
    first, place = ids.setdefault(row.task.id, (content, row.place))
    if first != content:
        yield f"{row.place}: id {row.task.id!r} is also that of {place}. Give each task its own id"


def _names_workspace(verifier: Verify) -> bool:
    if verifier.mounts:  # of a task folder, which changes to its own directory
        return True
    texts = [verifier.script.encode("utf-8", "replace"), *verifier.files.values()]
    return any(b"WORKSPACE" in text or b"/workspace" in text for text in texts)


def find_unknown_tools(task: Task | None) -> Iterator[str]:
    """Errors in the toolsets and the distribution of a row, which would fail its unit."""
    if task is None:
        return
    try:
        tool_names(task.toolsets or ())
        if task.distribution is not None:
            Catalogue().distribution(task.distribution)
    except UserError as error:
        yield str(error)


def find_missing_tools(task: Task | None) -> Iterator[str]:
    """What a row's toolsets lack on this machine; its unit would not be offered it."""
    if task is None or task.toolsets is None:
        return
    catalogue = Catalogue()
    with suppress(UserError):  # of an unknown toolset, which is reported elsewhere
        for name, why in catalogue.missing(task.toolsets, here=task.image is None).items():
            yield f"the tool {name!r} of its toolsets cannot be offered here: {why}"
        for name in catalogue.empty(task.toolsets):
            yield f"the toolset {name!r} has no tools. Leave it out, or use none"


def find_absent_extras(task: Task | None) -> Iterator[str]:
    """Packages that a row's scorers need and that are not installed."""
    needed = task is not None and any(scorer.type == "math" for scorer in task.score)
    if needed and importlib.util.find_spec("math_verify") is None:
        yield "'score' of type math needs a package: pip install 'hermes-rl[eval]'"


async def find_bad_formulas(targets: Collection[str]) -> list[str]:
    """Targets of `math` that no answer reaches: as answers to themselves they are wrong."""
    if not targets or importlib.util.find_spec("math_verify") is None:
        return []
    pool = ScorerPool()
    try:
        return [
            target
            for target in targets
            if not (
                await pool.score("math", {"target": target}, f"\\boxed{{{formula(target)}}}")
            ).value
        ]
    finally:
        await pool.aclose()


def _script_faults(kept: Iterable[tuple[int, str, str, str]]) -> Iterator[tuple[int, str]]:
    """Errors of scripts that bash refuses.

    Args:
        kept: row number, place, column and script.
    """
    kept = list(kept)
    refused = find_script_errors(dict.fromkeys(script for *_, script in kept))
    for index, place, name, script in kept:
        if script in refused:
            yield index, f"{place}: '{name}' is not a bash script: {refused[script]}"


def find_script_errors(many: Iterable[str]) -> dict[str, str]:
    """Script -> the error of `bash -n`, for scripts with one.

    Starting bash is slower than parsing: scripts are parsed together while all are valid.
    """
    together: list[str] = []
    alone: list[str] = []
    for script in many:
        (together if _ends_its_documents(script) else alone).append(script)
    refused = {script: why for script in alone if (why := _script_error(script))}
    groups = [together]
    while groups:
        group = groups.pop()
        # bash reports some errors and exits with 0.
        if len(group) > 1 and _parse_with_bash("".join(map(_frame, group))).stderr:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        elif len(group) == 1 and (why := _script_error(group[0])):
            refused[group[0]] = why
    return refused


def _frame(script: str) -> str:
    """Frame a script so that others cannot complete it: anything that it leaves open (a loop, a
    bracket, a quote) meets a wrong end, or a parenthesis that is not allowed."""
    return f"(\nwhile :\ndo :\n{script}\n# )) ) ( }} (\ndone\n)\n: 'a (' \"b (\" `c (`\n"


def _ends_its_documents(script: str) -> bool:
    """Whether each here-document ends within the script, and cannot include the next script."""
    text = script.replace("<<<", "")
    begun = list(_DOCUMENT.finditer(text))
    return text.count("<<") == len(begun) and all(
        re.search(rf"^\t*{re.escape(one[2])}$", text[one.end() :], re.MULTILINE) for one in begun
    )


def _script_error(script: str) -> str | None:
    done = _parse_with_bash(script)
    if not done.returncode:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0].removeprefix("bash: ") if lines else "refused"


def _parse_with_bash(text: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-n"], input=text.encode("utf-8", "replace"), capture_output=True
    )


def scripts(task: Task | None) -> list[tuple[str, str]]:
    """A task's scripts by column."""
    if task is None:
        return []
    verify = task.verify.script if task.verify else None
    oracle = task.oracle if verify or not task.score else None  # else it is an answer
    named = [("setup", task.setup), ("verify", verify), ("oracle", oracle)]
    return [(name, script) for name, script in named if script]


async def find_missing_programs(programs: Iterable[str]) -> list[str]:
    """Find programs that the default sandbox lacks. Raises: SandboxStartError."""
    wanted = sorted(programs)
    if not wanted:
        return []
    from hermes_rl.sandboxes import SandboxSpec
    from hermes_rl.wiring import make_backend

    backend = make_backend("bubblewrap")
    try:
        async with await backend.lease(SandboxSpec(lease="check-requires")) as sandbox:
            missing = []
            for program in wanted:
                command = f"command -v -- {shlex.quote(program)}"
                result = await sandbox.run(command, timeout_s=30.0)
                missing += [program] if result.exit_code else []
            return missing
    finally:
        await backend.aclose()


@dataclass(frozen=True)
class PlayMode:
    """A way of playing every task, and the expected reward."""

    name: str
    model: str
    wanted: float
    scripts: Mapping[str, str] = field(default_factory=dict)
    """PlayResult instead of the oracle, each on every task."""
    answers: bool = False
    """Play answers that cheat instead of the oracle, on tasks with scorers."""
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """The section of the configuration."""


def play_modes(sandbox: Mapping[str, Any]) -> list[PlayMode]:
    """Oracle 1, no-op 0, cheats 0."""
    bundles = {name: bundle(name) for name in BUNDLES}
    made = [
        PlayMode("oracle", "oracle", 1.0),
        PlayMode("no-op", "noop", 0.0),
        PlayMode(f"{len(CHEATS)} cheats", "oracle", 0.0, bundles),
        PlayMode("forged answers", "oracle", 0.0, answers=True),
    ]
    return [replace(play, sandbox=sandbox) for play in made]


@dataclass(frozen=True)
class PlayResult:
    """The result of a `PlayMode`."""

    play: PlayMode
    tasks: int
    wrong: list[str]
    """`task: expected and actual result`."""


def play_all(
    dataset: str, columns: dict[str, str], limit: int | None, sandbox: Mapping[str, Any]
) -> Iterator[PlayResult]:
    """PlayMode every verified task in every mode, through the real pipeline. Prints progress to
    stderr.

    Args:
        sandbox: the section of the configuration.

    Raises: SandboxStartError, UserError.
    """
    rows = [
        row
        for row in mapped_rows(dataset, columns=columns, limit=limit, skip_unreadable=True)
        if (row.get("verify") is not None or row.get("score") is not None) and not _is_judged(row)
    ]
    _build_images(dataset, limit, str(sandbox.get("backend", "")))
    with tempfile.TemporaryDirectory(prefix="hermes-rl-check-") as scratch:
        for number, play in enumerate(play_modes(sandbox)):
            out = Path(scratch) / str(number)
            chosen = [r for r in rows if _plays(play, r)]
            if chosen or not (play.answers or play.scripts):
                yield _play(chosen, play, out)


def _is_judged(row: Mapping[str, Any]) -> bool:
    """Whether a model must judge it, which costs money."""
    score = row.get("score") or ()
    return any(s["type"] == "judge" for s in ([score] if isinstance(score, Mapping) else score))


def _plays(play: PlayMode, row: Mapping[str, Any]) -> bool:
    """Whether a row is played in a mode."""
    if play.answers:
        return row.get("score") is not None
    if play.scripts:
        return row.get("verify") is not None
    return play.name != "oracle" or bool(row.get("oracle"))


def _build_images(dataset: str, limit: int | None, backend: str) -> None:
    """Build missing images of task folders. Tasks report failed builds."""
    path = Path(dataset).expanduser()
    if not path.is_dir():
        return
    from hermes_rl.cli.images_command import build_all
    from hermes_rl.sandboxes import ImageBuilds, image_taker, missing_images
    from hermes_rl.task_folders import build_contexts

    taker = image_taker(backend)
    missing = missing_images(build_contexts(path, limit), taker)
    build_all(ImageBuilds(missing, taker=taker), sys.stderr)


def _play(rows: list[dict[str, Any]], play: PlayMode, out: Path) -> PlayResult:
    if not rows:
        return PlayResult(play, 0, [])
    played = _with_answers(rows) if play.answers else _with_scripts(rows, play.scripts)
    wrong = _play_and_compare(played, play, out)
    if play.scripts and wrong:
        # PlayMode each cheat alone on the tasks that a bundle of cheats passed.
        suspects = [r for r in rows if any(w.startswith(f"{r.get('id')} (") for w in wrong)]
        alone = _with_scripts(suspects, CHEATS) if suspects else []
        wrong = (_play_and_compare(alone, play, out / "alone") if alone else []) or wrong
    if play.name == "oracle" and wrong:
        wrong = _add_hints(rows, wrong, play, out)
    return PlayResult(play, len(rows), wrong)


def _with_scripts(rows: list[dict[str, Any]], scripts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every row with every script as its oracle and in its id; the rows without scripts."""
    if not scripts:
        return rows
    return [
        {**row, "id": f"{row.get('id', number)} ({name})", "oracle": script}
        for number, row in enumerate(rows)
        for name, script in scripts.items()
    ]


def _with_answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every forged answer as its oracle and in its id."""
    return [
        {**row, "id": f"{row.get('id', number)} ({name})", "oracle": json.dumps([answer])}
        for number, row in enumerate(rows)
        for name, answer in answer_cheats(row).items()
    ]


def _play_and_compare(rows: list[dict[str, Any]], play: PlayMode, out: Path) -> list[str]:
    rewards = _run(rows, play, out)
    return [
        f"{task}: {why or f'reward {reward}, wanted {play.wanted}'}"
        for task, (reward, why) in rewards.items()
        if reward != play.wanted
    ]


def _run(
    rows: list[dict[str, Any]], play: PlayMode, out: Path
) -> dict[str, tuple[float | None, str | None]]:
    """Task -> (reward, error), over one run of the batch runner.

    Raises: KeyboardInterrupt, UserError: the run stopped early, and the results are incomplete.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tasks.jsonl"
    with path.open("w") as file:
        for row in rows:
            kept = {
                k: v for k, v in row.items() if k not in ("repeats", "toolsets", "distribution")
            }
            file.write(json.dumps(kept) + "\n")
    config = parse_config(
        {
            "dataset": {"path": str(path)},
            "model": {"name": play.model},
            "agent": {"toolsets": ["terminal"]},
            "sandbox": dict(play.sandbox),
            "run": {"out": str(out / "run"), "workers": 0, "concurrency": 8, "max_attempts": 1},
        }
    )
    from batch_runner import default_progress, run_batch
    from hermes_rl.store import load_run

    progress = default_progress()
    progress.note(f"{play.name}: {len(rows):,} rollouts")
    report = run_batch(config, progress=progress)
    if report.exit_code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if report.stopped is not None:
        raise UserError(f"{play.name}: stopped before all tasks were played: {report.stopped}")
    run = load_run(out / "run")
    rewards: dict[str, tuple[float | None, str | None]] = {}
    for table in ("failures", "trajectories"):
        for row in run.arrow(table).to_pylist():
            rewards[row["task_id"]] = (row["reward"], row["error"])
    return rewards


def _add_hints(
    rows: list[dict[str, Any]], wrong: list[str], play: PlayMode, out: Path
) -> list[str]:
    """Add a hint to failing oracles whose verifier passes in the sandbox of the agent."""
    failing = {line.partition(":")[0] for line in wrong}
    suspects = [r for r in rows if str(r.get("id")) in failing and isinstance(r.get("verify"), str)]
    if not suspects:
        return wrong
    replayed = [
        {**r, "oracle": _verify_in_session(r), "verify": 'test -e "$WORKSPACE/.passed"'}
        for r in suspects
    ]
    again = replace(play, name="oracle, verified in the agent's sandbox")
    rewards = _run(replayed, again, out / "again")
    hint = (
        " (it passes in the agent's sandbox: /tmp and services do not reach the verifier's sandbox)"
    )
    return [
        line + hint if rewards.get(line.partition(":")[0], (0.0, None))[0] == 1.0 else line
        for line in wrong
    ]


def _verify_in_session(row: dict[str, Any]) -> str:
    """A script with the oracle and then the verifier in its sandbox, whose home is the
    workspace."""
    verified = f"(cd / && bash -c {shlex.quote(row['verify'])})"
    return f'export WORKSPACE=~\n{row["oracle"]}\n{verified} && touch "$WORKSPACE/.passed"'
