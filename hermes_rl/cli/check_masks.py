"""`check RUN --masks`: is what the model said masked in, all of it, and nothing else.

Where ids were recorded, the masks are those of table `segments`. For each chat template that is
given, they are those that a trainer of text has to find: what the template writes between the
opening of an assistant's turn and its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hermes_rl.cli.exact_rows import Renderers, Rollout, Row
from hermes_rl.export.samples import Sample, samples_of
from hermes_rl.messages import AssistantMessage, Message, ToolMessage, conversation_from_openai
from hermes_rl.models.tokens.renderer import Renderer
from hermes_rl.models.tokens.template import TemplateRefused
from hermes_rl.segments.branches import MAIN
from hermes_rl.segments.rules import runs_of

_LEAST_CHARS = 12
"""A shorter tool output may stand in what the model says by chance."""

_OTHER = "made with another tokenizer than those that are named: add it with --tokenizer"


@dataclass
class Masks:
    """The masks of one template over a run, or those of its recorded ids."""

    name: str
    renderer: Renderer | None = None
    """The template's; None for recorded ids."""
    marks_turns: bool | None = None
    """The template has `{% generation %}` blocks, by which some trainers find the mask."""
    spans: int = 0
    """Assistant messages (or recorded answers) that are to be trained."""
    found: int = 0
    """Those of them that are masked in."""
    tokens: int = 0
    """Tokens of assistant messages."""
    masked: int = 0
    """Those of them that are masked in."""
    texts: int = 0
    """Spans whose decoded text was compared with the message."""
    faults: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    """Messages that could not be looked at, by the reason."""

    @property
    def share(self) -> float | None:
        """Of the tokens of assistant messages that are masked in."""
        return self.masked / self.tokens if self.tokens else None

    def verdict(self) -> list[str]:
        """What is wrong: messages that cannot be looked at, one line per reason; texts that differ;
        or nothing to train on."""
        told = [f"{n:,} of {self.spans:,} messages: {why}" for why, n in self.unread.most_common()]
        if self.spans and not (self.masked or told):
            told.append("no assistant token is masked in: training learns nothing")
        return [f"{self.name}: {fault}" for fault in (*told, *self.faults)]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "template": self.name,
            "share": self.share,
            "tokens": self.tokens,
            "masked": self.masked,
            "messages": self.spans,
            "found": self.found,
            "compared": self.texts,
            "generation_blocks": self.marks_turns,
            "faults": self.verdict(),
        }

    def line(self) -> str:
        """For people."""
        share = "no assistant tokens" if self.share is None else f"{self.share:.1%} masked in"
        text = f"{self.name}: {share}, {self.masked:,} of {self.tokens:,} assistant tokens, "
        text += f"{self.found:,} of {self.spans:,} messages, {self.texts:,} compared by text"
        if self.marks_turns is False:
            text += "; no {% generation %} block: a trainer that needs one masks all out"
        return f"{text}; {len(self.verdict()) or 'no'} faults"


def recorded(rollout: Rollout, masks: Masks, renderers: Renderers) -> None:
    """Add the masks of a rollout's recorded ids; what is not trainable is left out.

    Args:
        renderers: to compare texts with; none compares none.
    """
    if rollout.unsound:
        masks.faults += [f"{rollout.name}: {fault}" for fault in rollout.unsound]
        return
    for segment in rollout.segments:
        if segment["trainable"]:
            for run in runs_of(segment):
                if run.trained:
                    masks.spans += 1
                    masks.found += 1
                    masks.tokens += run.end - run.start
                    masks.masked += run.end - run.start
    if renderers.named:
        told = _recorded_faults(rollout, masks, renderers)
        masks.faults += [f"{rollout.name} {fault}" for fault in told]


def _recorded_faults(rollout: Rollout, masks: Masks, renderers: Renderers) -> Iterator[str]:
    """The main agent's recorded answers beside its messages."""
    said, outputs = _said_at(rollout), _outputs(rollout.messages())
    for segment in rollout.segments:
        if not segment["trainable"] or segment["agent_name"] != MAIN:
            continue
        renderer = renderers.of(segment)
        for run in runs_of(segment):
            turn = segment["turn_ids"][run.start]
            if run.trained and renderer is None:
                masks.unread[_OTHER] += 1
            elif run.trained and turn in said and renderer is not None:
                masks.texts += 1
                text = renderer.decode(segment["input_ids"][run.start : run.end])
                faults = _text_faults(text, said[turn], outputs)
                yield from (f"turn {turn}: {fault}" for fault in faults)


def _said_at(rollout: Rollout) -> dict[int, AssistantMessage]:
    """Turn -> what the policy said, where it said one thing."""
    found: dict[int, AssistantMessage] = {}
    infos = rollout.row["message_info"]
    for message, info in zip(rollout.messages(), infos, strict=True):
        if isinstance(message, AssistantMessage) and info["turn"] and not info["synthetic"]:
            found[info["turn"]] = message
    return found


def rendered(rollout: Rollout, masks: Masks) -> None:
    """Add the masks that a template gives to a rollout's messages."""
    if rollout.row["status"] != "ok" or masks.renderer is None:
        return
    row = rollout.row
    decoded = {**row, "messages": [msgspec.json.decode(text) for text in row["messages"]]}
    for sample in samples_of(decoded):
        for where, fault in _of_sample(sample, rollout.tools(), masks):
            masks.faults.append(f"{rollout.name} message {where}: {fault}")


def _of_sample(sample: Sample, tools: Sequence[Row], masks: Masks) -> Iterator[tuple[int, str]]:
    messages = conversation_from_openai(sample.messages)
    outputs = _outputs(messages)
    for place, (message, trained) in enumerate(zip(messages, sample.trained, strict=True)):
        if not trained or not isinstance(message, AssistantMessage):
            continue
        masks.spans += 1
        span = _span(messages, place, tools, masks)
        if span is not None:
            masks.found += 1
            masks.texts += 1
            yield from ((place, fault) for fault in _text_faults(span, message, outputs))


def _span(
    messages: Sequence[Message], place: int, tools: Sequence[Row], masks: Masks
) -> str | None:
    """The text between the opening of the assistant's turn at `place` and what follows it."""
    renderer = masks.renderer
    assert renderer is not None
    try:
        before = renderer.render(messages[:place], tools)
        whole = renderer.render(messages[: place + 1], tools, generation_prompt=False)
        closed = renderer.render(messages[:place], tools, generation_prompt=False)
    except TemplateRefused as error:
        masks.unread[str(error)] += 1
        return None
    masks.tokens += max(0, len(whole) - len(closed))
    if whole[: len(before)] != before:
        return None
    masks.tokens -= len(before) - len(closed)  # the opening of the turn is nobody's saying
    ends = (n for n in range(len(before), len(whole)) if whole[n] in renderer.end_ids)
    end = next(ends, len(whole) - 1) + 1
    masks.tokens -= len(whole) - end
    masks.masked += end - len(before)
    return renderer.decode(whole[len(before) : end])


def _outputs(messages: Sequence[Message]) -> list[str]:
    texts = (m.content.strip() for m in messages if isinstance(m, ToolMessage))
    return [text for text in texts if len(text) >= _LEAST_CHARS]


def _text_faults(text: str, message: AssistantMessage, outputs: Sequence[str]) -> Iterator[str]:
    """Whether a masked span is what the message says, and holds no tool's output."""
    own = [message.raw_content or message.content, *(c.name for c in message.tool_calls)]
    absent = [piece for piece in own if piece.strip() and piece.strip() not in text]
    if absent:
        yield f"masked in is {text[:80]!r}, without {absent[0][:80]!r}"
    arguments = [c.arguments for c in message.tool_calls]
    said = "\n".join([*own, message.reasoning_content or "", *arguments])
    if any(output in text and output not in said for output in outputs):
        yield "a tool's output is masked in"
