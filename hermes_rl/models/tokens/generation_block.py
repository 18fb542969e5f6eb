"""The block `{% generation %} ... {% endgeneration %}` of chat templates: it prints what it holds.

Templates put it around what the assistant says, so that trainers can find it. Masks here come from
sampled ids, so the block only has to be read.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    """Reads the block and keeps its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a plain scope around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
