"""What people write of the way to an endpoint: certificates, proxy, headers.

A header's value or a proxy's address may be `$NAME`: it is then read from that variable, and stored
nowhere. What looks like a secret has to be written so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hermes_rl.errors import UserError
from hermes_rl.input_errors import refusal

_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TELLING = re.compile(r"auth|cookie|key|token|secret|passw|credential|session|signature", re.I)
_KEY_LIKE = re.compile(r"(bearer|basic|token)\s|(sk|pk|gsk|xai|key|hf|nvapi|or)[-_]|eyJ", re.I)


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        hide_input_in_errors=True,  # it may be a key
    )

    if not TYPE_CHECKING:  # a type checker takes the fields as parameters

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise refusal(error.errors(), type(self), type(self).__name__) from None

        # Only for calls in Python: validation of nested data does not go through it.
        __init__.__pydantic_base_init__ = True


class ReachSection(Section):
    """How an endpoint is reached, beside its address."""

    ca_file: str | None = None
    """A file with the certificates to trust, in the place of the system's."""
    proxy: str | None = None
    """Address of an HTTP proxy, or `$NAME`. The variables HTTP_PROXY and the like are not read."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of each request; `$NAME` reads a value from that variable."""

    @field_validator("ca_file")
    @classmethod
    def _whole_path(cls, given: str | None) -> str | None:
        return given and str(Path(given).expanduser().absolute())

    @field_validator("proxy")
    @classmethod
    def _plain_proxy(cls, given: str | None) -> str | None:
        if given is None or variable_of(given):
            return given
        check_proxy(given, "'proxy'")
        if "@" in urlsplit(given).netloc:
            raise UserError(
                "'proxy' holds a user or a password. Put the address into a variable, and write "
                "proxy: $NAME"
            )
        return given

    @field_validator("headers")
    @classmethod
    def _plain_headers(cls, given: dict[str, str]) -> dict[str, str]:
        for name, value in given.items():
            if not _HEADER.fullmatch(name):
                raise UserError(f"'headers' holds {name!r}, which cannot be a header's name")
            if any(c in value for c in "\r\n\0"):
                raise UserError(f"'headers.{name}' holds a line break. Take it out")
            if variable_of(value) is None and (_TELLING.search(name) or _KEY_LIKE.match(value)):
                raise UserError(
                    f"'headers.{name}' may be a secret, and would be stored with the run. Put it "
                    f"into a variable, and write {name}: $NAME"
                )
        return given


def variable_of(text: str) -> str | None:
    """The variable that a text `$NAME` names."""
    named = _VARIABLE.fullmatch(text)
    return named[1] if named else None


def variables_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Variable -> what it is for, of texts by their purpose."""
    return {name: use for use, text in texts.items() if (name := variable_of(text))}


def check_proxy(address: str, place: str) -> None:
    """Raises: UserError for what is no address of a proxy; the address is not shown."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        known = False
    if not known:
        raise UserError(f"{place} is no address of a proxy. Use for example http://127.0.0.1:3128")


def given_reach(section: ReachSection) -> dict[str, Any]:
    """The keys that a section sets."""
    values = {"ca_file": section.ca_file, "proxy": section.proxy, "headers": section.headers}
    return {name: value for name, value in values.items() if value}
