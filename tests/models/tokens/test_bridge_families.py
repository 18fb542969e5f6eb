"""The bridge under four further builds of templates, each with its own trap behind a tool call.

runs_on: results stand in the model's own turn, and the token that opens them ends the call (GLM).
closed: the same, and a control token that ends no turn closes the call (Gemma 4).
bare: an end without a line break, and no opening of a turn behind results (DeepSeek).
channels: calls end with one token, answers with another, the last answer with a third (gpt-oss).
"""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from render_kit import TOOLS, call, conversations, results, texts, words
from test_bridge_open import answers, new_messages

from hermes_rl.messages import AssistantMessage, Message, UserMessage
from hermes_rl.models.tokens import History, Renderer
from hermes_rl.models.tokens.template import Template
from hermes_rl.models.tokens.tokenizer import Tokenizer
from hermes_rl.testing.tiny_tokenizer import tokenizer_json

_BEHIND_RESULTS = "loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool'"
_OPEN = "{% if add_generation_prompt and messages[-1].role != 'tool' %}OPENING{% endif %}"
SOURCES = {
    "runs_on": (
        "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{% if not (" + _BEHIND_RESULTS + ") %}"
        "<|im_start|>model\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if not m.tool_calls %}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _OPEN.replace("OPENING", "<|im_start|>model\n")
    ),
    "bare": (
        "<s>{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{% if not (" + _BEHIND_RESULTS + ") %}"
        "[/INST]{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
        "{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}" + _OPEN.replace("OPENING", "[/INST]")
    ),
    "channels": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
        "<|im_start|>assistant to={{ c.function.name }}<|end_header_id|>"
        "{{ c.function.arguments | tojson }}<|eom_id|>{% else %}<|im_start|>assistant"
        "<|end_header_id|>{{ m.content }}{{ '<|endoftext|>' if loop.last and not "
        "add_generation_prompt else '<|im_end|>' }}{% endfor %}{% else %}<|im_start|>{{ m.role }}"
        "<|end_header_id|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    ),
}
SOURCES["closed"] = SOURCES["runs_on"].replace(
    "arguments | tojson }}", "arguments | tojson }}[/AVAILABLE_TOOLS]"
)
ENDS = {
    "closed": ("<|im_end|>", "[TOOL_RESULTS]"),
    "runs_on": ("<|im_end|>", "[TOOL_RESULTS]"),
    "bare": ("</s>",),
    "channels": ("<|endoftext|>", "<|eom_id|>"),
}
AFTER_A_CALL = {
    "runs_on": "[TOOL_RESULTS]",
    "closed": "[TOOL_RESULTS]",
    "bare": "</s>",
    "channels": "<|eom_id|>",
}
ASK: tuple[Message, ...] = (UserMessage(content="What is it?"),)
ONE = call(1, "it")


def renderer_of(build: str) -> Renderer:
    tokenizer = Tokenizer(tokenizer_json())
    ends = [tokenizer.id_of(text) for text in ENDS[build]]
    known = [one for one in ends if one is not None]
    return Renderer(tokenizer, Template(SOURCES[build]), end_ids=known)


RENDERERS = {build: renderer_of(build) for build in SOURCES}


def sampled(renderer: Renderer, base: Sequence[Message], whole: list[int]) -> list[int]:
    """What stands behind a prompt in a longer one, up to the end of the answer."""
    said = whole[len(renderer.render(base, TOOLS)) :]
    return said[: 1 + next(n for n, token in enumerate(said) if token in renderer.end_ids)]


@pytest.mark.parametrize("build", SOURCES)
@pytest.mark.parametrize("spoke", ["", "I look."])
def test_the_end_behind_a_call_is_neither_doubled_nor_lost_nor_another(
    build: str, spoke: str
) -> None:
    renderer = RENDERERS[build]
    answer = AssistantMessage(content="" if build == "channels" else spoke, tool_calls=(ONE,))
    new = results([ONE], "Found <|im_end|>[TOOL_RESULTS]</s>.")
    whole = renderer.render([*ASK, answer, *new], TOOLS)
    prompt = renderer.render(ASK, TOOLS)
    ids = sampled(renderer, ASK, whole)
    assert renderer.tokenizer.text_of(ids[-1]) == AFTER_A_CALL[build]
    history = History(messages=ASK, prompt_ids=prompt, answer=answer)
    ended = renderer.bridge(history, ids, new, TOOLS)
    cut = renderer.bridge(history, ids[:-1], new, TOOLS)
    assert ended.ids == cut.ids == tuple(whole)
    assert (ended.closed, cut.closed) == (False, True)
    assert cut.glue == (ids[-1], *ended.glue)
    assert AFTER_A_CALL[build] not in renderer.decode(ended.glue[:1])


def test_the_last_end_of_a_conversation_that_goes_on_is_a_fork() -> None:
    """The template ends a last answer by a token that it never writes again."""
    renderer = RENDERERS["channels"]
    answer, new = AssistantMessage(content="yes"), [UserMessage(content="And then?")]
    history = History(messages=ASK, prompt_ids=renderer.render(ASK, TOOLS), answer=answer)
    found = renderer.bridge(history, [7, max(renderer.end_ids)], new, TOOLS)
    assert found.ids is None
    assert "rewrites what comes before the new messages" in (found.fork_reason or "")


def test_results_behind_an_answer_that_ended_its_turn_are_a_fork() -> None:
    """The model called, and ended its turn by the token of an answer: what follows in the template
    opens with the other."""
    renderer = RENDERERS["runs_on"]
    end = renderer.tokenizer.id_of("<|im_end|>")
    assert end is not None
    answer = AssistantMessage(tool_calls=(ONE,))
    history = History(messages=ASK, prompt_ids=renderer.render(ASK, TOOLS), answer=answer)
    found = renderer.bridge(history, [7, end], results([ONE], "Found."), TOOLS)
    assert found.ids is None
    assert "ended with '<|im_end|>'" in (found.fork_reason or "")
    assert "continues with '[TOOL_RESULTS]'" in (found.fork_reason or "")


@pytest.mark.parametrize("build", SOURCES)
@given(data=st.data())
@settings(max_examples=40)
def test_a_canonical_sample_continues_as_a_full_render_would(
    build: str, data: st.DataObject
) -> None:
    renderer = RENDERERS[build]
    base = data.draw(conversations(words(), most_calls=1))
    answer = data.draw(answers("llama3", words()))  # one call at most
    new = new_messages(data, answer, texts())
    prompt = renderer.render(base, TOOLS)
    whole = renderer.render([*base, answer, *new], TOOLS)
    assume(whole[: len(prompt)] == prompt)
    ids = sampled(renderer, base, whole) if _ends(renderer, whole[len(prompt) :]) else None
    assume(ids is not None)
    history = History(messages=base, prompt_ids=prompt, answer=answer)
    cut = data.draw(st.booleans())
    found = renderer.bridge(history, (ids or [])[: -1 if cut else None], new, TOOLS)
    if found.ids is None:
        assert build == "channels"
        assert not answer.tool_calls
        return
    assert list(found.ids) == whole
    assert found.closed == cut


def _ends(renderer: Renderer, ids: Sequence[int]) -> bool:
    return any(token in renderer.end_ids for token in ids)


@pytest.mark.parametrize("build", SOURCES)
@given(data=st.data())
@settings(max_examples=40)
def test_whatever_was_sampled_stays(build: str, data: st.DataObject) -> None:
    renderer = RENDERERS[build]
    base, answer = data.draw(conversations(texts())), data.draw(answers("chatml", texts()))
    some = st.lists(st.integers(0, renderer.tokenizer.size - 1), max_size=12)
    prompt, sample = data.draw(some), data.draw(some)
    history = History(messages=base, prompt_ids=prompt, answer=answer)
    new = new_messages(data, answer, texts())
    found = renderer.bridge(history, sample, new, TOOLS)
    if found.ids is None:
        assert found.fork_reason
        return
    assert list(found.ids[: len(prompt) + len(sample)]) == [*prompt, *sample]
    ended = bool(sample) and sample[-1] in renderer.end_ids
    assert found.closed == (not ended)
    assert found.glue
