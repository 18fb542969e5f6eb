"""What the body of an error says: its codes, its texts, and the numbers in them.

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
_SAYS = (
    "message", "detail", "msg", "error", "errors", "raw", "error_description", "error_msg",
    "errormessage", "status_msg", "description", "title", "param", "text",
)  # fmt: skip
"""Keys whose values are messages, in this order; one provider gives the reason in `param`."""
_HOLDS = (
    "error", "errors", "detail", "details", "metadata", "innererror", "inner_error", "response",
    "upstream_error", "raw", "base_resp", "cause", "data", "message",
)  # fmt: skip
"""Keys that may contain another error, as an object, a list or a JSON string."""
_NUMBERS = {"n_ctx": "context_limit", "n_prompt_tokens": "prompt_tokens"}

_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]{0,500}>", re.DOTALL | re.IGNORECASE)
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_STATUS = re.compile(r"(?:error code|status(?: code)?|\bhttp)[:=]? ?([45]\d\d)\b", re.IGNORECASE)


@dataclass
class Fault:
    """What an error says, unwrapped."""

    codes: set[str] = field(default_factory=set)
    """Codes and types in lower case, without namespaces."""
    texts: list[str] = field(default_factory=list)
    """The messages for people, outermost first."""
    status: int | None = None
    """The first HTTP status that the body names."""
    upstream: bool = False
    """An aggregator quotes the provider behind it."""
    numbers: dict[str, int] = field(default_factory=dict)
    """`context_limit` and `prompt_tokens`, where they are fields."""

    @property
    def message(self) -> str:
        """All texts without repetitions."""
        return " ".join(dict.fromkeys(self.texts))


def fault_of(body: bytes, headers: Mapping[str, str]) -> Fault:
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
    fault = fault_in(form)
    if "x-amzn-errortype" in headers:
        fault.codes.add(_code(headers["x-amzn-errortype"]))
    return fault


def fault_in(form: Any) -> Fault:
    """Read a decoded error object, or any other value."""
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
    """Yield the texts of a value in order; codes and numbers go into `fault`."""
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
    """The field that pydantic complains about, as `at body.seed`."""
    return [f"at {'.'.join(map(str, loc[:9]))}"] if isinstance(loc, list) else []


def _text(text: str, fault: Fault, depth: int) -> Iterator[str]:
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
    """The code in lower case without the cloud's namespace: `com.x#Name`, `Name:http://...`."""
    return value.split("#")[-1].split(":")[0].strip().lower()


@lru_cache(maxsize=1)
def rules() -> dict[str, Any]:
    """The content of `rules.toml`, read at the first failure."""
    return tomllib.loads(files(__package__).joinpath("rules.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _limits() -> dict[str, list[re.Pattern[str]]]:
    """The patterns of limits and refused parameters, by what they tell."""
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


def facts_of(
    text: str, numbers: Mapping[str, int] = MappingProxyType({}), *, no_images: bool = False
) -> Facts:
    """Read the limits and the refused parameters from the text of an error.

    Args:
        text: of the error, whole.
        numbers: `context_limit` and `prompt_tokens` if the body has them as fields.
        no_images: the model does not accept images.
    """
    output, window, prompt = _first("output", text), None, None
    if found := _search("room", text):
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
    """The sampling parameters (fields of `Sampling`) that a text refuses by name."""
    known = rules()["limits"]["parameters"]
    found = (m[0] for pattern in _limits()["refused"] for m in pattern.finditer(text))
    named = (known[name] for part in found for name in re.findall(r"\w+", part) if name in known)
    return tuple(dict.fromkeys(named))


_WAIT = re.compile(
    r"(?:try again|retry)\w* (?:in|after) ((?:\d{1,7}(?:\.\d{1,6})?\s?(?:ms|s|m|h)[a-z]*\s?)+)",
    re.IGNORECASE,
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def wait_of(text: str) -> float | None:
    """The seconds to wait that a text asks for: `try again in 6m0s`, `retry after 26 seconds`."""
    asked = _WAIT.search(text)
    if asked is None:
        return None
    parts = re.findall(r"([\d.]+)\s?(ms|s|m|h)", asked[1], re.IGNORECASE)
    return round(sum(float(number) * _UNITS[unit.lower()] for number, unit in parts), 6)


def _search(name: str, text: str) -> re.Match[str] | None:
    """What the first of the patterns that fits finds."""
    return next(filter(None, (pattern.search(text) for pattern in _limits()[name])), None)


def _first(name: str, text: str) -> int | None:
    found = _search(name, text)
    return _number(found[1]) if found else None


def _number(digits: str) -> int:
    return int(digits.replace(",", "").replace("_", ""))
