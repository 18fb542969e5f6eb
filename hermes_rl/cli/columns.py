"""`--map OURS=THEIRS`: columns of a dataset under other names."""

from __future__ import annotations

from collections.abc import Iterable

from hermes_rl.errors import UserError


def column_map(given: Iterable[str] | None) -> dict[str, str]:
    """Our name -> the dataset's. Raises: UserError for what is no pair."""
    pairs = [(text, *text.partition("=")) for text in given or ()]
    for text, ours, _, theirs in pairs:
        if not ours or not theirs:
            raise UserError(f"--map {text}: write --map prompt=COLUMN")
    return {ours: theirs for _, ours, _, theirs in pairs}
