"""Chat templates, rendered with jinja2 in a sandbox, without anything volatile.

The environment is the one that chat templates are written for: trimmed blocks, `break` and
`continue`, a `generation` block, `raise_exception`, and a `tojson` that keeps characters and does
not escape HTML. A template that asks for today's date gets a fixed one: a prompt that changes at
midnight could neither be cached nor compared.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import BadRequest, UserError

if TYPE_CHECKING:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.parser import Parser


DATE = datetime.date(2024, 7, 26)
"""The date of every prompt: the one that Llama's templates fall back to."""

_EXTRA = "exact tokens need tokenizers and jinja2: pip install 'hermes-rl[rl]'"


class TemplateRefused(BadRequest):
    """The template does not render this conversation, such as two calls where it allows one."""


class Template:
    """The chat template of one model.

    Args:
        sources: jinja2 sources by name: `default`, and optionally `tool_use`, which is taken where
            tools are offered.
        variables: what every rendering gets beside the messages: `bos_token`, `enable_thinking`...
        date: what `strftime_now` tells.

    Raises:
        UserError: a source is no template, or there is none.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        *,
        variables: Mapping[str, Any] | None = None,
        date: datetime.date = DATE,
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.variables = dict(variables or {})
        self.date = date
        if not self.sources:
            raise UserError("the model has no chat template: give one with chat_template.jinja")
        environment = _environment(date)
        self._compiled = {
            name: _compiled(environment, name, source) for name, source in self.sources.items()
        }

    @property
    def sha256(self) -> str:
        """Of everything that a rendering depends on, the messages aside."""
        parts = [self.sources, self.variables, self.date.isoformat()]
        text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    def source_for(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The source that renders conversations with these tools."""
        return self.sources[self._name(bool(tools))]

    def dated(self, date: datetime.date) -> Template:
        """The same template on another day."""
        return Template(self.sources, variables=self.variables, date=date)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: in the form that the template reads (`forms`).
            tools: function schemas; none is told as None.
            generation_prompt: end with the opening of the assistant's turn.

        Raises: TemplateRefused.
        """
        template = self._compiled[self._name(bool(tools))]
        context = {**self.variables, "messages": list(messages), "tools": list(tools) or None}
        context |= {"documents": None, "add_generation_prompt": generation_prompt}
        try:
            return template.render(context)
        except RecursionError:
            raise TemplateRefused("the chat template recurses without end") from None
        except Exception as error:  # a template is a program of strangers: it raises anything
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TemplateRefused(f"the chat template refuses this conversation: {why}") from error

    def _name(self, tools: bool) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))


def _environment(date: datetime.date) -> jinja2.Environment:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError(_EXTRA) from None

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_block()],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _fixed(date)
    return environment


def _generation_block() -> type[Extension]:
    """Return the extension for `{% generation %} ... {% endgeneration %}`, which prints its body.

    Templates put the block around what the assistant writes, for trainers. Masks here come from
    sampled ids instead, so the block only has to be parsed.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 - the name and form that jinja2 requires

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _fixed(date: datetime.date) -> Callable[[str], str]:
    return lambda form: datetime.datetime.combine(date, datetime.time()).strftime(form)


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it; jinja2's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _compiled(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(f"chat template {name!r}, line {error.lineno}: {error.message}") from None
