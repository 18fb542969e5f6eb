"""The graph of a rollout's tokens stores shared tokens once and returns every path."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.events import Event, TokensAdded, pack_ids, unpack_ids
from hermes_rl.models import Conversation, ModelRequest, Sampling, TokenCapture
from hermes_rl.models.tokens import TokenGraph, TokensFault, record_tokens, shaped_by

REQUEST = ModelRequest("m", Conversation(), "", sampling=Sampling(temperature=1.0, top_k=-1))
few = st.lists(st.integers(0, 2), max_size=8)


def put(graph: TokenGraph, name: str, prompt, sampled, agent="main", **more) -> TokensAdded:
    tokens = TokenCapture(prompt_ids=tuple(prompt), completion_ids=tuple(sampled), **more)
    event = record_tokens(graph, name, agent, tokens, REQUEST)
    assert event is not None
    return event


@given(st.lists(st.tuples(few, few.filter(bool)), min_size=1, max_size=12))
def test_every_path_is_returned_and_shares_the_longest_prefix(calls):
    graph, whole, events = TokenGraph(), [], []
    for number, (prompt, sampled) in enumerate(calls):
        event = put(graph, str(number), prompt, sampled)
        longest = max((common(prompt, path) for path in whole), default=0)
        assert event.kept == longest
        assert len(event.glue) // 4 == len(prompt) - longest
        whole.append([*prompt, *sampled])
        events.append(event)
    line = msgspec.json.encode(events)
    again = TokenGraph.of(msgspec.json.decode(line, type=list[TokensAdded]), {})
    for number, path in enumerate(whole):
        assert list(unpack_ids(graph.path(number))) == path
        assert graph.path(number) == again.path(number)


def common(one, other):
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_the_journal_contains_a_long_conversation_once():
    graph, path, size = TokenGraph(), list(range(1000)), 0
    for turn in range(200):
        sampled = [5_000 + turn] * 20
        event = put(graph, str(turn), path, sampled, logprobs=(-0.5,) * 20)
        size += len(msgspec.json.encode(event))
        path = [*path, *sampled, 7, 8, 9]
    assert len(path) == 5_600
    assert size < 5_600 * 12 + 200 * 400  # bytes per token, and per call


def test_of_equal_answers_the_latest_of_the_same_agent_is_the_parent():
    graph = TokenGraph()
    put(graph, "one", [1, 2], [3])
    put(graph, "two", [1, 2], [3], agent="helper")
    put(graph, "three", [1, 2], [3], agent="helper")
    assert put(graph, "four", [1, 2, 3, 4], [5]).parent == "one"
    assert put(graph, "five", [1, 2, 3, 6], [5], agent="helper").parent == "three"


@pytest.mark.parametrize(
    "tokens",
    [
        TokenCapture(prompt_ids=(1,), completion_ids=None),
        TokenCapture(prompt_ids=(1,), completion_ids=()),
        TokenCapture(prompt_ids=None, completion_ids=(1,)),
        TokenCapture(prompt_ids=(1 << 40,), completion_ids=(1,)),
    ],
)
def test_incomplete_captures_are_not_recorded(tokens):
    assert record_tokens(TokenGraph(), "call", "main", tokens, REQUEST) is None


@pytest.mark.parametrize("logprobs", [(-0.5,), (-0.5, -0.5, -0.5), (-1e300, -1e300)])
def test_logprobs_of_a_wrong_length_or_size_are_left_out(logprobs):
    event = put(TokenGraph(), "call", [1], [2, 3], logprobs=logprobs)
    assert event.logprobs is None


@pytest.mark.parametrize(
    "event",
    [
        TokensAdded(call_id="a", parent="nobody", kept=1, sampled=pack_ids([1])),
        TokensAdded(call_id="b", parent="first", kept=3, sampled=pack_ids([1])),
        TokensAdded(call_id="b", kept=1, sampled=pack_ids([1])),
        TokensAdded(call_id="b", glue=b"123", sampled=pack_ids([1])),
        TokensAdded(call_id="first", sampled=pack_ids([1])),
    ],
)
def test_events_that_fit_no_graph_are_refused(event: Event):
    first = TokensAdded(call_id="first", glue=pack_ids([1]), sampled=pack_ids([2]))
    with pytest.raises(TokensFault):
        TokenGraph.of([first, event], {})


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({}, ()),
        ({"repetition_penalty": 1.0, "logit_bias": {}, "tool_choice": "auto"}, ()),
        ({"response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}}, ()),
        ({"repetition_penalty": 1.1}, ("repetition_penalty",)),
        ({"tool_choice": "required", "presence_penalty": 0.5}, ("presence_penalty", "tool_choice")),
        ({"guided_json": {"type": "object"}}, ("guided_json",)),
    ],
)
def test_parameters_that_change_the_distribution_are_named(extra, names):
    assert shaped_by(extra) == names
