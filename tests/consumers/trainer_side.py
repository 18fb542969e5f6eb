"""Tokenizers and a one-layer model for trainers, without a hub; what is in TRL's batches."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import trl
from live_truth import Term, context
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATES = Path(trl.__file__).parent / "chat_templates"

QUICK: dict[str, Any] = {
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": [],
}
"""Settings of one step of training on the CPU."""


def load_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and one of TRL's chat templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return made


def tiny_model(vocabulary: int) -> Qwen2ForCausalLM:
    """A model of about ten thousand random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def byte_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of an exported run, with the template of this folder."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
    return tokenizer


def load_example(name: str) -> ModuleType:
    """Import a program of `examples`."""
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(name, root / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def rows_of_batch(inputs: dict[str, torch.Tensor]) -> list[tuple[list[Term], float]]:
    """The loss terms and the advantage of each row of GRPOTrainer's padded batch."""
    rows = []
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    names = (*names, "sampling_per_token_logps", "advantages")
    for prompt, shown, completion, kept, mine, logprobs, advantage in zip(
        *(inputs[name] for name in names), strict=True
    ):
        ids = prompt[shown.bool()].tolist() + completion[kept.bool()].tolist()
        first = int(shown.sum())
        terms = [
            (context(ids[: first + at]), ids[first + at], logprobs[at].item())
            for at in (kept * mine).nonzero().flatten().tolist()
        ]
        rows.append((terms, advantage.item()))
    return rows
