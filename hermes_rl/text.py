"""Text that is safe to store, send and show: lone surrogates, control characters, secrets, JSON.

JSON is read and written as servers really send it: bytes that are not valid UTF-8 and lone
surrogates do not lose an answer. Models see results as JSON, cut in the middle when too long,
without terminal codes.

`SECRETS` is what this process knows of secrets: API keys where they are read (`Keys`), what key
commands print, and variables of the environment that are named like secrets. All that is written to
a run passes through one of its `scrub` methods, which replace each by `[secret NAME]`: as it is, in
lower or upper case, in base64 (both alphabets, at any offset), in hexadecimal, percent-encoded,
escaped for JSON, and with white space, quotes, commas or line breaks within it, also where adjacent
texts of one record have its parts. The registry is one for the process, as its environment is. A
secret is never forgotten: texts with a key that was replaced since may still arrive.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters, line breaks included: they could command a terminal."""

_KEYS = re.compile(
    r"(?i)\bbearer\s+[^\s\"',;]+|\b(?:sk|pk|gsk|xai|key|hf|nvapi|or)[-_][a-z0-9_\-*.]{8,}"
)
"""What API keys look like."""
_LONGEST_LINE = 500

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def clean(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD; other text is returned as is."""
    if text.isascii():  # a flag of the object: it costs nothing
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def one_line(text: str) -> str:
    """Replace each run of control characters and white space by one space."""
    return " ".join(CONTROL.sub(" ", text).split())


def mask(text: str, secrets: Iterable[str], shown: str = "***") -> str:
    """Replace secrets by `shown`, both as they are and in base64."""
    for secret in secrets:
        text = text.replace(secret, shown)
        text = text.replace(b64encode(secret.encode()).decode(), shown)
    return text


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """One line of at most 500 characters without the secrets or anything that looks like a key."""
    text = _KEYS.sub("***", one_line(mask(text, secrets)))
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON; lone surrogates, which UTF-8 cannot carry, become U+FFFD."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(json.loads(clean(json.dumps(value, ensure_ascii=False))))


def why_not_json(value: Any) -> str | None:
    """Return why a value cannot be sent and stored as JSON; None if it can."""
    try:
        _encode(value)
    except UnicodeEncodeError:
        return "is not valid Unicode text (lone surrogates)"
    except (TypeError, ValueError, RecursionError) as error:
        return f"is not JSON-serializable ({error})"
    return None


def decode_json(data: bytes) -> Any:
    """Decode JSON, repaired where it is not valid UTF-8. Raises: ValueError."""
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        return _decode(repair_json(data))


def repair_json(data: bytes) -> bytes:
    """Replace bad bytes and lone surrogates in a JSON text. Raises: ValueError."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    return encode_json(value)


HEAD_SHARE = 0.4
"""Share of a cut text that is its beginning; the rest is its end."""

_ANSI = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    r"|[ -/]*[0-~]"  # other escapes
    r")"
)


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and characters that change the direction of text."""


def many(number: int, what: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number:,} {what}" + "s" * (number != 1)


def visible(text: str) -> str:
    """Escape control characters in texts of models and programs."""
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def tool_output(content: str) -> str:
    """The output of a tool, then what else its envelope has."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, TypeError):
        return content
    if not isinstance(value, dict) or "output" not in value:
        return content
    more = [f"[{name}] {one}" for name, one in value.items() if name != "output" and one]
    return "\n".join([str(value["output"]).rstrip("\n"), *more])


def strip_ansi(text: str) -> str:
    """Text without terminal control sequences (ECMA-48)."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def cut_middle(text: str, max_chars: int) -> str:
    """Text of at most `max_chars` characters: the first 40 %, a mark, the last 60 %."""
    if len(text) <= max_chars:
        return text
    mark = f"\n\n... [at least {len(text) - max_chars} characters omitted] ...\n\n"
    space = max(0, max_chars - len(mark))
    head = int(space * HEAD_SHARE)
    tail = space - head
    return (text[:head] + mark + (text[-tail:] if tail else ""))[:max_chars]


def to_json(fields: Mapping[str, Any]) -> str:
    """One JSON object as text, keys in the given order."""
    return _encode(fields).decode()


def json_result(fields: dict[str, Any], long_field: str, max_chars: int) -> str:
    """A JSON object of at most `max_chars` characters: one long text field gives way.

    Escaping can make text longer, so the field is shortened until the object fits.
    """
    text = to_json(fields)
    whole = str(fields[long_field])
    keep = len(whole)
    while len(text) > max_chars and keep > 0:
        keep = min(keep - 1, int(keep * max_chars / len(text) * 0.95))
        text = to_json({**fields, long_field: cut_middle(whole, keep)})
    return text


LEAST = 8
"""Characters of a secret. A shorter one cannot be distinguished from ordinary text."""

# A text is searched without the characters that may be within a secret. Every long form of a secret
# contains eight bytes that start at a multiple of eight in that text, so one pass over its 64-bit
# blocks shows that it has none. Only a text that may have one is searched with the pattern.
_BLOCK = 8
_LONG = 2 * _BLOCK - 1
"""Bytes of a text that contains a whole aligned block, wherever it starts."""

_BETWEEN = b" \t\n\r\f\v\"'\\,%"
"""Characters that may be within a secret: of line breaks, quotes, escapes and lists."""
_DROPPED = re.compile(rb"\\[nrt]|[ \t\n\r\f\v\"'\\,%]")
_DROPPED_ALONE = re.compile(rb"[ \t\n\r\f\v\"'\\,%]")
"""A backslash before an n may be an escaped line break, or part of no escape before a secret."""
_PERCENT, _BACKSLASH = re.compile(rb"%[0-9A-Fa-f]{2}"), re.compile(rb"\\[ux][0-9A-Fa-f]{2}")
_LINE_BREAK = re.compile(rb"\\[nrt]")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})|\\+u([0-9A-Fa-f]{4})|\\+x([0-9A-Fa-f]{2})")

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:\w*API_?KEYS?|\w*_KEY|\w*TOKEN|\w*SECRET|\w*PASSWORD|PASSWD|CREDENTIALS?)(?:_|\d|$)",
    re.IGNORECASE,
)
_PATH = re.compile(r"(?:~|\.{1,2})?/")
_PLACEHOLDERS = re.compile(
    r"(?:sk-)?(?:no|not|your|dummy|fake|test)[-_](?:api[-_])?(?:key|needed|required|used)"
    r"(?:[-_](?:needed|required|here))?|placeholder|changeme|token-abc123|lm-studio",
    re.IGNORECASE,
)
"""What people write where a server needs no key; texts may name these."""

_T = TypeVar("_T")


class Found(NamedTuple):
    """A secret in a text."""

    start: int
    end: int
    """Bytes of the text in UTF-8, `end` not included."""
    name: str


@dataclass(frozen=True)
class _Forms:
    """All forms of the known secrets, as they are searched."""

    names: Mapping[bytes, str] = field(default_factory=dict)
    """Form -> name of the secret."""

    @cached_property
    def short(self) -> tuple[bytes, ...]:
        return tuple(form for form in self.names if len(form) < _LONG)

    @cached_property
    def blocks(self) -> frozenset[int]:
        long = (form for form in self.names if len(form) >= _LONG)
        parts = (form[n : n + _BLOCK] for form in long for n in range(len(form) - _BLOCK + 1))
        return frozenset(int.from_bytes(part, sys.byteorder) for part in parts)

    @cached_property
    def pattern(self) -> re.Pattern[bytes]:
        longest_first = sorted(self.names, key=len, reverse=True)
        return re.compile(b"|".join(re.escape(form) for form in longest_first))

    def may_be_in(self, compact: bytes) -> bool:
        """Whether a text without `_BETWEEN` may contain a form."""
        whole = memoryview(compact)[: len(compact) // _BLOCK * _BLOCK]
        if not self.blocks.isdisjoint(whole.cast("Q")):
            return True
        return any(form in compact for form in self.short)


class KnownSecrets:
    """The secrets of this process by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._forms = _Forms()
        self._values: set[str] = set()
        self._lock = threading.Lock()

    def learn(self, name: str, value: str) -> None:
        """Add a secret that the process was configured with.

        Args:
            name: shown in its place, usually its variable.
            value: of an address, only the password in it counts. Values of fewer than 8 characters,
                plain words and the usual placeholders are ignored.
        """
        if "://" in value:
            value = _password_of(value)
        if value in self._values or not _is_telling(value):
            return
        with self._lock:
            self._values.add(value)
            added = {form: name for form in _forms_of(value) if form not in self._forms.names}
            self._forms = _Forms({**self._forms.names, **added})

    def learn_environment(self, environ: Mapping[str, str] = os.environ) -> None:
        """Add the variables whose names and values look like secrets."""
        for name, value in list(environ.items()):
            if _SECRET_NAME.search(name) and ("://" in value or _looks_random(value)):
                self.learn(name, value)

    def find(self, data: bytes) -> list[Found]:
        """All secrets of a text in UTF-8, by place, not overlapping."""
        forms = self._forms
        if not forms.names:
            return []
        found = [*_search(forms, data, range(len(data)), range(1, len(data) + 1))]
        if _PERCENT.search(data) or _BACKSLASH.search(data):
            decoded, starts, ends = _unescape(data)
            found += _search(forms, decoded, starts, ends)
        return _merged([_with_backslashes(one, data) for one in found])

    def scrub(self, text: str) -> str:
        """A text without secrets."""
        data = _utf8(text)
        found = self.find(data)
        return _replaced([data], found)[0] if found else text

    def scrub_bytes(self, data: bytes) -> bytes:
        """`scrub` of a text in UTF-8."""
        found = self.find(data)
        return _utf8(_replaced([data], found)[0]) if found else data

    def scrub_record(self, record: _T) -> _T:
        """A record without secrets in its texts; the same object where there are none.

        Args:
            record: msgspec structs, lists, tuples, dicts and plain values. Bytes are not searched.
        """
        if not self._forms.names:
            return record
        texts, keys = list[str](), list[str]()
        _collect(record, texts, keys)
        data = [_utf8(text) for text in texts]
        found = self.find(b"".join(data))
        if not found and not self.find(_utf8("\0".join(keys))):
            return record
        rebuilt: _T = _rebuild(record, iter(_replaced(data, found)), self)
        return rebuilt


SECRETS = KnownSecrets()
"""Those of this process."""


def _password_of(url: str) -> str:
    try:
        return unquote(urlsplit(url).password or "")
    except ValueError:
        return ""


def _is_telling(value: str) -> bool:
    """Whether a configured value can be distinguished from ordinary text."""
    if len(_compact(_utf8(value))) < LEAST or _PLACEHOLDERS.fullmatch(value):
        return False
    plain = value.isalpha() and value in (value.lower(), value.upper()) and len(value) <= 12
    return not plain and len(set(value)) >= 5


def _looks_random(value: str) -> bool:
    """Whether a variable's value looks like a secret rather than a word, number, path or name."""
    if _PATH.match(value) and not any(_is_mixed(p) and len(p) >= 16 for p in value.split("/")):
        return False
    return len(set(value)) >= 6 and (_is_mixed(value) or len(value) >= 24)


def _is_mixed(text: str) -> bool:
    """Whether a text mixes digits and letters, or lower and upper case, or has rare signs."""
    kinds = [any(map(kind, text)) for kind in (str.isdigit, str.islower, str.isupper)]
    return sum(kinds) > 1 or bool(re.search(r"[^\w\s./:-]", text))


def _forms_of(value: str) -> Iterator[bytes]:
    """What is searched for in a text without `_BETWEEN`."""
    raw = _utf8(value)
    quoted = quote(raw, safe="")
    texts = [raw, raw.hex().encode(), raw.hex().upper().encode(), quoted.encode()]
    # Host names are recorded in lower case; other programs fold case too.
    texts += [_utf8(text) for text in (value.lower(), value.upper()) if _is_telling(text)]
    texts += [_utf8(quote(raw)), re.sub(r"%..", lambda m: m[0].lower(), quoted).encode()]
    for offset in range(3):
        coded = b64encode(b"\0" * offset + raw)
        # The characters that hold bits of the secret alone, whatever is before and after it.
        core = coded[-(-8 * offset // 6) : 8 * (offset + len(raw)) // 6]
        texts += [core, core.translate(bytes.maketrans(b"+/", b"-_"))]
    return (form for text in texts if len(form := _compact(text)) >= LEAST)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _compact(data: bytes) -> bytes:
    """A text without `_BETWEEN`, and without escaped line breaks."""
    if b"\\" in data:
        for letter in (b"\\n", b"\\r", b"\\t"):
            data = data.replace(letter, b"\n")
    return data.translate(None, _BETWEEN)


def _unescape(data: bytes) -> tuple[bytes, list[int], list[int]]:
    """A text without percent and backslash codes, and where each byte of it starts and ends."""
    decoded, starts, ends, last = bytearray(), list[int](), list[int](), 0
    for match in [*_ESCAPE.finditer(data), None]:
        start = len(data) if match is None else match.start()
        decoded += data[last:start]
        starts += range(last, start)
        ends += range(last + 1, start + 1)
        if match is not None:
            code = int(match[1] or match[2] or match[3], 16)
            character = _utf8(chr(code)) if match[2] else bytes([code])
            decoded += character
            starts += [start] * len(character)
            ends += [match.end()] * len(character)
            last = match.end()
    return bytes(decoded), starts, ends


def _search(
    forms: _Forms, data: bytes, starts: Sequence[int], ends: Sequence[int]
) -> Iterator[Found]:
    """The forms in a text. Args: starts, ends: of each byte, in the text that is reported on."""
    if forms.may_be_in(_compact(data)):
        yield from _matches(forms, data, starts, ends, _DROPPED)
    if _LINE_BREAK.search(data) and forms.may_be_in(data.translate(None, _BETWEEN)):
        yield from _matches(forms, data, starts, ends, _DROPPED_ALONE)


def _matches(
    forms: _Forms,
    data: bytes,
    first: Sequence[int],
    after: Sequence[int],
    dropped: re.Pattern[bytes],
) -> Iterator[Found]:
    kept, last = list[int](), 0
    for match in dropped.finditer(data):
        kept += range(last, match.start())
        last = match.end()
    kept += range(last, len(data))
    for match in forms.pattern.finditer(bytes(data[n] for n in kept)):
        name = forms.names[match[0]]
        yield Found(first[kept[match.start()]], after[kept[match.end() - 1]], name)


def _with_backslashes(found: Found, data: bytes) -> Found:
    """With the backslashes before it: one of them would escape the mark."""
    start = found.start
    while start and data[start - 1] == _BACKSLASH_CODE:
        start -= 1
    return found._replace(start=start)


def _merged(found: list[Found]) -> list[Found]:
    """By place; of those that overlap, the first with the end of the last."""
    merged: list[Found] = []
    for one in sorted(found):
        if merged and one.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(one.end, merged[-1].end))
        else:
            merged.append(one)
    return merged


def _replaced(texts: list[bytes], found: list[Found]) -> list[str]:
    """The texts with marks. Args: found: by place in the joined texts."""
    replaced = []
    for text, end in zip(texts, accumulate(map(len, texts)), strict=True):
        start = last = end - len(text)
        parts = list[bytes]()
        for one in found:
            if one.end > start and one.start < end:
                parts.append(text[last - start : max(one.start, start) - start])
                parts.append(f"[secret {one.name}]".encode() if one.start >= start else b"")
                last = min(one.end, end)
        parts.append(text[last - start :])
        replaced.append(b"".join(parts).decode("utf-8", "surrogatepass"))
    return replaced


_BACKSLASH_CODE = ord("\\")
_KIND = "type"
"""Of a content part: it would be between the texts of adjacent parts."""


def _collect(value: Any, texts: list[str], keys: list[str]) -> None:
    """The texts of a record in the order of `_rebuild`, and the keys of its dicts."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _collect(getattr(value, name), texts, keys)
    elif isinstance(value, dict):
        keys += [key for key in value if isinstance(key, str)]
        for key, item in value.items():
            if key == _KIND and isinstance(item, str):
                keys.append(item)
            else:
                _collect(item, texts, keys)
    elif _has_items(value):
        for item in value:
            _collect(item, texts, keys)


def _has_items(value: Any) -> bool:
    """Whether it is a list of more than numbers, as token ids are."""
    return isinstance(value, list | tuple) and not _NUMBERS.issuperset(map(type, value))


_NUMBERS = frozenset((int, float, bool, type(None)))


def _rebuild(value: Any, texts: Iterator[str], secrets: KnownSecrets) -> Any:
    """The record with other texts in place of its own."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        fields = {name: _rebuild(getattr(value, name), texts, secrets) for name in names}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {
            (secrets.scrub(key) if isinstance(key, str) else key): (
                secrets.scrub(item)
                if key == _KIND and isinstance(item, str)
                else _rebuild(item, texts, secrets)
            )
            for key, item in value.items()
        }
    if _has_items(value):
        return type(value)([_rebuild(item, texts, secrets) for item in value])
    return value
