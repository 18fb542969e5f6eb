"""Parsers of tool calls, by name: `hermes` (JSON in tags), `qwen3_coder` (parameters in tags),
`llama3_json` (JSON alone) and `mistral` (JSON after a mark).

With exact tokens the ids come first, so the text is parsed here, once, in the same way for every
engine. A parser reads and never edits: ids and raw text are recorded apart from what it reads, so a
wrong reading can give the model a wrong result but never change a token. Arguments in JSON are kept
as the text that the model wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from hermes_rl.errors import UserError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Tools, has_unparsed_call, tool_names


@dataclass(frozen=True)
class ParsedCall:
    """One tool call, well-formed or not."""

    name: str
    """Empty if none can be read."""
    arguments_text: str
    """A JSON object; exactly what the model wrote where that cannot be read."""
    start: int
    """Index of the first character of the call in the parsed text, its opening tag included."""
    end: int
    """Index after its last character, its closing tag included."""
    id: str
    """A hash of the call's position and text, so that the same text gives the same id; or the id
    that the model gave (Mistral)."""
    error: str | None = None
    """What is wrong with its form, for the model."""


@dataclass(frozen=True)
class Parsed:
    """The parts of an answer."""

    content: str
    """The text outside reasoning and calls."""
    reasoning: str | None = None
    """The text in `<think>`; None if there is no such block."""
    calls: tuple[ParsedCall, ...] = ()
    suspected_unparsed: bool = False
    """The answer may contain a call that was not parsed: see `models.has_unparsed_call`."""

    def message(self, text: str) -> AssistantMessage:
        """Return the message of an answer.

        Args:
            text: what was parsed; kept as `raw_content` if `content` is not all of it.
        """
        calls = tuple(
            ToolCall(id=c.id, name=_storable(c.name), arguments=_storable(c.arguments_text))
            for c in self.calls
        )
        return AssistantMessage(
            content=self.content,
            reasoning_content=self.reasoning or None,
            tool_calls=calls,
            raw_content=None if text == self.content else text,
        )


class Found(NamedTuple):
    """A call in a text, before it has an id."""

    start: int
    end: int
    name: str
    arguments: str
    error: str | None = None
    id: Any = None


@dataclass(frozen=True)
class ToolCallParser:
    """Reads the tool calls of one family of models."""

    name: str
    find: Callable[[str, int, Tools], Iterator[Found]]
    """Text, index after the reasoning, offered tools -> the calls, in order."""

    def parse(
        self, text: str, tools: Tools = (), *, opened: bool = False, salt: str = ""
    ) -> Parsed:
        """Split an answer into its parts. Never raises: what cannot be read is a call with an
        error, or stays in the content.

        Args:
            text: the decoded answer without its end token.
            tools: OpenAI function schemas; they tell the types of arguments.
            opened: the prompt already opened `<think>`.
            salt: part of the hash in ids, so that equal calls of two turns differ.
        """
        reasoning, start = _split_reasoning(text, opened)
        calls: list[ParsedCall] = []
        for found in self.find(text, start, tools):
            spelled = json.dumps([salt, len(calls), text[found.start : found.end]])
            call_id = f"call_{hashlib.sha256(spelled.encode()).hexdigest()[:24]}"
            short = isinstance(found.id, str) and _SHORT_ID.fullmatch(found.id)
            if short and all(call.id != found.id for call in calls):
                call_id = found.id
            calls.append(
                ParsedCall(
                    found.name, found.arguments, found.start, found.end, call_id, found.error
                )
            )
        content = _outside(text, start, calls)
        parsed = Parsed(content, reasoning, tuple(calls))
        suspected = has_unparsed_call(parsed.message(content), tools)
        return Parsed(content, reasoning, parsed.calls, suspected)


_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""The form of ids that Mistral's templates take; such an id is kept, as the results name it."""


def _storable(text: str) -> str:
    """Replace lone surrogates, which a JSON escape can make and nothing can store."""
    return text.encode("utf-8", "replace").decode()


def _outside(text: str, start: int, calls: Sequence[ParsedCall]) -> str:
    """Return the text from `start` on without its calls and the white space around them."""
    if not calls:
        return text[start:]
    ends = [start, *(call.end for call in calls)]
    starts = [*(call.start for call in calls), len(text)]
    pieces = (text[a:b].strip() for a, b in zip(ends, starts, strict=True))
    return "\n".join(piece for piece in pieces if piece)


def _split_reasoning(text: str, opened: bool) -> tuple[str | None, int]:
    """Return the reasoning, and the index after it and the line breaks that follow. Only a block at
    the beginning is reasoning: later tags may be part of an argument."""
    start = 0
    if lead := re.match(r"\s*<think>", text):
        start = lead.end()
    elif not opened:
        return None, 0
    close = text.find("</think>")
    if close < 0:
        return text[start:].strip("\n"), len(text)
    rest = text[close + len("</think>") :].lstrip("\n")
    return text[start:close].strip("\n"), len(text) - len(rest)


# JSON in place: the places of its members are known, so that arguments keep their text.

_JSON = json.JSONDecoder(strict=False)
"""Reads line breaks within strings too, which models write."""
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_NO_NAME = 'the tool call has no "name"'


class _Members(NamedTuple):
    """A JSON object in a text."""

    values: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    end: int

    @property
    def name(self) -> str:
        """The name of the called function; empty if there is none."""
        name = self.values.get("name")
        return name if isinstance(name, str) else ""

    def arguments(self, text: str, *keys: str) -> str:
        """Return the text of the arguments under the first of these keys that has a value; what it
        encodes if they are encoded twice, and an empty object if there are none."""
        key = next((key for key in keys if self.values.get(key) is not None), None)
        if key is None:
            return "{}"
        value = self.values[key]
        if isinstance(value, str):
            return value if value.strip() else "{}"
        return text[slice(*self.spans[key])]


def _members(text: str, start: int) -> _Members:
    """Read the object that begins at `start`, with the place of each value.

    Raises: ValueError when it is not valid JSON, RecursionError when it is nested too deeply.
    """
    values: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    place = _after(text, start, "{")
    if text.startswith("}", place):
        return _Members(values, spans, place + 1)
    while True:
        if not text.startswith('"', place):
            raise json.JSONDecodeError("expected a name in double quotes", text, place)
        key, place = _JSON.raw_decode(text, place)
        at = _after(text, _skip(text, place), ":")
        values[key], place = _JSON.raw_decode(text, at)
        spans[key] = (at, place)
        place = _skip(text, place)
        if text.startswith("}", place):
            return _Members(values, spans, place + 1)
        place = _after(text, place, ",")


def _skip(text: str, place: int) -> int:
    """Return the index after the white space at a place."""
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _after(text: str, place: int, char: str) -> int:
    """Return the index after a required character and white space."""
    if not text.startswith(char, place):
        raise json.JSONDecodeError(f"expected {char!r}", text, place)
    return _skip(text, place + 1)


def _decoded_name(found: re.Match[str] | None) -> str:
    """Return the name in a JSON string; empty if that string cannot be read."""
    try:
        return str(_JSON.decode(found.group(1))) if found else ""
    except ValueError:
        return ""


def _explain(failure: Exception, *, cut: bool) -> str:
    """Tell the model why the JSON of a call cannot be read.

    Args:
        cut: the answer ends within the call.
    """
    why = failure.msg if isinstance(failure, json.JSONDecodeError) else "nested too deeply"
    why = "the answer ends in the middle of it" if cut else why
    return f"the JSON of the tool call cannot be read: {why}"


def _unreadable(start: int, end: int, inner: str, failure: Exception, *, cut: bool) -> Found:
    """Return a call whose JSON (`inner`) cannot be read, with its name and arguments as far as they
    can."""
    arguments = _ARGUMENTS.search(inner)
    return Found(
        start,
        end,
        _decoded_name(_NAME.search(inner)),
        inner[arguments.end() :] if arguments else inner,
        _explain(failure, cut=cut),
    )


# Hermes, which Qwen 2.5 and 3 share: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. The
# JSON is read by a JSON reader, so a closing tag in an argument ends nothing.

_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_HERMES_BEGIN = re.compile(r"<tool_call>\s*(?=\{)")
_HERMES_END = re.compile(r"\s*</tool_call>")


def _find_hermes(text: str, place: int, tools: Tools) -> Iterator[Found]:
    """Yield the calls. A last call without its closing tag counts if its JSON is complete."""
    while begin := _HERMES_BEGIN.search(text, place):
        yield (found := _hermes_call(text, begin.start(), begin.end()))
        place = found.end


def _hermes_call(text: str, start: int, place: int) -> Found:
    try:
        read = _members(text, place)
    except (ValueError, RecursionError) as failure:
        end = _hermes_stop(text, place)
        inner = text[place:end].rstrip()
        cut = end == len(text) and not inner.endswith(_HERMES_CLOSE)
        inner = inner.removesuffix(_HERMES_CLOSE).rstrip()
        return _unreadable(start, end, inner, failure, cut=cut)
    closed = _HERMES_END.match(text, read.end)
    end = closed.end() if closed else read.end
    error = None if read.name else _NO_NAME
    if not closed and (rest := text[end:].lstrip()) and not rest.startswith(_HERMES_OPEN):
        error = error or f"the tool call has text between its JSON and {_HERMES_CLOSE}"
        end = _hermes_stop(text, end)
    return Found(start, end, read.name, read.arguments(text, "arguments"), error)


def _hermes_stop(text: str, start: int) -> int:
    """Return the end of a broken call: after its closing tag, or where the next call begins."""
    close, following = text.find(_HERMES_CLOSE, start), text.find(_HERMES_OPEN, start)
    if close >= 0 and (following < 0 or close < following):
        return close + len(_HERMES_CLOSE)
    return following if following >= 0 else len(text)


# Llama 3: an answer that is {"name": ..., "parameters": {...}}, maybe after <|python_tag|>; several
# calls follow each other, with or without `;` between them.

_LLAMA_BEGIN = re.compile(r"\s*((?:<\|python_tag\|>\s*)?)(?=\{)")
_LLAMA_FURTHER = re.compile(r"\s*((?:;\s*)?(?:<\|python_tag\|>\s*)?)(?=\{)")
_LLAMA_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*'
)
_LLAMA_NEXT = re.compile(r'(?:;|\n)\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name"\s*:)')
_LLAMA_KEYS = ("parameters", "arguments")


def _find_llama(text: str, place: int, tools: Tools) -> Iterator[Found]:
    """Yield the calls at the beginning of an answer; without tools there are none.

    Nothing else marks a call, so an object counts if it names an offered tool, or if it has both
    members and is the whole answer.
    """
    offered = tool_names(tools)
    begin = _LLAMA_BEGIN.match(text, place) if tools else None
    while begin and (found := _llama_call(text, begin.start(1), begin.end(), offered)):
        yield found
        begin = _LLAMA_FURTHER.match(text, found.end)


def _llama_call(text: str, start: int, place: int, offered: set[str]) -> Found | None:
    try:
        read = _members(text, place)
    except (ValueError, RecursionError) as failure:
        head = _LLAMA_HEAD.match(text, place)
        name = _decoded_name(head)
        if head is None or name not in offered:
            return None
        following = _LLAMA_NEXT.search(text, head.end())
        end = following.start() if following else len(text)
        arguments = text[head.end() : end].rstrip()
        cut = end == len(text) and not text.rstrip().endswith("}")
        return Found(start, end, name, arguments, _explain(failure, cut=cut))
    alone = not text[read.end :].strip() and any(key in read.values for key in _LLAMA_KEYS)
    named = isinstance(read.values.get("name"), str)
    if not named or not (alone or read.name in offered):
        return None
    error = None if read.name else _NO_NAME
    return Found(start, read.end, read.name, read.arguments(text, *_LLAMA_KEYS), error)


# Mistral: after [TOOL_CALLS] a list of objects, an object, or a name and its arguments:
#
#     [TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls"}, "id": "a1B2c3D4e"}]
#     [TOOL_CALLS]terminal{"command": "ls"}
#     [TOOL_CALLS]terminal[CALL_ID]a1B2c3D4e[ARGS]{"command": "ls"}

_MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_BEGIN = re.compile(r"\[TOOL_CALLS\]\s*")
_MISTRAL_NAMED = re.compile(
    r"([^\s\[\]{}\"]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}\"]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_MISTRAL_NEXT = re.compile(r'\[TOOL_CALLS\]|,\s*(?=\{\s*"name"\s*:)')


def _find_mistral(text: str, place: int, tools: Tools) -> Iterator[Found]:
    """Yield the calls after each mark; what no call can be read from stays text."""
    while begin := _MISTRAL_BEGIN.search(text, place):
        start, place = begin.start(), begin.end()
        if text.startswith("[", place):
            for found in _mistral_list(text, start, _skip(text, place + 1)):
                yield found
                place = found.end
        elif text.startswith("{", place):
            yield (found := _mistral_object(text, start, place))
            place = found.end
        elif named := _MISTRAL_NAMED.match(text, place):
            yield (found := _mistral_named(text, start, named))
            place = found.end


def _mistral_list(text: str, start: int, place: int) -> Iterator[Found]:
    """Yield the objects of a list; each includes the comma or bracket after it."""
    while text.startswith("{", place):
        found = _mistral_object(text, start, place)
        after = _skip(text, found.end)
        more = text.startswith(",", after)
        if more or text.startswith("]", after):
            found = found._replace(end=after + 1)
        yield found
        if not more and found.error is None:
            return
        start = place = _skip(text, found.end)


def _mistral_object(text: str, start: int, place: int) -> Found:
    try:
        read = _members(text, place)
    except (ValueError, RecursionError) as failure:
        end = _mistral_stop(text, place + 1)
        inner = text[place:end].rstrip()
        if end < len(text):
            inner = inner.removesuffix(",").rstrip()
        cut = end == len(text) and not inner.endswith(("]", "}"))
        return _unreadable(start, end, inner, failure, cut=cut)
    error = None if read.name else _NO_NAME
    arguments = read.arguments(text, "arguments")
    return Found(start, read.end, read.name, arguments, error, read.values.get("id"))


def _mistral_named(text: str, start: int, named: re.Match[str]) -> Found:
    place, error = named.end(), None
    try:
        _, end = _JSON.raw_decode(text, place)
    except (ValueError, RecursionError) as failure:
        end = _mistral_stop(text, place)
        cut = end == len(text) and not text.rstrip().endswith("}")
        error = _explain(failure, cut=cut)
    arguments = text[place:end].rstrip()
    return Found(start, end, named.group(1), arguments, error, named.group(2))


def _mistral_stop(text: str, start: int) -> int:
    """Return the end of a broken call: before the next mark, or after the comma before the next
    object."""
    following = _MISTRAL_NEXT.search(text, start)
    if following is None:
        return len(text)
    return following.start() if following.group() == _MISTRAL_MARK else following.end()


# Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.
# Values are bare text without escapes, typed by the tool's schema. A parameter ends at the
# </parameter> that another parameter or the end of the function follows, so that the tag may stand
# in the middle of a value.

_CODER_BEGIN = re.compile(r"(<tool_call>\s*)?<function=([^>\n]*)>")
_CODER_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_CODER_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\n]*>|</function>))")
_CODER_LOOSE_END = re.compile(r"\n<parameter=[^>\n]*>|\n?</function>")
"""The end of a value whose closing tag the model left out."""
_CODER_FUNCTION_END = re.compile(r"\s*</function>")
_CODER_INTERRUPTION = re.compile(r"<tool_call>\s*<function=[^>\n]*>\s*(?:<parameter=|</function>)")
"""The opening of another call: no value continues after it."""
_CODER_NEXT = re.compile(r"<tool_call>|\s*<function=[^>\n]*>")
_CUT = "the tool call breaks off in the middle"


def _find_coder(text: str, place: int, tools: Tools) -> Iterator[Found]:
    """Yield the calls, also complete ones of an offered tool whose `<tool_call>` the model left
    out; other text without that tag stays content."""
    offered = tool_names(tools)
    while begin := _CODER_BEGIN.search(text, place):
        found = _coder_call(text, begin, tools)
        if begin.group(1) is None and (found.error or found.name not in offered):
            place = begin.end()
            continue
        yield found
        place = found.end


def _coder_call(text: str, begin: re.Match[str], tools: Tools) -> Found:
    name, start = begin.group(2).strip(), begin.end()
    values, end, error = _coder_values(text, start, _schema_of(tools, name))
    arguments = text[start:end] if error else json.dumps(values, ensure_ascii=False)
    if begin.group(1) is not None and (closed := _HERMES_END.match(text, end)):
        end = closed.end()
    error = error or (None if name else "the tool call names no function")
    return Found(begin.start(), end, name, arguments, error)


def _coder_values(
    text: str, start: int, schema: Mapping[str, Any]
) -> tuple[dict[str, Any], int, str | None]:
    """Return the arguments, the index after `</function>` or where reading stopped, and what is
    wrong."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    values: dict[str, Any] = {}
    interruption = _CODER_INTERRUPTION.search(text, start)
    limit = interruption.start() if interruption else len(text)
    place = start
    while parameter := _CODER_PARAMETER.match(text, place, limit):
        at = parameter.end()
        closed = text.find("</parameter>", at, limit) >= 0  # searched first: the regex is slow
        ended = _CODER_VALUE_END.search(text, at, limit) if closed else None
        end = ended or _CODER_LOOSE_END.search(text, at, limit)
        if end is None:
            return values, _coder_stop(text, start), _CUT
        key = parameter.group(1).strip()
        # The form puts one line break before and after a value.
        value = text[at : end.start()].removeprefix("\n").removesuffix("\n")
        values[key] = typed(value, properties.get(key), schema)
        place = end.end() if ended else end.start()
    if closed_at := _CODER_FUNCTION_END.match(text, place):
        return values, closed_at.end(), None
    why = text[place : place + 30].strip()
    why = f"the tool call has {why!r} where a parameter belongs" if why else _CUT
    return values, _coder_stop(text, place), why


def _coder_stop(text: str, start: int) -> int:
    """Return the end of a broken call: after its closing tag, or where the next call begins."""
    following = _CODER_NEXT.search(text, start)
    limit = following.start() if following else len(text)
    for tag in ("</function>", _HERMES_CLOSE):
        close = text.find(tag, start)
        if 0 <= close < limit:
            return close + len(tag)
    return limit


def _schema_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments; empty for an unknown tool."""
    functions = (tool.get("function") for tool in tools)
    for function in functions:
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}
_DEPTH = 8
"""Maximum number of references and alternatives to follow."""


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument that is written as bare text.

    Text stays text where the schema allows a string, or names no type; otherwise it must be JSON
    of a type that the schema allows. What does not fit stays text, and the tool's own check tells
    the model.

    Args:
        schema: of this argument.
        root: of all arguments, for `$ref`.
    """
    kinds = _kinds(schema, root, _DEPTH)
    bare = text.strip()
    if not kinds or "string" in kinds:
        return None if bare == "null" and "null" in kinds else text
    python = {"true": "true", "false": "false", "null": "null", "none": "null"}
    try:
        value = json.loads(
            python.get(bare.lower(), bare), parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value) if "integer" in kinds else value
    return value if any(_is_of(value, kind) for kind in kinds) else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    """Read a float. 1e999 would be infinity, which is not JSON."""
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ()))


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Return the types that a schema allows; empty if it names none."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_resolved(reference, root), root, depth - 1)
    if isinstance(kind := schema.get("type"), str | list):
        return {k for k in ([kind] if isinstance(kind, str) else kind) if isinstance(k, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            return set().union(*(_kinds(choice, root, depth - 1) for choice in choices))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    return {next(kind for kind in _TYPES if _is_of(value, kind)) for value in values}


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what `#/$defs/NAME` and the like point to; None for anything else."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


PARSERS: dict[str, ToolCallParser] = {
    name: ToolCallParser(name, find)
    for name, find in (
        ("hermes", _find_hermes),
        ("qwen3_coder", _find_coder),
        ("llama3_json", _find_llama),
        ("mistral", _find_mistral),
    )
}
"""By name, in the order in which a template's own calls are tried with them."""


def find_parser(name: str) -> ToolCallParser:
    """Return the parser of this name. Raises: UserError, which lists the names."""
    if name not in PARSERS:
        raise UserError(f"no tool-call parser {name!r}: use one of {', '.join(PARSERS)}")
    return PARSERS[name]
