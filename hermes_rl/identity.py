"""Identities: hashes of tasks, configurations, units, groups and attempts, and seeds.

Every id is a function of content alone, so that a resumed run, a reordered dataset and another
number
of workers find the same units (DESIGN 5.2).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgspec

IDENTITY_VERSION = 1
"""Changes only when the meaning of a hash changes; old run directories are then refused."""

ID_LENGTH = 32
"""Hex digits of an id: 128 bits."""


_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def canonical(value: Any) -> Any:
    """A JSON value with integral floats as integers, so that 1 and 1.0 hash alike.

    Floats beyond 64 bits stay floats: as integers no reader of rows could hold them.

    Raises: ValueError for NaN and infinities.
    """
    if type(value) is str:  # most values are, and a million rows are hashed
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a JSON number")
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, dict):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    return value


def canonical_json(value: Any) -> str:
    """Canonical JSON text: sorted keys, no spaces, integral floats as integers."""
    return _encode(canonical(value))


def digest(value: Any) -> str:
    """sha256 over the canonical JSON of a value, as 64 hex digits.

    Raises: ValueError for NaN and infinities; TypeError for what is not JSON-serializable.
    """
    try:
        return encoded_digest(_ready(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = canonical_json(value)  # the same bytes, slower; it decides what is refused
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def encoded_digest(ready: Any) -> str:
    """`digest` of a value whose floats went through `canonical_float`; many times as fast.

    Raises: what msgspec raises for what it cannot encode: take `digest` then.
    """
    return hashlib.sha256(_encode_sorted(ready)).hexdigest()


def canonical_float(value: float) -> int | msgspec.Raw:
    """A float as canonical JSON has it: an integer, or the text that `json` writes.

    Raises: ValueError for NaN and infinities.
    """
    number = canonical(value)
    return number if isinstance(number, int) else msgspec.Raw(repr(number).encode())


def _ready(value: Any) -> Any:
    """`canonical`, for msgspec. Raises: TypeError for anything else than plain JSON values."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        return {k if type(k) is str else str(k): _ready(v) for k, v in value.items()}
    if kind is list or kind is tuple:
        return [_ready(v) for v in value]
    if kind is float:
        return canonical_float(value)
    raise TypeError(f"{kind.__name__} is not plain JSON")


def unit_id(config_hash: str, task_hash: str, occurrence: int, repeat: int) -> str:
    """The id of a unit: (task, repeat) under one configuration.

    Args:
        config_hash: of the identity sections of the configuration.
        task_hash: of the whole normalised row.
        occurrence: 0 for the first of several identical rows, 1 for the second, and so on.
        repeat: 0-based.
    """
    return unit_key(config_hash, task_hash, occurrence, repeat).hex()


def unit_key(config_hash: str, task_hash: str, occurrence: int, repeat: int) -> bytes:
    """`unit_id` as 16 bytes: `digest` of ["unit", version, ...arguments], without building the
    list, since a resume calls it for every unit."""
    text = f'["unit",{IDENTITY_VERSION},"{config_hash}","{task_hash}",{occurrence},{repeat}]'
    return hashlib.sha256(text.encode()).digest()[: ID_LENGTH // 2]


def group_id(config_hash: str, task_hash: str, occurrence: int) -> str:
    """The id of the group of all repeats of one task: the unit's hash without the repeat."""
    members = ["unit", IDENTITY_VERSION, config_hash, task_hash, occurrence]
    return digest(members)[:ID_LENGTH]


def trajectory_id(unit: str, epoch: int, attempt: int) -> str:
    """The id of one attempt's record: a function of its key, so that a redo names it alike."""
    return digest(["trajectory", IDENTITY_VERSION, unit, epoch, attempt])[:ID_LENGTH]


def subagent_id(root: str, agent: str) -> str:
    """The id of a sub-agent's record.

    Args:
        root: the id of its attempt's record.
        agent: its name, unique in the attempt.
    """
    return digest(["subagent", IDENTITY_VERSION, root, agent])[:ID_LENGTH]


def unit_seed(seed: int, unit: str) -> int:
    """The seed of a unit from the run's seed: 31 bits, which every engine takes."""
    return int(digest(["seed", IDENTITY_VERSION, seed, unit])[:8], 16) & 0x7FFFFFFF
