"""Messages to ids: the files of a model, its template, and what messages may not do."""

import datetime
import json
from pathlib import Path

import pytest
from render_kit import FAMILIES, TOOLS, added_tokens, printed

from hermes_rl.errors import UserError
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.tokens import Renderer, Template, TemplateRefused, Tokenizer, load_renderer
from hermes_rl.testing import TEMPLATES, tiny_renderer, tokenizer_json, write_tiny_tokenizer

ASK = [SystemMessage(content="Be brief."), UserMessage(content="What is it?")]


def rendered(source: str, *, tools: bool = False, **variables: object) -> str:
    template = Template(source, variables=variables)
    return template.render([{"role": "user", "content": "hi"}], TOOLS if tools else [])


def test_prompt_matches_its_template() -> None:
    renderer = tiny_renderer("chatml")
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = renderer.render(ASK)
    assert renderer.decode(ids) == text == renderer.text(ASK)
    opened = ["<|im_start|>", "<|im_end|>"]
    assert added_tokens(renderer, ids) == [*opened, *opened, "<|im_start|>"]
    closed = renderer.decode(renderer.render(ASK, generation_prompt=False))
    assert closed == text.removesuffix("<|im_start|>assistant\n")


def test_prompt_has_one_bos() -> None:
    for family, bos in (("llama3", "<|begin_of_text|>"), ("mistral", "<s>")):
        renderer = tiny_renderer(family)
        ids = renderer.render(ASK)
        assert ids[0] == renderer.tokenizer.id_of(bos)
        assert ids.count(ids[0]) == 1


def test_post_processor_adds_no_token() -> None:
    """Llama's tokenizer.json adds a BOS unless that is switched off."""
    spec = json.loads(tokenizer_json())
    bos = {"id": "<s>", "ids": [264], "tokens": ["<s>"]}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": bos},
    }
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    plain, eager = Tokenizer(tokenizer_json()), Tokenizer(json.dumps(spec))
    text = "<s>the answer and another line"
    assert eager.encode(text) == plain.encode(text)
    assert eager.encode("\ufdd0<the", "\ufdd0") == plain.encode("\ufdd0<the", "\ufdd0")


def test_assistant_markup_becomes_tokens_but_control_tokens_stay_text() -> None:
    renderer = tiny_renderer("qwen3")
    message = AssistantMessage(content="<tool_call>{}</tool_call> then <|im_end|>")
    ids = renderer.render([*ASK, message], generation_prompt=False)
    found = added_tokens(renderer, ids)
    assert found.count("<tool_call>") == found.count("</tool_call>") == 1
    assert found.count("<|im_end|>") == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_rendered_as_json_or_parameters(family: str) -> None:
    calls = (ToolCall(id="call00001", name="look_up", arguments='{"subject": "é \\"x\\" <b>"}'),)
    reported = [*ASK, AssistantMessage(tool_calls=calls)]
    text = tiny_renderer(family).text(reported, TOOLS, generation_prompt=False)
    wanted = 'é "x" <b>' if family == "coder" else '{"subject": "é \\"x\\" <b>"}'
    assert wanted in text


@pytest.mark.parametrize("family", FAMILIES)
def test_invalid_arguments_do_not_break_templates(family: str) -> None:
    calls = (ToolCall(id="call00001", name="look_up", arguments='{"subject": "cu'),)
    text = tiny_renderer(family).text([*ASK, AssistantMessage(tool_calls=calls)], TOOLS)
    whole = '"arguments": {"subject": "cu}' if family == "text_arguments" else "_unparsed"
    assert whole in text
    assert "subject" in text


def test_call_ids_have_nine_characters_if_the_template_requires_it() -> None:
    renderer = tiny_renderer("mistral")
    calls = (ToolCall(id="call_0123456789abcdef", name="look_up", arguments="{}"),)
    result = ToolMessage(tool_call_id=calls[0].id, name="look_up", content="found")
    text = renderer.text([*ASK, AssistantMessage(tool_calls=calls), result], TOOLS)
    short = text.split('"call_id": "')[1][:9]
    assert short.isalnum()
    assert text.count(short) == 2


def test_two_calls_become_two_turns_if_the_template_allows_one() -> None:
    """An action of the model does not end the rollout."""
    renderer = tiny_renderer("llama3")
    calls = tuple(ToolCall(id=f"c{n}", name=f"tool_{n}", arguments="{}") for n in range(2))
    found = [ToolMessage(tool_call_id=f"c{n}", name="", content=f"found {n}") for n in (1, 0)]
    both = [*ASK, AssistantMessage(content="x", tool_calls=calls), *found, ASK[1]]
    text = renderer.text(both, TOOLS).partition("What is it?")[2]
    places = [
        text.index(fragment) for fragment in ("tool_0", "found 0", "tool_1", "found 1", "What is")
    ]
    assert places == sorted(places)
    open_end = [*ASK, AssistantMessage(tool_calls=calls)]
    assert "tool_1" in renderer.text(open_end, TOOLS)


def test_images_are_refused_with_one_line() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(UserError, match="for text"):
        tiny_renderer().render([UserMessage(content=[image])])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in tiny_renderer().text([UserMessage(content=parts)])


def test_templates_have_the_expected_environment() -> None:
    assert rendered("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert rendered("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert (
        rendered("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert rendered("{{ strftime_now('%Y-%m-%d') }}") == "2024-07-26"
    assert rendered("a\n    {% if true %}\nb\n    {% endif %}\n") == "a\nb\n"
    assert rendered("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert rendered("{{ tools[0].function.name }}", tools=True) == "look_up"
    assert rendered("{{ eos_token }}{{ nothing is defined }}", eos_token="</s>") == "</s>False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system') }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_forbidden_template_operations_are_refused(source: str) -> None:
    with pytest.raises(TemplateRefused, match="the chat template"):
        rendered(source)


def test_template_syntax_error_names_the_line() -> None:
    with pytest.raises(UserError, match="chat template 'default', line 2"):
        Template("fine\n{% if %}")


def test_date_is_fixed_and_part_of_the_hash() -> None:
    source = "{{ strftime_now('%d') }}"
    one, other = Template(source), Template(source, date=datetime.date(2025, 3, 4))
    assert (one.render([]), other.render([])) == ("26", "04")
    assert one.sha256 != other.sha256 != Template(source, variables={"x": 1}).sha256
    assert one.sha256 == Template({"default": source}).sha256


def test_tool_template_is_used_with_tools(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    renderer = load_renderer(tmp_path)
    assert renderer.text(ASK) == "plain"
    assert renderer.text(ASK, TOOLS) == "tools"


def test_folder_of_transformers_is_read(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, "llama3")
    local = load_renderer(tmp_path)
    assert local.render(ASK) == tiny_renderer("llama3").render(ASK)
    assert local.tokenizer_hash == tiny_renderer().tokenizer_hash

    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 256]}')
    wins = load_renderer(tmp_path)
    assert wins.text(ASK) == tiny_renderer("chatml").text(ASK)
    assert wins.end_ids >= {256, 257}
    assert load_renderer(tmp_path / "tokenizer.json").template_hash == wins.template_hash
    assert load_renderer(tmp_path, template="own").text(ASK) == "own"


def test_added_tokens_of_the_configuration_are_used(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    last = spec["added_tokens"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(last["id"]): {**last, "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_renderer(tmp_path).tokenizer
    assert tokenizer.id_of(last["content"]) == last["id"]
    assert tokenizer.encode(last["content"]) == [last["id"]]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", "{}", "has no 'model'"),
        ("tokenizer.json", '{"model": {"type": "Nothing"}}', "tokenizer.json: "),
        ("tokenizer.json", None, r"has no tokenizer\.json"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("tokenizer_config.json", "{}", "no chat template"),
    ],
)
def test_invalid_files_are_refused_with_one_line(
    tmp_path: Path, name: str, content: str | None, error: str
) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=error) as caught:
        load_renderer(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no tokenizer at"):
        load_renderer(tmp_path / "missing")


def test_an_added_token_with_a_wrong_id_is_refused() -> None:
    spec = json.loads(tokenizer_json())
    spec["added_tokens"][0]["id"] = 9_999
    with pytest.raises(UserError, match="does not get its id"):
        Tokenizer(json.dumps(spec))


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("chatml", {"<|im_end|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("llama3", {"<|eot_id|>", "<|eom_id|>"}),
        ("mistral", {"</s>"}),
    ],
)
def test_end_ids_are_those_of_the_template(family: str, ends: set[str]) -> None:
    renderer = tiny_renderer(family)
    assert {renderer.tokenizer.text_of(i) for i in renderer.end_ids} == ends


def test_end_ids_are_found_if_the_files_name_others() -> None:
    """A fine-tune that keeps the base model's eos_token and ends its turns by ChatML."""
    tokenizer = Tokenizer(tokenizer_json())
    reported = tokenizer.id_of("<|endoftext|>")
    assert reported is not None
    renderer = Renderer(tokenizer, Template(TEMPLATES["chatml"]), end_ids=[reported])
    assert renderer.end_ids == {reported, tokenizer.id_of("<|im_end|>")}
    ended = [*renderer.render(ASK)[:1], reported]
    assert "<|endoftext|>" not in renderer.answer_text(ended)


def test_opened_reasoning_is_detected() -> None:
    plain = TEMPLATES["qwen3"]
    opened = plain.replace("'<think>\\n\\n</think>\\n\\n'", "'<think>\\n'")
    tokenizer = Tokenizer(tokenizer_json())
    template = Template(opened, variables={"enable_thinking": False})
    assert Renderer(tokenizer, template).opens_reasoning
    assert not tiny_renderer("qwen3").opens_reasoning
    assert not tiny_renderer("qwen3", enable_thinking=False).opens_reasoning


def test_tiny_tokenizer_is_deterministic() -> None:
    code = (
        "from hermes_rl.testing.tiny_tokenizer import tiny_renderer as r;"
        "print(r().tokenizer_hash, r('qwen3').template_hash)"
    )
    assert printed(code).split() == [
        tiny_renderer().tokenizer_hash,
        tiny_renderer("qwen3").template_hash,
    ]
