"""Numbers in the texts of errors: how much a model takes and gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from hermes_rl.errors import Facts

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
"""Field of a request -> sampling parameter that it carries."""
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
"""How servers say that they do not take a field at all: OpenAI and its kin, LiteLLM, Google, xAI,
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
    """What an error's text says in numbers.

    Args:
        text: all that it says.
        numbers: `context_limit` and `prompt_tokens`, where they are fields.
        no_images: the model takes no images.
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
    """Sampling parameters that an error's text refuses by name (names of `Sampling`)."""
    found = (m[0] for pattern in _REFUSED for m in re.finditer(pattern, text, re.IGNORECASE))
    named = (name for part in found for name in re.findall(r"\w+", part) if name in _PARAMETERS)
    return tuple(dict.fromkeys(_PARAMETERS[name] for name in named))


_WAIT = re.compile(
    r"(?:try again|retry)\w* (?:in|after) ((?:\d{1,7}(?:\.\d{1,6})?\s?(?:ms|s|m|h)[a-z]*\s?)+)",
    re.IGNORECASE,
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def wait_of(text: str) -> float | None:
    """Seconds that a text asks to wait: `try again in 6m0s`, `retry after 26 seconds`."""
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
