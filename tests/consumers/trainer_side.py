"""What a trainer brings along, made here without a hub: a byte tokenizer and a one-layer model."""

from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, so that any text comes back as it was; one of TRL's chat templates."""
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
    """Random weights, about ten thousand of them."""
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
    """The tokenizer of a told run, with this folder's template."""
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    words.chat_template = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
    return words
