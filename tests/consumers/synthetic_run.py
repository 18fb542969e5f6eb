"""Write a run made from events, with exact tokens, and all exports, with the project's own Python.

Argument: the folder for `tokenizer.json` (one token per byte), `run/`, `exports/` with a file per
format, and `truth.json`: for each rollout the sampled texts with their tokens and prompts, and the
texts that were not sampled.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "export"), str(HERE.parent / "store")]

import rollouts  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from hermes_rl.events import MessageAdded  # noqa: E402
from hermes_rl.export import FORMATS, export_run  # noqa: E402
from hermes_rl.messages import AssistantMessage, to_openai  # noqa: E402
from hermes_rl.record import Segment  # noqa: E402
from hermes_rl.store import Finished  # noqa: E402

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    return core


def render_answer(message: dict[str, Any]) -> str:
    """The text that the policy sampled for a message."""
    text = ""
    if message.get("reasoning_content"):
        text += f"<think>\n{message['reasoning_content']}\n</think>\n"
    text += message["content"]
    for call in message.get("tool_calls", []):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}'
        text += "\n</tool_call>"
    return text + "<|im_end|>"


def render_message(message: dict[str, Any]) -> str:
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"


@dataclass
class Answer:
    """The prompt and the sampled tokens of one call."""

    prompt: list[int]
    ids: list[int]


def build_segments(
    core: Tokenizer, number: int, contexts: list[list[tuple[MessageAdded, bool]]]
) -> tuple[list[Segment], list[Answer]]:
    """Build one segment per context of (message, whether it is sampled here), and the answers."""
    made, answers = [], []
    for branch, context in enumerate(contexts):
        ids: list[int] = []
        sampled_positions: list[int] = []
        turns: list[int] = []
        for added, sampled in context:
            message = to_openai(added.message, parsed_arguments=True)
            opened = "<|im_start|>assistant\n" if message["role"] == "assistant" else ""
            text = render_answer(message) if opened else render_message(message)
            glue = core.encode(opened).ids if opened else []
            new = core.encode(text).ids
            ids += glue
            if sampled:
                answers.append(Answer(list(ids), new))
                sampled_positions += range(len(ids), len(ids) + len(new))
            ids += new
            turns += [added.turn] * (len(glue) + len(new))
        calls = [f"c{added.turn}" for added, sampled in context if sampled]
        kind = "compaction" if branch else "main"
        more = {"branch_index": branch, "n_branches": len(contexts), "branch_kind": kind}
        made.append(
            rollouts.segment(number, ids, sampled_positions, turn_ids=turns, call_ids=calls, **more)
        )
    return made, answers


def rollout(core: Tokenizer, number: int, events: list[Any]) -> tuple[Finished, dict[str, Any]]:
    added = [e for e in events if isinstance(e, MessageAdded)]
    by_policy = [is_by_policy(e) for e in added]
    cut = [e.start for e in events if type(e).__name__ == "ContextStarted" and e.start]
    whole = list(zip(added, by_policy, strict=True))
    if cut:
        kept = [(added[i], False) for i in (0, 3, 4)]
        contexts = [whole[: cut[0]], kept + whole[cut[0] :]]
    else:
        contexts = [whole]
    segments, answers = build_segments(core, number, contexts)
    reward = float(number % 2)
    made = rollouts.finished(number, events, reward=reward, segments=segments, size=2)
    forms = [to_openai(e.message, parsed_arguments=True) for e in added]
    truth = {
        "texts": [render_answer(m) for m, sampled in zip(forms, by_policy, strict=True) if sampled],
        "ids": [answer.ids for answer in answers],
        "prompts": [answer.prompt for answer in answers],
        "logprobs": [[-0.5] * len(answer.ids) for answer in answers],
        "first": answers_before_foreign_message(contexts[0]),
        "other_texts": [
            m["content"]
            for m, sampled in zip(forms, by_policy, strict=True)
            if not sampled and m["role"] in ("tool", "assistant")
        ],
        "tools": rollouts.TOOLS,
        "reward": reward,
        "group": made.row.group_id,
    }
    return made, truth


def answers_before_foreign_message(context: list[tuple[MessageAdded, bool]]) -> int:
    """Count the answers before an assistant message that was not sampled.

    Later contexts of these rollouts begin with one.
    """
    answers = [sampled for added, sampled in context if isinstance(added.message, AssistantMessage)]
    return [*answers, False].index(False)


def is_by_policy(added: MessageAdded) -> bool:
    is_answer = isinstance(added.message, AssistantMessage)
    return is_answer and bool(added.turn) and not added.synthetic


def main(out: Path) -> None:
    core = tokenizer()
    core.save(str(out / "tokenizer.json"))
    rows, truth = [], {}
    # Few formats train on invalid arguments; tests/export tests those.
    streams = [rollouts.tool_calls_and_answer('{"n": 1}'), *rollouts.EVENT_STREAMS[1:]]
    for number, events in enumerate(s for s in streams for _ in range(2)):
        made, facts = rollout(core, number, events)
        rows.append(made)
        truth[made.row.trajectory_id] = facts
    rollouts.write(out / "run", rows)
    (out / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    for name in FORMATS:
        export_run(out / "run", name, out / "exports" / f"{name}{FORMATS[name].suffix}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
