"""The bridge for any samples and messages: it never changes an id, and where what was sampled
is what the template would write, the next prompt is what the template writes."""

import pytest
from builds_kit import RENDERERS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from render_kit import TOOLS, call, conversations, family_tokens, phrases, results, texts

from hermes_rl.messages import AssistantMessage, Message, UserMessage
from hermes_rl.models.tokens import History, Renderer
from hermes_rl.testing import TEMPLATES, tiny_renderer

every_family = pytest.mark.parametrize("family", RENDERERS)
ONE_CALL = ("llama3", "runs_on", "closed", "bare", "channels")
"""Families whose templates write one call a turn, or several without a mark between them."""


def new_messages(
    draw: st.DataObject, answer: AssistantMessage, message: st.SearchStrategy[str]
) -> list[Message]:
    if answer.tool_calls:
        return results(answer.tool_calls, draw.draw(message))
    return [UserMessage(content=draw.draw(message))]


def answers(family: str, message: st.SearchStrategy[str]) -> st.SearchStrategy[AssistantMessage]:
    most = 1 if family in ONE_CALL else 3
    calls = st.lists(message, min_size=1, max_size=most).map(
        lambda reported: tuple(call(n, text) for n, text in enumerate(reported))
    )
    return st.builds(
        AssistantMessage,
        content=st.just(""),
        reasoning_content=phrases() if family == "qwen3" else st.none(),
        tool_calls=calls,
    ) | st.builds(AssistantMessage, content=message)


@every_family
@given(data=st.data())
@settings(max_examples=25)
def test_bridge_begins_with_all_previous_ids(family: str, data: st.DataObject) -> None:
    renderer = RENDERERS[family]
    base = data.draw(conversations(texts()))
    answer = data.draw(answers(family, texts()))
    ids = st.lists(st.integers(0, renderer.tokenizer.size - 1), max_size=12)
    prompt, sample = data.draw(ids), data.draw(ids)
    ended = data.draw(st.booleans())
    if ended:
        sample = [*sample, data.draw(st.sampled_from(sorted(renderer.end_ids)))]
    new = new_messages(data, answer, texts())
    history = History(messages=base, prompt_ids=prompt, answer=answer)
    found = renderer.bridge(history, sample, new, TOOLS)
    if found.ids is None:
        assert found.fork_reason
        assert "\n" not in found.fork_reason
        return
    kept = [*prompt, *sample]
    assert list(found.ids[: len(kept)]) == kept
    assert found.glue_start == len(kept)
    assert found.closed == (not sample or sample[-1] not in renderer.end_ids)
    assert found.glue
    if family not in TEMPLATES:
        return
    assert (found.glue[0] in renderer.end_ids) == found.closed
    quiet = (
        [UserMessage(content="word")]
        if not answer.tool_calls
        else results(answer.tool_calls, "word")
    )
    plain = renderer.bridge(history, sample, quiet, TOOLS)
    assert family_tokens(family, found.glue) == family_tokens(family, plain.glue)


@every_family
@given(data=st.data())
@settings(max_examples=30)
def test_bridge_of_a_canonical_sample_equals_a_full_render(
    family: str, data: st.DataObject
) -> None:
    renderer = RENDERERS[family]
    most = 1 if family in ONE_CALL else 3
    base = data.draw(conversations(phrases(), most_calls=most))
    answer = data.draw(answers(family, phrases()))
    new = new_messages(data, answer, texts())
    prompt = renderer.render(base, TOOLS)
    whole = renderer.render([*base, answer, *new], TOOLS)
    assume(whole[: len(prompt)] == prompt)  # else no model could have sampled it
    message = whole[len(prompt) :]
    ends = [place for place, token in enumerate(message) if token in renderer.end_ids]
    assume(ends)
    end = ends[0]
    history = History(messages=base, prompt_ids=prompt, answer=answer)
    cut = data.draw(st.booleans())
    found = renderer.bridge(history, message[: end if cut else end + 1], new, TOOLS)
    if found.ids is None:  # only if the template rewrites earlier text
        alone = renderer.text([*base, answer], TOOLS, generation_prompt=False)
        after = renderer.text([*base, answer, *new], TOOLS)
        assert not after.startswith(alone)
        return
    assert list(found.ids) == whole
    assert found.closed == cut


@given(st.lists(st.sampled_from(("terminal", "look_up")), max_size=3), texts(), st.data())
@settings(max_examples=40)
def test_each_prompt_extends_the_previous(names: list[str], text: str, data: st.DataObject) -> None:
    """A conversation of calls, each sampled in an odd spelling: every id stays where it was."""
    renderer = tiny_renderer("chatml")
    messages: list[Message] = [UserMessage(content="Go.")]
    prompt = renderer.render(messages, TOOLS)
    for number, name in enumerate(names):
        sample = [*_spelled(renderer, f"{name} ", data), max(renderer.end_ids)]
        answer = AssistantMessage(content=name, tool_calls=(call(number, name),))
        new = results(answer.tool_calls, text)
        history = History(messages=list(messages), prompt_ids=prompt, answer=answer)
        found = renderer.bridge(history, sample, new, TOOLS)
        assert found.ids is not None, found.fork_reason
        assert list(found.ids[: len(prompt) + len(sample)]) == [*prompt, *sample]
        messages += [answer, *new]
        prompt = list(found.ids)


def _spelled(renderer: Renderer, text: str, data: st.DataObject) -> list[int]:
    """The text in ids, cut where a model may have cut it."""
    cut = data.draw(st.integers(0, len(text)))
    encode = renderer.tokenizer.encode
    return [*encode(text[:cut]), *encode(text[cut:])]


@every_family
def test_the_probes_agree_with_the_bridge(family: str) -> None:
    """What a finding calls identical is identical in ids, as the canonical samples show."""
    finding = RENDERERS[family].preserves_prefix()
    assert len({case.name for case in finding.cases}) == len(finding.cases)
    assert all(case.why or case.outcome == "identical" for case in finding.cases)
    assert finding.preserved == all(c.outcome in ("identical", "refused") for c in finding.cases)
