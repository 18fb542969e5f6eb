"""Demonstrations by an oracle that speaks ids, and a policy that imitates them.

The demonstrations have the right form, but often the wrong command: for each question one wrong
command is shown more often than the right one. Imitation alone therefore does not solve the tasks.
"""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import torch
from environment import COMMANDS, Config, Numbers
from grpo import Row
from model import Shape, Transformer, logprobs_of
from tokenizer import write_tokenizer
from tokenizers import Tokenizer

from hermes_rl.rl import Policy, rollouts
from hermes_rl.testing import ExactConfig, ExactEngine, PromptView, ScriptedAnswer, Speaker

SHARES = (0.3, 0.5, 0.1, 0.1)
"""Of commands in demonstrations: the right one, then the next ones of `COMMANDS`, in a circle."""
STEPS, BATCH, RATE = 200, 64, 3e-3


def write_call(command: str) -> str:
    """Return a call as the template writes it."""
    arguments = json.dumps({"command": command})
    return f'<tool_call>\n{{"name": "terminal", "arguments": {arguments}}}\n</tool_call>'


def train_tokenizer(folder: Path) -> Path:
    """Train the tokenizer on tasks and calls; return its folder."""
    tasks = islice(Numbers(Config()).tasks("train", 0), 400)
    frame = f"system\nTools: terminal\nassistant\nuser\n{Config().system_prompt}\n"
    lines = [frame + '{"output":"12\\n","exit_code":0}\n']
    for task in tasks:
        calls = json.loads(task.oracle)[0]["calls"]
        lines += [task.prompt_text, write_call(calls[0]["arguments"]["command"]), lines[0]]
    return write_tokenizer(folder, lines)


def make_oracle(rng: random.Random) -> Speaker:
    """Return a speaker that plays a demonstration."""
    names = list(COMMANDS)

    def answer(view: PromptView) -> ScriptedAnswer | None:
        files = re.findall(r"log\d+\.txt", view.text)
        if not files:  # a question of the probe before the run
            return None
        if view.turn:
            outputs = re.findall(r'"output":"(\w+)', view.text)
            return ScriptedAnswer(plain=outputs[-1] if outputs else "none")
        wanted = next(n for n, name in enumerate(names) if name in view.text)
        shift = rng.choices(range(len(names)), SHARES)[0]
        command = COMMANDS[names[(wanted + shift) % len(names)]].format(files[0])
        return ScriptedAnswer(raw=write_call(command))

    return answer


async def demonstrate(folder: Path, tokenizer: Path, count: int) -> list[Row]:
    """Play demonstrations in real sandboxes; return their ids and what of them was sampled."""
    rows = []
    engine = ExactEngine(ExactConfig(tokenizer), speaker=make_oracle(random.Random(0)))
    async with engine:
        policy = Policy(
            model="oracle-of-ids", base_url=engine.base_url, tokens="vllm", tokenizer=tokenizer
        )
        stream = rollouts(Numbers, policy, out=folder, group_size=4, limit=count // 4)
        async with stream:
            async for group in stream:
                for member in group.members:
                    for one in member.segments:
                        sampled = one.sampled_mask
                        rows.append(Row(one.input_ids, sampled, one.logprobs, one.version_ids, 0))
                await group.ack()
    return rows


def imitate(rows: list[Row], tokenizer: Path, seed: int) -> Transformer:
    """Train a new policy on the sampled tokens of demonstrations."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    model = Transformer(Shape(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    for step in range(STEPS):
        share = min(1, (step + 1) / 50, (STEPS - step) / (0.4 * STEPS))
        optimizer.param_groups[0]["lr"] = RATE * share
        batch = rng.sample(rows, BATCH)
        logprobs = logprobs_of(model, [row.ids for row in batch])
        masks = [row.mask + [False] * (logprobs.shape[1] - len(row.mask)) for row in batch]
        mask = torch.tensor(masks)
        loss = -logprobs[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model
