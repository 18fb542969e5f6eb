"""Bridge second prompts of many templates with the project's own Python, for test_rendering.py.

    python render_bridges.py OUT TEMPLATES

Writes one model folder per template, with the template's control tokens, and OUT/bridges.json.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from render_prompts import ASK, CALL, FOUND

from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage
from hermes_rl.models.tokens import (
    PROBE_TOOL,
    History,
    Renderer,
    TemplateRefused,
    load_renderer,
    message_form,
)
from hermes_rl.testing import write_tiny_tokenizer

CONTROL = re.compile(
    r"<\|[^|<>\s'\"]+\|>|<｜[^<>]+?｜>|<(?:start|end)_of_\w+>|<\|\w+>|<\w+\|>|</?s>|\[/?[A-Z_]{3,}\]"
)
"""Control tokens of the model families."""
ENDS = (
    "</s>",
    "<turn|>",
    "<|call|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|observation|>",
    "<|return|>",
    "<|tool_response>",
    "<|user|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)
"""End-of-turn tokens in the generation_config.json of these families."""
OTHER = ToolCall(id="call00002", name="look_up", arguments='{"subject": "that"}')
BACK = ToolMessage(tool_call_id="call00002", name="look_up", content="Found that.")
CONVERSATIONS: dict[str, tuple[list[Message], AssistantMessage, list[Message]]] = {
    "answer": ([ASK], AssistantMessage(content="It is."), [ASK]),
    "call": ([ASK], AssistantMessage(tool_calls=(CALL,)), [FOUND]),
    "text and call": ([ASK], AssistantMessage(content="So.", tool_calls=(CALL,)), [FOUND]),
    "two calls": ([ASK], AssistantMessage(tool_calls=(CALL, OTHER)), [FOUND, BACK]),
    "after a call": (
        [ASK, AssistantMessage(tool_calls=(CALL,)), FOUND],
        AssistantMessage(tool_calls=(OTHER,)),
        [BACK],
    ),
}


def main(out: Path, templates: Path) -> None:
    made = [one for path in sorted(templates.glob("*.jinja")) for one in bridges(out, path)]
    (out / "bridges.json").write_text(json.dumps(made), encoding="utf-8")


def bridges(out: Path, path: Path) -> Iterator[dict[str, Any]]:
    folder = model(out / path.stem, path.read_text(encoding="utf-8"))
    renderer = load_renderer(folder)
    for title, (base, answer, new) in CONVERSATIONS.items():
        if answer.tool_calls and not renderer.form.writes_calls:
            continue
        if renderer.form.one_call and len(answer.tool_calls) > 1:
            continue
        thought = msgspec.structs.replace(answer, reasoning_content="Hm.")
        for variant in (answer, thought):
            bridge = bridge_prompt(renderer, base, variant, new)
            if bridge is not None:
                whole = [*base, variant, *new]
                yield {
                    "folder": str(folder),
                    "title": f"{path.stem}: {title}{' thought' * (variant is thought)}",
                    "messages": [message_form(message, renderer.form) for message in whole],
                    "tools": [PROBE_TOOL] if answer.tool_calls else None,
                    **bridge,
                }


def model(folder: Path, source: str) -> Path:
    """A model's folder: the tiny tokenizer with the control tokens of a template."""
    from tokenizers import AddedToken, Tokenizer

    write_tiny_tokenizer(folder)
    place = str(folder / "tokenizer.json")
    made = Tokenizer.from_file(place)
    known = [AddedToken(t, special=True, normalized=False) for t in CONTROL.findall(source)]
    made.add_special_tokens(list(dict.fromkeys(known)))
    made.save(place)
    ids = [made.token_to_id(end) for end in ENDS if end in source]
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>", "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def bridge_prompt(
    renderer: Renderer, base: list[Message], answer: AssistantMessage, new: list[Message]
) -> dict[str, Any] | None:
    """Bridge the second prompt from the whole answer and from the answer without its end token.

    None if no model can have sampled the answer as the template writes it.
    """
    tools = [PROBE_TOOL] if answer.tool_calls else []
    try:
        prompt = renderer.render(base, tools)
        whole = renderer.render([*base, answer, *new], tools)
    except TemplateRefused:
        return None
    sampled = whole[len(prompt) :]
    ends = [place for place, token in enumerate(sampled) if token in renderer.end_ids]
    if whole[: len(prompt)] != prompt or not ends:
        return None
    history = History(messages=base, prompt_ids=prompt, answer=answer)
    found = [renderer.bridge(history, sampled[: ends[0] + n], new, tools) for n in (1, 0)]
    dated = any("strftime_now" in source for source in renderer.template.sources.values())
    return {
        "ids": [one.ids for one in found],
        "why": found[0].fork_reason,
        "read_token_ids": whole if dated else None,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
