"""Read error bodies: their codes, texts and numbers.

Providers, engines and gateways wrap errors in each other: an aggregator quotes its provider as a
string of JSON, a proxy puts an exception's text around a body, a cloud puts the code into a header.
This module unwraps them to a bounded depth into a set of codes and a text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from hermes_rl.errors import Facts
from hermes_rl.text import decode_json

_DEPTH = 5
_CHARS = 2_000
"""Characters that are read of one text."""
_ALL_CHARS = 6_000
"""Characters that are read of one body; the rules are matched against them."""

_CODES = (
    "code", "type", "status", "reason", "error_code", "error_type", "__type", "errortype", "name",
    "status_code",
)  # fmt: skip
_MESSAGE_KEYS = (
    "message", "detail", "msg", "error", "errors", "raw", "error_description", "error_msg",
    "errormessage", "status_msg", "description", "title", "param", "text",
)  # fmt: skip
"""Keys whose values are messages, in this order; one provider gives the reason in `param`."""
_ERROR_KEYS = (
    "error", "errors", "detail", "details", "metadata", "innererror", "inner_error", "response",
    "upstream_error", "raw", "base_resp", "cause", "data", "message",
)  # fmt: skip
"""Keys that may contain another error, as an object, a list or a JSON string."""
_NUMBERS = {"n_ctx": "context_limit", "n_prompt_tokens": "prompt_tokens"}

_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]{0,500}>", re.DOTALL | re.IGNORECASE)
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_STATUS = re.compile(r"(?:error code|status(?: code)?|\bhttp)[:=]? ?([45]\d\d)\b", re.IGNORECASE)


@dataclass
class ErrorContent:
    """The unwrapped content of an error body."""

    codes: set[str] = field(default_factory=set)
    """Codes and types in lower case, without namespaces."""
    texts: list[str] = field(default_factory=list)
    """The messages, outermost first."""
    status: int | None = None
    """The first HTTP status that the body names."""
    upstream: bool = False
    """Whether an aggregator quotes the provider behind it."""
    numbers: dict[str, int] = field(default_factory=dict)
    """`context_limit` and `prompt_tokens`, if they are fields."""

    @property
    def message(self) -> str:
        """All texts without repetitions."""
        return " ".join(dict.fromkeys(self.texts))


def read_error_body(body: bytes, headers: Mapping[str, str]) -> ErrorContent:
    """Read the body of an answer whose status is not a success."""
    text = body.decode("utf-8", "replace").strip()
    form: Any = text
    if text[:1] in ("{", "[", '"'):
        try:
            form = decode_json(body)
        except ValueError:
            form = text
    elif text.startswith(("data:", "event:")):  # an error sent as an event
        form = text[text.find("{") :] if "{" in text else text
    elif text.startswith("<"):
        form = " ".join(_TAGS.sub(" ", text[:20_000]).split())
    content = read_error_object(form)
    if "x-amzn-errortype" in headers:
        content.codes.add(_normalize_code(headers["x-amzn-errortype"]))
    return content


def read_error_object(form: Any) -> ErrorContent:
    """Read a decoded error object, or any other value."""
    content, read = ErrorContent(), 0
    for text in _walk(form, content, _DEPTH):
        # Join blanks first: truncation must not leave half a secret, which would not be scrubbed.
        content.texts.append(_BLANKS.sub(" ", text)[:_CHARS])
        read += len(content.texts[-1]) + 1
        if read >= _ALL_CHARS:
            break
    if content.status is None:
        named = _STATUS.search(content.message)
        content.status = int(named[1]) if named else None
    return content


def _walk(form: Any, content: ErrorContent, depth: int) -> Iterator[str]:
    """Yield the texts of a value in order; codes and numbers go into `fault`."""
    if isinstance(form, str):
        yield from _text(form, content, depth)
    elif depth <= 0:
        return
    elif isinstance(form, list):
        for item in form[:10]:
            yield from _walk(item, content, depth - 1)
    elif isinstance(form, Mapping):
        low = {str(key).lower(): value for key, value in form.items()}
        _add_codes(low, content)
        for key in _MESSAGE_KEYS:
            if isinstance(low.get(key), str):
                yield from _text(low[key], content, depth)
        yield from _pydantic_location(low.get("loc"))
        named = [key for key in low if key.endswith("exception")]  # an event's name is its code
        content.codes.update(named[:5])
        for key in (*_ERROR_KEYS, *named[:5]):
            if isinstance(low.get(key), Mapping | list):
                yield from _walk(low[key], content, depth - 1)


def _pydantic_location(loc: Any) -> list[str]:
    """Return the field of a pydantic error, as `at body.seed`."""
    return [f"at {'.'.join(map(str, loc[:9]))}"] if isinstance(loc, list) else []


def _text(text: str, content: ErrorContent, depth: int) -> Iterator[str]:
    """Yield a text without the JSON in it, then the texts of that JSON."""
    start, end = text.find("{"), text.rfind("}")
    if depth > 0 and 0 <= start < end:
        try:
            inner = decode_json(text[start : end + 1].encode("utf-8", "replace"))
        except ValueError:
            inner = None
        if isinstance(inner, Mapping):
            around = f"{text[:start]} {text[end + 1 :]}".strip()
            if around:
                yield around
            yield from _walk(inner, content, depth - 1)
            return
    if text.strip():
        yield text.strip()


def _add_codes(low: Mapping[str, Any], content: ErrorContent) -> None:
    for key in _CODES:
        value = low.get(key)
        if isinstance(value, str) and 0 < len(value) <= 100:
            content.codes.add(_normalize_code(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            content.codes.add(str(value))
        if key != "reason" and content.status is None:
            content.status = _read_status(value)
    for key, name in _NUMBERS.items():
        value = low.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            content.numbers.setdefault(name, value)
    quoted = low.get("provider_name") or low.get("upstream_error")
    content.upstream = content.upstream or bool(quoted)


def _read_status(value: Any) -> int | None:
    if isinstance(value, str) and len(value) == 3 and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
        return value
    return None


def _normalize_code(value: str) -> str:
    """Return the code in lower case, without namespaces such as `com.x#Name`, `Name:http://...`."""
    return value.split("#")[-1].split(":")[0].strip().lower()


@lru_cache(maxsize=1)
def rules() -> dict[str, Any]:
    """Return the content of `rules.toml`, read at the first failure."""
    return tomllib.loads(files(__package__).joinpath("rules.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _limits() -> dict[str, list[re.Pattern[str]]]:
    """The patterns for limits and refused parameters, by name."""
    form = rules()["limits"]
    parts = {"PARAMETER": "|".join(sorted(form["parameters"], key=len, reverse=True))}

    def spell(pattern: str) -> str:
        return re.sub(r"\{([A-Z]+)\}", lambda name: parts[name[1]], pattern)

    for name, pattern in form["parts"].items():
        parts[name] = spell(pattern)
    return {
        name: [re.compile(spell(pattern), re.IGNORECASE) for pattern in patterns]
        for name, patterns in form["patterns"].items()
    }


def read_error_facts(
    text: str, numbers: Mapping[str, int] = MappingProxyType({}), *, no_images: bool = False
) -> Facts:
    """Read the limits and the refused parameters from the text of an error.

    Args:
        text: of the error, whole.
        numbers: `context_limit` and `prompt_tokens` if the body has them as fields.
        no_images: the model does not accept images.
    """
    output, window, prompt = _first("output", text), None, None
    if found := _search("difference", text):
        window, prompt = _number(found[1]), _number(found[2])
    elif found := _search("sum", text):
        prompt, window = _number(found[1]), _number(found[2])
    elif found := _search("requested", text):
        prompt = max(0, _number(found[1]) - _number(found[2]))  # 0 says nothing
    elif found := _search("open_range", text):
        output = _number(found[1]) - 1
    window = window or numbers.get("context_limit") or _first("window", text)
    prompt = prompt or numbers.get("prompt_tokens") or _first("prompt", text)
    if output is None and window and prompt and prompt < window:
        output = window - prompt
    return Facts(
        refused=refused_parameters(text),
        max_output_tokens=output if output and output > 0 else None,
        context_limit=window,
        prompt_tokens=prompt,
        no_images=no_images,
        completion_cap=bool(_search("renamed", text)),
    )


def refused_parameters(text: str) -> tuple[str, ...]:
    """Return the sampling parameters (fields of `Sampling`) that a text refuses by name."""
    known = rules()["limits"]["parameters"]
    found = (m[0] for pattern in _limits()["refused"] for m in pattern.finditer(text))
    named = (known[name] for part in found for name in re.findall(r"\w+", part) if name in known)
    return tuple(dict.fromkeys(named))


_WAIT = re.compile(
    r"(?:try again|retry)\w* (?:in|after) ((?:\d{1,7}(?:\.\d{1,6})?\s?(?:ms|s|m|h)[a-z]*\s?)+)",
    re.IGNORECASE,
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_retry_delay(text: str) -> float | None:
    """Read the delay in a text such as `try again in 6m0s` or `retry after 26 seconds`."""
    found = _WAIT.search(text)
    if found is None:
        return None
    parts = re.findall(r"([\d.]+)\s?(ms|s|m|h)", found[1], re.IGNORECASE)
    return round(sum(float(number) * _UNITS[unit.lower()] for number, unit in parts), 6)


def _search(name: str, text: str) -> re.Match[str] | None:
    """Return the match of the first pattern that matches."""
    return next(filter(None, (pattern.search(text) for pattern in _limits()[name])), None)


def _first(name: str, text: str) -> int | None:
    found = _search(name, text)
    return _number(found[1]) if found else None


def _number(digits: str) -> int:
    return int(digits.replace(",", "").replace("_", ""))
