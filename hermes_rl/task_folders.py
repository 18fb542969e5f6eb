"""Task folders: the form in which terminal tasks are published (harbor, and Terminal-Bench 1).

    my-task/                        Terminal-Bench 1:
      task.toml                       task.yaml
      instruction.md                  (in task.yaml)
      environment/Dockerfile          Dockerfile, docker-compose.yaml with one service
      tests/test.sh                   run-tests.sh, tests/
      solution/solve.sh (optional)    solution.sh or solution.yaml (optional)

A folder becomes a row as a JSONL file would hold it. The row names its image by the digest of the
build context (`task:<digest>`), so that the row is the same on each machine; `build_contexts` says
which folder to build for it. The tests are files of the verifier: the agent never sees them.

Formats: https://harborframework.com/docs/tasks (schema 1.4) and task-difference, 2026-11.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import shlex
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.errors import TaskFault
from hermes_rl.tasks import FIELDS

IMAGE_PREFIX = "task:"
"""What names of images that are built from a task's folder begin with."""

_HARBOR, _TERMINAL_BENCH = "task.toml", "task.yaml"
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml")
_NOT_BUILT = {"tests", "run-tests.sh", "solution.sh", "solution.yaml", _TERMINAL_BENCH}
"""What Terminal-Bench 1 keeps beside the Dockerfile, and that images do not need."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_SIZE = re.compile(r"\s*([\d.]+)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_AGENT_S, _TESTS_S = 900.0, 600.0
"""Seconds where a task names none; the latter is harbor's."""


@dataclass(frozen=True)
class BuildContext:
    """A folder from which a task's image is built."""

    image: str
    """The name that rows use."""
    folder: Path
    dockerfile: Path
    timeout_s: float = 600.0

    @property
    def task(self) -> str:
        """The task that it is of, or one of them."""
        folder = self.folder
        return folder.parent.name if folder.name == "environment" else folder.name


def is_task_folder(path: Path) -> bool:
    """Whether a folder is one task."""
    harbor = (path / _HARBOR).is_file() and (path / "instruction.md").is_file()
    return harbor or (path / _TERMINAL_BENCH).is_file()


def task_folders(path: Path) -> list[Path]:
    """The tasks in a folder, in order of their names: the folder itself, or those right below it;
    none in any other folder."""
    if is_task_folder(path):
        return [path]
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and is_task_folder(entry))


def read_rows(path: Path) -> Iterator[tuple[dict[str, Any] | str, str]]:
    """Yield each task as a row, or why it cannot be run here, with its folder."""
    for folder in task_folders(path):
        try:
            yield _row(folder), str(folder)
        except TaskFault as fault:
            yield str(fault), str(folder)


def build_contexts(path: Path, limit: int | None = None) -> dict[str, BuildContext]:
    """The images that the tasks of a folder need and that are built from them, by name.

    Tasks with equal build contexts share one. Tasks that cannot be run here are left out.

    Args:
        limit: only of the first tasks.
    """
    found: dict[str, BuildContext] = {}
    for folder in task_folders(path)[:limit]:
        try:
            context = _task(folder).context()
        except TaskFault:
            continue
        if context is not None:
            found.setdefault(context.image, context)
    return found


def describe_network_requests(path: Path, limit: int | None = None) -> str | None:
    """How many tasks of a folder ask for the network, in one line; None for none, and for what is
    not a folder of tasks.

    In this format a task that does not mention the network has it. Only those that do are counted:
    the others may not need it.

    Args:
        limit: only the first tasks.
    """
    if not path.is_dir():
        return None
    folders = task_folders(path)[:limit]
    asking = [folder.name for folder in folders if _asks_for_network(folder)]
    if not asking:
        return None
    return f"{len(asking):,} of {len(folders):,} tasks ask for the network (first: {asking[0]})"


def _asks_for_network(folder: Path) -> bool:
    try:
        config = tomllib.loads((folder / _HARBOR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    tables = [config.get(name) for name in ("environment", "agent")]
    return any(
        table.get("allow_internet") is True or table.get("network_mode") in ("public", "allowlist")
        for table in tables
        if isinstance(table, dict)
    )


def _row(folder: Path) -> dict[str, Any]:
    task = _task(folder)
    context = task.context()
    described = {k: v for k, v in task.metadata.items() if k not in FIELDS}
    return {
        **described,
        "id": folder.name,
        "prompt": task.instruction,
        "image": task.image if context is None else context.image,
        "limits": {"wall_seconds": task.agent_s, **task.limits},
        "verify": {
            "script": _verifier(task),
            "files": _embedded(task.tests, "tests"),
            "timeout_s": task.tests_s,
            "score": True,
            "mounts": {"/tests": "tests", "/logs/verifier": ""},
        },
        **({"cwd": task.workdir} if task.workdir else {}),
        **({"env_vars": task.env} if task.env else {}),
        **({"oracle": task.oracle} if task.oracle else {}),
    }


@dataclass(frozen=True)
class _Task:
    """What both formats say of a task."""

    instruction: str
    metadata: Mapping[str, Any]
    agent_s: float
    tests: Mapping[str, Path]
    """Files of the verifier, by their path below /tests."""
    test: str
    """The one that is run."""
    tests_s: float
    tests_env: Mapping[str, str]
    build: Path | None
    """The folder with the Dockerfile."""
    left_out: frozenset[str]
    """Entries of that folder that do not belong to the image."""
    image: str | None
    build_s: float = 600.0
    limits: Mapping[str, float] = field(default_factory=dict)
    """What its sandbox may use, as rows have it."""
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the agent's shell."""
    oracle: str | None = None

    def context(self) -> BuildContext | None:
        """What its image is built from; None where it names a published image."""
        if self.build is None:
            return None
        name = IMAGE_PREFIX + _digest(self.build, self.left_out)
        return BuildContext(name, self.build, self.build / "Dockerfile", self.build_s)


def _task(folder: Path) -> _Task:
    """Read a task folder. Raises: TaskFault for what cannot be read or run."""
    try:
        return _harbor(folder) if (folder / _HARBOR).is_file() else _terminal_bench(folder)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise TaskFault(f"the task folder cannot be read: {line}") from error


def _harbor(folder: Path) -> _Task:
    config = tomllib.loads((folder / _HARBOR).read_text(encoding="utf-8"))
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    _refuse("steps (a task of several steps)", config.get("steps"))
    for name, refused in (("GPUs", "gpus"), ("a TPU", "tpu"), ("MCP servers", "mcp_servers")):
        _refuse(f"{name} (environment.{refused})", environment.get(refused))
    _refuse("a healthcheck (environment.healthcheck)", environment.get("healthcheck"))
    _refuse("Windows", environment.get("os", "linux") != "linux")
    mode = verifier.get("environment_mode") == "separate" or verifier.get("environment")
    _refuse("a separate image for the verifier", mode)
    image = environment.get("docker_image")
    build = folder / "environment"
    compose = _compose(build)
    if compose is not None:
        image = image or compose.get("image") if "build" not in compose else None
    if image is None and not (build / "Dockerfile").is_file():
        raise TaskFault("environment/Dockerfile is missing, and no environment.docker_image")
    test = folder / "tests" / "test.sh"
    if not test.is_file():
        raise TaskFault("tests/test.sh is missing")
    env = {
        **_compose_variables(compose or {}),
        **_variables(environment.get("env"), "environment.env"),
    }
    return _Task(
        instruction=(folder / "instruction.md").read_text(encoding="utf-8"),
        metadata={
            **_table(config, "metadata"),
            "environment": {k: v for k, v in environment.items() if k != "env"},
        },
        agent_s=_seconds(_table(config, "agent"), "timeout_sec", _AGENT_S),
        tests=_files(folder / "tests"),
        test="test.sh",
        tests_s=_seconds(verifier, "timeout_sec", _TESTS_S),
        tests_env={**env, **_variables(verifier.get("env"), "verifier.env")},
        build=None if image else build,
        left_out=frozenset(),
        image=image,
        build_s=_seconds(environment, "build_timeout_sec", 600.0),
        limits={**_compose_limits(compose or {}), **_limits(environment)},
        workdir=environment.get("workdir"),
        env=env,
        oracle=_oracle(folder / "solution", config),
    )


def _terminal_bench(folder: Path) -> _Task:
    config = yaml.safe_load((folder / _TERMINAL_BENCH).read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise TaskFault(f"{_TERMINAL_BENCH} has no text 'instruction'")
    compose = _compose(folder)
    if not (folder / "Dockerfile").is_file():
        raise TaskFault("Dockerfile is missing")
    if not (folder / "run-tests.sh").is_file():
        raise TaskFault("run-tests.sh is missing")
    tests = _files(folder / "tests") if (folder / "tests").is_dir() else {}
    env = _compose_variables(compose or {})
    described = ("difficulty", "category", "tags", "author_name", "parser_name")
    return _Task(
        instruction=config["instruction"],
        metadata={k: config[k] for k in described if k in config},
        agent_s=_seconds(config, "max_agent_timeout_sec", _AGENT_S),
        tests={**tests, "run-tests.sh": folder / "run-tests.sh"},
        test="run-tests.sh",
        tests_s=_seconds(config, "max_test_timeout_sec", _TESTS_S),
        tests_env={**env, "TEST_DIR": "/tests"},
        build=folder,
        left_out=frozenset(_NOT_BUILT),
        image=None,
        limits=_compose_limits(compose or {}),
        env=env,
        oracle=_terminal_bench_oracle(folder),
    )


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise TaskFault(f"{_HARBOR}: [{name}] must be a table")
    return value


def _refuse(what: str, wanted: Any) -> None:
    """Raises: TaskFault where a task wants what is not supported."""
    if wanted:
        raise TaskFault(f"the task needs {what}, which is not supported")


def _seconds(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise TaskFault(f"{key} must be a number of seconds above 0")
    return float(value)


def _limits(environment: Mapping[str, Any]) -> dict[str, float]:
    """What a sandbox may use, by the names that rows have. Raises: TaskFault."""
    found: dict[str, float] = {}
    if environment.get("cpus") is not None:
        found["cpus"] = _number(environment["cpus"], "cpus")
    for name in ("memory", "storage"):
        if environment.get(f"{name}_mb") is not None:
            found[f"{name}_bytes"] = _number(environment[f"{name}_mb"], f"{name}_mb") * (1 << 20)
        elif environment.get(name) is not None:
            found[f"{name}_bytes"] = _size(environment[name], name)
    return found


def _compose_limits(service: Mapping[str, Any]) -> dict[str, float]:
    """The same of a service in a compose file. Raises: TaskFault."""
    deploy = service.get("deploy") or {}
    form = ((deploy.get("resources") or {}).get("limits") or {}) if isinstance(deploy, dict) else {}
    found: dict[str, float] = {}
    cpus, memory = form.get("cpus", service.get("cpus")), form.get("memory")
    memory = service.get("mem_limit") if memory is None else memory
    if cpus is not None:
        found["cpus"] = _number(_default(cpus, "cpus"), "cpus")
    if memory is not None:
        found["memory_bytes"] = _size(_default(memory, "memory"), "memory")
    return found


def _compose_variables(service: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of a service in a compose file. Raises: TaskFault."""
    listed = service.get("environment") or {}
    if isinstance(listed, list):  # its other form: `NAME=value`, or `NAME` of the machine
        listed = {
            name: value if is_set else f"${{{name}}}"
            for name, is_set, value in (str(item).partition("=") for item in listed)
        }
    return _variables(listed, "environment of the compose file")


def _default(value: Any, where: str) -> Any:
    """A value of a compose file, with the defaults of its variables."""
    return _variables({where: value}, where)[where] if isinstance(value, str) else value


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise TaskFault(f"{name} must be a number above 0, not {value!r:.40}")
    return number


def _size(value: Any, name: str) -> float:
    """Bytes: a number of them, or a text such as `2G`, `512mb` or `1.5GiB`. Raises: TaskFault."""
    found = _SIZE.fullmatch(str(value))
    if found is None or isinstance(value, bool):
        raise TaskFault(f"{name} must be a size such as 2G, not {value!r:.40}")
    return _number(found[1], name) * (1 << 10 * " kmgt".index(found[2].lower() or " "))


def _variables(value: Any, where: str) -> dict[str, str]:
    """Environment variables; `${NAME:-default}` takes its default. Raises: TaskFault."""
    if not isinstance(value or {}, dict):
        raise TaskFault(f"{where} must be a table of names and texts")

    def default(found: re.Match[str]) -> str:
        if found[2] is None:
            raise TaskFault(
                f"{where} takes {found[1]} from the machine's environment, which is not supported: "
                "it may be a secret, and rows are recorded"
            )
        return found[2]

    return {str(k): _VARIABLE.sub(default, str(v)) for k, v in (value or {}).items()}


def _compose(folder: Path) -> dict[str, Any] | None:
    """The one service of a compose file, where there is one. Raises: TaskFault for several."""
    path = next((folder / name for name in _COMPOSE if (folder / name).is_file()), None)
    if path is None:
        return None
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    services = form.get("services") if isinstance(form, dict) else None
    if not isinstance(services, dict) or not services:
        raise TaskFault(f"{path.name} names no services")
    _refuse(f"{len(services)} services ({', '.join(services)})", len(services) > 1)
    (service,) = services.values()
    return service if isinstance(service, dict) else {}


def _files(folder: Path) -> dict[str, Path]:
    """The regular files below a folder, by relative path. Raises: TaskFault for links out of it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TaskFault(f"{path.name} in {folder.name}/ is a link to a file outside the folder")
        found[path.relative_to(folder).as_posix()] = path
    return found


def _embedded(files: Mapping[str, Path], prefix: str) -> dict[str, Any]:
    """Contents of files as rows hold them."""
    made: dict[str, Any] = {}
    for name, path in files.items():
        data = path.read_bytes()
        try:
            made[f"{prefix}/{name}"] = data.decode("utf-8")
        except UnicodeDecodeError:
            made[f"{prefix}/{name}"] = {"base64": base64.b64encode(data).decode()}
    return made


def _digest(folder: Path, left_out: frozenset[str]) -> str:
    """A digest of a build context: names, contents, links and which files are executable."""
    state = hashlib.sha256()
    for parent, names, files in os.walk(folder):
        if Path(parent) == folder:
            names[:] = [name for name in names if name not in left_out]
            files = [name for name in files if name not in left_out]
        names.sort()
        links = [name for name in names if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*files, *links]):
            path = Path(parent, name)
            link = path.is_symlink()
            data = os.readlink(path).encode() if link else path.read_bytes()
            executable = not link and bool(path.stat().st_mode & 0o100)
            head = (path.relative_to(folder).as_posix(), link, executable, len(data))
            state.update(repr(head).encode("utf-8", "surrogateescape") + data)
    return state.hexdigest()[:32]


def _exports(variables: Mapping[str, str]) -> str:
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    return "".join(lines)


_VERIFIER = """\
{exports}cd -- {workdir} || cd /
/tests/{test} 3>&-
code=$?
if [ -f /logs/verifier/reward.json ]; then
    IFS= read -r -d '' rewards </logs/verifier/reward.json
    printf 'rewards=%s\\n' "${{rewards//$'\\n'/ }}" >&3
elif [ -f /logs/verifier/reward.txt ]; then
    read -r reward </logs/verifier/reward.txt
    printf 'reward=%s\\n' "$reward" >&3
elif [ "$code" = 0 ]; then
    printf 'reward=1\\n' >&3
else
    printf 'reward=0\\n' >&3
fi
"""
"""Only the shell's builtins: what the agent left on PATH decides nothing here. What it changed may
still deceive the test itself, as with every runner of this format."""


def _verifier(task: _Task) -> str:
    workdir = shlex.quote(task.workdir) if task.workdir else '"${WORKDIR:-/}"'
    return _VERIFIER.format(test=task.test, exports=_exports(task.tests_env), workdir=workdir)


def _oracle(solution: Path, config: Mapping[str, Any]) -> str | None:
    """A script that does what `solution/solve.sh` does, with the files beside it in /solution."""
    if not (solution / "solve.sh").is_file():
        return None
    env = _variables(_table(config, "solution").get("env"), "solution.env")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(solution, arcname=".")
    text = base64.encodebytes(packed.getvalue()).decode()
    return (
        f"{_exports(env)}mkdir -p /solution\nbase64 -d <<'END' | tar -xz -C /solution\n{text}END\n"
        "bash /solution/solve.sh\n"
    )


def _terminal_bench_oracle(folder: Path) -> str | None:
    if (folder / "solution.sh").is_file():
        return (folder / "solution.sh").read_text(encoding="utf-8")
    if not (folder / "solution.yaml").is_file():
        return None
    steps = yaml.safe_load((folder / "solution.yaml").read_text(encoding="utf-8"))
    if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps):
        raise TaskFault("solution.yaml must be a list of commands")
    return "".join(f"{step['command']}\n" for step in steps if "command" in step)
