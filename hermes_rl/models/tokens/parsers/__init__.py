"""Parsers of tool calls, by name: `hermes` (JSON in tags), `qwen3_coder` (parameters in tags),
`llama3_json` (JSON alone) and `mistral` (JSON behind a mark).

A model's own engine may parse as well; with exact tokens the ids come first, so the text is parsed
here, once, in the same way for every engine.
"""

from __future__ import annotations

from hermes_rl.errors import UserError
from hermes_rl.models.tokens.parsers.base import Parsed as Parsed
from hermes_rl.models.tokens.parsers.base import ParsedCall as ParsedCall
from hermes_rl.models.tokens.parsers.base import ToolCallParser as ToolCallParser
from hermes_rl.models.tokens.parsers.hermes import HermesParser as HermesParser
from hermes_rl.models.tokens.parsers.llama3_json import Llama3JsonParser as Llama3JsonParser
from hermes_rl.models.tokens.parsers.mistral import MistralParser as MistralParser
from hermes_rl.models.tokens.parsers.qwen3_coder import Qwen3CoderParser as Qwen3CoderParser

PARSERS: dict[str, ToolCallParser] = {
    parser.name: parser
    for parser in (HermesParser(), Qwen3CoderParser(), Llama3JsonParser(), MistralParser())
}
"""By name, in the order in which a template's own calls are tried with them."""


def parser_named(name: str) -> ToolCallParser:
    """The parser of this name. Raises: UserError with the names there are."""
    if name not in PARSERS:
        raise UserError(f"no tool-call parser {name!r}: use one of {', '.join(PARSERS)}")
    return PARSERS[name]
