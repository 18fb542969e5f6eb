"""The bridge: the next prompt is what was sampled, exactly, and the template's words behind it."""

from collections.abc import Sequence

import pytest
from builds_kit import AFTER_A_CALL, RENDERERS, SOURCES
from render_kit import CHATML_LIKE, FAMILIES, TOOLS, call, results

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.tokens import Bridged, History, Renderer, Template, Tokenizer, abridged
from hermes_rl.testing import TEMPLATES, tiny_renderer, tokenizer_json

ASK: tuple[Message, ...] = (
    SystemMessage(content="Be brief."),
    UserMessage(content="What is it?"),
)
GO_ON = UserMessage(content="And then?")
ONE = call(1, "it")


def sampled(renderer: Renderer, base: Sequence[Message], answer: AssistantMessage) -> list[int]:
    """The ids of an answer as the template would write it, its end token included."""
    prompt = renderer.render(base, TOOLS)
    whole = renderer.render([*base, answer], TOOLS, generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    said = whole[len(prompt) :]
    ends = [place for place, token in enumerate(said) if token in renderer.end_ids]
    return said[: ends[0] + 1]


def bridged(
    renderer: Renderer,
    base: Sequence[Message],
    answer: AssistantMessage,
    ids: Sequence[int],
    new: Sequence[Message],
) -> Bridged:
    history = History(messages=base, prompt_ids=renderer.render(base, TOOLS), answer=answer)
    return renderer.bridge(history, ids, new, TOOLS)


def text_of(renderer: Renderer, found: Bridged) -> str:
    return renderer.decode(found.glue)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_turn_is_what_the_template_would_have_written(family: str) -> None:
    renderer = tiny_renderer(family)
    reasoning = "I look." if family == "qwen3" else None
    answer = AssistantMessage(tool_calls=(ONE,), reasoning_content=reasoning)
    new = results([ONE], "Found <|im_end|>[INST]</tool_response>.")
    ids = sampled(renderer, ASK, answer)
    found = bridged(renderer, ASK, answer, ids, new)
    assert found.ids == tuple(renderer.render([*ASK, answer, *new], TOOLS))
    assert not found.closed
    prompt = renderer.render(ASK, TOOLS)
    assert found.ids[: found.glue_start] == (*prompt, *ids)


@pytest.mark.parametrize("family", CHATML_LIKE)
def test_a_cut_answer_is_closed_and_an_ended_one_is_not_closed_again(family: str) -> None:
    renderer = tiny_renderer(family, **({"enable_thinking": False} if family == "qwen3" else {}))
    answer = AssistantMessage(content="the answer")
    end = renderer.tokenizer.id_of("<|im_end|>")
    assert end is not None
    said = renderer.tokenizer.encode("the answer")
    cut = bridged(renderer, ASK, answer, said, [GO_ON])
    ended = bridged(renderer, ASK, answer, [*said, end], [GO_ON])
    assert cut.closed
    assert not ended.closed
    assert cut.ids == ended.ids
    assert cut.glue == (end, *ended.glue)
    assert text_of(renderer, ended).startswith("\n<|im_start|>user\nAnd then?<|im_end|>\n")


def test_the_end_token_after_tool_calls_is_that_of_tool_calls() -> None:
    """Llama ends a turn with a call by another token than a turn with words: taking the end of a
    placeholder without calls puts a wrong token behind a cut call, and glue that is off by one."""
    renderer = tiny_renderer("llama3")
    answer, new = AssistantMessage(tool_calls=(ONE,)), results([ONE], "Found.")
    ids = sampled(renderer, ASK, answer)
    assert renderer.tokenizer.text_of(ids[-1]) == "<|eom_id|>"
    ended = bridged(renderer, ASK, answer, ids, new)
    cut = bridged(renderer, ASK, answer, ids[:-1], new)
    whole = tuple(renderer.render([*ASK, answer, *new], TOOLS))
    assert ended.ids == cut.ids == whole
    assert renderer.tokenizer.text_of(cut.glue[0]) == "<|eom_id|>"
    assert renderer.tokenizer.text_of(ended.glue[0]) == "<|start_header_id|>"


def test_another_end_token_than_the_templates_stays_as_it_was_sampled() -> None:
    tokenizer = Tokenizer(tokenizer_json())
    other = tokenizer.id_of("<|endoftext|>")
    assert other is not None
    renderer = Renderer(tokenizer, Template(TEMPLATES["chatml"]), end_ids=[other])
    answer = AssistantMessage(content="yes")
    found = bridged(renderer, ASK, answer, [*tokenizer.encode("yes"), other], [GO_ON])
    assert found.ids is not None
    text = renderer.decode(found.ids)
    assert "yes<|endoftext|>\n<|im_start|>user\nAnd then?" in text


def test_dropped_reasoning_is_a_fork_and_says_so() -> None:
    renderer = tiny_renderer("qwen3")
    answer = AssistantMessage(content="yes", reasoning_content="I think.")
    ids = sampled(renderer, ASK, answer)
    found = bridged(renderer, ASK, answer, ids, [GO_ON])
    assert found.ids is None
    assert found.drops_reasoning
    assert "drops the reasoning of earlier turns" in (found.fork_reason or "")
    again = bridged(renderer, ASK, answer, ids, [ToolMessage(tool_call_id="", name="", content="")])
    assert again.ids is not None


def test_reasoning_that_is_dropped_two_turns_later_forks_then() -> None:
    renderer = tiny_renderer("qwen3")
    thought = AssistantMessage(tool_calls=(ONE,), reasoning_content="I think.")
    base = [*ASK, thought, *results([ONE], "Found.")]
    answer = AssistantMessage(content="yes")
    found = bridged(renderer, base, answer, renderer.tokenizer.encode("yes"), [GO_ON])
    assert found.ids is None
    assert found.drops_reasoning


def test_an_empty_thought_is_no_reason_to_fork() -> None:
    """Qwen 3 without thinking: the opening of a turn holds an empty block, earlier turns do not."""
    renderer = tiny_renderer("qwen3", enable_thinking=False)
    answer, new = AssistantMessage(tool_calls=(ONE,)), results([ONE], "Found.")
    said = renderer.tokenizer.encode('<tool_call>\n{"name": "look_up"}\n</tool_call><|im_end|>')
    found = bridged(renderer, ASK, answer, said, new)
    assert found.ids is not None
    assert text_of(renderer, found) == (
        "\n<|im_start|>user\n<tool_response>\nFound.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_tools_that_move_behind_the_last_question_are_a_fork() -> None:
    renderer = tiny_renderer("mistral")
    answer = AssistantMessage(content="yes")
    ids = sampled(renderer, ASK, answer)
    found = bridged(renderer, ASK, answer, ids, [GO_ON])
    assert found.ids is None
    assert "rewrites what comes before" in (found.fork_reason or "")
    history = History(messages=ASK, prompt_ids=renderer.render(ASK), answer=answer)
    assert renderer.bridge(history, ids, [GO_ON]).ids is not None


def test_two_calls_where_the_template_allows_one_are_bridged() -> None:
    renderer = tiny_renderer("llama3")
    two = (ONE, call(2, "that"))
    end = renderer.tokenizer.id_of("<|eom_id|>")
    assert end is not None
    answer = AssistantMessage(tool_calls=two)
    found = bridged(renderer, ASK, answer, [1, 2, end], results(two, "Found."))
    assert not found.closed
    text = text_of(renderer, found)
    assert text.count("Found.") == text.count("ipython") == 2
    base = [*ASK, answer, *results(two, "Found.")]
    again = bridged(renderer, base, AssistantMessage(content="so"), [1], [GO_ON])
    assert again.ids is not None


def test_a_refusal_of_the_template_is_a_fork() -> None:
    renderer = plain_renderer(
        "{% for m in messages %}{{ m.content or raise_exception('no') }}{% endfor %}"
    )
    new = [UserMessage(content="")]
    history = History(messages=ASK, prompt_ids=(), answer=AssistantMessage(content="a"))
    found = renderer.bridge(history, [1], new)
    assert found.ids is None
    assert "TemplateError: no" in (found.fork_reason or "")


def test_a_conversation_that_spells_the_placeholder_is_no_trap() -> None:
    renderer = tiny_renderer("chatml")
    base = [
        *ASK,
        UserMessage(content="placeholder0answer placeholder1answer placeholder0reasoning"),
    ]
    answer = AssistantMessage(content="yes")
    new = [UserMessage(content="placeholder0answer<|im_end|>")]
    found = bridged(renderer, base, answer, sampled(renderer, base, answer), new)
    assert found.ids == tuple(renderer.render([*base, answer, *new], TOOLS))


PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def plain_renderer(source: str = PLAIN) -> Renderer:
    tokenizer = Tokenizer(tokenizer_json())
    end = tokenizer.id_of("<|endoftext|>")
    assert end is not None
    return Renderer(tokenizer, Template(source), end_ids=[end])


def test_without_a_control_token_the_seam_is_tokenised_as_one() -> None:
    renderer = plain_renderer()
    encode = renderer.tokenizer.encode
    answer = AssistantMessage(content="yes")
    clean = bridged(renderer, ASK, answer, encode("yes"), [GO_ON])
    assert clean.ids == tuple(renderer.render([*ASK, answer, GO_ON], TOOLS))
    assert not clean.closed
    blurred = bridged(renderer, ASK, answer, encode("yes\n"), [GO_ON])
    assert blurred.ids is None
    assert "share a token" in (blurred.fork_reason or "")
    ended = bridged(renderer, ASK, answer, [*encode("yes\n"), *renderer.end_ids], [GO_ON])
    assert text_of(renderer, ended) == "\n\n### user:\nAnd then?\n\n### assistant:\n"


def test_an_end_token_that_comes_with_the_next_turn_is_not_doubled() -> None:
    """Some templates write the end only between turns."""
    renderer = plain_renderer(
        "{% for m in messages %}{% if not loop.first %}<|endoftext|>{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|endoftext|>{% endif %}"
    )
    answer, end = AssistantMessage(content="yes"), max(renderer.end_ids)
    said = renderer.tokenizer.encode("yes")
    whole = tuple(renderer.render([*ASK, answer, GO_ON], TOOLS))
    assert bridged(renderer, ASK, answer, [*said, end], [GO_ON]).ids == whole
    assert bridged(renderer, ASK, answer, said, [GO_ON]).ids == whole


def test_a_turn_that_ends_with_the_opening_of_the_next_role_must_go_on_with_it() -> None:
    """GLM's models stop at the control token that opens the next turn."""
    tokenizer = Tokenizer(tokenizer_json())
    user, tool = (tokenizer.id_of(text) for text in ("[INST]", "[TOOL_RESULTS]"))
    assert user is not None
    assert tool is not None
    source = (
        "{% for m in messages %}{{ {'user': '[INST]', 'system': '<s>', 'tool': '[TOOL_RESULTS]',"
        " 'assistant': '[/INST]'}[m.role] }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[/INST]{% endif %}"
    )
    renderer = Renderer(tokenizer, Template(source), end_ids=[user, tool])
    answer, said = AssistantMessage(content="yes"), tokenizer.encode("yes")
    whole = tuple(renderer.render([*ASK, answer, GO_ON], TOOLS))
    assert bridged(renderer, ASK, answer, [*said, user], [GO_ON]).ids == whole
    other = bridged(renderer, ASK, answer, [*said, tool], [GO_ON])
    assert other.ids is None
    assert "'[TOOL_RESULTS]'" in (other.fork_reason or "")


def test_a_final_end_that_only_the_last_turn_has_is_left_out() -> None:
    """Phi's templates put an end of text behind everything, unless a turn is opened."""
    renderer = plain_renderer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
    )
    answer = AssistantMessage(content="yes")
    said = renderer.tokenizer.encode("yes<|im_end|>")
    found = bridged(renderer, ASK, answer, said, [GO_ON])
    assert found.ids == tuple(renderer.render([*ASK, answer, GO_ON], TOOLS))


def test_a_long_conversation_is_abridged_but_keeps_its_build() -> None:
    rounds: list[Message] = []
    for number in range(40):
        told = call(number, "it")
        rounds += [AssistantMessage(tool_calls=(told,)), *results([told], "line\n" * 200)]
    thought = AssistantMessage(tool_calls=(ONE,), reasoning_content="I think.")
    rounds[20:20] = [thought, *results([ONE], "Found.")]
    base = [*ASK, *rounds]
    short = abridged(base)
    assert len(short) < 16
    assert thought in short
    assert short[:2] == list(ASK)
    assert [getattr(m, "tool_calls", None) for m in short[-6:]] == [
        getattr(m, "tool_calls", None) for m in base[-6:]
    ]
    for family in ("chatml", "qwen3", "llama3", "mistral", "coder"):
        renderer = tiny_renderer(family)
        reasoning = "Hm." if family == "qwen3" else None
        answer = AssistantMessage(tool_calls=(ONE,), reasoning_content=reasoning)
        new = results([ONE], "Found.")
        found = bridged(renderer, base, answer, sampled(renderer, base, answer), new)
        assert found.ids == tuple(renderer.render([*base, answer, *new], TOOLS))


@pytest.mark.parametrize("build", SOURCES)
@pytest.mark.parametrize("spoke", ["", "I look."])
def test_the_end_behind_a_call_is_neither_doubled_nor_lost_nor_another(
    build: str, spoke: str
) -> None:
    renderer = RENDERERS[build]
    answer = AssistantMessage(content="" if build == "channels" else spoke, tool_calls=(ONE,))
    new = results([ONE], "Found <|im_end|>[TOOL_RESULTS]</s>.")
    whole = renderer.render([*ASK, answer, *new], TOOLS)
    said = whole[len(renderer.render(ASK, TOOLS)) :]
    ids = said[: 1 + next(n for n, token in enumerate(said) if token in renderer.end_ids)]
    assert renderer.tokenizer.text_of(ids[-1]) == AFTER_A_CALL[build]
    ended = bridged(renderer, ASK, answer, ids, new)
    cut = bridged(renderer, ASK, answer, ids[:-1], new)
    assert ended.ids == cut.ids == tuple(whole)
    assert (ended.closed, cut.closed) == (False, True)
    assert cut.glue == (ids[-1], *ended.glue)
    assert AFTER_A_CALL[build] not in renderer.decode(ended.glue[:1])


def test_the_last_end_of_a_conversation_that_goes_on_is_a_fork() -> None:
    """The template ends a last answer by a token that it never writes again."""
    renderer = RENDERERS["channels"]
    answer, new = AssistantMessage(content="yes"), [UserMessage(content="And then?")]
    found = bridged(renderer, ASK, answer, [7, max(renderer.end_ids)], new)
    assert found.ids is None
    assert "rewrites what comes before the new messages" in (found.fork_reason or "")


def test_results_behind_an_answer_that_ended_its_turn_are_a_fork() -> None:
    """The model called, and ended its turn by the token of an answer: what follows in the template
    opens with the other."""
    renderer = RENDERERS["runs_on"]
    end = renderer.tokenizer.id_of("<|im_end|>")
    assert end is not None
    answer = AssistantMessage(tool_calls=(ONE,))
    found = bridged(renderer, ASK, answer, [7, end], results([ONE], "Found."))
    assert found.ids is None
    assert "ended with '<|im_end|>'" in (found.fork_reason or "")
    assert "continues with '[TOOL_RESULTS]'" in (found.fork_reason or "")
