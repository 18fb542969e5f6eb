"""Export the tasks of a dataset as task folders, which harbor and `hermes-rl run` read.

    OUT/NAME/task.toml            limits, and the row's other columns as metadata
    OUT/NAME/instruction.md       the prompt
    OUT/NAME/environment/         Dockerfile, the row's files, its setup
    OUT/NAME/tests/               test.sh runs the verifier and writes the reward
    OUT/NAME/solution/solve.sh    the oracle, if there is one

Format: https://harborframework.com/docs/tasks (schema 1.1).
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.errors import TaskFault, UserError
from hermes_rl.messages import UserMessage, text_of
from hermes_rl.sources import read_tasks
from hermes_rl.tasks import Task, Verify

NAME = "harbor-tasks"
ABOUT = "task folders (harbor) of a dataset's tasks; takes a dataset in place of a run"
IMAGE = "ubuntu:24.04"
"""Base image of tasks that name none."""
_AGENT_S = 900.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED = re.compile(r"[\x7f-\x9f]")


@dataclass
class TaskExport:
    """The result of an export of tasks."""

    out: Path
    written: int = 0
    left_out: list[str] = field(default_factory=list)
    """`PLACE: WHY` of each row that these folders cannot hold."""


def export_tasks(dataset: str, out: Path, image: str = IMAGE) -> TaskExport:
    """Write each task of a dataset as a folder.

    Args:
        dataset: as for a run.
        out: a new or empty folder.
        image: what tasks without an image are built from.

    Raises: UserError for a dataset that cannot be read, or a folder that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: not an empty folder. Name a new one")
    report = TaskExport(out)
    names: set[str] = set()
    for row in read_tasks(dataset):
        try:
            if row.task is None:
                raise TaskFault(row.error or "the row cannot be read")
            files = _files(row.task, image)
        except TaskFault as fault:
            report.left_out.append(f"{row.place}: {fault}")
            continue
        name = _UNSAFE.sub("-", row.task.id).strip("-.")[:80] or "task"
        while name in names:
            name = f"{name}-{row.index}"
        names.add(name)
        for path, data in files.items():
            target = out / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if path.endswith(".sh"):
                target.chmod(0o755)
        report.written += 1
    return report


def _files(task: Task, image: str) -> dict[str, bytes]:
    """Return the files of a task folder. Raises: TaskFault for unsupported tasks."""
    (message, *more) = task.prompt
    if more or not isinstance(message, UserMessage) or not isinstance(message.content, str):
        raise TaskFault("the prompt is more than one text")
    if task.verify is None:
        raise TaskFault("no 'verify'")
    if task.verify.image is not None:
        raise TaskFault("'verify.image': the tests of a task folder run in the agent's image")
    if task.verify.mounts:
        raise TaskFault("'verify.mounts': the tests of a task folder are at /tests")
    texts = {
        "task.toml": _settings(task),
        "instruction.md": text_of(message),
        "environment/Dockerfile": _dockerfile(task, image),
        "tests/test.sh": _test(task.verify),
        "tests/verify.sh": task.verify.script.replace("/verify", "/tests/verify"),
    }
    if task.setup:
        texts["environment/setup.sh"] = task.setup
    if task.oracle:
        texts["solution/solve.sh"] = (
            f"#!/bin/bash\ncd {shlex.quote(_workdir(task))} || exit\n{task.oracle}\n"
        )
    found = {name: text.encode("utf-8", "replace") for name, text in texts.items()}
    found |= {f"environment/files/{path}": data for path, data in task.files.items()}
    return found | {f"tests/verify/{path}": data for path, data in task.verify.files.items()}


def _workdir(task: Task) -> str:
    return posixpath.normpath(posixpath.join("/workspace", task.cwd or ""))


def _dockerfile(task: Task, image: str) -> str:
    lines = [f"FROM {task.image or image}"]
    if task.requires:
        programs = " ".join(map(shlex.quote, task.requires))
        lines.append(f"RUN for p in {programs}; do command -v $p || exit 1; done")
    lines.append("WORKDIR /workspace")
    if task.files:
        lines.append("COPY files/ /workspace/")
    if task.setup:
        lines += ["COPY setup.sh /setup.sh", "RUN bash /setup.sh && rm /setup.sh"]
    if task.cwd:
        lines.append(f"WORKDIR {_workdir(task)}")
    return "\n".join(lines) + "\n"


_TEST = """\
#!/bin/bash
# Runs the verifier in an empty folder, as hermes-rl does, and writes the reward.
mkdir -p /logs/verifier
export WORKSPACE=/workspace VERIFY=/tests/verify LC_ALL=C.UTF-8 TZ=UTC PYTHONNOUSERSITE=1
export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
unset BASH_ENV ENV
HOME=$(mktemp -d) && export HOME && cd "$HOME" || exit 1
/bin/bash --norc --noprofile /tests/verify.sh {report}
code=$?
{reward}
"""
_BY_CODE = """\
if [ $code = 0 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt"""
_BY_REPORT = """\
read -r line <"$HOME/.report"
if [ $code -gt 128 ]; then echo 0 >/logs/verifier/reward.txt; exit; fi
case $line in
rewards=*) echo "${line#rewards=}" >/logs/verifier/reward.json ;;
reward=*) echo "${line#reward=}" >/logs/verifier/reward.txt ;;
cannot-judge=*) echo "$line" >&2; exit 1 ;;
*) if [ $code = 0 ]; then exit 1; else echo 0 >/logs/verifier/reward.txt; fi ;;
esac"""


def _test(verify: Verify) -> str:
    report = '3>"$HOME/.report"' if verify.score else ""
    return _TEST.format(report=report, reward=_BY_REPORT if verify.score else _BY_CODE)


def _settings(task: Task) -> str:
    limits, verify = task.limits, task.verify
    assert verify is not None
    environment: dict[str, Any] = {"workdir": _workdir(task)}
    if "cpus" in limits:
        environment["cpus"] = limits["cpus"]
    for name in ("memory", "storage"):
        if f"{name}_bytes" in limits:
            environment[f"{name}_mb"] = max(1, int(limits[f"{name}_bytes"]) >> 20)
    described = {**task.metadata, "id": task.id}
    if task.system:
        described["system"] = task.system
    agent_s = limits.get("wall_seconds", limits.get("max_seconds", _AGENT_S))
    tables = {
        "metadata": described,
        "agent": {"timeout_sec": float(agent_s)},
        "verifier": {"timeout_sec": float(verify.timeout_s)},
        "environment": environment,
        **({"environment.env": task.env_vars} if task.env_vars else {}),
    }
    lines = ['schema_version = "1.1"']
    for name, values in tables.items():
        lines += ["", f"[{name}]"]
        lines += [
            f"{k if _BARE.fullmatch(k) else _text(k)} = {_value(v)}"
            for k, v in values.items()
            if v is not None
        ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Encode a value as TOML; values that TOML lacks become JSON text."""
    if isinstance(value, bool | int | float):
        return json.dumps(value) if not isinstance(value, float) else repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return f"[{', '.join(map(_text, value))}]"
    return _text(json.dumps(value, ensure_ascii=False, default=str))


def _text(value: str) -> str:
    """Encode text as TOML: JSON, with the control characters that TOML also escapes."""
    encoded = json.dumps(value.encode("utf-8", "replace").decode(), ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)
