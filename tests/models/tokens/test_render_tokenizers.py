"""Tokenizers of other builds: SentencePiece-like ones, whose pieces depend on the text before
them, and whose control tokens are in the vocabulary of the model."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_kit import printed
from tokenizers import AddedToken, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Built
from tokenizers.models import BPE, Unigram

from hermes_rl.models.tokens import Tokenizer

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]"]
LINES = [
    "the answer is the other answer",
    "</s> </s> </s> </s>",
    "[INST] [INST] [INST]",
    "a file and another file",
    "INST inst s unk",
    "/<>[]",
]
MARK = "\ufdd0"


@cache
def made(kind: str) -> Tokenizer:
    """A tokenizer with its control tokens in the model's own vocabulary."""
    if kind == "unigram":
        core = Built(Unigram())
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        core.train_from_iterator(
            LINES * 3,
            trainers.UnigramTrainer(
                vocab_size=70, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>"
            ),
        )
    else:
        core = Built(BPE(unk_token="<unk>", byte_fallback=True))
        if kind == "llama_legacy":
            core.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        else:
            core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.train_from_iterator(
            LINES * 3, trainers.BpeTrainer(vocab_size=120, special_tokens=[*SPECIAL, "<unk>"])
        )
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken("<tool>", rstrip=True, lstrip=True, normalized=False)])
    return Tokenizer(core.to_str())


KINDS = ["llama_legacy", "metaspace_first", "unigram"]
PIECES = st.sampled_from([*SPECIAL, "<tool>", " ", "  ", "the answer", "x", "\n", "é", "file"])


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(PIECES, max_size=8), st.sampled_from(SPECIAL))
@settings(max_examples=40)
def test_marked_text_is_encoded_in_context(kind: str, pieces: list[str], spelled: str) -> None:
    """Up to the last real token before a lookalike, both ways of encoding give the same ids."""
    tokenizer = made(kind)
    text = "".join(pieces) + "</s>"
    plain = tokenizer.encode(text)
    marked = tokenizer.encode(text + "".join(MARK + char for char in spelled), MARK)
    assert marked[: len(plain)] == plain
    with_explicit_filters = {tokenizer.text_of(i) for i in marked[len(plain) :]}
    assert with_explicit_filters <= {None, "<unk>"}


@pytest.mark.parametrize("kind", KINDS)
def test_lookalike_is_encoded_as_text(kind: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode("[INST]say " + "".join(MARK + char for char in "</s>") + "</s>", MARK)
    found = [tokenizer.text_of(i) for i in ids]
    assert [text for text in found if text not in (None, "<unk>")] == ["[INST]", "</s>"]


def test_unknown_hub_name_is_a_one_line_error() -> None:
    code = (
        "from hermes_rl.models.tokens import load_renderer\n"
        "from hermes_rl.errors import UserError\n"
        "try: load_renderer('no-such-owner/no-such-model')\n"
        "except UserError as error: print(error)"
    )
    message = printed(code, HF_HUB_OFFLINE="1")
    assert message.startswith("no folder 'no-such-owner/no-such-model', and the hub")
    assert message.count("\n") == 1


def test_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from hermes_rl.models.tokens.tokenizer import Tokenizer\n"
        "from hermes_rl.errors import UserError\n"
        "try: Tokenizer('{\"model\": {}}')\n"
        "except UserError as error: print(error)"
    )
    assert printed(code) == (
        "exact tokens need tokenizers and jinja2: pip install 'hermes-rl[rl]'\n"
    )
