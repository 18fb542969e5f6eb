"""What messages say must not become a control token: lookalikes in them are marked.

Marked are, in everything that a message says, the control tokens of the tokenizer; and in what
users, tools and arguments of calls say, also the markup that the template itself writes, such as
`</tool_response>`. An assistant's own text keeps its markup: the model wrote it as tokens. What a
template spells as ordinary text (`### User:`) can be told from a message's text by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.models.tokens.tokenizer import AddedToken, clean, lookalikes

_MARKS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xF0010, 0xF1000))]
"""Characters that never stand in text by the rules of Unicode, then some of private use."""


class Shield:
    """Marks lookalikes of tokens in what messages say.

    Args:
        added: the added tokens of the tokenizer.
        template: the sources of the chat template, one after the other.
    """

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        tokens = [token for token in added if token.text.strip()]
        self._control = [token.text for token in tokens if token.special]
        markup = [t.text for t in tokens if not t.special and _is_markup(t.text)]
        self._envelope = self._control + [text for text in markup if text in template]
        self._find_control = lookalikes(self._control)
        self._find_envelope = lookalikes(self._envelope)

    def message(self, form: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """A message in its template's form, marked as its role asks for."""
        strict = form["role"] in ("user", "tool")
        return {
            key: value
            if key in ("role", "type")
            else self.marked(value, mark, strict=strict or key == "tool_calls")
            for key, value in form.items()
        }

    def marked(self, value: Any, mark: str, *, strict: bool) -> Any:
        """A value of JSON with each lookalike in its strings and keys marked.

        Args:
            strict: also the template's own markup.
        """
        if isinstance(value, str):
            return self._marked_text(clean(value), mark, strict=strict)
        if isinstance(value, dict):
            return {
                self.marked(key, mark, strict=strict): self.marked(inner, mark, strict=strict)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(inner, mark, strict=strict) for inner in value]
        return value

    def _marked_text(self, text: str, mark: str, *, strict: bool) -> str:
        if not any(token in text for token in (self._envelope if strict else self._control)):
            return text
        pattern = self._find_envelope if strict else self._find_control
        return pattern.sub(lambda found: "".join(mark + char for char in found.group()), text)


def mark_for(values: Iterable[Any]) -> str:
    """A character that none of these values of JSON holds.

    Raises: UserError when they hold every one of 4,000 characters that no text needs.
    """
    texts = [text for text in _strings(values) if not text.isascii()]
    for mark in _MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise UserError("the messages hold every private character of Unicode: none is left to use")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _strings(value.values())
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _strings(inner)


def _is_markup(text: str) -> bool:
    return len(text) > 2 and not any(char.isspace() for char in text)
