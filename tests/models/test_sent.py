"""What all three dialects make of one request: prefixes, adaptations, cache markers."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models import Conversation, Endpoint, ModelRequest, Sampling, dialect_for
from hermes_rl.models.prepare import NO_IMAGE
from hermes_rl.models.providers import quirks_at
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
words = st.text(alphabet="ab é\n", max_size=12)
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
        content=draw(words),
        reasoning_content=draw(st.none() | words),
        tool_calls=calls,
        reasoning_details=draw(st.none() | st.just(DETAILS)),
    )
    if not calls:
        return [replace_text(answer), UserMessage(content=draw(words))]
    results = [ToolMessage(tool_call_id=c.id, name="t", content=draw(words)) for c in calls]
    return [answer, *results]


def replace_text(answer):
    return AssistantMessage(content="said " + answer.content, reasoning_details=DETAILS)


@pytest.mark.parametrize("dialect", DIALECTS)
@few
@given(first=words, added=st.lists(turns(), min_size=1, max_size=4), exact=st.booleans(),
       ephemeral=st.none() | words, prefill=st.booleans())  # fmt: skip
def test_each_turns_body_extends_the_last_one(dialect, first, added, exact, ephemeral, prefill):
    speaks = at("api.example.com", dialect)
    shown = (UserMessage(content="example"), AssistantMessage(content="so")) if prefill else ()
    asked = request(
        SystemMessage(content="s"), UserMessage(content=first),
        exact=exact, ephemeral=ephemeral, prefill=shown,
    )  # fmt: skip
    body = speaks.encode(asked)
    for turn in added:
        for message in turn:
            asked.conversation.append(message)
        longer = speaks.encode(asked)
        json.loads(longer)
        assert speaks.bound(asked) <= len(longer) + 64
        assert longer.startswith(body[: _shared(body)])
        # A fresh conversation with the same messages is sent as the same bytes.
        fresh = replace(asked, conversation=Conversation(list(asked.conversation)))
        assert speaks.encode(fresh) == longer
        body = longer


def _shared(body):
    """The length of a body without the brackets that end it. Where results and what follows them
    share one message, it ends with that message's brackets too."""
    return len(body.rstrip(b"]}"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_replays_its_own_reasoning_only(dialect):
    answer = AssistantMessage(content="a", reasoning_details=DETAILS)
    asked = request(UserMessage(content="hi"), answer)
    body = at("api.anthropic.com", dialect).encode(asked).decode()
    own = {
        ChatCompletions: "ROUTED", AnthropicMessages: "SIGNED", Responses: "ENCRYPTED"
    }[dialect]  # fmt: skip
    assert [m for m in ("SIGNED", "ENCRYPTED", "ROUTED") if m in body] == [own]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_adaptations_leave_out_what_a_server_refused(dialect):
    speaks = at("api.anthropic.com", dialect)
    seen = UserMessage(content=[{"type": "text", "text": "see"}, IMAGE])
    answer = AssistantMessage(content="a", reasoning_details=DETAILS)
    asked = request(seen, answer, UserMessage(content="go on"))

    def sent(*without):
        return speaks.encode(replace(asked, adaptations=frozenset(without))).decode()

    assert "image" in sent()
    assert "AA==" in sent()
    assert "AA==" not in sent("no_images")
    assert NO_IMAGE in sent("no_images")
    assert f"see\\n{NO_IMAGE}" in sent("text_only")
    assert "SIGNED" not in sent("no_signatures")
    assert "ENCRYPTED" not in sent("no_encrypted_reasoning")
    assert '"pattern"' in sent()
    assert '"pattern"' not in sent("no_grammar")
    assert sent() == speaks.encode(asked).decode()  # the first form is still there


@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_that_no_server_could_read_are_sent_as_objects(dialect):
    call = ToolCall(id="call_1", name="t", arguments='{"b": 1, "a"')
    result = ToolMessage(tool_call_id="call_1", name="t", content="invalid JSON")
    asked = request(UserMessage(content="hi"), AssistantMessage(tool_calls=(call,)), result)
    body = dialect().encode(asked).decode()
    assert '{"b":1}' in body or '{\\"b\\":1}' in body


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_image_may_cost_more_tokens_than_its_address_has_bytes(dialect):
    def bound(*parts):
        asked = request(UserMessage(content=[{"type": "text", "text": "see"}, *parts]))
        return dialect().bound(asked)

    image = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
    assert bound(image) - bound() > 4_000
    assert bound(image, image) - bound(image) > 4_000


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_prompt_has_no_more_tokens_than_its_bound(dialect):
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
def test_openrouter_takes_cache_markers_for_claude(kept, marker):
    asked = request(*history(), cache=kept)
    body = ChatCompletions(quirks_at("openrouter.ai")).encode(asked)
    roles = ["system", "assistant", "assistant", "user"]
    assert marked(body) == [(role, marker) for role in roles]
    texts = [m["content"] for m in json.loads(body)["messages"]]
    assert texts[0] == [{"type": "text", "text": "s", "cache_control": marker}]
    assert texts[1] == "one"
    # Without its markers it is the same conversation as ever.
    assert ChatCompletions(quirks_at("openrouter.ai")).encode(replace(asked, cache=None)) == (
        ChatCompletions(quirks_at("api.example.com")).encode(asked)
    )
    for other in ("api.openai.com", "127.0.0.1:8000"):
        assert marked(ChatCompletions(quirks_at(other)).encode(asked)) == []
    gpt = replace(asked, model="openai/gpt-5")
    assert marked(ChatCompletions(quirks_at("openrouter.ai")).encode(gpt)) == []


@pytest.mark.parametrize("dialect", [ChatCompletions, Responses])
def test_openai_gets_a_key_that_stays_with_the_conversation(dialect):
    speaks = at("api.openai.com", dialect)

    def key(asked, there=speaks):
        return json.loads(there.encode(asked)).get("prompt_cache_key")

    asked = request(SystemMessage(content="s"), UserMessage(content="one"), cache="5m")
    first = key(asked)
    asked.conversation.append(AssistantMessage(content="a"))
    asked.conversation.append(UserMessage(content="two"))
    assert key(asked) == first
    assert len(first) == 32
    other = request(SystemMessage(content="s"), UserMessage(content="other"), cache="5m")
    assert key(other) != first
    assert key(replace(asked, cache=None)) is None
    assert key(asked, at("127.0.0.1:8000", dialect)) is None


def test_there_are_never_more_than_four_markers():
    asked = request(*history(), cache="5m")
    for number in range(5):
        asked.conversation.append(AssistantMessage(content=f"a{number}"))
        asked.conversation.append(UserMessage(content=f"u{number}"))
        for dialect in (ChatCompletions, AnthropicMessages):
            body = at("openrouter.ai", dialect).encode(asked)
            assert body.count(b'"cache_control"') == 4
