"""Render prompts of many templates with the project's own Python, for test_rendering.py.

    python render_prompts.py OUT TEMPLATES

Writes one model folder per template, and OUT/prompts.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from hermes_rl.messages import SystemMessage as System
from hermes_rl.models.tokens import (
    PROBE_TOOL,
    Renderer,
    TemplateRefused,
    load_renderer,
    message_form,
)
from hermes_rl.testing import TEMPLATES, write_tiny_tokenizer

CALL = ToolCall(id="call00001", name="look_up", arguments='{"subject": "é \\"<b>\\" 🙂"}')
FOUND = ToolMessage(tool_call_id="call00001", name="look_up", content="{'a': 1}\n\nFound <i>.")
ASK = UserMessage(content="What is it?\n\n  And why? 汉字")
CONVERSATIONS: dict[str, list[Message]] = {
    "question": [System(content="Be brief."), ASK],
    "answer": [ASK, AssistantMessage(content="It is."), UserMessage(content="Sure?")],
    "call": [System(content="Be brief."), ASK, AssistantMessage(tool_calls=(CALL,)), FOUND],
    "thought": [ASK, AssistantMessage(reasoning_content="Hm.", tool_calls=(CALL,)), FOUND],
}


def main(out: Path, templates: Path) -> None:
    sources = {f"tiny-{name}": source for name, source in TEMPLATES.items()}
    sources |= {p.stem: p.read_text(encoding="utf-8") for p in sorted(templates.glob("*.jinja"))}
    made = [prompt for name, source in sources.items() for prompt in prompts(out, name, source)]
    (out / "prompts.json").write_text(json.dumps(made), encoding="utf-8")


def prompts(out: Path, name: str, source: str) -> list[dict[str, Any]]:
    folder = write_tiny_tokenizer(out / name)
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>", "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    renderer = load_renderer(folder)
    made = []
    for title, messages in CONVERSATIONS.items():
        if messages[-1] is FOUND and not renderer.form.writes_calls:
            continue
        for opened in (True, False):
            made.append(
                {
                    "folder": str(folder),
                    "title": f"{name}: {title}",
                    "messages": [message_form(message, renderer.form) for message in messages],
                    "tools": [PROBE_TOOL] if messages[-1] is FOUND else None,
                    "opened": opened,
                    "date": "strftime_now" in source,
                    "ids": render(renderer, messages, opened),
                }
            )
    return made


def render(renderer: Renderer, messages: list[Message], opened: bool) -> list[int] | None:
    try:
        tools = [PROBE_TOOL] if messages[-1] is FOUND else []
        return renderer.render(messages, tools, generation_prompt=opened)
    except TemplateRefused:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
