"""A YAML file as plain data, with the lines of its keys; a key that is given twice is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hermes_rl import __version__
from hermes_rl.errors import UserError
from hermes_rl.input_errors import nearest_file

_log = logging.getLogger(__name__)

LineOf = Callable[[str], int | None]
"""Dotted key -> its line in the file, or that of the nearest section around it."""


class _KeyTwice(yaml.MarkedYAMLError):
    """A mapping names a key a second time."""


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a key given twice, where YAML itself would drop the first value in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    where = key.start_mark
                    raise _KeyTwice(None, None, f"duplicate key '{key.value}'", where)
                seen.add(key.value)
        return node


def read_mapping(path: Path, model: type[BaseModel]) -> tuple[dict[str, Any], LineOf]:
    """The mapping in a YAML file.

    Args:
        model: what the file configures: of a run that another version wrote, keys that it does not
            have are left out.

    Raises: UserError when the file is absent, not YAML, or not a mapping.
    """
    try:
        loader = _EachKeyOnce(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except OSError as error:
        raise UserError(f"{path}: {_why(path, error)}. Check --config") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not valid UTF-8 text. Check --config") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deep. Check --config") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        twice = error.problem if isinstance(error, _KeyTwice) else "not valid YAML"
        raise UserError(f"{path}{line}: {twice}. Fix that line") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold sections such as 'dataset:' and 'model:'")
    if _of_another_version(path):
        _take_out_unknown(data, model, path)
    return data, partial(_line_of, node)


def _of_another_version(path: Path) -> bool:
    """Whether it is the run.yaml of a run that another version of hermes_rl wrote."""
    try:
        manifest = json.loads(path.with_name("manifest.json").read_bytes())
        return path.name == "run.yaml" and bool(manifest["versions"]["hermes_rl"] != __version__)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _take_out_unknown(data: dict[str, Any], model: type[BaseModel], path: Path) -> None:
    """Take out the keys that this version does not have; each is named in a warning."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        unknown = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        for *sections, key in unknown:
            inner: Any = data
            for section in sections:
                inner = inner[section]
            del inner[key]
            name = ".".join(map(str, (*sections, key)))
            _log.warning("%s: '%s' is no key of this version and is left out", path, name)


def _why(path: Path, error: OSError) -> str:
    """Why a file cannot be read, and the name of one beside it that was probably meant."""
    why, near = error.strerror or str(error), nearest_file(path)
    hint = f" (did you mean {str(path.with_name(near))!r}?)" if near and not path.exists() else ""
    return why[0].lower() + why[1:] + hint


def _line_of(node: yaml.Node | None, key: str) -> int | None:
    """The line of a dotted key, or of the last part of it that is there."""
    line = None
    for name in key.split("."):
        if isinstance(node, yaml.SequenceNode) and name.isdecimal() and int(name) < len(node.value):
            node = node.value[int(name)]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == name), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
    return line
