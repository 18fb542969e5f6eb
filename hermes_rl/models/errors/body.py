"""What the body of an error says, whatever its shape.

Providers, engines and gateways wrap errors in each other: an aggregator quotes its provider as a
string of JSON, a proxy puts an exception's text around a body, a cloud puts the code into a header.
All of them are unwrapped here, to a bounded depth; what recovery needs is then a set of codes and a
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.text import decode_json

_DEPTH = 5
_CHARS = 2_000
"""Characters that are read of one text."""
_ALL_CHARS = 6_000
"""Characters that are read of one body: the table is matched against them."""

_CODES = (
    "code", "type", "status", "reason", "error_code", "error_type", "__type", "errortype", "name",
    "status_code",
)  # fmt: skip
_SAYS = (
    "message", "detail", "msg", "error", "errors", "raw", "error_description", "error_msg",
    "errormessage", "status_msg", "description", "title", "param", "text",
)  # fmt: skip
"""Keys whose texts are said to people, in this order; `param` is where one provider says why."""
_HOLDS = (
    "error", "errors", "detail", "details", "metadata", "innererror", "inner_error", "response",
    "upstream_error", "raw", "base_resp", "cause", "data", "message",
)  # fmt: skip
"""Keys under which another error may stand, as an object, a list or a string of JSON."""
_NUMBERS = {"n_ctx": "context_limit", "n_prompt_tokens": "prompt_tokens"}

_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]{0,500}>", re.DOTALL | re.IGNORECASE)
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_STATUS = re.compile(r"(?:error code|status(?: code)?|\bhttp)[:=]? ?([45]\d\d)\b", re.IGNORECASE)


@dataclass
class Fault:
    """What an error says."""

    codes: set[str] = field(default_factory=set)
    """Codes and types, lower case, without name spaces."""
    texts: list[str] = field(default_factory=list)
    """What is said to people, outermost first."""
    status: int | None = None
    """The first HTTP status that the body names."""
    upstream: bool = False
    """An aggregator quotes the provider behind it."""
    numbers: dict[str, int] = field(default_factory=dict)
    """`context_limit` and `prompt_tokens`, where they are fields."""

    @property
    def message(self) -> str:
        """All texts, without repetitions."""
        return " ".join(dict.fromkeys(self.texts))


def fault_of(body: bytes, headers: Mapping[str, str]) -> Fault:
    """The fault of an answer that is no success."""
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
    fault = fault_in(form)
    if "x-amzn-errortype" in headers:
        fault.codes.add(_code(headers["x-amzn-errortype"]))
    return fault


def fault_in(form: Any) -> Fault:
    """The fault that a decoded value holds."""
    fault, read = Fault(), 0
    for text in _walk(form, fault, _DEPTH):
        # Blanks first: what is cut off must never be half a key that is shown.
        fault.texts.append(_BLANKS.sub(" ", text)[:_CHARS])
        read += len(fault.texts[-1]) + 1
        if read >= _ALL_CHARS:
            break
    if fault.status is None:
        named = _STATUS.search(fault.message)
        fault.status = int(named[1]) if named else None
    return fault


def _walk(form: Any, fault: Fault, depth: int) -> Iterator[str]:
    """Texts of a value, as they come; codes and numbers go into `fault`."""
    if isinstance(form, str):
        yield from _text(form, fault, depth)
    elif depth <= 0:
        return
    elif isinstance(form, list):
        for item in form[:10]:
            yield from _walk(item, fault, depth - 1)
    elif isinstance(form, Mapping):
        low = {str(key).lower(): value for key, value in form.items()}
        _note(low, fault)
        for key in _SAYS:
            if isinstance(low.get(key), str):
                yield from _text(low[key], fault, depth)
        yield from _place(low.get("loc"))
        named = [key for key in low if key.endswith("exception")]  # an event's name is its code
        fault.codes.update(named[:5])
        for key in (*_HOLDS, *named[:5]):
            if isinstance(low.get(key), Mapping | list):
                yield from _walk(low[key], fault, depth - 1)


def _place(loc: Any) -> list[str]:
    """Which field pydantic means: `at body.seed`."""
    return [f"at {'.'.join(map(str, loc[:9]))}"] if isinstance(loc, list) else []


def _text(text: str, fault: Fault, depth: int) -> Iterator[str]:
    """A text, without the JSON in it; what that says comes after."""
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
            yield from _walk(inner, fault, depth - 1)
            return
    if text.strip():
        yield text.strip()


def _note(low: Mapping[str, Any], fault: Fault) -> None:
    for key in _CODES:
        value = low.get(key)
        if isinstance(value, str) and 0 < len(value) <= 100:
            fault.codes.add(_code(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            fault.codes.add(str(value))
        if key != "reason" and fault.status is None:
            fault.status = _http(value)
    for key, name in _NUMBERS.items():
        value = low.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            fault.numbers.setdefault(name, value)
    quoted = low.get("provider_name") or low.get("upstream_error")
    fault.upstream = fault.upstream or bool(quoted)


def _http(value: Any) -> int | None:
    if isinstance(value, str) and len(value) == 3 and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
        return value
    return None


def _code(value: str) -> str:
    """Lower case, without what a cloud puts around: `com.x#Name`, `Name:http://...`."""
    return value.split("#")[-1].split(":")[0].strip().lower()
