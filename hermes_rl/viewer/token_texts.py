"""The texts of a segment's tokens, if its tokenizer is on this machine: nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.errors import UserError
from hermes_rl.models.tokens import Tokenizer, load_tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MAX_PARTS = 8
"""Tokens of one character, at most."""


def token_texts(run: Path, made_by: str | None, ids: Sequence[int]) -> list[str | None] | None:
    """Return the text of each token; None for one whose character ends in a later token.

    Args:
        run: the run directory, whose `endpoint.tokenizer` is read.
        made_by: SHA-256 of the tokenizer that the ids are of.
        ids: tokens in a row.

    Returns: None when this tokenizer is not on this machine.
    """
    found = _tokenizer(run)
    if found is None or found.sha256 != made_by:
        return None
    texts, last, parts = list[str | None](), list[int](), list[int]()
    for token_id in ids:
        parts.append(token_id)
        # Some decoders change the first token of a text, so the one before is decoded, too.
        whole, before = found.decode([*last, *parts]), found.decode(last)
        if whole.endswith(INCOMPLETE) and len(parts) < MAX_PARTS:
            texts.append(None)
            continue
        texts.append(whole[len(before) :])
        last, parts = parts[-1:], []
    return texts


@lru_cache(maxsize=8)
def _tokenizer(run: Path) -> Tokenizer | None:
    try:
        config = yaml.safe_load((run / "run.yaml").read_text(encoding="utf-8"))
        name = config["endpoint"]["tokenizer"]
        return load_tokenizer(_local_folder(name)) if isinstance(name, str) else None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, UserError):
        return None  # the ids are shown


def _local_folder(name: str) -> Path:
    """Return a folder, or the copy of a model of the hub that was fetched earlier. Raises: OSError,
    ValueError."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    fetch: Any = snapshot_download
    return Path(fetch(name, local_files_only=True))
