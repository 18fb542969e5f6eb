"""Environments for verifiers up to 0.3: a game of several turns, and one with a tool."""

from typing import Any

import verifiers as vf
from datasets import Dataset

STEPS = {
    "game": '[{"text": "11"}, {"text": "10"}]',
    "tool": '[{"calls": [{"name": "double", "arguments": {"n": 4}}]}, {"text": "It is 8"}]',
}


def dataset(kind: str) -> Dataset:
    prompt = [{"role": "user", "content": f"Play.\nSCRIPT: {STEPS[kind]}\n"}]
    return Dataset.from_list([{"prompt": prompt, "answer": "10"}])


class Game(vf.MultiTurnEnv):
    @vf.stop
    async def solved(self, state: vf.State) -> bool:
        texts = [text(step["completion"][-1]) for step in state["trajectory"]]
        return bool(texts) and texts[-1] == "10"

    async def env_response(self, messages: Any, state: vf.State, **_: Any) -> Any:
        return [{"role": "user", "content": "Less."}]


def text(message: Any) -> str:
    content = message["content"] if isinstance(message, dict) else message.content
    return content or ""


def last_text(completion: Any, answer: str) -> float:
    return float(text(completion[-1]).endswith(("8", answer)))


async def double(n: int) -> str:
    """Double a number.

    Args:
        n: the number.
    """
    return str(2 * n)


def load_game() -> vf.Environment:
    return Game(dataset=dataset("game"), rubric=vf.Rubric(funcs=[last_text]), max_turns=5)


def load_tool() -> vf.Environment:
    rubric = vf.Rubric(funcs=[last_text])
    return vf.ToolEnv(tools=[double], dataset=dataset("tool"), rubric=rubric, max_turns=5)
