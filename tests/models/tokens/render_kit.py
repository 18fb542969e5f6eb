"""Conversations for the tests of rendering and bridging, plain and drawn."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from hypothesis import strategies as st

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.tokens import PROBE_TOOL, Renderer
from hermes_rl.testing import CONTROL, MARKUP, TEMPLATES, tiny_renderer

TOOLS = [PROBE_TOOL]
CHATML_LIKE = ("chatml", "text_arguments", "coder", "qwen3")
FAMILIES = (*CHATML_LIKE, "llama3", "mistral")

GLM_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>"
    "\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
"""Has the tags of hermes' form, and something else between them."""

_PIECES = (
    *CONTROL,
    *MARKUP,
    "<|im_",
    "end|>",
    "<",
    "|>",
    "\n",
    "\n\n",
    " ",
    "the ",
    "answer",
    "é",
    "汉字",
    "🙂",
    "\ud83d",
    "\udc00",
    "\ufdd0",
    "\U000f0000",
    "\U000f00000.17\U000f0001",
    "{",
    '"',
    "\\",
    "'",
    "<table>",
    "\x00",
)


def texts(max_pieces: int = 6) -> st.SearchStrategy[str]:
    """Texts that try to be tokens of the template, and texts of any kind."""
    piece = st.sampled_from(_PIECES) | st.text(max_size=5)
    return st.lists(piece, max_size=max_pieces).map("".join)


def phrases(max_pieces: int = 5) -> st.SearchStrategy[str]:
    """Texts that every template writes as they are: no blank ends, nothing that looks like markup
    or like an end of a turn."""
    piece = st.sampled_from(("the ", "answer", "é", "汉字", "🙂", " and\n\n", "12", "<|im_", "{"))
    return st.lists(piece, min_size=1, max_size=max_pieces).map(lambda ps: f"a{''.join(ps)}z")


def call(number: int, argument: str) -> ToolCall:
    """A call of the probe tool."""
    reported = json.dumps({"subject": argument}, ensure_ascii=False)
    return ToolCall(id=f"call{number:05}", name="look_up", arguments=reported)


def results(calls: Sequence[ToolCall], text: str) -> list[Message]:
    """What the calls gave."""
    return [ToolMessage(tool_call_id=c.id, name=c.name, content=text) for c in calls]


@st.composite
def conversations(
    draw: st.DrawFn, content: st.SearchStrategy[str], *, most_calls: int = 3
) -> list[Message]:
    """A question, rounds of calls, and what their results were."""
    messages: list[Message] = []
    if draw(st.booleans()):  # whose markup is tokens: its author means it
        messages.append(SystemMessage(content=draw(phrases())))
    messages.append(UserMessage(content=draw(content)))
    for _ in range(draw(st.integers(0, 2))):
        calls = [call(n, draw(content)) for n in range(draw(st.integers(1, most_calls)))]
        messages.append(AssistantMessage(tool_calls=tuple(calls)))
        messages += results(calls, draw(content))
    return messages


def added_tokens(renderer: Renderer, ids: Sequence[int]) -> list[str]:
    """The added tokens among these ids, in order."""
    found = (renderer.tokenizer.text_of(i) for i in ids)
    return [text for text in found if text is not None]


def family_tokens(family: str, ids: Sequence[int]) -> list[str]:
    """The tokens among these ids that the family's template writes, in order."""
    official = {*CONTROL, *(text for text in MARKUP if text in TEMPLATES[family])}
    return [text for text in added_tokens(tiny_renderer(family), ids) if text in official]


def neutral(message: Message) -> Message:
    """A message of the same build that says nothing that could be a token."""
    if isinstance(message, SystemMessage):
        return SystemMessage(content="word")
    if isinstance(message, UserMessage):
        return UserMessage(content="word")
    if isinstance(message, ToolMessage):
        return ToolMessage(tool_call_id=message.tool_call_id, name=message.name, content="word")
    calls = tuple(call(n, "word") for n, _ in enumerate(message.tool_calls))
    return AssistantMessage(content="word" if message.content else "", tool_calls=calls)


def printed(code: str, **environment: str) -> str:
    """What a new Python process prints, without the configuration of the hub that this one has."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
