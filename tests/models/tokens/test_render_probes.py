"""What is found out about a template at the start, and how it is told."""

import pytest
from render_kit import GLM_LIKE

from hermes_rl.models.tokens import Finding, Renderer
from hermes_rl.models.tokens.rendering import detect_form
from hermes_rl.models.tokens.template import Template
from hermes_rl.models.tokens.tokenizer import Tokenizer
from hermes_rl.testing.tiny_tokenizer import TEMPLATES, tiny_renderer, tokenizer_json

CALLS = ("a tool call", "text and a tool call", "several tool calls", "a second round of tools")


def finding_of(source: str, **variables: object) -> Finding:
    tokenizer = Tokenizer(tokenizer_json())
    return Renderer(tokenizer, Template(source, variables=variables)).preserves_prefix()


def outcomes(finding: Finding) -> dict[str, str]:
    return {case.name: case.outcome for case in finding.cases}


@pytest.mark.parametrize("family", ["chatml", "coder", "text_arguments"])
def test_templates_that_only_add_are_identical_but_for_reasoning(family: str) -> None:
    finding = tiny_renderer(family).preserves_prefix()
    told = {name for name, outcome in outcomes(finding).items() if outcome != "identical"}
    assert told == {"reasoning before a tool call", "reasoning before an answer"}
    assert finding.forks == ()
    assert all("never shows reasoning" in line for line in finding.lines())


def test_dropped_reasoning_is_named() -> None:
    finding = tiny_renderer("qwen3").preserves_prefix()
    assert outcomes(finding)["reasoning before a tool call"] == "identical"
    (fork,) = finding.forks
    assert fork.name == "reasoning before an answer"
    assert "drops the reasoning of earlier turns" in fork.why
    assert not finding.preserved


def test_a_template_that_keeps_reasoning_is_preserved() -> None:
    kept = TEMPLATES["qwen3"].replace("loop.index0 > last.query and", "true and")
    kept = kept.replace("(loop.last or message.reasoning_content)", "message.reasoning_content")
    finding = finding_of(kept)
    assert finding.preserved, finding.lines()
    assert finding.lines() == []


def test_an_empty_thought_is_told_but_bridged() -> None:
    finding = tiny_renderer("qwen3", enable_thinking=False).preserves_prefix()
    assert outcomes(finding)["a tool call"] == "bridged"
    assert any("empty reasoning" in line for line in finding.lines())


def test_an_opening_that_history_does_not_show_is_told() -> None:
    opened = TEMPLATES["chatml"].replace(
        "add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
        "add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}",
    )
    finding = finding_of(opened)
    assert outcomes(finding)["a tool call"] == "bridged"
    assert any("does not open such a turn with" in line for line in finding.lines())


def test_tools_that_move_are_told() -> None:
    finding = tiny_renderer("mistral").preserves_prefix()
    assert {case.name for case in finding.forks} == {
        "a question after an answer, tools offered",
        "a question after tools",
    }
    assert outcomes(finding)["several tool calls"] == "identical"


def test_a_day_is_told_and_fixed() -> None:
    finding = tiny_renderer("llama3").preserves_prefix()
    assert "the template writes the day; every prompt says 2024-07-26" in finding.notes
    assert outcomes(finding)["a tool call"] == "identical"


def test_a_template_with_one_call_a_turn_is_told() -> None:
    finding = tiny_renderer("llama3").preserves_prefix()
    assert outcomes(finding)["several tool calls"] == "bridged"
    assert any("writes one call a turn" in line for line in finding.lines())


def test_a_template_that_numbers_its_messages_from_the_end_forks() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ loop.revindex }} {{ m.role }}\n{{ m.content }}"
        "<|im_end|>{% endfor %}"
    )
    finding = finding_of(source)
    assert outcomes(finding)["a question after an answer"] == "forks"
    assert outcomes(finding)["a tool call"] == "refused"
    assert "rewrites what comes before" in finding.forks[0].why


def test_a_template_that_writes_no_answers_forks() -> None:
    source = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}{% endfor %}"
    finding = finding_of(source)
    assert outcomes(finding)["a question after an answer"] == "forks"
    assert "does not write the assistant's turn" in finding.forks[0].why


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
def test_the_parser_is_the_one_that_reads_what_the_template_writes(
    family: str, parser: str
) -> None:
    renderer = tiny_renderer(family)
    assert renderer.parser_name == parser
    assert renderer.parser_fits
    assert not any("no parser" in note for note in renderer.preserves_prefix().notes)


def test_calls_that_no_parser_reads_are_told() -> None:
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


def test_the_form_that_a_template_reads_is_found() -> None:
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
    words = loop.replace("BODY", "{{ m.content }}")
    parts = loop.replace("BODY", "{% for p in m.content %}{{ p['text'] }}{% endfor %}")
    calls = (
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    strings = calls.replace(" | tojson", "")
    absent = "{% if m.content is none %}" + calls + "{% else %}{{ m.content }}{% endif %}"
    assert form(words) == ("object", "", False, False, False)
    assert form(parts) == ("object", "", False, True, False)
    assert form(loop.replace("BODY", calls)) == ("object", "", False, False, True)
    assert form(loop.replace("BODY", strings)) == ("text", "", False, False, True)
    assert form(loop.replace("BODY", absent)) == ("object", "none", False, False, True)
    assert form(TEMPLATES["mistral"]) == ("object", "", True, False, True)
