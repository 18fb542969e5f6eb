"""The bridge: the next prompt is what was sampled, exactly, then what the template writes."""

from collections.abc import Sequence

import pytest
from builds_kit import END_OF_A_CALL, RENDERERS
from render_kit import CHATML_LIKE, TOOLS, call, results

from hermes_rl.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from hermes_rl.models.tokens import (
    Bridged,
    History,
    Renderer,
    Template,
    Tokenizer,
    abridge_messages,
)
from hermes_rl.testing import TEMPLATES, tiny_renderer, tokenizer_json

ASK: tuple[Message, ...] = (
    SystemMessage(content="Be brief."),
    UserMessage(content="What is it?"),
)
GO_ON = UserMessage(content="And then?")
ONE = call(1, "it")
YES, CALLED = AssistantMessage(content="yes"), AssistantMessage(tool_calls=(ONE,))
FOUND = results([ONE], "Found <|im_end|>[TOOL_RESULTS]</s></tool_response>.")
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
REFUSES = "{% for m in messages %}{{ m.content or raise_exception('no') }}{% endfor %}"
END_WITH_THE_NEXT_TURN = (
    "{% for m in messages %}{% if not loop.first %}<|endoftext|>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|endoftext|>{% endif %}"
)
OPENING_ENDS = (  # GLM's models stop at the control token that opens the next turn
    "{% for m in messages %}{{ {'user': '[INST]', 'system': '<s>', 'tool': '[TOOL_RESULTS]',"
    " 'assistant': '[/INST]'}[m.role] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[/INST]{% endif %}"
)
END_OF_ALL = (  # Phi's templates end a whole conversation, unless a turn is opened
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)


def build_renderer(template: str, ends: Sequence[str] = ("<|endoftext|>",)) -> Renderer:
    """The renderer of a family, or of the source of a template."""
    if template in RENDERERS:
        return RENDERERS[template]
    tokenizer = Tokenizer(tokenizer_json())
    known = {token.text: token.id for token in tokenizer.added}
    return Renderer(tokenizer, Template(template), end_ids=[known[end] for end in ends])


def bridged(
    renderer: Renderer,
    base: Sequence[Message],
    answer: AssistantMessage,
    sampled: Sequence[int] | str,
    new: Sequence[Message],
) -> Bridged:
    ids = renderer.tokenizer.encode(sampled) if isinstance(sampled, str) else sampled
    history = History(messages=base, prompt_ids=renderer.render(base, TOOLS), answer=answer)
    return renderer.bridge(history, ids, new, TOOLS)


def sampled_as_written(
    renderer: Renderer, base: Sequence[Message], answer: AssistantMessage, new: Sequence[Message]
) -> tuple[list[int], tuple[int, ...]]:
    """The ids of an answer as the template would write it, with its end token; and the whole next
    prompt."""
    prompt, whole = renderer.render(base, TOOLS), renderer.render([*base, answer, *new], TOOLS)
    assert whole[: len(prompt)] == prompt
    message = whole[len(prompt) :]
    end = next(place for place, token in enumerate(message) if token in renderer.end_ids)
    return message[: end + 1], tuple(whole)


@pytest.mark.parametrize("text", ["", "I look."])
@pytest.mark.parametrize("family", RENDERERS)
def test_end_token_after_a_call_occurs_once(family: str, text: str) -> None:
    """Llama ends a turn with a call by another token than a turn with text: taking the end of a
    placeholder without calls gives a wrong token after a cut call, and glue that is off by one."""
    renderer = RENDERERS[family]
    one_or_other = family in ("channels", "llama3", "mistral")  # text or a call
    reasoning = "I think." if family == "qwen3" else None
    content = "" if one_or_other else text
    answer = AssistantMessage(content=content, tool_calls=(ONE,), reasoning_content=reasoning)
    ids, whole = sampled_as_written(renderer, ASK, answer, FOUND)
    assert renderer.tokenizer.text_of(ids[-1]) == END_OF_A_CALL[family]
    ended = bridged(renderer, ASK, answer, ids, FOUND)
    cut = bridged(renderer, ASK, answer, ids[:-1], FOUND)
    assert ended.ids == cut.ids == whole
    assert (ended.closed, cut.closed) == (False, True)
    assert cut.glue == (ids[-1], *ended.glue)
    assert whole[: ended.glue_start] == (*renderer.render(ASK, TOOLS), *ids)


@pytest.mark.parametrize("family", CHATML_LIKE)
def test_only_truncated_answers_are_closed(family: str) -> None:
    renderer = tiny_renderer(family, **({"enable_thinking": False} if family == "qwen3" else {}))
    cut = bridged(renderer, ASK, YES, "yes", [GO_ON])
    ended = bridged(renderer, ASK, YES, "yes<|im_end|>", [GO_ON])
    assert (cut.closed, ended.closed) == (True, False)
    assert cut.ids == ended.ids
    assert cut.glue == (renderer.tokenizer.id_of("<|im_end|>"), *ended.glue)
    opened = "\n<|im_start|>user\nAnd then?<|im_end|>\n"
    assert renderer.decode(ended.glue).startswith(opened)


@pytest.mark.parametrize(
    ("template", "ends", "sampled"),
    [
        (PLAIN, ["<|endoftext|>"], "yes"),
        (END_WITH_THE_NEXT_TURN, ["<|endoftext|>"], "yes"),
        (END_WITH_THE_NEXT_TURN, ["<|endoftext|>"], "yes<|endoftext|>"),
        (OPENING_ENDS, ["[INST]", "[TOOL_RESULTS]"], "yes[INST]"),
        (END_OF_ALL, ["<|endoftext|>"], "yes<|im_end|>"),
    ],
)
def test_end_token_occurs_once_for_any_template(
    template: str, ends: list[str], sampled: str
) -> None:
    renderer = build_renderer(template, ends)
    whole = tuple(renderer.render([*ASK, YES, GO_ON], TOOLS))
    assert bridged(renderer, ASK, YES, sampled, [GO_ON]).ids == whole


def test_other_sampled_end_token_is_kept() -> None:
    renderer = build_renderer(TEMPLATES["chatml"])
    found = bridged(renderer, ASK, YES, "yes<|endoftext|>", [GO_ON])
    assert "yes<|endoftext|>\n<|im_start|>user\nAnd then?" in renderer.decode(found.ids or ())
    plain = build_renderer(PLAIN)
    found = bridged(plain, ASK, YES, "yes\n<|endoftext|>", [GO_ON])
    assert plain.decode(found.glue) == "\n\n### user:\nAnd then?\n\n### assistant:\n"


THOUGHT = AssistantMessage(content="yes", reasoning_content="I think.")
THOUGHT_BEFORE = [
    *ASK,
    AssistantMessage(tool_calls=(ONE,), reasoning_content="I think."),
    *results([ONE], "Found."),
]
DROPS, REWRITES = "drops the reasoning of earlier turns", "rewrites what comes before the new"


@pytest.mark.parametrize(
    ("template", "base", "answer", "sampled", "new", "reason"),
    [
        ("qwen3", ASK, THOUGHT, "yes<|im_end|>", [GO_ON], DROPS),
        ("qwen3", THOUGHT_BEFORE, YES, "yes", [GO_ON], DROPS),
        ("mistral", ASK, YES, "yes</s>", [GO_ON], REWRITES),
        ("channels", ASK, YES, "yes<|endoftext|>", [GO_ON], REWRITES),
        (REFUSES, ASK, YES, "yes", [UserMessage(content="")], "TemplateError: no"),
        (PLAIN, ASK, YES, "yes\n", [GO_ON], "share a token"),
        (OPENING_ENDS, ASK, YES, "yes[TOOL_RESULTS]", [GO_ON], "ended with '[TOOL_RESULTS]'"),
        (
            "runs_on",
            ASK,
            CALLED,
            "yes<|im_end|>",
            FOUND,
            "ended with '<|im_end|>', and",
        ),
    ],
)
def test_fork_has_a_reason(
    template: str,
    base: Sequence[Message],
    answer: AssistantMessage,
    sampled: str,
    new: Sequence[Message],
    reason: str,
) -> None:
    ends = ["[INST]", "[TOOL_RESULTS]"] if template == OPENING_ENDS else ["<|endoftext|>"]
    found = bridged(build_renderer(template, ends), base, answer, sampled, new)
    assert found.ids is None
    assert reason in (found.fork_reason or "")
    assert found.drops_reasoning == (reason == DROPS)


def test_kept_content_does_not_fork() -> None:
    qwen, mistral = tiny_renderer("qwen3"), tiny_renderer("mistral")
    result = ToolMessage(tool_call_id="", name="", content="")
    assert bridged(qwen, ASK, THOUGHT, "yes<|im_end|>", [result]).ids
    history = History(messages=ASK, prompt_ids=mistral.render(ASK), answer=YES)
    sampled = mistral.tokenizer.encode("yes</s>")
    assert mistral.bridge(history, sampled, [GO_ON]).ids  # without tools, which it would move
    # Without thinking the opening of a turn holds an empty block, and earlier turns do not.
    quiet = tiny_renderer("qwen3", enable_thinking=False)
    found = bridged(quiet, ASK, CALLED, "<tool_call>{}</tool_call><|im_end|>", FOUND[:1])
    assert quiet.decode(found.glue).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_two_calls_are_bridged_if_the_template_allows_one() -> None:
    renderer = tiny_renderer("llama3")
    two = (ONE, call(2, "that"))
    answer, new = AssistantMessage(tool_calls=two), results(two, "Found.")
    found = bridged(renderer, ASK, answer, "x<|eom_id|>", new)
    assert not found.closed
    text = renderer.decode(found.glue)
    assert text.count("Found.") == text.count("ipython") == 2
    assert bridged(
        renderer, [*ASK, answer, *new], AssistantMessage(content="so"), "so", [GO_ON]
    ).ids


def test_placeholder_in_a_conversation_is_harmless() -> None:
    renderer = tiny_renderer("chatml")
    names = "placeholder0answer placeholder1answer placeholder0reasoning"
    base, new = [*ASK, UserMessage(content=names)], [UserMessage(content=f"{names}<|im_end|>")]
    ids, whole = sampled_as_written(renderer, base, YES, new)
    assert bridged(renderer, base, YES, ids, new).ids == whole


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "mistral", "coder"])
def test_abridged_conversation_gives_the_same_bridge(family: str) -> None:
    rounds: list[Message] = []
    for number in range(40):
        one = call(number, "it")
        rounds += [AssistantMessage(tool_calls=(one,)), *results([one], "line\n" * 200)]
    thought = AssistantMessage(tool_calls=(ONE,), reasoning_content="I think.")
    rounds[20:20] = [thought, *results([ONE], "Found.")]
    base = [*ASK, *rounds]
    short = abridge_messages(base)
    assert len(short) < 16
    assert thought in short
    assert short[:2] == list(ASK)
    calls = [[getattr(m, "tool_calls", None) for m in part[-6:]] for part in (short, base)]
    assert calls[0] == calls[1]
    reasoning = "Hm." if family == "qwen3" else None
    answer = AssistantMessage(tool_calls=(ONE,), reasoning_content=reasoning)
    ids, whole = sampled_as_written(tiny_renderer(family), base, answer, FOUND)
    assert bridged(tiny_renderer(family), base, answer, ids, FOUND).ids == whole
