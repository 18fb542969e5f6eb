"""A tokenizer of a few hundred tokens and chat templates in the style of the common families.

Everything is made here in milliseconds and always the same, so that tests of exact tokens need no
download: a byte-level BPE trained on a few sentences, the control tokens of ChatML, Llama 3 and
Mistral in one vocabulary, and templates written for these tests.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl.models.tokens.files import TokenizerFiles
from hermes_rl.models.tokens.renderer import Renderer, renderer_of
from hermes_rl.testing.tiny_templates import END, TEMPLATES

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)
"""Control tokens (special)."""
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added tokens that are not special, as in the Qwen 3 family."""
_SENTENCES = (
    "You are a helpful assistant. The user asks a question and the assistant answers.",
    'The tools are functions: {"name": "terminal", "arguments": {"command": "ls -la"}}',
    "user assistant system tool function parameters type object properties string required",
    "one\n\ntwo\n\nthree\n\n\nfour:\n\nfive.\n\nsix\n\n\nseven\n",
    "the there then them this that these those and answer another file folder line number 1234",
)
_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How words are parted: contractions, words, single digits, punctuation, line ends, spaces."""


@cache
def tokenizer_json() -> str:
    """The text of the tokenizer's file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_SENTENCES, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return made.to_str()


@cache
def tiny_renderer(family: str = "chatml", **variables: Any) -> Renderer:
    """The renderer of a family.

    Args:
        family: a key of `tiny_templates.TEMPLATES`.
        variables: for the template, such as `enable_thinking=False`.
    """
    files = TokenizerFiles(
        tokenizer=tokenizer_json().encode(),
        templates={"default": TEMPLATES[family]},
        named=_named(family),
    )
    return renderer_of(files, variables=variables)


def tiny_tokenizer(folder: Path, family: str = "chatml") -> Path:
    """Writes the files of a family as a model's folder has them, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {**_named(family), "chat_template": TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _named(family: str) -> dict[str, str]:
    begin = {"llama3": "<|begin_of_text|>", "mistral": "<s>"}
    named = {"eos_token": END[family], "pad_token": "<|endoftext|>"}
    return {**named, **({"bos_token": begin[family]} if family in begin else {})}
