"""Run by the project's own Python: a told run with messages and exact tokens, and its exports.

Arguments: the folder to fill. Written are `tokenizer.json` (one token per byte), `run/`, one file
per format in `exports/`, and `truth.json`: by rollout what the policy said, as texts and as tokens
after which prompt, and what it did not say.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "export"), str(HERE.parent / "store")]

import told  # noqa: E402
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


def written(message: dict[str, Any]) -> str:
    """What the policy sampled for a message."""
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


def heard(message: dict[str, Any]) -> str:
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"


@dataclass
class Answer:
    """What the engine would have logged of one call."""

    prompt: list[int]
    ids: list[int]


def exact(
    core: Tokenizer, number: int, contexts: list[list[tuple[MessageAdded, bool]]]
) -> tuple[list[Segment], list[Answer]]:
    """One segment per context, of (message, whether it is sampled here), and its answers."""
    made, answers = [], []
    for branch, context in enumerate(contexts):
        ids: list[int] = []
        own: list[int] = []
        turns: list[int] = []
        for added, sampled in context:
            message = to_openai(added.message, parsed_arguments=True)
            opened = "<|im_start|>assistant\n" if message["role"] == "assistant" else ""
            text = written(message) if opened else heard(message)
            glue = core.encode(opened).ids if opened else []
            new = core.encode(text).ids
            ids += glue
            if sampled:
                answers.append(Answer(list(ids), new))
                own += range(len(ids), len(ids) + len(new))
            ids += new
            turns += [added.turn] * (len(glue) + len(new))
        calls = [f"c{added.turn}" for added, sampled in context if sampled]
        kind = "compaction" if branch else "main"
        more = {"branch_index": branch, "n_branches": len(contexts), "branch_kind": kind}
        made.append(told.segment(number, ids, own, turn_ids=turns, call_ids=calls, **more))
    return made, answers


def rollout(core: Tokenizer, number: int, story: list[Any]) -> tuple[Finished, dict[str, Any]]:
    added = [e for e in story if isinstance(e, MessageAdded)]
    mine = [is_own(e) for e in added]
    cut = [e.start for e in story if type(e).__name__ == "ContextStarted" and e.start]
    whole = list(zip(added, mine, strict=True))
    if cut:
        kept = [(added[i], False) for i in (0, 3, 4)]
        contexts = [whole[: cut[0]], kept + whole[cut[0] :]]
    else:
        contexts = [whole]
    segments, answers = exact(core, number, contexts)
    reward = float(number % 2)
    made = told.finished(number, story, reward=reward, segments=segments, size=2)
    forms = [to_openai(e.message, parsed_arguments=True) for e in added]
    truth = {
        "said": [written(m) for m, own in zip(forms, mine, strict=True) if own],
        "ids": [answer.ids for answer in answers],
        "prompts": [answer.prompt for answer in answers],
        "logprobs": [[-0.5] * len(answer.ids) for answer in answers],
        "first": first_own(contexts[0]),
        "not_said": [
            m["content"]
            for m, own in zip(forms, mine, strict=True)
            if not own and m["role"] in ("tool", "assistant")
        ],
        "tools": told.TOOLS,
        "reward": reward,
        "group": made.row.group_id,
    }
    return made, truth


def first_own(context: list[tuple[MessageAdded, bool]]) -> int:
    """How many answers come before an assistant message of somebody else: a later context of these
    stories begins with one."""
    mine = [own for added, own in context if isinstance(added.message, AssistantMessage)]
    return [*mine, False].index(False)


def is_own(added: MessageAdded) -> bool:
    said = isinstance(added.message, AssistantMessage)
    return said and bool(added.turn) and not added.synthetic


def main(out: Path) -> None:
    core = tokenizer()
    core.save(str(out / "tokenizer.json"))
    rows, truth = [], {}
    # Arguments that are no JSON are trained on by few formats; tests/export has them.
    stories = [told.simple('{"n": 1}'), *told.STORIES[1:]]
    for number, story in enumerate(s for s in stories for _ in range(2)):
        made, facts = rollout(core, number, story)
        rows.append(made)
        truth[made.row.trajectory_id] = facts
    told.write(out / "run", rows)
    (out / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    for name in FORMATS:
        export_run(out / "run", name, out / "exports" / f"{name}{FORMATS[name].suffix}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
