"""Findings about a template at the start, and their messages."""

import pytest
from render_kit import GLM_LIKE

from hermes_rl.models.tokens import Finding, Renderer, Template, Tokenizer, detect_form
from hermes_rl.testing import TEMPLATES, tiny_renderer, tokenizer_json

CALLS = ("a tool call", "text and a tool call", "several tool calls", "a second round of tools")


def finding_of(source: str, **variables: object) -> Finding:
    tokenizer = Tokenizer(tokenizer_json())
    return Renderer(tokenizer, Template(source, variables=variables)).preserves_prefix()


def outcomes(finding: Finding) -> dict[str, str]:
    return {case.name: case.outcome for case in finding.cases}


@pytest.mark.parametrize("family", ["chatml", "coder", "text_arguments"])
def test_appending_templates_are_identical_except_for_reasoning(family: str) -> None:
    finding = tiny_renderer(family).preserves_prefix()
    reported = {name for name, outcome in outcomes(finding).items() if outcome != "identical"}
    assert reported == {"reasoning before a tool call", "reasoning before an answer"}
    assert "forks" not in outcomes(finding).values()
    assert all("never shows reasoning" in line for line in finding.lines())


def test_dropped_reasoning_is_reported() -> None:
    finding = tiny_renderer("qwen3").preserves_prefix()
    assert outcomes(finding)["reasoning before a tool call"] == "identical"
    (fork,) = (case for case in finding.cases if case.outcome == "forks")
    assert fork.name == "reasoning before an answer"
    assert "drops the reasoning of earlier turns" in fork.why
    assert not finding.preserved


def test_a_template_that_keeps_reasoning_is_preserved() -> None:
    kept = TEMPLATES["qwen3"].replace("loop.index0 > last.query and", "true and")
    kept = kept.replace("(loop.last or message.reasoning_content)", "message.reasoning_content")
    finding = finding_of(kept)
    assert finding.preserved, finding.lines()
    assert finding.lines() == []


CHATML = TEMPLATES["chatml"]
NUMBERED = (
    "{% for m in messages %}<|im_start|>{{ loop.revindex }} {{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endfor %}"
)
ONLY_USERS = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}{% endfor %}"
OPENS_REASONING = CHATML.replace(
    "add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
    "add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}",
)


@pytest.mark.parametrize(
    ("template", "probe", "outcome", "why"),
    [
        ("qwen3 without thinking", "a tool call", "bridged", "empty reasoning"),
        (OPENS_REASONING, "a tool call", "bridged", "does not open such a turn with"),
        ("mistral", "a question after tools", "forks", "rewrites what comes before"),
        ("mistral", "a question after an answer, tools offered", "forks", "rewrites"),
        ("mistral", "several tool calls", "identical", ""),
        ("llama3", "a tool call", "identical", "every prompt says 2024-07-26"),
        ("llama3", "several tool calls", "bridged", "writes one call a turn"),
        (NUMBERED, "a question after an answer", "forks", "rewrites what comes before"),
        (NUMBERED, "a tool call", "refused", "writes no tool calls"),
        (ONLY_USERS, "a question after an answer", "forks", "does not write the assistant's turn"),
    ],
)
def test_what_a_template_does_to_earlier_turns_is_reported(
    template: str, probe: str, outcome: str, why: str
) -> None:
    family, _, without = template.partition(" without ")
    if family in TEMPLATES:
        variables = {"enable_thinking": False} if without else {}
        finding = tiny_renderer(family, **variables).preserves_prefix()
    else:
        finding = finding_of(template)
    assert outcomes(finding)[probe] == outcome
    assert any(why in line for line in finding.lines())


@pytest.mark.parametrize(
    ("family", "parser"),
    [
        ("chatml", "hermes"),
        ("text_arguments", "hermes"),
        ("qwen3", "hermes"),
        ("coder", "qwen3_coder"),
        ("llama3", "llama3_json"),
        ("mistral", "mistral"),
    ],
)
def test_parser_is_detected_from_the_template(family: str, parser: str) -> None:
    renderer = tiny_renderer(family)
    assert renderer.parser_name == parser
    assert renderer.parser_fits
    assert not any("no parser" in note for note in renderer.preserves_prefix().notes)


def test_calls_without_a_parser_are_reported() -> None:
    renderer = Renderer(tiny_renderer().tokenizer, Template(GLM_LIKE))
    assert not renderer.parser_fits
    (note,) = (n for n in renderer.preserves_prefix().notes if "no parser" in n)
    assert note == renderer.unread_calls
    assert "<tool_call>look_up<arg_key>subject" in note
    assert "hermes, qwen3_coder, llama3_json, mistral" in note
    silent = Renderer(tiny_renderer().tokenizer, Template("{{ messages[-1].content }}"))
    assert not silent.parser_fits
    (note,) = silent.preserves_prefix().notes
    assert note == silent.unread_calls
    assert note.startswith("this model's chat template writes no tool calls")


def test_form_of_a_template_is_detected() -> None:
    def form(source: str) -> tuple[str, str, bool, bool, bool]:
        found = detect_form(Template(source, variables={"eos_token": "</s>"}))
        return (
            found.arguments,
            found.empty_content,
            found.short_ids,
            found.parts,
            found.writes_calls,
        )

    loop = "{% for m in messages %}BODY{% endfor %}"
    texts = loop.replace("BODY", "{{ m.content }}")
    parts = loop.replace("BODY", "{% for p in m.content %}{{ p['text'] }}{% endfor %}")
    calls = (
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    strings = calls.replace(" | tojson", "")
    absent = "{% if m.content is none %}" + calls + "{% else %}{{ m.content }}{% endif %}"
    assert form(texts) == ("object", "", False, False, False)
    assert form(parts) == ("object", "", False, True, False)
    assert form(loop.replace("BODY", calls)) == ("object", "", False, False, True)
    assert form(loop.replace("BODY", strings)) == ("text", "", False, False, True)
    assert form(loop.replace("BODY", absent)) == ("object", "none", False, False, True)
    assert form(TEMPLATES["mistral"]) == ("object", "", True, False, True)
