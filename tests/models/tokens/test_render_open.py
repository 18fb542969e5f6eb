"""Whatever messages say: nothing in them becomes a token of the template, and nothing is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_kit import FAMILIES, TOOLS, added_tokens, conversations, family_tokens, neutral, texts

from hermes_rl.messages import AssistantMessage, Message, UserMessage
from hermes_rl.models.tokens import clean
from hermes_rl.testing import CONTROL, MARKUP, tiny_renderer

FAMILY = st.sampled_from(FAMILIES)


@given(FAMILY, st.data())
@settings(max_examples=60)
def test_messages_never_become_control_tokens(family: str, data: st.DataObject) -> None:
    renderer = tiny_renderer(family)
    messages: list[Message] = data.draw(conversations(texts()))
    ids = renderer.render(messages, TOOLS)
    quiet = renderer.render([neutral(message) for message in messages], TOOLS)
    assert family_tokens(family, ids) == family_tokens(family, quiet)


@given(FAMILY, st.data())
@settings(max_examples=40)
def test_ids_decode_to_the_text_that_the_template_wrote(family: str, data: st.DataObject) -> None:
    renderer = tiny_renderer(family)
    messages = data.draw(conversations(texts()))
    messages.append(AssistantMessage(content=data.draw(texts())))
    messages.append(UserMessage(content=data.draw(texts())))
    assert renderer.decode(renderer.render(messages, TOOLS)) == renderer.text(messages, TOOLS)


@given(texts(10), texts(10), st.sampled_from(CONTROL + MARKUP))
@settings(max_examples=60)
def test_both_ways_of_encoding_agree(before: str, after: str, token: str) -> None:
    """Text with a lookalike goes through the renamed tokenizer, text without goes through the plain
    one: the text on both sides of a real token is encoded alike by both."""
    tokenizer = tiny_renderer().tokenizer
    before, after = (text.replace("\ufdd0", "") for text in (before, after))
    marked = "".join(f"\ufdd0{char}" for char in token)
    parted = tokenizer.encode("<|endoftext|>")
    plain = [*tokenizer.encode(before), *parted, *tokenizer.encode(after)]
    both = tokenizer.encode(f"{before}<|endoftext|>{after}<|endoftext|>{marked}", "\ufdd0")
    assert both[: len(plain)] == plain
    spelled = both[len(plain) + 1 :]
    assert all(tokenizer.text_of(i) is None for i in spelled)
    assert tokenizer.decode(spelled) == token


@given(texts(12))
def test_every_text_round_trips(text: str) -> None:
    tokenizer = tiny_renderer().tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == clean(text)


def test_messages_with_every_mark_are_still_marked() -> None:
    """A text with all noncharacters: another mark is used."""
    renderer = tiny_renderer("chatml")
    nonsense = "".join(chr(code) for code in range(0xFDD0, 0xFDF0)) + "<|im_end|>"
    ids = renderer.render([UserMessage(content=nonsense)])
    assert added_tokens(renderer, ids).count("<|im_end|>") == 1
    assert nonsense in renderer.decode(ids)


@pytest.mark.parametrize("number", [0, 1])
def test_messages_with_renamed_tokens_stay_text(number: int) -> None:
    renderer = tiny_renderer("chatml")
    spelled = f"\U000f00000.{number}\U000f0001\U000f00001.{number}\U000f0001<|im_end|>"
    ids = renderer.render([UserMessage(content=spelled)])
    assert added_tokens(renderer, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert spelled in renderer.decode(ids)
