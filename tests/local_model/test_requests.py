"""A chat request read into one step of the engine, without an engine."""

import json

import jsonschema
import pytest

from hermes_rl.models.local import (
    LOCAL_MODELS,
    PREFILL,
    BadChatRequest,
    Generation,
    Step,
    Writer,
    plan_step,
    read_call,
    read_catalogue,
    read_request,
    simplify,
)

TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"],
        },
    },
}
HELLO = {"role": "user", "content": "hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "terminal", "arguments": '{"command":  "ls"}'},
        }
    ],
}


def step_of(template_has_tools: bool = True, **body: object) -> Step:
    raw = json.dumps({"model": "local", "messages": [HELLO], **body}).encode()
    return plan_step(read_request(raw), template_has_tools=template_has_tools)


def names_in(schema: dict) -> list[str]:
    return [option["properties"]["name"]["const"] for option in schema["anyOf"]]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["terminal", "finish"]),
        ("auto", ["terminal", "finish"]),
        ("required", ["terminal"]),
        ({"type": "function", "function": {"name": "terminal"}}, ["terminal"]),
        ("none", []),
    ],
)
def test_tools_become_a_choice_of_calls_and_an_end(choice, names):
    step = step_of(tools=[TERMINAL], tool_choice=choice)
    assert names_in(step.sampling.get("json_schema", {"anyOf": []})) == names
    assert [tool["function"]["name"] for tool in step.tools] == names
    assert (step.prefill, step.constrained) == (PREFILL if names else "", bool(names))


def test_an_offered_finish_keeps_its_name():
    offered = {"type": "function", "function": {"name": "finish"}}
    assert step_of(tools=[TERMINAL, offered]).finish == "final_answer"


def test_an_earlier_call_is_spelled_as_the_model_wrote_it():
    result = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
    step = step_of(messages=[HELLO, CALL, result], tools=[TERMINAL])
    text = '{"name": "terminal", "arguments": {"command":  "ls"}}'
    assert step.messages[1] == {
        "role": "assistant",
        "content": f"<tool_call>\n{text}\n</tool_call>",
    }
    assert step.messages[2] == {"role": "tool", "content": "a.txt"}
    assert read_call(text) == ("terminal", '{"command":  "ls"}')


def test_a_template_without_tools_gets_them_in_the_system_message():
    system = {"role": "system", "content": "Be brief."}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}
    step = step_of(False, messages=[system, HELLO, CALL, result], tools=[TERMINAL])
    assert step.tools == []
    head = step.messages[0]["content"]
    assert head.startswith("Be brief.")
    assert '"terminal"' in head
    assert '"finish"' in head
    assert step.messages[3]["role"] == "user"
    assert "a.txt" in step.messages[3]["content"]


def test_limits_and_sampling_are_passed_on():
    step = step_of(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=2**40 + 3,
        stop="x",
        top_logprobs=3,
        logprobs=True,
    )
    wanted = {
        "n_predict": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "stop": ["x"],
        "n_probs": 3,
    }
    assert wanted.items() <= step.sampling.items()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"{", "not JSON"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', r"\$\.messages\[0\]\.role|robot"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n: "),
    ],
)
def test_a_bad_request_is_refused_with_its_place(body, place):
    with pytest.raises(BadChatRequest, match=place):
        read_request(body)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"tools": [TERMINAL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [TERMINAL], "tool_choice": {"function": {"name": "absent"}}},
            "no tool is called 'absent'",
        ),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(body, place):
    with pytest.raises(BadChatRequest, match=place):
        step_of(**body)


def test_a_schema_keeps_only_what_the_grammar_knows_and_never_gets_narrower():
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


def test_a_call_writes_required_arguments_only_or_any_where_none_is_required():
    step = step_of(tools=[TERMINAL])
    arguments = step.sampling["json_schema"]["anyOf"][0]["properties"]["arguments"]
    assert arguments["properties"] == {"command": {"type": "string"}}
    assert arguments["additionalProperties"] is False
    relaxed = json.loads(json.dumps(TERMINAL))
    del relaxed["function"]["parameters"]["required"]
    step = step_of(tools=[relaxed])
    arguments = step.sampling["json_schema"]["anyOf"][0]["properties"]["arguments"]
    assert set(arguments["properties"]) == {"command", "timeout"}


@pytest.mark.parametrize("schema", [None, {}, True, {"type": "foo"}, {"type": ["string", "foo"]}])
def test_a_schema_that_says_nothing_known_allows_everything(schema):
    assert simplify(schema) == {}


def completion(text: str, stop_type: str = "eos") -> dict:
    request = read_request(json.dumps({"messages": [HELLO], "tools": [TERMINAL]}).encode())
    generation = Generation()
    generation.take({"content": text, "tokens": [1, 2]})
    counts = {"tokens_evaluated": 10, "tokens_predicted": 2, "timings": {"cache_n": 4}}
    generation.take({"content": "", "stop": True, "stop_type": stop_type, **counts})
    return Writer(request, plan_step(request, template_has_tools=True), "local", generation).whole()


CUT = '{"name": "terminal", "arguments": {"comm'


@pytest.mark.parametrize(
    ("text", "stop", "reason", "content", "arguments"),
    [
        (
            '{"name": "terminal", "arguments": {"command": "echo \\u00e9"}}',
            "eos",
            "tool_calls",
            None,
            '{"command": "echo \\u00e9"}',
        ),
        ('{"name": "finish", "arguments": {"answer": "42"}}', "eos", "stop", "42", None),
        (CUT, "limit", "length", CUT, None),
    ],
)
def test_an_answer_is_a_call_as_written_a_final_text_or_what_was_cut(
    text, stop, reason, content, arguments
):
    (choice,) = completion(text, stop)["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == (reason, content)
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert functions == ([{"name": "terminal", "arguments": arguments}] if arguments else [])


def test_usage_includes_what_came_from_the_cache():
    assert completion("{}")["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_the_catalogue_is_whole():
    catalogue = read_catalogue()
    assert tuple(catalogue) == LOCAL_MODELS
    for weights in catalogue.values():
        assert sum(part.bytes for part in weights.parts) == weights.bytes
        assert len({part.sha256 for part in weights.parts}) == len(weights.parts)
        assert all(len(part.sha256) == 64 for part in weights.parts)
        assert "tiny" in weights.description or "small" in weights.description


def test_each_model_has_its_licence_and_credit():
    from importlib.resources import files

    package = files("hermes_rl.models.local")
    notice = (package / "NOTICE").read_text()
    for weights in read_catalogue().values():
        assert "Apache License" in (package / weights.licence).read_text()
        assert weights.licence in notice
        assert weights.title.split()[0] in notice
