"""The formats, one file each with a `FORMAT`. A format whose reader no test runs is not listed."""

from __future__ import annotations

import importlib

from hermes_rl.errors import UserError
from hermes_rl.export.base import Format
from hermes_rl.input_errors import unknown

FORMATS = {
    "trl": "trl",
    "trl-tokens": "trl_tokens",
    "trl-grpo": "trl_grpo",
    "axolotl": "axolotl",
    "axolotl-tokens": "axolotl_tokens",
    "verl": "verl",
    "verl-rl": "verl_rl",
    "prime-rl": "prime_rl",
    "atropos": "atropos",
    "openai": "openai",
    "sharegpt": "sharegpt",
    "atif": "atif",
}
"""Name -> module of this package."""


def format_named(name: str) -> Format:
    """A format by its name. Raises: UserError."""
    if name not in FORMATS:
        raise UserError(unknown("format", name, FORMATS))
    module = importlib.import_module(f"hermes_rl.export.formats.{FORMATS[name]}")
    form: Format = module.FORMAT
    return form
