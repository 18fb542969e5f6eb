"""Tasks: one row of a dataset each, read lazily from every input of DESIGN 5.1.

`read_tasks` yields a `TaskRow` per row, good or bad: a bad row becomes a failed unit with cause
`task` and never stops the run.

`lazy_rows` finds the identity of rows without making a `Task`: a resume asks a million rows for it
and runs a few of them. A line of JSON is decoded with its floats in canonical form and encoded
again with sorted keys. Unusual rows take the long way through `parse_row`, whose hash is the same
by definition.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from hermes_rl.errors import TaskFault
from hermes_rl.identity import canonical, canonical_float, digest, encoded_digest
from hermes_rl.messages import (
    TOOL_NAME,
    Message,
    UserMessage,
    check_prompt,
    conversation_from_openai,
    text_of,
)
from hermes_rl.scorers import Scorer, parse_scores

_TEXTS = ("system", "image", "cwd", "setup", "oracle", "distribution")
_LISTS = ("requires", "toolsets")
_SCRIPTS = ("setup", "oracle")

FIELDS = frozenset(
    ("id", "prompt", "files", "verify", "score", "limits", "repeats", "env_vars", "answer_tools")
).union(_TEXTS, _LISTS)
"""The columns of a task row with a defined meaning; all others are in `metadata`."""

RawRow = Mapping[str, Any] | bytes | str
"""A row of a source: decoded, a line of JSON, or an error."""

Columns = Mapping[str, str]
"""Column names of hermes_rl -> those of the dataset."""

_TOOL_KEYS = ("name", "description", "parameters")
_VERIFY_KEYS = ("script", "files", "timeout_s", "image", "score", "mounts")
_WHOLE_LIMITS = ("max_turns", "max_tokens")
LEAST_MEMORY, LEAST_STORAGE = 32 << 20, 1 << 20
"""Minimum bytes of a sandbox and its storage."""
_LEAST = {"cpus": 0.01, "memory_bytes": LEAST_MEMORY, "storage_bytes": LEAST_STORAGE}
_LIMIT_KEYS = (*_WHOLE_LIMITS, "max_seconds", "wall_seconds", *_LEAST)

DEFAULT_VERIFY_TIMEOUT_S = 120.0
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """Computes the reward from the final state of a rollout."""

    script: str
    files: dict[str, bytes] = {}
    timeout_s: float = DEFAULT_VERIFY_TIMEOUT_S
    image: str | None = None
    score: bool = False
    """Descriptor 3 takes one line: `reward=<float>`, `rewards=<object of numbers>` or
    `cannot-judge=<why>`."""
    mounts: dict[str, str] = {}
    """Absolute path in the grading sandbox -> folder of `files` that is shown there, writable; the
    empty text is an empty folder. What the agent left at such a path is hidden."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task, normalised."""

    id: str
    prompt: tuple[Message, ...]
    system: str | None = None
    image: str | None = None
    cwd: str | None = None
    env_vars: dict[str, str] = {}
    """Environment variables of the agent's shell and of `setup`. Not of the verifier."""
    files: dict[str, bytes] = {}
    setup: str | None = None
    verify: Verify | None = None
    score: tuple[Scorer, ...] = ()
    """Judge the final answer; with `verify` both count."""
    oracle: str | None = None
    """Never shown to the agent."""
    requires: tuple[str, ...] = ()
    toolsets: tuple[str, ...] | None = None
    answer_tools: tuple[dict[str, Any], ...] = ()
    """Tools with which the model answers: `name`, `description` and `parameters` of each."""
    distribution: str | None = None
    limits: dict[str, float] = {}
    repeats: int | None = None
    metadata: dict[str, Any] = {}

    @property
    def prompt_text(self) -> str:
        """The last user text."""
        users = [m for m in self.prompt if isinstance(m, UserMessage)]
        return text_of(users[-1]) if users else ""


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a task, or the error."""

    index: int
    """0-based position in the dataset."""
    place: str
    """Its place, such as `my.jsonl:17`."""
    task_hash: str
    task: Task | None = None
    error: str | None = None
    raw_id: str = ""
    """The row's own id, also for a bad row; the content hash's start without one."""
    repeats: int | None = None


def parse_row(row: Mapping[str, Any], index: int, place: str) -> TaskRow:
    """A task from a row, after columns were renamed; never raises for a bad row.

    The hash covers the whole row as given, unknown columns and `verify` included, `oracle` and
    `repeats`
    not. Columns whose value is None count as absent, so that Parquet and JSONL give one hash.
    """
    values = {k: v for k, v in row.items() if v is not None}
    place = _sayable(place)
    try:
        try:
            task_hash = digest(_hashed(values))
        except TypeError:  # dates and the like, as Parquet has them
            values = {k: _json_form(v, k) for k, v in values.items()}
            task_hash = digest(_hashed(values))
    except (TaskFault, TypeError, ValueError, RecursionError) as error:
        fallback = digest({"bad row": repr(sorted(map(str, values))), "why": str(error)})
        return TaskRow(index=index, place=place, task_hash=fallback, error=_sayable(str(error)))
    raw_id = _sayable(_id(values) or task_hash[:12])
    base = TaskRow(index=index, place=place, task_hash=task_hash, raw_id=raw_id)
    try:
        task = _task(values, raw_id)
        _check_holdable(values)
    except TaskFault as error:
        return msgspec.structs.replace(base, error=_sayable(str(error)))
    return msgspec.structs.replace(base, task=task, repeats=task.repeats)


def _hashed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in ("oracle", "repeats")}


def _json_form(value: Any, column: str) -> Any:
    """A value as JSON has it: dates as ISO text, decimals as text, bytes as `{"base64": ...}`.

    Raises: TaskFault for what has no such form (a decoded picture, a set).
    """
    match value:
        case dict():
            return {str(k): _json_form(v, column) for k, v in value.items()}
        case list() | tuple():
            return [_json_form(v, column) for v in value]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal() | uuid.UUID():
            return str(value)
        case bytes():
            return {"base64": base64.b64encode(value).decode()}
        case str() | bool() | int() | float() | None:
            return value
    kind = type(value).__name__
    raise TaskFault(
        f"column '{column}' holds a {kind}, which is not JSON-serializable; drop or convert it"
    )


def _id(row: Mapping[str, Any]) -> str:
    """The row's own id, a number too; empty without one."""
    raw = canonical(row.get("id", ""))
    return "" if isinstance(raw, bool | dict | list) else str(raw)


def _sayable(text: str) -> str:
    """Text that can be stored and shown: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode()


def _check_holdable(row: Mapping[str, Any]) -> None:
    """Raises: TaskFault for a value that can neither be sent nor stored."""
    for name, value in row.items():
        try:
            msgspec.msgpack.encode({name: value})
        except UnicodeEncodeError:
            raise TaskFault(f"'{name}' is not valid Unicode text (lone surrogates)") from None
        except OverflowError:
            raise TaskFault(f"'{name}' holds a whole number of more than 64 bits") from None


def _task(row: Mapping[str, Any], task_id: str) -> Task:
    _check_types(row)
    # A number called `score` comes from datasets with ratings; it judges nothing.
    rated = isinstance(row.get("score"), int | float)
    metadata = {
        k: canonical(v) for k, v in row.items() if k not in FIELDS or (k == "score" and rated)
    }
    alone = ("none",) if row.get("answer_tools") and "distribution" not in row else None
    return Task(
        id=task_id,
        prompt=_prompt(row),
        system=row.get("system"),
        image=row.get("image"),
        cwd=row.get("cwd"),
        env_vars=_env_vars(row.get("env_vars", {})),
        files=_files(row.get("files"), "files"),
        setup=row.get("setup"),
        verify=_verify(row.get("verify")),
        score=parse_scores(row["score"]) if "score" in row and not rated else (),
        oracle=row.get("oracle"),
        requires=tuple(row.get("requires", ())),
        toolsets=tuple(row["toolsets"]) if "toolsets" in row else alone,
        answer_tools=_answer_tools(row.get("answer_tools", ())),
        distribution=row.get("distribution"),
        limits=_limits(row.get("limits", {})),
        repeats=canonical(row["repeats"]) if "repeats" in row else None,
        metadata=metadata,
    )


def _check_types(row: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        if name in row and not isinstance(row[name], str):
            raise TaskFault(f"'{name}' must be text, not {type(row[name]).__name__}")
    for name in _LISTS:
        value = row.get(name, [])
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise TaskFault(f"'{name}' must be a list of texts")
    for name in _SCRIPTS:
        if "\0" in row.get(name, ""):
            raise TaskFault(f"'{name}' holds a NUL byte")
    if "id" in row and not isinstance(row["id"], str) and not _id(row):
        raise TaskFault(f"'id' must be text or a number, not {type(row['id']).__name__}")
    repeats = row.get("repeats", 1)
    if isinstance(repeats, float) and repeats.is_integer():
        repeats = canonical(repeats)
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise TaskFault("'repeats' must be a whole number of 1 or more")


def _prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if "prompt" not in row:
        found = ", ".join(list(map(str, row))[:8]) or "nothing"
        raise TaskFault(f"no column 'prompt' (found: {found}). Try --map prompt=COLUMN")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise TaskFault("'prompt' is empty")
        return (UserMessage(content=prompt),)
    if not isinstance(prompt, list | tuple) or not prompt:
        raise TaskFault("'prompt' must be text or a list of messages")
    if not all(isinstance(m, Mapping) for m in prompt):
        raise TaskFault("'prompt' must be text or a list of {role, content} messages")
    try:
        messages = tuple(conversation_from_openai(_without_nulls(m) for m in prompt))
        check_prompt(messages)
    except ValueError as error:
        raise TaskFault(f"'prompt': {error}") from error
    return messages


def _without_nulls(form: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in form.items() if v is not None}


def _files(value: Any, where: str) -> dict[str, bytes]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TaskFault(f"'{where}' must be an object of path and content")
    files = {
        _path(p, where): _content(v, f"{where}.{p}") for p, v in value.items() if v is not None
    }
    for path in files:
        if above := next((str(p) for p in PurePosixPath(path).parents if str(p) in files), None):
            raise TaskFault(f"'{where}' holds {above!r} as a file and as the folder of {path!r}")
    return files


def _path(path: Any, where: str) -> str:
    text = str(path)
    parts = text.split("/")
    if parts[-1] in ("", ".") or parts[0] == "" or "\0" in text or ".." in parts:
        raise TaskFault(f"'{where}' holds the path {text!r}: use a path inside the workspace")
    return text


def _content(value: Any, where: str) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, Mapping) and isinstance(value.get("base64"), str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except ValueError as error:
            raise TaskFault(f"'{where}' is not valid base64") from error
    raise TaskFault(f"'{where}' must be text or {{\"base64\": ...}}")


def _verify(value: Any) -> Verify | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = {"script": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("script"), str):
        raise TaskFault("'verify' must be a script, or an object with 'script'")
    fields = _without_nulls(value)
    unknown = [k for k in fields if k not in _VERIFY_KEYS]
    if unknown:
        raise TaskFault(f"'verify' has the unknown key {unknown[0]!r} (known: {_VERIFY_KEYS})")
    if "\0" in fields["script"]:
        raise TaskFault("'verify' holds a NUL byte")
    if not isinstance(fields.get("image", ""), str):
        raise TaskFault("'verify.image' must be text")
    timeout = fields.get("timeout_s", DEFAULT_VERIFY_TIMEOUT_S)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise TaskFault("'verify.timeout_s' must be a number of seconds above 0")
    if not isinstance(fields.get("score", False), bool):
        raise TaskFault("'verify.score' must be true or false")
    mounts = fields.get("mounts", {})
    if not isinstance(mounts, Mapping) or not all(map(_is_mount, mounts.items())):
        raise TaskFault("'verify.mounts' must be an object of absolute paths and relative folders")
    return Verify(
        script=fields["script"],
        files=_files(fields.get("files"), "verify.files"),
        timeout_s=float(timeout),
        image=fields.get("image"),
        score=fields.get("score", False),
        mounts=dict(mounts),
    )


def _is_mount(mount: tuple[Any, Any]) -> bool:
    """Whether it is an absolute path, and a folder of `files` or the empty text.

    An absolute folder would name one of this machine."""
    place, folder = mount
    if not isinstance(place, str) or not isinstance(folder, str) or "\0" in place + folder:
        return False
    if not place.startswith("/") or folder.startswith("/") or ".." in folder:
        return False
    return not any(part in ("..", "") for part in place[1:].split("/"))


def _env_vars(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TaskFault("'env_vars' must be an object of names and texts")
    variables = _without_nulls(value)
    for name, text in variables.items():
        if not _VARIABLE_NAME.fullmatch(str(name)):
            raise TaskFault(f"'env_vars' has {name!r}, which is not the name of a variable")
        if not isinstance(text, str) or "\0" in text:
            raise TaskFault(f"'env_vars.{name}' must be text without NUL bytes")
    return variables


def _answer_tools(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(form, Mapping) for form in value):
        raise TaskFault(f"'answer_tools' must be a list of objects with {', '.join(_TOOL_KEYS)}")
    names: set[str] = set()
    for number, form in enumerate(value):
        where, name = f"'answer_tools.{number}", form.get("name")
        if unknown := [key for key in form if key not in _TOOL_KEYS]:
            raise TaskFault(f"{where}' has the unknown key {unknown[0]!r} (known: {_TOOL_KEYS})")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise TaskFault(f"{where}.name' must match {TOOL_NAME.pattern}, not {name!r}")
        if name in names:
            raise TaskFault(f"{where}.name': {name!r} is the name of another one")
        if not isinstance(form.get("description", ""), str):
            raise TaskFault(f"{where}.description' must be text")
        if not isinstance(form.get("parameters"), Mapping):
            raise TaskFault(f"{where}.parameters' must be a JSON schema of the arguments")
        names.add(name)
    return tuple({str(k): v for k, v in form.items()} for form in value)


def _limits(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TaskFault("'limits' must be an object")
    for name, number in _without_nulls(value).items():
        if name not in _LIMIT_KEYS:
            known = ", ".join(_LIMIT_KEYS)
            raise TaskFault(f"'limits' has the unknown key {name!r} (known: {known})")
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            raise TaskFault(f"'limits.{name}' must be a number above 0")
        if name in _WHOLE_LIMITS and number < 1:
            raise TaskFault(f"'limits.{name}' must be 1 or more")
        if number < _LEAST.get(name, 0) or not math.isfinite(number):
            raise TaskFault(f"'limits.{name}' must be {_LEAST.get(name, 0):,} or more, and finite")
    return {k: float(v) for k, v in _without_nulls(value).items()}


def decoded(line: bytes) -> dict[str, Any] | str:
    """The row in a line of JSON, or the error."""
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
    except DuplicateKey as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    return row if isinstance(row, dict) else "a row must be a JSON object"


class DuplicateKey(ValueError):
    """An object of a row has a key twice: a reader would silently drop one of the values."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises: DuplicateKey."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in made if names.count(name) > 1)
        raise DuplicateKey(f"duplicate key {repeated!r}. Remove one of the two")
    return made


def renamed(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Rename the columns of a row by `columns` (name of hermes_rl -> name in the dataset).

    What had a name of ours before has it no longer: it is not what the mapping means.
    """
    if not columns:
        return {str(k): v for k, v in row.items()}
    mapped = set(columns.values())
    named = {str(k): v for k, v in row.items()}
    rest = {k: v for k, v in named.items() if k not in mapped and k not in columns}
    return {
        **rest,
        **{key: named[name] for key, name in columns.items() if name in named},
    }


def task_row(raw: RawRow, index: int, place: str, columns: Columns) -> TaskRow:
    """A task from a row of a source; never raises for a bad row."""
    row = decoded(raw) if isinstance(raw, bytes) else raw
    if isinstance(row, str):
        found = _quick_identity(raw, columns)  # of an object with a duplicate key
        name = found[0] if found else digest({"bad row": row, "place": place})
        return TaskRow(index=index, place=place, task_hash=name, error=row, raw_id=name[:12])
    return parse_row(renamed(row, columns), index, place)


_decode = msgspec.json.Decoder(dict, float_hook=lambda t: canonical_float(float(t))).decode


class LazyRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row, with the identity that its `TaskRow` will have."""

    index: int
    """0-based position in the dataset."""
    place: str
    """Its place, for messages."""
    task_hash: str
    repeats: int | None
    """Repeats of the row, if set; only with `quick`."""
    quick: bool
    """False when the row was parsed already, or only the hash is reliable."""
    raw: RawRow
    columns: Columns

    def parse(self) -> TaskRow:
        """The task, or the error."""
        return task_row(self.raw, self.index, self.place, self.columns)


def lazy_rows(
    rows: Iterable[tuple[RawRow, str]], columns: Columns, start: int = 0
) -> Iterator[LazyRow]:
    """Lazy rows from (row, place) pairs; the first has the index `start`."""
    for index, (raw, place) in enumerate(rows, start):
        found = _quick_identity(raw, columns)
        if found is None:
            task_hash, repeats = task_row(raw, index, place, columns).task_hash, None
        else:
            task_hash, repeats = found
        yield LazyRow(
            index=index,
            place=place,
            task_hash=task_hash,
            repeats=repeats,
            quick=found is not None,
            raw=raw,
            columns=columns,
        )


def _quick_identity(raw: RawRow, columns: Columns) -> tuple[str, int | None] | None:
    """Hash and repeats of a row; None for a row that only `task_row` can judge."""
    if isinstance(raw, str):
        return None
    try:
        from_line = isinstance(raw, bytes)
        row = _decode(raw) if isinstance(raw, bytes) else renamed(raw, columns)
        if from_line and columns:
            row = renamed(row, columns)
        repeats = _take_unhashed(row)
        return encoded_digest(row) if from_line else digest(row), repeats
    except (TaskFault, ValueError, TypeError, OverflowError, RecursionError):
        return None  # msgspec's errors are ValueErrors


def _take_unhashed(row: dict[str, Any]) -> int | None:
    """Remove what the hash does not cover from a row: absent values, the oracle and the repeats.

    Returns the repeats. Raises: TaskFault for what `parse_row` is to judge.
    """
    row.pop("oracle", None)
    value = row.pop("repeats", None)
    if None in row.values():
        for name in [k for k, v in row.items() if v is None]:
            del row[name]
    if value is None:
        return None
    number = canonical(value)
    if type(number) is not int or number < 1:
        raise TaskFault("'repeats' must be a whole number of 1 or more")
    return number
