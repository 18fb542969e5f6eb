"""What the terminal's encoding lacks is printed as an escape, and never ends a command."""

from __future__ import annotations

import codecs
import io
import json
import sys

_HANDLER = "hermes_rl.escape"


def escape_unprintable() -> None:
    """Let stdout and stderr write `\\u2026` for what their encoding cannot say: JSON stays JSON."""
    codecs.register_error(_HANDLER, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
