"""From messages to the text that a model reads, with the lookalikes in them marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hermes_rl.messages import Message
from hermes_rl.models.tokens.forms import Form, message_form
from hermes_rl.models.tokens.shield import Shield, mark_for
from hermes_rl.models.tokens.template import Template


@dataclass(frozen=True)
class Typesetter:
    """A chat template with the form it reads and the shield of the tokenizer it writes for."""

    template: Template
    form: Form
    shield: Shield

    def mark_for(self, messages: Iterable[Message], tools: Iterable[Mapping[str, Any]]) -> str:
        """A mark that stands in none of these messages and tools."""
        return mark_for([msgspec.to_builtins(list(messages)), list(tools)])

    def text(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]],
        mark: str,
        *,
        generation_prompt: bool,
    ) -> str:
        """The rendered conversation. Raises: TemplateRefused; UserError for images."""
        forms = [message_form(message, self.form, self.shield, mark) for message in messages]
        told = [self.shield.marked(dict(tool), mark, strict=False) for tool in tools]
        return self.template.render(forms, told, generation_prompt=generation_prompt)
