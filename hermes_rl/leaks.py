"""Finds texts that look like secrets, for `check --secrets` and exports.

Unlike `text.SECRETS` this also finds secrets whose value is unknown here, by the forms of the large
providers. The forms are strict: a finding stops an export, so ordinary text must not be one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hermes_rl.text import SECRETS

_TOKEN = "JSON Web Token"
# Each starts with plain characters: such a pattern is searched as fast as a fixed text.
_PATTERNS: dict[str, re.Pattern[str]] = {
    "OpenAI or Anthropic key": re.compile(
        r"sk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{32,})"
    ),
    "GitHub token": re.compile(r"gh[pousr]_[A-Za-z0-9]{36,}"),
    "GitHub fine-grained token": re.compile(r"github_pat_[A-Za-z0-9_]{40,}"),
    "AWS access key": re.compile(r"A(?:KIA|SIA)(?=[A-Z]{0,15}[0-9])[A-Z0-9]{16}(?![A-Za-z0-9])"),
    "Google API key": re.compile(r"AIza[\w-]{35}(?![\w-])"),
    "Slack token": re.compile(r"xox[abeprs]-(?=[A-Za-z-]{0,100}\d)[A-Za-z0-9-]{20,}"),
    "Hugging Face token": re.compile(r"hf_(?=[A-Za-z0-9]*[A-Z])[A-Za-z0-9]{30,}"),
    "private key": re.compile(
        r"-----BEGIN (?:[A-Z]+ ){0,2}PRIVATE KEY-----(?:\s|\\+[nr])*[A-Za-z0-9+/]{16}"
    ),
    # Its second part: a search for the first one takes quadratic time in text that repeats it.
    _TOKEN: re.compile(r"\.eyJ[\w-]{10,}\.[\w-]{16,}"),
    "password in a URL": re.compile(
        r"://[\w.%+-]{1,64}:([^\s:/@\"'\\<>{}$*\[\]()|]{6,128})@[\w\[]"
    ),
}
_HEADER_BEFORE = re.compile(r"[\w-]{10,4000}")
"""The first part of a token, from its end on."""
_HEADER_CHARS = 4000
_LEAST_HEADER = 13
_EXAMPLE = re.compile(r"pass(?:word|wd)?|secret|token|x+|your.*|my.*|changeme|example", re.I)
"""Passwords that documentation writes."""
_ESCAPED = re.compile(r"\\[nrt]\Z")
_SHOWN = 4
"""Characters of a finding that are shown: its prefix, which names the provider."""


class Leak(NamedTuple):
    """A text that must not be passed on."""

    kind: str
    """The name of the format, or `value of NAME`."""
    sample: str
    """Its first characters and its length; never the secret."""


def find_leaks(text: str) -> list[Leak]:
    """The secrets in a text: known ones of this process, and texts that look like one."""
    data = text.encode("utf-8", "surrogatepass")
    known = [Leak(f"value of {f.name}", f"{f.end - f.start} bytes") for f in SECRETS.find(data)]
    return [*known, *_find_key_like_texts(text)]


def leaks_of_row(row: Mapping[str, Any]) -> Iterator[tuple[str, Leak]]:
    """Column -> leak, for all texts of a row. Bytes are not searched."""
    for column, value in row.items():
        for leak in find_leaks("\n".join(_texts(value))):
            yield column, leak


def _find_key_like_texts(text: str) -> Iterator[Leak]:
    for kind, pattern in _PATTERNS.items():
        for match in pattern.finditer(text):
            if kind == "password in a URL":
                if not _EXAMPLE.fullmatch(match[1]):
                    yield Leak(kind, f"{len(match[1])} characters")
            elif kind == _TOKEN:
                if length := _header_length(text, match.start()):
                    yield Leak(kind, f"eyJ... ({length + len(match[0])} characters)")
            elif _is_separate(text, match.start()):
                yield Leak(kind, f"{match[0][:_SHOWN]}... ({len(match[0])} characters)")


def _header_length(text: str, end: int) -> int:
    """Characters of a token's first part, which ends there; 0 where there is none."""
    header = _HEADER_BEFORE.match(text[max(0, end - _HEADER_CHARS) : end][::-1])
    run = header[0][::-1] if header else ""
    for found in re.finditer("eyJ", run):
        start = end - len(run) + found.start()
        if end - start >= _LEAST_HEADER and _is_separate(text, start):
            return end - start
    return 0


def _is_separate(text: str, start: int) -> bool:
    before = text[max(0, start - 2) : start]
    return not before[-1:].isalnum() or bool(_ESCAPED.search(before))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
