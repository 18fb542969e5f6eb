"""A model request becomes one step of the engine, and the engine's text a message."""

import json
from importlib.resources import files

import jsonschema
import pytest

from hermes_rl.config import LOCAL_MODELS
from hermes_rl.errors import BadRequest
from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.messages import SystemMessage as System
from hermes_rl.models import Conversation, ModelRequest, Sampling
from hermes_rl.models.local import PREFILL, Step, plan_step, read_catalogue, simplify

COMMAND = {"command": {"type": "string"}, "timeout": {"type": "number"}}
TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": COMMAND, "required": ["command"]},
    },
}
HELLO = UserMessage(content="hello")
IMAGE = UserMessage(content=[{"type": "image_url", "image_url": {"url": "data:,"}}])
CALL = AssistantMessage(
    tool_calls=(ToolCall(id="1", name="terminal", arguments='{"command":"ls"}'),)
)
RESULT = ToolMessage(tool_call_id="1", name="terminal", content="a.txt")


def step_of(*messages, has_tools: bool = True, tools=(TERMINAL,), **more: object) -> Step:
    conversation = Conversation(messages or [HELLO])
    request = ModelRequest("local", conversation, "call", tools=tuple(tools), **more)
    return plan_step(request, template_has_tools=has_tools)


def calls_in(step: Step) -> dict[str, dict]:
    """The schema of each call's arguments, by name."""
    calls = step.body.get("json_schema", {"anyOf": []})["anyOf"]
    return {call["properties"]["name"]["const"]: call["properties"]["arguments"] for call in calls}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({}, ["terminal", "finish"]),
        ({"tool_choice": "auto"}, ["terminal", "finish"]),
        ({"tool_choice": "required"}, ["terminal"]),
        ({"tool_choice": {"type": "function", "function": {"name": "terminal"}}}, ["terminal"]),
        ({"tool_choice": "none"}, []),
    ],
)
def test_tools_become_a_choice_of_calls_and_an_end(choice, names):
    step = step_of(extra=choice)
    assert list(calls_in(step)) == names
    assert [tool["function"]["name"] for tool in step.tools] == names
    assert step.calls is bool(names)
    assert step.logprobs_kind == ("constrained" if names else "raw")


def test_an_offered_finish_keeps_its_name():
    offered = {"type": "function", "function": {"name": "finish"}}
    assert step_of(tools=[TERMINAL, offered]).finish == "final_answer"


def test_earlier_calls_are_written_as_the_model_wrote_them():
    messages = step_of(HELLO, CALL, RESULT).messages
    written = f'{PREFILL}{{"name": "terminal", "arguments": {{"command":"ls"}}}}\n</tool_call>'
    assert messages[1:] == [
        {"role": "assistant", "content": written},
        {"role": "tool", "content": "a.txt"},
    ]


def test_a_template_without_tools_gets_them_in_the_system_message():
    step = step_of(System(content="Be brief."), HELLO, CALL, RESULT, has_tools=False)
    head, last = step.messages[0]["content"], step.messages[3]
    assert step.tools == []
    assert head.startswith("Be brief.")
    assert '"terminal"' in head
    assert '"finish"' in head
    assert last["role"] == "user"
    assert "a.txt" in last["content"]


def test_limits_and_sampling_and_further_fields_are_passed_on():
    sampling = Sampling(max_tokens=7, temperature=0, top_p=0.5, seed=2**40 + 3, stop=("x",))
    sent = {"n_predict": 7, "temperature": 0, "top_p": 0.5, "seed": 3, "n_probs": 1}
    extra = {"presence_penalty": 0.5}
    step = step_of(tools=(), sampling=sampling, extra=extra, logprobs=True)
    assert {**sent, **extra, "stop": ["x"]}.items() <= step.body.items()
    assert "stop" not in step_of(sampling=sampling).body  # it would cut a call in two


@pytest.mark.parametrize(
    ("message", "extra", "place"),
    [
        (HELLO, {"tool_choice": "sometimes"}, "tool_choice"),
        (HELLO, {"tool_choice": {"function": {"name": "absent"}}}, "'absent'"),
        (HELLO, {"tool_choice": "none", "response_format": {"type": "poem"}}, "response_format"),
        (IMAGE, {}, "image_url"),
    ],
)
def test_unsupported_fields_and_images_are_refused_by_name(message, extra, place):
    with pytest.raises(BadRequest, match=place):
        step_of(message, extra=extra)


def test_a_simplified_schema_has_only_supported_keywords_and_accepts_whatever_the_original_does():
    schema = {
        "type": "object",
        "$defs": {"x": {"type": "string"}},
        "properties": {
            "path": {"type": "string", "pattern": "^(?!/)", "format": "uri"},
            "mode": {"enum": ["a", "b"]},
            "limit": {"type": ["integer", "null"], "minimum": 1},
            "items": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1},
            "either": {"oneOf": [{"type": "string"}, {"type": "number"}]},
            "odd": {"type": "date"},
        },
        "required": ["path", "absent"],
    }
    simple = simplify(schema)
    text = json.dumps(simple)
    for unknown in ("pattern", "format", "minimum", "minItems", "$ref", "date", "oneOf"):
        assert unknown not in text
    jsonschema.Draft202012Validator.check_schema(simple)
    fits = {"path": "a", "mode": "b", "limit": None, "items": ["x"], "either": 1.5, "odd": "today"}
    jsonschema.validate(fits, simple)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"mode": "b"}, simple)


@pytest.mark.parametrize("schema", [None, {}, True, {"type": "foo"}, {"type": ["string", "foo"]}])
def test_a_schema_of_unknown_keywords_allows_everything(schema):
    assert simplify(schema) == {}


def test_a_call_has_its_required_arguments_only_or_any_if_none_is_required():
    arguments = calls_in(step_of())["terminal"]
    assert arguments["properties"] == {"command": {"type": "string"}}
    assert arguments["additionalProperties"] is False
    form = {"name": "terminal", "parameters": {"type": "object", "properties": COMMAND}}
    relaxed = step_of(tools=[{"type": "function", "function": form}])
    assert set(calls_in(relaxed)["terminal"]["properties"]) == {"command", "timeout"}


CUT = '{"name": "terminal", "arguments": {"comm'
CALLED = '{"name": "terminal", "arguments": {"command": "echo \\u00e9"}}'


@pytest.mark.parametrize(
    ("text", "reason", "content", "arguments"),
    [
        (CALLED, "tool_calls", "", ['{"command": "echo \\u00e9"}']),
        ('{"name":"terminal","arguments":{}}', "tool_calls", "", ["{}"]),
        ('{"name": "finish", "arguments": {"answer": "42"}}', "stop", "42", []),
        (CUT, "length", CUT, []),
        ("[42]", "length", "[42]", []),
    ],
)
def test_answer_is_a_call_or_final_text_or_truncated_text(text, reason, content, arguments):
    message, finish_reason = step_of().outcome(text, "stop")
    assert (finish_reason, message.content) == (reason, content)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("terminal", one) for one in arguments
    ]


def test_the_catalogue_is_complete():
    catalogue = read_catalogue()
    notice = (files("hermes_rl.models.local") / "NOTICE").read_text()
    assert tuple(catalogue) == LOCAL_MODELS
    for weights in catalogue.values():
        assert sum(part.bytes for part in weights.parts) == weights.bytes
        assert len({part.sha256 for part in weights.parts}) == len(weights.parts)
        assert all(len(part.sha256) == 64 for part in weights.parts)
        assert "tiny" in weights.description or "small" in weights.description
        licence = (files("hermes_rl.models.local") / weights.licence).read_text()
        assert "Apache License" in licence
        assert weights.licence in notice
        assert weights.title.split()[0] in notice
