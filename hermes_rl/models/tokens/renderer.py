"""The renderer of one model: messages to token ids, ids to text, and bridges between calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from hermes_rl.models.tokens import template_checks
from hermes_rl.models.tokens.bridge import Bridged, History, bridge, seam
from hermes_rl.models.tokens.files import TokenizerFiles, folder_of, read_folder
from hermes_rl.models.tokens.parsers import PARSERS
from hermes_rl.models.tokens.rendering import PROBE_TOOL, Form, PromptWriter, Tools
from hermes_rl.models.tokens.template import Template, TemplateRefused
from hermes_rl.models.tokens.tokenizer import Tokenizer


class Renderer:
    """A tokenizer with its chat template.

    Args:
        tokenizer: encodes and decodes.
        template: writes a conversation as text.
        end_ids: ids that end a turn according to the model's files. The token with which the
        template
            ends an assistant's turn is added.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, *, end_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._file_end_ids = frozenset(end_ids)
        self._writer = PromptWriter.of(tokenizer, template)

    @property
    def form(self) -> Form:
        """The form in which the template reads messages."""
        return self._writer.form

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of tokenizer.json."""
        return self.tokenizer.sha256

    @property
    def template_hash(self) -> str:
        """SHA-256 of the template, its variables and its date."""
        return self.template.sha256

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an assistant's turn. Generation stops at these, never at a text."""
        found = (self._end_of(answer, tools) for answer, tools in _PLAIN_TURNS)
        return self._file_end_ids | {token_id for token_id in found if token_id is not None}

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the opening of the assistant's turn holds `<think>`, so that sampling begins
        inside reasoning."""
        ask = [UserMessage(content="A question?")]
        try:
            text = self._writer.prompt(ask, ()).text(generation_prompt=True)
        except TemplateRefused:
            return False
        return text.rstrip().endswith("<think>")

    @property
    def parser_name(self) -> str:
        """The name of the tool-call parser that fits the template; `hermes` if none does."""
        return self._rendered_call.parser or "hermes"

    @property
    def parser_fits(self) -> bool:
        """Whether a parser reads calls as this template writes them. Also False if it writes none:
        calls and their results would be missing in the next prompt."""
        return self._writer.form.writes_calls and self._rendered_call.parser is not None

    @property
    def unread_calls(self) -> str:
        """Why no parser fits, and what to do: a message for users."""
        if not self._writer.form.writes_calls:
            return (
                "this model's chat template writes no tool calls: it could not show the model what "
                "was called. Put one that does into the folder of endpoint.tokenizer "
                "(chat_template.jinja), use endpoint.tokens=chat, or offer no tools"
            )
        return (
            f"no parser here reads tool calls as this model's template writes them: "
            f"{self._rendered_call.text!r} (the parsers are {', '.join(PARSERS)}). Use "
            "endpoint.tokens=chat, where the engine reads them, or a template in one of these forms"
        )

    @cached_property
    def _rendered_call(self) -> template_checks.RenderedCall:
        return template_checks.render_call(self._writer)

    def render(
        self, messages: Iterable[Message], tools: Tools = (), generation_prompt: bool = True
    ) -> list[int]:
        """Return the prompt of a conversation. Nothing in its messages becomes a control token.

        Args:
            tools: OpenAI function schemas.
            generation_prompt: end with the opening of the assistant's turn.

        Raises: TemplateRefused; UserError for images.
        """
        marked = self._writer.prompt(self._writer.fitted(messages), tools)
        return self.tokenizer.encode(marked.text(generation_prompt=generation_prompt), marked.mark)

    def text(
        self, messages: Iterable[Message], tools: Tools = (), generation_prompt: bool = True
    ) -> str:
        """Return the rendered text, for people. Raises: as `render`."""
        marked = self._writer.prompt(self._writer.fitted(messages), tools)
        return marked.text(generation_prompt=generation_prompt).replace(marked.mark, "")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens."""
        return self.tokenizer.decode(ids)

    def answer_text(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of an answer for a parser, without its end token."""
        ended = bool(sampled_ids) and sampled_ids[-1] in self.end_ids
        return self.decode(sampled_ids[:-1] if ended else sampled_ids)

    def bridge(
        self,
        history: History,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> Bridged:
        """Return the next prompt: the last one, what was sampled, and what the template writes
        next.

        Args:
            history: the last call: its conversation, its prompt, and its answer as parsed.
            sampled_ids: every id of the answer in the order sampled, its end token included.
            new_messages: the messages after the answer.

        Raises: UserError for images.
        """
        return bridge(self._writer, self.end_ids, history, tuple(sampled_ids), new_messages, tools)

    def preserves_prefix(self) -> template_checks.Finding:
        """Return whether the template only adds at the end, and what it rewrites otherwise."""
        return self._finding

    @cached_property
    def _finding(self) -> template_checks.Finding:
        found = template_checks.check_prefix(self._writer, self.end_ids)
        return found if self.parser_fits else found.with_note(self.unread_calls)

    def _end_of(self, answer: AssistantMessage, tools: Tools) -> int | None:
        """Return the id with which the template ends such a turn."""
        ask = UserMessage(content="A question?")
        results = [
            ToolMessage(tool_call_id=call.id, name=call.name, content="A result.")
            for call in answer.tool_calls
        ]
        history = History(messages=(ask,), prompt_ids=(), answer=answer)
        try:
            found = seam(self._writer, self._file_end_ids, history, results or [ask], tools)
        except TemplateRefused:
            return None
        return self.tokenizer.id_of(found.end)


_CALL = ToolCall(id="probe0001", name="look_up", arguments='{"subject": "it"}')
_PLAIN_TURNS: tuple[tuple[AssistantMessage, Tools], ...] = (
    (AssistantMessage(content="An answer."), ()),
    (AssistantMessage(tool_calls=(_CALL,)), (PROBE_TOOL,)),
)


def load_renderer(
    path_or_name: str | Path,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Renderer:
    """Return the renderer of a model.

    Args:
        path_or_name: a folder with tokenizer.json, or a model's name on the hub.
        template: the source of a chat template, in place of the model's own.
        variables: for the template, such as `enable_thinking`.
        revision: of the model on the hub.

    Raises: UserError when files are missing or unreadable, or the model has no template.
    """
    files = read_folder(folder_of(path_or_name, revision))
    return renderer_of(files, template=template, variables=variables)


def renderer_of(
    files: TokenizerFiles,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Renderer:
    """Return the renderer of files that were read. Raises: as `load_renderer`."""
    tokenizer = Tokenizer(files.tokenizer, special=files.special, added=files.added)
    sources: Mapping[str, str] | str = files.templates if template is None else template
    chat_template = Template(sources, variables={**files.named, **(variables or {})})
    end = files.named.get("eos_token")
    end_id = tokenizer.any_id_of(end) if isinstance(end, str) else None
    ends = files.end_ids | ({end_id} if end_id is not None else set())
    return Renderer(tokenizer, chat_template, end_ids=ends)
