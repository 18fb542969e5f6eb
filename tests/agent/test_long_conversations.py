"""Conversations that do not fit in the model's context window, against a server with a real one."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import AIAgent, ContextConfig, ModelConfig
from hermes_rl.agent import (
    PRESETS,
    AgentParts,
    AgentResult,
    AuxiliaryModel,
    ContextParts,
    ContextView,
    Control,
    Limits,
    NextContext,
    Progress,
    Replacement,
    SummaryEngine,
    load_engine,
    run_agent,
)
from hermes_rl.config import parse_config
from hermes_rl.errors import (
    ENDINGS,
    ContextOverflow,
    HermesError,
    Interrupted,
    ModelError,
    UserError,
)
from hermes_rl.events import ContextStarted, EventLog, MessageAdded
from hermes_rl.export import Sample, samples_of
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    conversation_from_openai,
    text_of,
    to_openai,
)
from hermes_rl.models import Endpoint, Sampling, connect
from hermes_rl.models.calls import ModelCaller, RetryPolicy, Route
from hermes_rl.models.prepare import prepare
from hermes_rl.models.rate import Limiter
from hermes_rl.record import Trajectory
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest
from hermes_rl.tools import Tool, function_tool
from hermes_rl.wiring import identity_of

from .conftest import row_of, served_ids

WINDOW = 8_000
SUMMARY = "## Done\nAll steps so far, with their results."
Play = Callable[[ServedRequest], Any]


def steps(turns: int, summary: Any = SUMMARY) -> Play:
    """A policy that calls `work` until it has seen the result of the last step. It knows where it
    is from the messages that it is sent, and from nothing else."""

    def play(request: ServedRequest) -> Any:
        if not request.tools:
            return summary
        seen = [m.content for m in request.messages if isinstance(m, ToolMessage)]
        number = int(seen[-1].split()[1]) if seen else 0
        if number >= turns:
            return f"All {turns} steps are done."
        call = {"name": "work", "arguments": {"number": number + 1}, "id": f"c{number}"}
        return {"text": f"Now {number + 1}.", "calls": [call]}

    return play


@dataclass
class Long:
    """Runs the agent against a server with a window; keeps what the server was sent."""

    play: Play
    window: int | None = WINDOW
    size: int = 300
    """Characters of a result."""
    sent: list[ServedRequest] = field(default_factory=list)
    log: EventLog = field(default_factory=EventLog)
    result: AgentResult | None = None
    server: FakeServer = field(default_factory=FakeServer)

    def tool(self) -> Tool:
        def work(number: int) -> str:
            """Do a step of the work."""
            return f"step {number} done\n" + "x" * self.size

        return function_tool(work)

    def _noted(self, request: ServedRequest) -> Any:
        self.sent.append(request)
        return self.play(request)

    async def run(
        self,
        context: ContextParts | None = None,
        prompt: Sequence[Message] = (),
        control: Control | None = None,
        summaries: Play | None = None,
        **changes: Any,
    ) -> AgentResult:
        plays = {"m": self._noted} | ({"aux": summaries} if summaries else {})
        self.log = EventLog()
        async with AsyncExitStack() as stack:
            config = FakeConfig(plays=plays, window=self.window)
            self.server = await stack.enter_async_context(FakeServer(config))
            client = connect(Endpoint(self.server.base_url))
            stack.push_async_callback(client.aclose)
            policy = RetryPolicy(max_attempts=2, base_s=0.01, outage_s=0.2)
            caller = ModelCaller([Route.single("", client, Limiter(8))], self.log, policy)
            if summaries is not None:
                auxiliary = AuxiliaryModel(caller, "aux")
                context = replace(context or ContextParts(), summariser=auxiliary)
            tool = self.tool()
            parts = AgentParts(
                caller=caller,
                model="m",
                tools={tool.name: tool},
                sandbox=None,
                recorder=self.log,
                policy=PRESETS["datagen"],
                limits=Limits(max_turns=400),
                system="You are a test.",
                context=context or ContextParts(),
            )
            messages = list(prompt) or [UserMessage(content="Do all steps.")]
            self.result = await run_agent(replace(parts, **changes), messages, control)
        return self.result

    @property
    def row(self) -> Trajectory:
        return row_of(self.log, self.result)

    @property
    def contexts(self) -> list[ContextStarted]:
        return [e for e in self.log.events if isinstance(e, ContextStarted)]

    @property
    def reasons(self) -> list[str]:
        return [e.reason for e in self.contexts]

    def samples(self) -> list[Sample]:
        """What an export makes of the row: one sample per context."""
        row = msgspec.to_builtins(self.row)
        row["messages"] = [json.loads(text) for text in row["messages"]]
        row["tools"] = json.loads(row["tools"])
        return list(samples_of(row, raw_arguments=True))

    def check(self) -> None:
        """Legal requests, a whole history, each answer once, exact accounting."""
        for request in self.sent:
            check_legal(request.messages)
        self._check_samples()
        self._check_accounting()

    def _check_samples(self) -> None:
        row, samples = self.row, self.samples()
        by_policy = [
            json.loads(text)
            for text, info in zip(row.messages, row.message_info, strict=True)
            if info.role == "assistant" and info.turn and not info.synthetic
        ]
        trained = [
            message
            for sample in samples
            for message, yes in zip(sample.messages, sample.trained, strict=True)
            if yes
        ]
        assert trained == by_policy
        stored = [conversation_from_openai(sample.messages) for sample in samples]
        wholes = [[to_openai(m) for m in prepare(messages)] for messages in stored]
        for request in self.sent:
            if request.tools:  # what the model saw is the beginning of one context's sample
                seen = [to_openai(m) for m in request.messages]
                assert any(whole[: len(seen)] == seen for whole in wholes) or any(
                    [to_openai(m) for m in prepare(messages[:end])] == seen
                    for messages in stored
                    for end in range(len(messages) + 1)
                ), seen[-3:]

    def _check_accounting(self) -> None:
        row, served = self.row, [e for e in self.server.entries if e.outcome == "served"]
        known = {e.call_id: e for e in served}
        ok = [call for call in row.calls if call.outcome == "ok"]
        assert {call.call_id for call in ok} <= known.keys()
        for call in ok:
            assert call.input_tokens == known[call.call_id].prompt_tokens
            assert call.output_tokens == known[call.call_id].completion_tokens
        open_calls = [c for c in row.calls if c.outcome in ("cancelled", "cut", "unknown")]
        assert row.usage.unknown_calls == len(open_calls)
        assert sorted(call.call_id for call in row.calls) == served_ids(self.server)
        originals = [e for e in self.log.events if isinstance(e, MessageAdded) and not e.compressed]
        assert row.tool_call_count == sum(isinstance(e.message, ToolMessage) for e in originals)


def check_legal(messages: Sequence[Message]) -> None:
    """System first, then user and assistant in turn; each call has its results, each result its
    call."""
    rest = [m for m in messages if not isinstance(m, SystemMessage)]
    assert list(messages[len(messages) - len(rest) :]) == rest
    assert isinstance(rest[0], UserMessage)
    waiting: list[str] = []
    last: type | None = None
    for message in rest:
        if isinstance(message, ToolMessage):
            waiting.remove(message.tool_call_id)
            last = ToolMessage
            continue
        assert not waiting
        assert type(message) is not last
        last = type(message)
        if isinstance(message, AssistantMessage):
            waiting = [call.id for call in message.tool_calls]
    assert not waiting
    assert not isinstance(messages[-1], AssistantMessage)


@pytest.mark.parametrize(
    ("known", "size"), [(True, 300), (False, 300), (False, 9_000)], ids=["known", "learned", "big"]
)
async def test_300_turns_fit_in_a_window_of_8000_tokens(known: bool, size: int) -> None:
    long = Long(steps(300), size=size)
    result = await long.run(ContextParts(window=WINDOW if known else None))
    assert (result.end_reason, result.turns) == ("answered", 301)
    assert result.final_response == "All 300 steps are done."
    assert result.metrics["compressions"] == len(long.contexts) > 3
    refused = [e for e in long.server.entries if e.outcome == "refused"]
    assert len(refused) == (0 if known else 1)  # the refusal says how large the window is
    assert long.row.tool_call_count == 300
    long.check()


async def test_old_results_become_digests_before_a_model_is_called() -> None:
    long = Long(steps(12), size=2_400)
    await long.run(ContextParts(window=WINDOW))
    assert set(long.reasons) == {"threshold, digest"}
    assert all(request.tools for request in long.sent)  # no call for a summary
    last = [m for m in long.sent[-1].messages if isinstance(m, ToolMessage)]
    assert last[0].content == "[work returned 2,412 characters, beginning: step 1 done " + (
        "x" * 85 + "...]"
    )
    assert len(last[-1].content) == 2_413  # the latest one is whole
    long.check()


async def test_results_larger_than_the_window_are_shortened_at_once() -> None:
    long = Long(steps(6), size=60_000)
    result = await long.run(ContextParts(window=WINDOW))
    assert (result.end_reason, len(long.contexts)) == ("answered", 6)  # one for each result
    long.check()


async def test_an_output_limit_near_the_window_is_seldom_refused() -> None:
    long = Long(steps(60))
    result = await long.run(ContextParts(window=WINDOW), sampling=Sampling(max_tokens=7_900))
    assert result.end_reason == "answered"
    refused = [e for e in long.server.entries if e.outcome == "refused"]
    assert 0 < len(refused) < 8  # the estimate becomes better with each
    assert min(e.max_tokens for e in long.server.entries if e.outcome == "served") > 1_000
    long.check()


async def test_a_summary_keeps_task_request_and_todo_list() -> None:
    history = [
        UserMessage(content="The task."),
        *[m for n in range(30) for m in exchange(n)],
        UserMessage(content="The latest request."),
        *[m for n in range(30, 60) for m in exchange(n)],
        UserMessage(content="(empty)"),
    ]
    view = ContextView(
        messages=[SystemMessage(content="S"), *history],
        trigger="threshold",
        threshold=1_500,
        window=2_000,
        scale=1.0,
        harness_texts=frozenset({"(empty)"}),
        tool_state={"todo": [{"content": "Write docs", "status": "pending"}]},
        summarise=answering("First summary"),
    )
    found = await SummaryEngine().compress(view)
    assert found is not None
    assert (found.method, found.summary) == ("summary", 1)
    start = found.entries[1]
    assert isinstance(start, Replacement)
    text = text_of(start.message)
    assert text.startswith("The task.\n\n[Summary of")
    assert text.endswith("[Latest message from the user]\nThe latest request.")
    assert "First summary\n\n[Todo list]\n- [pending] Write docs\n[End of" in text

    prompts: list[str] = []
    again = replace(
        view,
        messages=[SystemMessage(content="S"), start.message, *history[1:110]],
        summarise=answering("Second summary", prompts),
        tool_state={},
    )
    second = await SummaryEngine().compress(again)
    assert second is not None
    assert isinstance(second.entries[1], Replacement)
    text = text_of(second.entries[1].message)
    assert "Earlier summary:\nFirst summary\n\nConversation:" in prompts[0]
    assert text.count("[Summary of") == text.count("The task.") == 1
    assert "First summary" not in text
    assert "Second summary" in text
    assert text.endswith("The latest request.")


def exchange(number: int) -> list[Message]:
    call = ToolCall(id=f"c{number}", name="work", arguments="{}")
    result = ToolMessage(tool_call_id=call.id, name="work", content=f"step {number} " + "x" * 100)
    return [AssistantMessage(content="Next.", tool_calls=(call,)), result]


def answering(text: str, prompts: list[str] | None = None) -> Any:
    async def summarise(prompt: str, tokens: int) -> str:
        if prompts is not None:
            prompts.append(prompt)
        return text

    return summarise


BAD_SUMMARIES = {
    "fails": {"fault": "server_error"},
    "hangs": {"text": "late", "latency_s": 60},
    "is much longer than requested": {"text": "word " * 10_000},
    "answers nothing": {"text": "  \n"},
    "is cut": {"text": SUMMARY, "fault": "cut"},
}


@pytest.mark.parametrize("bad", BAD_SUMMARIES)
async def test_a_summariser_that(bad: str) -> None:
    long = Long(steps(100, BAD_SUMMARIES[bad]))
    result = await long.run(ContextParts(window=WINDOW, seconds=0.5))
    assert (result.end_reason, result.turns) == ("answered", 101)
    assert set(long.reasons) == {"threshold, static"}
    assert result.metrics["failed_summaries"] == 2  # then no further one is paid for
    summaries = [call for call in long.row.calls if call.purpose == "summary"]
    assert summaries
    assert all(call.agent == "main" and call.turn for call in summaries)
    compressed = [m for r in long.sent for m in r.messages if "[Summary of" in text_of(m)]
    assert '- work {"number":40}\n  -> work returned 313 characters' in text_of(compressed[0])
    long.check()


async def test_a_named_summariser_is_called_first_and_replaced_when_it_fails() -> None:
    long = Long(steps(300))

    def summaries(request: ServedRequest) -> Any:
        return {"fault": "auth"} if "Earlier summary" in text_of(request.messages[0]) else "Good."

    await long.run(ContextParts(window=WINDOW), summaries=summaries)
    calls = [(c.model, c.outcome) for c in long.row.calls if c.purpose == "summary"]
    assert calls[:3] == [("aux", "ok"), ("aux", "refused"), ("m", "ok")]
    assert set(long.reasons) == {"threshold, summary"}
    long.check()


async def test_an_interrupt_ends_a_compression_at_once() -> None:
    control = Control()
    long = Long(steps(100, {"text": "late", "latency_s": 60}))
    reached = asyncio.Event()
    late = long.play

    def play(request: ServedRequest) -> Any:
        if not request.tools:
            reached.set()
        return late(request)

    long.play = play
    run = asyncio.create_task(long.run(ContextParts(window=WINDOW), control=control))
    await reached.wait()
    start = time.monotonic()
    control.interrupt()
    with pytest.raises(Interrupted):
        await run
    assert time.monotonic() - start < 20
    summary = long.row.calls[-1]
    assert (summary.purpose, summary.outcome) == ("summary", "cancelled")
    long.check()


async def test_a_prompt_that_no_compression_helps_ends_as_before() -> None:
    long = Long(steps(1))
    with pytest.raises(ContextOverflow) as raised:
        await long.run(prompt=[UserMessage(content="x" * 40_000)])
    assert raised.value.cause == "task"
    assert not long.contexts


async def test_a_refused_body_and_a_window_of_unknown_size_are_compressed_too() -> None:
    def play(request: ServedRequest) -> Any:
        size = sum(len(text_of(m)) for m in request.messages)
        if request.tools and size > 6_000:
            kinds.append("too_large" if len(kinds) % 2 else "context_overflow")
            return {"fault": kinds[-1]}
        return steps(80)(request)

    kinds: list[str] = []
    long = Long(play, window=None)
    result = await long.run()
    assert (result.end_reason, result.turns) == ("answered", 81)
    assert "overflow, summary" in long.reasons
    assert set(kinds) == {"too_large", "context_overflow"}
    long.check()


class Engine:
    """An engine of a plugin."""

    def __init__(self, compress: Callable[[ContextView], Any]) -> None:
        self._compress = compress

    def threshold(self, window: int, max_tokens: int | None) -> int:
        return window // 2

    async def compress(self, view: ContextView) -> Any:
        found = self._compress(view)
        return await found if asyncio.iscoroutine(found) else found


def last_exchange(view: ContextView) -> NextContext:
    place = max(n for n, m in enumerate(view.messages) if isinstance(m, AssistantMessage))
    return NextContext([0, 1, *range(place, len(view.messages))], "mine")


PLUGIN = """
from hermes_rl.agent import NextContext
from hermes_rl.messages import AssistantMessage

class Plugin:
    def threshold(self, window, max_tokens):
        return window // 2

    async def compress(self, view):
        last = max(n for n, m in enumerate(view.messages) if isinstance(m, AssistantMessage))
        return NextContext([0, 1, *range(last, len(view.messages))], "by a plugin")
"""


async def test_an_engine_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "a_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: a-plugin\nVersion: 1.0\n")
    entry = "[hermes_rl.context_engines]\nplugged = a_plugin:Plugin\nbroken = a_plugin:Absent\n"
    (metadata / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    long = Long(steps(100))
    await long.run(ContextParts(engine=load_engine("plugged"), window=WINDOW))
    assert set(long.reasons) == {"threshold, by a plugin"}
    long.check()
    with pytest.raises(UserError, match="context engine 'broken': AttributeError"):
        load_engine("broken")


BAD_ENGINES: dict[str, Callable[[ContextView], Any]] = {
    "raises": lambda view: 1 // 0,
    "hangs": lambda view: asyncio.sleep(60),
    "returns garbage": lambda view: "all of it",
    "separates a result from its call": lambda view: NextContext(
        [0, 1, len(view.messages) - 1], "x"
    ),
    "drops the system message": lambda view: NextContext([1], "x"),
    "names a message that is not there": lambda view: NextContext([0, 1, 10_000], "x"),
    "gains nothing": lambda view: NextContext(range(len(view.messages)), "x"),
}


async def test_an_engine_of_a_plugin_decides() -> None:
    long = Long(steps(100))
    result = await long.run(ContextParts(engine=Engine(last_exchange), window=WINDOW))
    assert result.end_reason == "answered"
    assert set(long.reasons) == {"threshold, mine"}
    assert max(e.prompt_tokens for e in long.server.entries) < WINDOW // 2 + 300
    long.check()


@pytest.mark.parametrize("bad", BAD_ENGINES)
async def test_an_engine_does_no_harm_that(bad: str) -> None:
    long = Long(steps(60))
    result = await long.run(
        ContextParts(engine=Engine(BAD_ENGINES[bad]), window=WINDOW, seconds=0.0)
    )
    assert result.end_reason == "answered"
    assert set(long.reasons) == {"threshold, static"}
    long.check()


async def test_a_run_resumes_in_its_compressed_context() -> None:
    first = Long(steps(100), window=3_000)
    at: list[tuple[Progress, int]] = []

    async def after_turn(progress: Progress) -> None:
        encoded = msgspec.json.encode(progress)
        at.append((msgspec.json.decode(encoded, type=Progress), len(first.log.events)))

    await first.run(ContextParts(window=3_000), after_turn=after_turn)
    progress, length = at[60]
    assert progress.context == 2
    events = first.log.events[:length]
    whole = [e.message for e in events if isinstance(e, MessageAdded)]
    second = Long(steps(100))
    result = await second.run(ContextParts(window=3_000), whole, resumed=progress)
    assert (result.end_reason, result.turns) == ("answered", 101)
    requests = [r.messages for r in first.sent if r.tools]
    assert second.sent[0].messages == requests[61]
    assert second.reasons == first.reasons[2:]  # its size is known as before
    assert result.messages[: len(whole)] == whole


def test_a_conversation_continues_compressed_and_is_returned_whole(tmp_path: Any) -> None:
    async def converse() -> None:
        seen: list[ServedRequest] = []

        def play(request: ServedRequest) -> Any:
            seen.append(request)
            return (
                SUMMARY if not request.tools else f"Answer to {text_of(request.messages[-1])[-9:]}"
            )

        def look(x: int) -> int:
            """Look."""
            return x

        config = FakeConfig(plays={"m": play}, window=2_000)
        async with FakeServer(config) as server:
            model = ModelConfig(name="m", base_url=server.base_url)
            settings: dict[str, Any] = {
                "toolsets": [],
                "tools": [look],
                "context": ContextConfig(window=2_000),
                "session": tmp_path / "s.jsonl",
            }
            async with AIAgent(model, **settings) as agent:
                for n in range(30):
                    result = await agent.run(f"{'question ' * 40} number {n:02}")
                    texts = [m["content"] for m in result["messages"]]
                    assert len(texts) == 2 * n + 3
                    assert [t[-9:] for t in texts[1::2]] == [f"number {i:02}" for i in range(n + 1)]
                    assert not any("[Summary of" in text for text in texts)
                assert any("[Summary of" in text_of(m) for m in seen[-1].messages)
                spent = result["usage"]["total_tokens"]
                assert spent == sum(c["input_tokens"] + c["output_tokens"] for c in result["calls"])
            async with AIAgent(model, **settings) as other:
                await other.run("And the last number 99")
                assert any("[Summary of" in text_of(m) for m in seen[-1].messages)
                assert len(seen[-1].messages) < 30
        for request in seen:
            check_legal(request.messages)

    asyncio.run(converse())


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(HermesError, match="context has no effect: the preset rl"):
        AIAgent("noop", preset="rl", toolsets=[], context={"window": 9})
    with pytest.raises(HermesError, match=r"context\.engine.*methods threshold and compress"):
        AIAgent("noop", toolsets=[], context=object())
    agent = AIAgent("noop", toolsets=[], context={"engine": "none-such"})
    with agent, pytest.raises(HermesError, match="unknown context engine 'none-such'"):
        agent.chat("Hello")


def test_only_runs_that_compress_have_it_in_their_identity() -> None:
    def identity(**agent: Any) -> dict[str, Any]:
        data = {"dataset": {"path": "x"}, "model": {"name": "m"}, "agent": agent}
        found: dict[str, Any] = identity_of(parse_config(data))["agent"]
        return found

    for plain in (identity(preset="rl"), identity(switches={"compress_context": False})):
        assert "context" not in plain
        assert "compress_context" not in plain["preset"]
    data = {"dataset": {"path": "x"}, "model": {"name": "local-tiny"}}
    assert "context" not in identity_of(parse_config(data))["agent"]
    on = identity()
    assert on["preset"]["compress_context"] is True
    summary = {"name": "small", "base_url": "http://127.0.0.1:1/v1"}
    assert identity(context={"seconds": 5}) == on
    named = identity(context={"window": 9_000, "summary": summary})
    assert {**named["context"], **on["context"]} == named["context"]
    elsewhere = {**summary, "base_url": "http://127.0.0.1:2/v1"}
    assert identity(context={"window": 9_000, "summary": elsewhere}) == named
    with pytest.raises(HermesError, match=r"'agent\.context' has no effect"):
        identity(preset="rl", context={"window": 9_000})


ODD = {
    "cut": {"text": "A part of it", "finish": "length"},
    "empty": {"text": ""},
    "thoughts": {"text": "", "reasoning": "Hm."},
    "bad arguments": {"calls": [{"arguments": "{bad"}]},
    "no such tool": {"calls": [{"name": "none"}]},
    "lost": {"fault": "reset"},
}
"""Answers that are continued, requested again, or end the run."""

step_forms = st.fixed_dictionaries(
    {
        "size": st.sampled_from([0, 50, 400, 3_000, 12_000]),
        "calls": st.integers(0, 3),
        "odd": st.sampled_from([None, None, None, *ODD]),
    }
)


@settings(max_examples=40)
@given(
    forms=st.lists(step_forms, min_size=1, max_size=40),
    summaries=st.lists(st.sampled_from([SUMMARY, *BAD_SUMMARIES.values()]), max_size=4),
    window=st.sampled_from([1_500, 3_000, 8_000]),
    known=st.booleans(),
    exact=st.booleans(),
)
def test_any_conversation_stays_legal_whole_and_accounted(
    forms: list[dict[str, Any]],
    summaries: list[Any],
    window: int,
    known: bool,
    exact: bool,
) -> None:
    turns, texts = iter(range(10_000)), iter(summaries)

    def play(request: ServedRequest) -> Any:
        if not request.tools:
            form = next(texts, SUMMARY)
            return (
                {**form, "latency_s": 5} if isinstance(form, dict) and "latency_s" in form else form
            )
        turn = next(turns)
        if turn >= len(forms):
            return "The end."
        form = forms[turn]
        if form["odd"] is not None and not (exact and form["odd"] == "bad arguments"):
            odd = ODD[form["odd"]]
            return odd | {"calls": [c | {"id": f"odd{turn}"} for c in odd.get("calls", ())]}
        calls = [
            {"name": "work", "arguments": {"number": i, "size": form["size"]}, "id": f"c{turn}_{i}"}
            for i in range(form["calls"])
        ]
        return {"text": "y" * (form["size"] % 700), "calls": calls} if calls else "An answer."

    async def reply(messages: Sequence[Message]) -> Message | None:
        last = messages[-1]
        assert isinstance(last, AssistantMessage)
        assert not any("[Summary of" in text_of(m) for m in messages)
        return None if last.content == "The end." else UserMessage(content="Continue.")

    def work(number: int, size: int = 0) -> str:
        """Work."""
        return "z" * size

    async def run() -> None:
        tool = function_tool(work)
        long = Long(play, window=window)
        policy = PRESETS["rl"] if exact else PRESETS["datagen"]
        try:
            result = await long.run(
                ContextParts(window=window if known else None, seconds=0.2),
                policy=replace(policy, tool_loop_limit=None),
                sampling=Sampling(),
                tools={"work": tool},
                reply=reply,
            )
            assert result.end_reason in ENDINGS
        except ModelError:  # lost answers; or the first prompt does not fit
            assert long.result is None
        long.check()

    asyncio.run(run())
