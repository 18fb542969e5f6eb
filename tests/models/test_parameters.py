"""Sampling parameters: only what the user set is sent, and what an endpoint refuses by name is left
out of all its calls."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
from typed_body import misfits

from hermes_rl.errors import BadRequest, UserError
from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models import DIALECTS, Conversation, Endpoint, ModelRequest, Sampling, dialect_for
from hermes_rl.models.providers import shipped
from hermes_rl.models.wire import ChatCompletions

ALL = Sampling(
    temperature=0.5, top_p=0.9, max_tokens=64, seed=7, stop=("END",), reasoning="low", top_k=-1
)
DOT = "data:image/png;base64,iVBORw0KGgo="
HISTORY = [
    SystemMessage(content="Be brief."),
    UserMessage(
        content=[
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": DOT}},
        ]
    ),
    AssistantMessage(
        content="I look.",
        reasoning_content="hm",
        tool_calls=(ToolCall(id="call_1", name="terminal", arguments='{"command":"ls"}'),),
        reasoning_details=[
            {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        ],
    ),
    ToolMessage(tool_call_id="call_1", name="terminal", content="a.txt"),
    AssistantMessage(content="One file."),
    UserMessage(content="And now?"),
]
OFFICIAL = {
    "chat_completions": ("api.openai.com", "openai.types.chat.completion"),
    "codex_responses": ("api.openai.com", "openai.types.responses.response"),
    "anthropic_messages": ("api.anthropic.com", "anthropic.types.message"),
}
"""api_mode -> the host of the package's own provider, the beginning of its module's name."""


UNDECLARED = {
    "chat_completions": {"body.messages.3.name is not declared"},
    "codex_responses": set(),
    "anthropic_messages": {"body.temperature is not declared", "body.top_p is not declared"},
}
"""What is sent all the same: the tool's name beside its result, which templates of engines read,
and sampling of the API version 2023-06-01, which the package's newer one no longer has."""


def body_of(mode, host=None, **fields):
    host = OFFICIAL[mode][0] if host is None else host
    request = ModelRequest(
        model="m", conversation=Conversation(HISTORY), call_id="c", cache="5m", **fields
    )
    return json.loads(dialect_for(Endpoint(f"https://{host}", api_mode=mode)).encode(request))


def declared(mode, stream):
    name = OFFICIAL[mode][1]
    module = import_module(f"{name}_create_params")  # late: two seconds, only for this process
    kind = name.rpartition(".")[2].title() + "CreateParams"
    return getattr(module, kind + ("Streaming" if stream else "NonStreaming"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", list(DIALECTS))
def test_bodies_match_the_types_of_the_official_packages(kit, mode, stream):
    body = body_of(mode, tools=kit.TERMINAL, sampling=ALL, stream=stream)
    assert set(misfits(body, declared(mode, stream))) <= UNDECLARED[mode]
    plain = body_of(mode, stream=stream, sampling=Sampling(max_tokens=64))
    assert set(misfits(plain, declared(mode, stream))) <= UNDECLARED[mode]
    assert plain.keys() & {"seed", "temperature", "top_p", "top_k", "stop"} == set()


def test_body_check_detects_undeclared_fields(kit):
    body = body_of("codex_responses", tools=kit.TERMINAL, sampling=ALL)
    declaration = declared("codex_responses", stream=False)
    assert misfits({**body, "seed": 1}, declaration) == ["body.seed is not declared"]
    assert misfits({**body, "temperature": "hot"}, declaration) != []
    assert misfits({**body, "input": [{"type": "nonsense", "id": 1}]}, declaration) != []


@pytest.mark.parametrize(
    ("mode", "left_out"),
    [
        ("chat_completions", set()),
        ("codex_responses", {"seed", "stop"}),
        ("anthropic_messages", {"seed", "stop", "top_k"}),
    ],
)
def test_parameters_without_a_field_are_not_sent(mode, left_out):
    body = body_of(mode, host="127.0.0.1", sampling=ALL)
    assert {"seed", "stop", "top_k"} - body.keys() == left_out
    assert ("stop_sequences" in body) is (mode == "anthropic_messages")


def test_seed_is_not_sent_to_google():
    google = ChatCompletions(quirks=shipped()["google"].quirks)
    request = ModelRequest(
        model="m", conversation=Conversation(HISTORY), call_id="c", sampling=Sampling(seed=1)
    )
    assert "seed" not in json.loads(google.encode(request))


@pytest.mark.parametrize("mode", ["chat_completions", "codex_responses"])
async def test_refused_parameter_is_dropped_for_the_endpoint(kit, stage, mode, caplog):
    sampling = Sampling(seed=5, temperature=0.5, top_p=0.9, top_k=3)
    async with stage() as s:
        route = s.route(await s.server(), api_mode=mode)
        for _ in range(2):  # two rollouts: the second one is not refused
            request = kit.request("hi", "fault-sampling", sampling=sampling)
            assert (await s.caller(route).call(request, turn=1)).message.content == "done"
    assert s.outcomes == ["refused", "ok", "ok"]
    gone = {"temperature", "top_p", "top_k"}
    assert [set(start.unsent) for start in s.events.starts] == [set(), gone, gone]
    assert len([r for r in caplog.records if "no longer sent" in r.message]) == 3


@pytest.mark.parametrize(
    ("fault", "sampling", "outcomes"),
    [
        ("seed", Sampling(seed=5, temperature=1.0), ["refused", "ok"]),
        ("sampling", Sampling(temperature=1.0, top_p=1.0, top_k=-1), ["refused"]),
    ],
)
async def test_exact_request_drops_only_seed_and_neutral_filters(
    kit, stage, fault, sampling, outcomes
):
    async with stage() as s:
        route = s.route(await s.server())
        request = replace(kit.request("hi", f"fault-{fault}", sampling=sampling), exact=True)
        if outcomes[-1] == "ok":
            await s.caller(route).call(request, turn=1)
        else:
            with pytest.raises(BadRequest, match="temperature, top_k, top_p"):
                await s.caller(route).call(request, turn=1)
    assert s.outcomes == outcomes


async def test_extra_body_fields_are_never_dropped(kit, stage):
    async with stage() as s:
        route = s.route(await s.server())
        request = kit.request("hi", "fault-sampling", extra={"top_k": 3})
        with pytest.raises(BadRequest):
            await s.caller(route).call(request, turn=1)
    assert s.outcomes == ["refused"]


def test_stop_texts_without_a_field_are_refused():
    from hermes_rl.config import parse_config
    from hermes_rl.models.providers import resolve_targets_by_model

    data = {
        "dataset": {"path": "d.jsonl"},
        "model": {"name": "m", "stop": "END"},
        "endpoint": {"base_url": "http://127.0.0.1:1/v1", "api_mode": "codex_responses"},
    }
    with pytest.raises(UserError, match=r"'model\.stop' has no field in codex_responses"):
        resolve_targets_by_model(parse_config(data))
