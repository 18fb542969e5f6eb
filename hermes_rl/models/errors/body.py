"""What the body of an error says: its codes, its texts, and the numbers in them.

Providers, engines and gateways wrap errors in each other: an aggregator quotes its provider as a
string of JSON, a proxy puts an exception's text around a body, a cloud puts the code into a header.
This module unwraps them to a bounded depth into a set of codes and a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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


_N = r"([\d][\d,_]{0,11})"
_MAX = r"(?:max_(?:completion_|output_|new_)?tokens|max_?output_?tokens|maxoutputtokens)"

_OUTPUT = (
    rf"supports at most {_N} (?:completion|output) tokens",
    rf"{_MAX}: [\d,]+ > {_N}",
    rf"range of {_MAX}\S* (?:is|should be) \[\d+, ?{_N}\]",
    rf"maximum tokens you requested exceeds? the model limit of {_N}",
    rf"(?<!\+ `){_MAX}\W{{0,3}} (?:must|should) be (?:less than or equal to|<=|at most) \W?{_N}",
    rf"{_MAX}\W.{{0,120}}expected a value <= {_N}",
    rf"{_MAX}\W.{{0,80}}(?:cannot|must not|may not) (?:exceed|be greater than) {_N}",
    rf"{_MAX}\W.{{0,80}}maximum (?:is|of|value:?) {_N}",
    rf"{_MAX} > {_N} must have stream",
)
_OPEN_RANGE = rf"{_MAX}\W.{{0,80}}supported range is from \d+ \(inclusive\) to {_N} \(exclusive\)"
_ROOM = rf"\([\d,]+ > {_N} - {_N}\)"
"""vLLM: asked > window - prompt."""
_SUM = rf"exceed context limit: {_N} \+ [\d,]+ > {_N}"
"""Anthropic: prompt + asked > window."""

_RENAMED = r"max_tokens\W.{0,80}\buse \W?max_completion_tokens"
"""OpenAI, and gateways to its models."""

_PARAMETERS = {
    **{n: n for n in ("seed", "temperature", "top_p", "top_k", "min_p", "stop")},
    "stop_sequences": "stop",
    "reasoning_effort": "reasoning",
    "reasoning": "reasoning",
}
"""Field of a request -> the sampling parameter in it."""
_FIELD = rf"(?<![.\w\]])(?:{'|'.join(sorted(_PARAMETERS, key=len, reverse=True))})\b(?!\.\w|\[)"
"""Not within a longer path: `tools.0.input_schema.properties.seed` is another field."""
_QUOTE = r"[\s\[({'\"`:]{0,4}"
_LIST = rf"(?:{_QUOTE}{_FIELD}['\"`,\]]{{0,3}}){{1,9}}"
"""One field or several, quoted or not, as a list or not."""
_BAD = r"(?:unsupported|unknown|unrecognized|unexpected|extraneous|deprecated|not supported)"
_NOT = r"(?:(?:is|are) )?(?:not|no longer) (?:supported|permitted|allowed|accepted|recognized)"
_THING = r"(?:parameter|argument|field|key|keyword|property|name|option|input|param)s?"
_REFUSED = (
    rf"{_BAD} (?:[a-z]+ ){{0,2}}{_THING}(?: supplied| \S*)?{_LIST}",
    rf"(?:does not|doesn't|do not|don't|cannot) (?:support|accept|allow|take|recognize)"
    rf"(?: the| these| this)?(?: {_THING})?{_LIST}",
    rf"{_FIELD}['\"`\]]{{0,2}}(?: {_THING})?:? (?:{_NOT}|(?:is|are) (?:{_BAD}))",
    rf"{_FIELD}['\"`]{{0,2}}: extra (?:inputs|fields) (?:are )?not permitted",
    rf"extra (?:inputs|fields) (?:are )?not permitted[^a-z]{{0,4}}(?:{_THING})?{_LIST}",
    rf"extra (?:inputs|fields) (?:are )?not permitted at body\.(?:{'|'.join(_PARAMETERS)})(?=\s|$)",
    rf"(?:argument|parameter) not supported on this model{_LIST}",
    rf"{_FIELD}.{{0,40}}only the default \(\S{{1,8}}\) value is supported",
)
"""How servers refuse a field altogether: OpenAI and its kin, LiteLLM, Google, xAI,
Groq, Mistral, Fireworks, and the validators pydantic and serde."""

_REQUESTED = rf"requested (?:about )?{_N} tokens \(.{{0,160}}?\b{_N} in the (?:output|completion)"
"""OpenAI, vLLM, OpenRouter: prompt and answer together, then the parts of the prompt and what was
asked for."""

_WINDOW = (
    rf"maximum context length(?: is| of)? \(?{_N}",
    rf"context length (?:is|of)(?: only)? {_N}",
    rf"context length \({_N}",
    rf"context size \({_N}",
    rf"maximum (?:model|prompt|input|allowed) length(?: is| of)? \(?{_N}",
    rf"too long: [\d,]+ tokens > {_N} maximum",
    rf"model token limit: {_N}",
    rf"max length(?: exceeded, max length)?: ?{_N}",
    rf"range of input length should be \[\d+, ?{_N}\]",
    rf"tokens allowed \({_N}\)",
    rf"exceeds the limit of {_N}",
    rf"with {_N} maximum context length",
    rf"must be <= {_N}\. given",
)
_PROMPT = (
    rf"\({_N} in the messages",
    rf"{_N} input tokens",
    rf"{_N} tokens from the input messages",
    rf"too long: {_N} tokens >",
    rf"resulted in {_N} tokens",
    rf"prompt \(length {_N}\)",
    rf"input \({_N} tokens\)",
    rf"requested: {_N}\)",
    rf"(?:prompt|request) contains {_N} tokens",
    rf"request \({_N} tokens\)",
    rf"given: {_N} `inputs`",
    rf"token count of {_N} exceeds",
    rf"about {_N} tokens \(",
    rf"input length \({_N}\)",
)


def facts_of(
    text: str, numbers: Mapping[str, int] = MappingProxyType({}), *, no_images: bool = False
) -> Facts:
    """Read the limits and the refused parameters from the text of an error.

    Args:
        text: of the error, whole.
        numbers: `context_limit` and `prompt_tokens` if the body has them as fields.
        no_images: the model does not accept images.
    """
    output, window, prompt = _first(_OUTPUT, text), None, None
    room = re.search(_ROOM, text, re.IGNORECASE)
    total = re.search(_SUM, text, re.IGNORECASE)
    requested = re.search(_REQUESTED, text, re.IGNORECASE)
    until = re.search(_OPEN_RANGE, text, re.IGNORECASE)
    if room:
        window, prompt = _number(room[1]), _number(room[2])
    elif total:
        prompt, window = _number(total[1]), _number(total[2])
    elif requested:
        prompt = max(0, _number(requested[1]) - _number(requested[2]))  # 0 says nothing
    elif until:
        output = _number(until[1]) - 1
    window = window or numbers.get("context_limit") or _first(_WINDOW, text)
    prompt = prompt or numbers.get("prompt_tokens") or _first(_PROMPT, text)
    if output is None and window and prompt and prompt < window:
        output = window - prompt
    return Facts(
        refused=refused_parameters(text),
        max_output_tokens=output if output and output > 0 else None,
        context_limit=window,
        prompt_tokens=prompt,
        no_images=no_images,
        completion_cap=bool(re.search(_RENAMED, text, re.IGNORECASE)),
    )


def refused_parameters(text: str) -> tuple[str, ...]:
    """The sampling parameters (fields of `Sampling`) that a text refuses by name."""
    found = (m[0] for pattern in _REFUSED for m in re.finditer(pattern, text, re.IGNORECASE))
    named = (name for part in found for name in re.findall(r"\w+", part) if name in _PARAMETERS)
    return tuple(dict.fromkeys(_PARAMETERS[name] for name in named))


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


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, text, re.IGNORECASE)
        if found:
            return _number(found[1])
    return None


def _number(digits: str) -> int:
    return int(digits.replace(",", "").replace("_", ""))
