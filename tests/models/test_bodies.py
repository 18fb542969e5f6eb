"""What all three dialects make of one request: prefixes, adaptations, cache markers."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models import Conversation, Endpoint, ModelRequest, Sampling, dialect_for
from hermes_rl.models.prepare import NO_IMAGE
from hermes_rl.models.providers import find_quirks
from hermes_rl.models.wire import AnthropicMessages, ChatCompletions, Responses

few = settings(deadline=None, max_examples=25)
DIALECTS = [ChatCompletions, AnthropicMessages, Responses]
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "t",
            "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"pattern": "^a"}}},
        },
    },
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
DETAILS = [
    {"type": "thinking", "thinking": "SIGNED", "signature": "s"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "ENCRYPTED"},
    {"type": "reasoning.text", "text": "ROUTED"},
]
text = st.text(alphabet="ab é\n", max_size=12)
arguments = st.sampled_from(["{}", '{"b": 1, "a": [2]}', "", '{"cut', "no json"])


def at(host, dialect):
    return dialect_for(Endpoint(f"https://{host}", api_mode=dialect.name))


def request(*messages, **fields):
    return ModelRequest(
        model="claude-x", conversation=Conversation(messages), call_id="c", tools=TOOLS,
        sampling=Sampling(max_tokens=64, temperature=0.5), **fields,
    )  # fmt: skip


@st.composite
def turns(draw):
    """What one turn adds: an answer, and its results or the next thing that the user says."""
    ids = draw(st.lists(st.integers(0, 999), max_size=3, unique=True))
    calls = tuple(ToolCall(id=f"call_{i}", name="t", arguments=draw(arguments)) for i in ids)
    answer = AssistantMessage(
        content=draw(text),
        reasoning_content=draw(st.none() | text),
        tool_calls=calls,
        reasoning_details=draw(st.none() | st.just(DETAILS)),
    )
    if not calls:
        return [replace_text(answer), UserMessage(content=draw(text))]
    results = [ToolMessage(tool_call_id=c.id, name="t", content=draw(text)) for c in calls]
    return [answer, *results]


def replace_text(answer):
    return AssistantMessage(content="text " + answer.content, reasoning_details=DETAILS)


@pytest.mark.parametrize("dialect", DIALECTS)
@few
@given(first=text, added=st.lists(turns(), min_size=1, max_size=4), exact=st.booleans(),
       ephemeral=st.none() | text, prefill=st.booleans())  # fmt: skip
def test_body_of_each_turn_extends_the_previous(dialect, first, added, exact, ephemeral, prefill):
    wire_dialect = at("api.example.com", dialect)
    shown = (UserMessage(content="example"), AssistantMessage(content="so")) if prefill else ()
    model_request = request(
        SystemMessage(content="s"), UserMessage(content=first),
        exact=exact, ephemeral=ephemeral, prefill=shown,
    )  # fmt: skip
    body = wire_dialect.encode(model_request)
    for turn in added:
        for message in turn:
            model_request.conversation.append(message)
        longer = wire_dialect.encode(model_request)
        json.loads(longer)
        assert wire_dialect.bound(model_request) <= len(longer) + 64
        assert longer.startswith(body[: _shared(body)])
        # A fresh conversation with the same messages is sent as the same bytes.
        fresh = replace(model_request, conversation=Conversation(list(model_request.conversation)))
        assert wire_dialect.encode(fresh) == longer
        body = longer


def _shared(body):
    """The length of a body without the brackets that end it. Where results and what follows them
    share one message, it ends with that message's brackets too."""
    return len(body.rstrip(b"]}"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialect_replays_only_its_reasoning(dialect):
    answer = AssistantMessage(content="a", reasoning_details=DETAILS)
    model_request = request(UserMessage(content="hi"), answer)
    body = at("api.anthropic.com", dialect).encode(model_request).decode()
    custom = {
        ChatCompletions: "ROUTED", AnthropicMessages: "SIGNED", Responses: "ENCRYPTED"
    }[dialect]  # fmt: skip
    assert [m for m in ("SIGNED", "ENCRYPTED", "ROUTED") if m in body] == [custom]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_adaptations_change_the_body(dialect):
    wire_dialect = at("api.anthropic.com", dialect)
    seen = UserMessage(content=[{"type": "text", "text": "see"}, IMAGE])
    answer = AssistantMessage(content="a", reasoning_details=DETAILS)
    model_request = request(seen, answer, UserMessage(content="continue"))

    def sent(*without):
        return wire_dialect.encode(replace(model_request, adaptations=frozenset(without))).decode()

    assert "image" in sent()
    assert "AA==" in sent()
    assert "AA==" not in sent("no_images")
    assert NO_IMAGE in sent("no_images")
    assert f"see\\n{NO_IMAGE}" in sent("text_only")
    assert "SIGNED" not in sent("no_signatures")
    assert "ENCRYPTED" not in sent("no_encrypted_reasoning")
    assert '"pattern"' in sent()
    assert '"pattern"' not in sent("no_grammar")
    assert sent() == wire_dialect.encode(model_request).decode()  # the first form is still there


@pytest.mark.parametrize("dialect", DIALECTS)
def test_unparsable_arguments_are_sent_as_objects(dialect):
    call = ToolCall(id="call_1", name="t", arguments='{"b": 1, "a"')
    result = ToolMessage(tool_call_id="call_1", name="t", content="invalid JSON")
    model_request = request(UserMessage(content="hi"), AssistantMessage(tool_calls=(call,)), result)
    body = dialect().encode(model_request).decode()
    assert '{"b":1}' in body or '{\\"b\\":1}' in body


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bound_includes_image_tokens(dialect):
    def bound(*parts):
        model_request = request(UserMessage(content=[{"type": "text", "text": "see"}, *parts]))
        return dialect().bound(model_request)

    image = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
    assert bound(image) - bound() > 4_000
    assert bound(image, image) - bound(image) > 4_000


@pytest.mark.parametrize("dialect", DIALECTS)
def test_prompt_never_exceeds_its_bound(dialect):
    """A token may be a single byte."""
    messages = SystemMessage(content="s" * 500), UserMessage(content="é" * 1_000)
    assert dialect().bound(request(*messages)) >= 2_500


# Cache markers in Chat Completions


def history():
    call = ToolCall(id="1", name="t", arguments="{}")
    return [
        SystemMessage(content="s"), UserMessage(content="one"),
        AssistantMessage(content="look", tool_calls=(call,)),
        ToolMessage(tool_call_id="1", name="t", content="out"),
        AssistantMessage(content="two"),
        UserMessage(content=[{"type": "text", "text": "t"}, IMAGE]),
    ]  # fmt: skip


def marked(body):
    """Role and marker of each message that has one."""
    return [
        (m["role"], part["cache_control"])
        for m in json.loads(body)["messages"]
        if isinstance(m["content"], list)
        for part in m["content"]
        if "cache_control" in part
    ]


@pytest.mark.parametrize(
    ("kept", "marker"),
    [("5m", {"type": "ephemeral"}), ("1h", {"type": "ephemeral", "ttl": "1h"})],
)
def test_openrouter_gets_cache_markers_for_claude(kept, marker):
    model_request = request(*history(), cache=kept)
    body = ChatCompletions(find_quirks("openrouter.ai")).encode(model_request)
    roles = ["system", "assistant", "assistant", "user"]
    assert marked(body) == [(role, marker) for role in roles]
    texts = [m["content"] for m in json.loads(body)["messages"]]
    assert texts[0] == [{"type": "text", "text": "s", "cache_control": marker}]
    assert texts[1] == "one"
    # Without its markers it is the same conversation as ever.
    assert ChatCompletions(find_quirks("openrouter.ai")).encode(
        replace(model_request, cache=None)
    ) == (ChatCompletions(find_quirks("api.example.com")).encode(model_request))
    for other in ("api.openai.com", "127.0.0.1:8000"):
        assert marked(ChatCompletions(find_quirks(other)).encode(model_request)) == []
    gpt = replace(model_request, model="openai/gpt-5")
    assert marked(ChatCompletions(find_quirks("openrouter.ai")).encode(gpt)) == []


@pytest.mark.parametrize("dialect", [ChatCompletions, Responses])
def test_openai_gets_a_stable_cache_key(dialect):
    wire_dialect = at("api.openai.com", dialect)

    def key(model_request, there=wire_dialect):
        return json.loads(there.encode(model_request)).get("prompt_cache_key")

    model_request = request(SystemMessage(content="s"), UserMessage(content="one"), cache="5m")
    first = key(model_request)
    model_request.conversation.append(AssistantMessage(content="a"))
    model_request.conversation.append(UserMessage(content="two"))
    assert key(model_request) == first
    assert len(first) == 32
    other = request(SystemMessage(content="s"), UserMessage(content="other"), cache="5m")
    assert key(other) != first
    assert key(replace(model_request, cache=None)) is None
    assert key(model_request, at("127.0.0.1:8000", dialect)) is None


def test_at_most_four_cache_markers():
    model_request = request(*history(), cache="5m")
    for number in range(5):
        model_request.conversation.append(AssistantMessage(content=f"a{number}"))
        model_request.conversation.append(UserMessage(content=f"u{number}"))
        for dialect in (ChatCompletions, AnthropicMessages):
            body = at("openrouter.ai", dialect).encode(model_request)
            assert body.count(b'"cache_control"') == 4
