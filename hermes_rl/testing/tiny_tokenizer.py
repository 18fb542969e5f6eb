"""A tokenizer of a few hundred tokens and chat templates in the style of the common families.

Everything is deterministic and made in milliseconds, so tests of exact tokens need no download: a
byte-level BPE trained on a few sentences, the control tokens of ChatML, Llama 3 and Mistral in one
vocabulary, and the templates in `templates/`, each with its family's difficulties:

chatml: tools in the system message, results as `<tool_response>` in a user turn (Qwen 2.5).
qwen3: the same with reasoning, which a later user message removes from earlier turns.
coder: calls as parameters in tags (Qwen3-Coder).
llama3: headers, one call per turn, a turn of calls ends with a token of its own, a date.
mistral: `[INST]`, tools before the last question, ids of nine letters, no opening of a turn.
text_arguments: takes the arguments of calls as text.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl.models.tokens import Renderer, TokenizerFiles, build_renderer

_FOLDER = Path(__file__).parent
_PARTS: dict[str, Any] = tomllib.loads(
    (_FOLDER / "tiny_tokenizer.toml").read_text(encoding="utf-8")
)
TEMPLATES = {
    family: (_FOLDER / f"templates/{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    for family in _PARTS["named"]
}
"""Family -> source."""
CONTROL: tuple[str, ...] = tuple(_PARTS["control"])
MARKUP: tuple[str, ...] = tuple(_PARTS["markup"])


@cache
def tokenizer_json() -> str:
    """Return the text of the tokenizer's file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_PARTS["split"])), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_PARTS["sentences"], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer.to_str()


@cache
def tiny_renderer(family: str = "chatml", **variables: Any) -> Renderer:
    """Return the renderer of a family.

    Args:
        family: a key of `TEMPLATES`.
        variables: for the template, such as `enable_thinking=False`.
    """
    files = TokenizerFiles(
        tokenizer=tokenizer_json().encode(),
        templates={"default": TEMPLATES[family]},
        named=_named(family),
    )
    return build_renderer(files, variables=variables)


def write_tiny_tokenizer(folder: Path, family: str = "chatml") -> Path:
    """Write the files of a family as a model's folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {**_named(family), "chat_template": TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _named(family: str) -> dict[str, str]:
    return {"pad_token": "<|endoftext|>", **_PARTS["named"][family]}
