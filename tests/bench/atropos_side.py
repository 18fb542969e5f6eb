"""The work of rounds_env.py as an environment of atroposlib 0.4.0, for the same server.

Run by the Python of an environment that has atroposlib: see atropos.py.
"""

import argparse
import asyncio
import json
import os
import time

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROUNDS = 3
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def save_tokenizer(folder: str) -> None:
    """A word tokenizer, so that nothing is fetched."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


class Rounds(BaseEnv):
    name = "rounds"

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return self.number - 1

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectory(self, item):
        script = json.dumps([f"answer {turn} of {item}" for turn in range(ROUNDS)])
        messages = [{"role": "user", "content": f"Number {item}.\nSCRIPT: {script}"}]
        for turn in range(ROUNDS):
            answer = await self.server.chat_completion(messages=messages, n=1, max_tokens=64)
            text = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            if turn + 1 < ROUNDS:
                messages.append({"role": "user", "content": "Continue."})
        score = float(text == f"answer {ROUNDS - 1} of {item}")
        # Its own tokenize_for_trainer renders every prefix, and does not know transformers 5.
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return ScoredDataItem(tokens=tokens, masks=tokens, scores=score), []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()
    save_tokenizer(f"{arguments.folder}/tokenizer")
    config = BaseEnvConfig(
        tokenizer_name=f"{arguments.folder}/tokenizer",
        group_size=arguments.size,
        use_wandb=False,
        include_messages=True,
        ensure_scores_are_not_same=False,
        data_path_to_save_groups=f"{arguments.folder}/groups.jsonl",
        total_steps=arguments.groups,
    )
    server = APIServerConfig(
        model_name="fake",
        base_url=arguments.base_url,
        api_key="x",
        health_check=False,
        num_max_requests_at_once=64,
    )
    env = Rounds(config, [server], testing=False)
    env.process_mode = True
    env.n_groups_to_process = arguments.groups
    env.group_size_to_process = arguments.size
    began = time.monotonic()
    asyncio.run(env.process_manager())
    with open(f"{arguments.folder}/groups.jsonl") as file:
        groups = [json.loads(line) for line in file]
    solved = sum(sum(group["scores"]) for group in groups)
    print(
        json.dumps({"seconds": time.monotonic() - began, "groups": len(groups), "solved": solved})
    )


if __name__ == "__main__":
    main()
