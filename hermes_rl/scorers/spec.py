"""The column `score` of a task row: which scorers judge the final answer, and their options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from hermes_rl.errors import TaskFault
from hermes_rl.scorers.answers import MAX_CHOICES
from hermes_rl.scorers.code import uses_answer
from hermes_rl.scorers.isolated import formula
from hermes_rl.text import to_json

MAX_NUMBER = 1e100


class Scorer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One scorer of a task."""

    type: str
    name: str
    """Of its part of the reward."""
    weight: float = 1.0
    options: dict[str, Any] = {}

    def compared(self) -> Iterator[str]:
        """What the answer is compared with, one option per line, for people."""
        for name in _COMPARED:
            if name in self.options:
                value = self.options[name]
                if self.type == "math":
                    value = formula(value)
                line = f"{name}: {to_json(value)}"
                yield line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…"


_COMPARED = (
    *("pattern", "target", "tolerance", "relative", "fields", "excludes", "tests", "options"),
)
_LINE_CHARS = 500


class Option(NamedTuple):
    """An option of a scorer."""

    check: Callable[[Any], bool]
    what: str
    required: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= MAX_NUMBER  # false for NaN too


def _is_from_zero(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_numeric(value: Any) -> bool:
    from hermes_rl.scorers.answers import number_of

    return _is_number(value) or (isinstance(value, str) and number_of(value) is not None)


def _is_pattern(value: Any) -> bool:
    try:
        return bool(re.compile(value).pattern)
    except (re.error, TypeError, RecursionError, OverflowError):
        return False


def _is_schema(value: Any) -> bool:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(value)
    except (SchemaError, RecursionError):
        return False
    return isinstance(value, dict) and _has_all_references(value)


def _has_all_references(schema: dict[str, Any]) -> bool:
    """Whether every reference of a schema leads into it: scoring fetches nothing."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    pending: list[tuple[Any, Any]] = [(resolver, schema)]
    seen: set[int] = set()
    while pending:
        resolver, part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        resource = DRAFT202012.create_resource(part)
        resolver = resolver.in_subresource(resource)
        keys = ("$ref", "$dynamicRef") if isinstance(part, dict) else ()
        try:
            found = [resolver.lookup(part[key]) for key in keys if key in part]
        except (Unresolvable, ValueError):
            return False
        pending += [(one.resolver, one.contents) for one in found]
        pending += [(resolver, one.contents) for one in resource.subresources()]
    return True


def _is_scores(value: Any) -> bool:
    """Whether it maps at least two verdicts, which differ by more than case, to scores."""
    if not isinstance(value, Mapping) or not all(map(_is_number, value.values())):
        return False
    names = {str(name).casefold() for name in value} - {"no_commitment"}  # a judge's own verdict
    return len(value) > 1 and len(names) == len(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_python(value: Any) -> bool:
    try:
        compile(value, "tests", "exec")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


_TARGETS = Option(lambda v: _is_text(v) or _is_texts(v), "text, or a list of texts", True)
_TEXTS = Option(lambda v: v == [] or _is_texts(v), "a list of texts")
_FLAG = Option(_is_flag, "true or false")
_FROM_ZERO = Option(_is_from_zero, "a number from 0 on")

OPTIONS: dict[str, dict[str, Option]] = {
    "exact": {"target": _TARGETS, "ignore_case": _FLAG},
    "includes": {"target": _TARGETS, "excludes": _TEXTS, "ignore_case": _FLAG},
    "regex": {
        "pattern": Option(_is_pattern, "a regular expression that is not empty", True),
        "target": Option(_is_text, "text"),
        "ignore_case": _FLAG,
    },
    "choice": {
        "target": Option(_is_text, "a letter, or the text of a choice", True),
        "choices": Option(
            lambda v: _is_texts(v) and len(v) <= MAX_CHOICES, f"at most {MAX_CHOICES} texts"
        ),
    },
    "number": {
        "target": Option(_is_numeric, "a number", True),
        "tolerance": _FROM_ZERO,
        "relative": _FROM_ZERO,
    },
    "json": {
        "schema": Option(_is_schema, "a JSON schema (draft 2020-12) whose references lead into it"),
        "fields": Option(lambda v: isinstance(v, Mapping) and bool(v), "an object"),
        "target": Option(lambda v: v is not None, "a value"),
    },
    "math": {"target": Option(_is_text, "text", True)},
    "code": {
        "tests": Option(_is_python, "Python source", True),
        "setup": Option(_is_python, "Python source"),
        "functions": Option(_is_texts, "a list of names"),
        "timeout_s": Option(lambda v: _is_number(v) and v > 0, "a number of seconds above 0"),
    },
    "judge": {
        "rubric": Option(_is_text, "text", True),
        "target": Option(_is_text, "text"),
        "scores": Option(
            _is_scores, "an object of two or more different verdicts and their scores"
        ),
    },
    "python": {
        "function": Option(_is_text, "the name of a function", True),
        "options": Option(lambda v: isinstance(v, Mapping), "an object"),
    },
}
"""Type of a scorer -> its options."""

_COMMON = ("type", "name", "weight")


def parse_scores(value: Any) -> tuple[Scorer, ...]:
    """Parse the column `score` of a row: an object, or a list of objects.

    Raises: TaskFault that names the key and what it may hold.
    """
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise TaskFault("'score' must be an object with 'type', or a list of such objects")
    made: list[Scorer] = []
    for position, form in enumerate(listed):
        where = "score" if isinstance(value, Mapping) else f"score.{position}"
        scorer = _parse(form, where)
        same = sum(other.name.rpartition("-")[0] == scorer.name for other in made)
        same += any(other.name == scorer.name for other in made)
        if same:
            if "name" in form:
                raise TaskFault(f"'{where}.name': {scorer.name!r} is the name of another scorer")
            scorer = msgspec.structs.replace(scorer, name=f"{scorer.name}-{same + 1}")
        made.append(scorer)
    return tuple(made)


def _parse(form: Any, where: str) -> Scorer:
    if not isinstance(form, Mapping):
        raise TaskFault(f"'{where}' must be an object with 'type'")
    # Parquet gives every object of a column all keys.
    fields = {str(k): v for k, v in form.items() if v is not None}
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in OPTIONS:
        raise TaskFault(f"'{where}.type' is {kind!r} (known: {', '.join(OPTIONS)})")
    name, weight = fields.get("name", kind), fields.get("weight", 1.0)
    if not _is_text(name):
        raise TaskFault(f"'{where}.name' must be text")
    if name == "verify" or not _is_number(weight) or weight <= 0:
        wrong = "name' is that of the verifier" if name == "verify" else "weight' must be above 0"
        raise TaskFault(f"'{where}.{wrong}")
    options = {k: v for k, v in fields.items() if k not in _COMMON}
    known = OPTIONS[kind]
    for key, value in options.items():
        if key not in known:
            raise TaskFault(
                f"'{where}' ({kind}) has the unknown key {key!r} (known: {', '.join(known)})"
            )
        if not known[key].check(value):
            raise TaskFault(f"'{where}.{key}' must be {known[key].what}")
    for key, option in known.items():
        if option.required and key not in options:
            raise TaskFault(f"'{where}' ({kind}) has no '{key}': {option.what}")
    _check_together(kind, options, where)
    return Scorer(type=kind, name=name, weight=float(weight), options=options)


def _check_together(kind: str, options: Mapping[str, Any], where: str) -> None:
    """Check options that depend on each other."""
    from hermes_rl.scorers.answers import letter_of

    if kind == "code" and not uses_answer(options):
        raise TaskFault(f"'{where}.tests' do not use the answer: any code would pass them")
    if kind == "json" and not options:
        raise TaskFault(f"'{where}' (json) needs 'schema', 'fields' or 'target'")
    if kind == "choice" and letter_of(options["target"], options.get("choices", ())) is None:
        raise TaskFault(f"'{where}.target' is neither a letter nor one of the choices")
    if kind == "regex" and "target" in options and re.compile(options["pattern"]).groups > 1:
        raise TaskFault(f"'{where}.pattern' may have one group, whose text is compared")
