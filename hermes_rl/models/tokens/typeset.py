"""From messages to the text that a model reads, with the lookalikes in them marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.messages import Message
from hermes_rl.models.tokens.forms import Form, message_form
from hermes_rl.models.tokens.shield import Shield, mark_for
from hermes_rl.models.tokens.template import Template
from hermes_rl.models.tokens.turns import one_call_each

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sheet:
    """Messages and tools as the template reads them, marked, ready to be rendered."""

    template: Template
    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    mark: str
    """The character before each character of a lookalike; it stands nowhere else."""

    def text(self, count: int | None = None, *, generation_prompt: bool) -> str:
        """The rendered text of the first `count` messages, or of all. Raises: TemplateRefused."""
        told = self.messages if count is None else self.messages[:count]
        return self.template.render(told, self.tools, generation_prompt=generation_prompt)


@dataclass(frozen=True)
class Typesetter:
    """A chat template with the form it reads and the shield of the tokenizer it writes for."""

    template: Template
    form: Form
    shield: Shield

    def fitted(self, messages: Iterable[Message]) -> list[Message]:
        """The messages in turns that the template can write."""
        told = list(messages)
        return one_call_each(told) if self.form.one_call else told

    def sheet(self, messages: Iterable[Message], tools: Tools) -> Sheet:
        """The (fitted) messages, ready to be rendered. Raises: UserError for images."""
        forms = [message_form(message, self.form) for message in messages]
        mark = mark_for([forms, list(tools)])
        told = [self.shield.message(form, mark) for form in forms]
        offered = [self.shield.marked(dict(tool), mark, strict=False) for tool in tools]
        return Sheet(self.template, told, offered, mark)
