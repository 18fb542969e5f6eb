"""How mistakes in what people write are described: unknown names, and values of the wrong kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from hermes_rl.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

Fault = Mapping[str, Any]
"""One of pydantic's errors, as `ValidationError.errors` gives them."""

_SHOWN = 60
"""Characters of a refused value that are repeated."""

_LOOKED_AT = 1000
"""Names in a folder that are compared with one that is not there."""

_WHOLE = "must be a whole number"
_KINDS = {
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a section with keys",
    "model_type": "must be a section with keys",
    "model_attributes_type": "must be a section with keys",
}
"""Type of a pydantic error -> what it says here; `{}` are values of its context."""


_UNION_KINDS = {"bool": "true or false", "int": "a whole number"}
"""What pydantic adds to the place of a value that may be of several kinds -> what it says here."""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that was probably meant, whatever its case.

    Args:
        likeness: ratio of `difflib` that it must reach.
    """
    import difflib

    folded = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), folded, 1, likeness)
    if not close and len(name) > 2:  # a name that was cut short
        close = [one for one in folded if one.startswith(name.lower())]
    return folded[close[0]] if close else None


def nearest_file(path: Path) -> str | None:
    """The name in the same folder that was probably meant; endings do not count."""
    names = (one.name for one in itertools.islice(path.parent.glob("*"), _LOOKED_AT))
    stems = {name.partition(".")[0]: name for name in names}
    near = nearest(path.name.partition(".")[0], stems, 0.75)
    return stems[near] if near is not None else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """` (did you mean 'NAME'?)` for the nearest known name, or the other text."""
    near = nearest(name, known)
    return f" (did you mean {near!r}?)" if near is not None else otherwise


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown toolset 'fle' (did you mean 'file'?)`, or with all known names where none is near.

    Args:
        what: the kind of thing, such as `toolset`.
    """
    names = list(known)
    instead = f" (known: {', '.join(names)})" if names else " (there are none)"
    return f"unknown {what} {name!r}" + did_you_mean(name, names, instead)


def describe(faults: Sequence[Fault], model: type[BaseModel]) -> tuple[str, str]:
    """The most telling of pydantic's errors: its dotted key, and one line without the place.

    Args:
        model: what was validated, for the names of its keys.
    """
    ranks = {"extra_forbidden": 0, "missing": 2}
    fault = min(faults, key=lambda one: ranks.get(one["type"], 1))
    path = fault["loc"]
    if path and path[-1] in _UNION_KINDS:  # one of the kinds that are accepted, not a key
        key = ".".join(map(str, path[:-1]))
        kinds = [one["loc"][-1] for one in faults if one["loc"][:-1] == path[:-1]]
        wanted = ", or ".join(text for kind, text in _UNION_KINDS.items() if kind in kinds)
        return key, f"'{key}' must be {wanted}, not {_shown(fault['input'])}"
    key = ".".join(map(str, path))
    if fault["type"] == "extra_forbidden":
        return key, f"unknown key '{key}'" + _known_instead(fault["loc"], model)
    if fault["type"] == "missing":
        return key, f"'{key}' is missing"
    return key, f"'{key}' {_reason(fault)}" if key else _reason(fault)


def refusal(
    faults: Sequence[Fault],
    model: type[BaseModel],
    place: str,
    written: Mapping[str, str] | None = None,
    line_of: Callable[[str], int | None] | None = None,
) -> UserError:
    """The one-line error for a configuration that pydantic refused.

    Args:
        model: what was validated.
        place: where the data came from, such as a file.
        written: dotted key -> what the user typed for it, such as `--repeats 0`.
        line_of: dotted key -> its line in the file.
    """
    error = faults[0].get("ctx", {}).get("error")
    if isinstance(error, UserError):
        return error
    key, text = describe(faults, model)
    for dotted, typed in (written or {}).items():
        if f"{dotted}.".startswith(f"{key}.") or f"{key}.".startswith(f"{dotted}."):
            named = typed.startswith("--set") or not text.startswith(f"'{key}' ")
            return UserError(f"{typed}: {text if named else text.removeprefix(f'{key!r} ')}")
    line = line_of(key) if line_of is not None else None
    return UserError(f"{place}{f':{line}' if line else ''}: {text}")


def check_fields(made: Any, place: str) -> None:
    """Check the values of a dataclass by the types of its fields; `"3"` becomes the number. For its
    `__post_init__`.

    Raises: UserError that names the field.
    """
    from pydantic import ValidationError

    kind: Any = type(made)
    model, values = _model_of(kind), vars(made)
    try:
        checked = model(**values)
    except ValidationError as error:
        raise refusal(error.errors(), model, place) from None
    for name in values:
        object.__setattr__(made, name, getattr(checked, name))  # it may be frozen


@functools.cache
def _model_of(kind: type) -> type[BaseModel]:
    from pydantic import ConfigDict, create_model

    fields: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(kind).items()}
    return create_model(
        kind.__name__, __config__=ConfigDict(arbitrary_types_allowed=True), **fields
    )


def _known_instead(path: Sequence[str | int], model: type[BaseModel]) -> str:
    """The key that was probably meant: the nearest in the section, or the same in another one."""
    *section, name = map(str, path)
    known = _keys_at(section, model)
    near = nearest(name, known)
    meant = [".".join([*section, near])] if near else []
    meant += [f"{other}.{name}" for other in model.model_fields if name in _keys_at([other], model)]
    return f" (did you mean '{meant[0]}'?)" if meant else f" (known here: {', '.join(known)})"


def _reason(fault: Fault) -> str:
    context = fault.get("ctx", {})
    text = str(fault["msg"])
    if fault["type"] == "value_error":
        text = text.removeprefix("Value error, ")
        return text[0].lower() + text[1:]
    if fault["type"] in ("too_short", "string_too_short"):
        return "must not be empty"
    kind = _KINDS.get(fault["type"])
    plain = {name: str(value).removesuffix(".0") for name, value in context.items()}
    text = kind.format(**plain) if kind else text
    text = text.replace("Input should be", "must be")
    text = text[0].lower() + text[1:]
    hint = ""
    if fault["type"] == "literal_error":
        hint = did_you_mean(str(fault["input"]), context["expected"].split("'")[1::2])
    if "key" in str(fault["loc"][-1]):  # the value may be the key itself
        return text
    return f"{text}, not {_shown(fault['input'])}{hint}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _keys_at(path: Iterable[str], model: type[BaseModel]) -> list[str]:
    """The keys of the section at a place; a name or a number within a mapping or a list leads to
    what it holds."""
    section: type[BaseModel] | None = model
    for name in path:
        known = section.model_fields.get(name) if section else None
        if known is not None:
            section = _section_in(known.annotation)
    return list(section.model_fields) if section else []


def _section_in(kind: Any) -> type[BaseModel] | None:
    if isinstance(kind, type) and hasattr(kind, "model_fields"):
        return kind
    return next((found for part in get_args(kind) if (found := _section_in(part))), None)
