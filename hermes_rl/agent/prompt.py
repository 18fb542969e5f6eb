"""What the harness says to the model: system prompts, and messages during a run.

Every wording that runs were made with is kept, because it is part of a run's identity: a run that
goes on uses the wording that it began with (the switch `wording`). No text contains anything
volatile: no date, host, path or user name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from hermes_rl.text import cut_middle
from hermes_rl.tools import BUNDLED_SKILLS, MEMORY, SKILL_VIEW, Memory, Services, Skills

EMPTY = "(empty)"
"""Replaces an empty answer, which no provider accepts in a history."""
_THOUGHT_CHARS = 16_000


@dataclass(frozen=True)
class Wording:
    """One version of all texts."""

    with_tools: str
    without_tools: str
    unattended: str
    """Added to `with_tools` where no user can reply."""
    messages: Messages


@dataclass(frozen=True)
class Messages:
    """What the harness says during a run. Each is recorded as synthetic."""

    summary_request: str
    """Sent at the turn limit."""
    cut_text: str
    cut_stream: str
    cut_call: str
    empty: str
    nudge: str
    thoughts: str
    quoted: str
    """Introduces the reasoning that `thoughts` refers to."""

    def as_list(self) -> list[str]:
        """All texts, in the order in which a run's identity lists them."""
        return list(astuple(self))

    def thoughts_note(self, reasoning: str | None) -> str:
        """Ask the model to continue from its reasoning, quoted: most providers do not accept an
        answer that is reasoning alone."""
        if not reasoning or not reasoning.strip():
            return self.thoughts
        return self.thoughts + self.quoted + cut_middle(reasoning.strip(), _THOUGHT_CHARS)


WORDINGS = {
    1: Wording(
        with_tools=(
            "You are an agent that works on a Linux machine with tools. Do what the user asks by "
            "calling tools, one step after another, and look at each result before the next step. "
            "Check that the work is really done. Then answer in a few words what you did or found, "
            "without calling a tool."
        ),
        without_tools="You are a helpful assistant. Answer what the user asks.",
        unattended=(
            " Nobody can answer questions while you work: decide what is not said, and go on."
        ),
        messages=Messages(
            summary_request=(
                "No further tool calls are possible. Say briefly what has been done, what was "
                "found, and what is still open."
            ),
            cut_text=(
                "Your answer was cut off at the output limit. Go on exactly where it stopped. "
                "Repeat nothing, and do not begin anew."
            ),
            cut_stream=(
                "The connection broke while you were answering, and only the text above arrived. "
                "Go on exactly where it stopped. Repeat nothing, and do not begin anew."
            ),
            cut_call=(
                "Your last tool call was cut off before it was complete, and was not run. Do the "
                "same in several smaller calls of at most about eight thousand tokens each; write "
                "a long file in parts."
            ),
            empty=EMPTY,
            nudge=(
                "Your answer was empty. Look at the tool results above and go on: call the next "
                "tool, or give your answer."
            ),
            thoughts=(
                "You have thought, but neither answered nor called a tool. Go on from your "
                "thoughts now."
            ),
            quoted=" They were:\n\n",
        ),
    ),
    2: Wording(
        with_tools=(
            "You are an agent working on a Linux machine with tools. Complete the user's request "
            "by calling tools, one step at a time, and check each result before you take the next "
            "step. Verify that the work is complete. Then reply with a short summary of what you "
            "did or found, without calling a tool."
        ),
        without_tools="You are a helpful assistant. Respond to the user's request.",
        unattended=(
            " No one can answer questions while you work. Where details are missing, make a "
            "reasonable decision and continue."
        ),
        messages=Messages(
            summary_request=(
                "You cannot make any more tool calls. Briefly summarize what you have done, what "
                "you have found, and what remains to be done."
            ),
            cut_text=(
                "Your answer reached the output limit and was cut off. Continue exactly where it "
                "stopped. Do not repeat anything, and do not start over."
            ),
            cut_stream=(
                "The connection was lost during your answer, and only the text above was received. "
                "Continue exactly where it stopped. Do not repeat anything, and do not start over."
            ),
            cut_call=(
                "Your last tool call was cut off before it was complete, so it was not executed. "
                "Split the work into several smaller calls of at most about eight thousand tokens "
                "each. Write long files in parts."
            ),
            empty=EMPTY,
            nudge=(
                "Your last answer was empty. Review the tool results above, then call the next "
                "tool or give your final answer."
            ),
            thoughts=(
                "Your last response contained only reasoning, with no answer and no tool call. "
                "Continue from your reasoning now."
            ),
            quoted=" Your reasoning was:\n\n",
        ),
    ),
}
WORDINGS[3] = WORDINGS[2]  # since then tools are described otherwise
"""Version -> its texts."""

LATEST = max(WORDINGS)


def system_prompt(preset: str, tools: Collection[str], wording: int = LATEST) -> str:
    """The system prompt of a preset.

    Args:
        tools: names of the offered tools.
        wording: a key of `WORDINGS`.
    """
    texts = WORDINGS[wording]
    if not tools:
        return texts.without_tools
    return texts.with_tools + ("" if preset == "interactive" else texts.unattended)


def with_services(
    system: str | None, services: Services, state: Mapping[str, Any], tools: Collection[str]
) -> str | None:
    """A system prompt with the skills and the memory of a conversation that begins.

    Args:
        state: of the rollout's tools, where services keep nothing outside.
        tools: names of the offered tools: what none of them reads is left out.

    Raises: UserError for skills or a memory that cannot be read.
    """
    parts = [system] if system else []
    if SKILL_VIEW in tools:
        parts.append((services.skills or Skills([BUNDLED_SKILLS])).index(state))
    if MEMORY in tools:
        parts.append((services.memory or Memory()).snapshot(state))
    return "\n\n".join(part for part in parts if part) or None


HINTS = {
    70: "Start to wrap up the work.",
    90: "Finish what is essential now, then give your answer.",
}
"""Percentage of the turns that are used -> what the model reads then."""


def budget_hint(percent: int, used: int, limit: int) -> str:
    """A hint that turns run out, as it is added to a tool's result.

    Args:
        percent: a key of `HINTS`.
    """
    return f"\n\n[You have used {used} of your {limit} turns. {HINTS[percent]}]"


def steer_note(texts: Collection[str]) -> str:
    """What the user said while tools ran, as it is added to a tool's result."""
    return "\n\n[Message from the user while you were working: " + "\n".join(texts) + "]"
