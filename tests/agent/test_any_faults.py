"""Errors of any class in any phase of a run, and any sequence of interrupts and faults: no message
and no token of usage is lost, and the next message is answered."""

import json
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import AIAgent, ModelConfig, errors, load_run
from hermes_rl.agent import Limits
from hermes_rl.aio import LoopThread
from hermes_rl.messages import Message
from hermes_rl.sandboxes import SandboxSpec, Subprocess
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest
from hermes_rl.tools import Tool, ToolContext, ToolResult

from .conftest import Make, say
from .test_long_conversations import check_legal

KNOWN = [
    e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.HermesError)
]
CLASSES = [e for e in KNOWN if not issubclass(e, errors.ToolError)]
CLASSES += [OSError, KeyError, MemoryError]
RUN = {"run": "echo hi", "text": "I run it."}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    run = load_run(folder)
    return [r for name in ("trajectories", "failures") for r in run.arrow(name).to_pylist()]


def check_usage(server: FakeServer, folder: Path, results: Sequence[dict[str, Any]]) -> None:
    """Each request is one call of one result and of one row, with its usage."""
    rows = rows_of(folder)
    calls = {c["call_id"]: c for r in rows for c in r["calls"]}
    returned = [c["call_id"] for result in results for c in result["calls"]]
    assert sorted(calls) == sorted(returned) == sorted(str(e.call_id) for e in server.entries)
    for entry in server.entries:
        call = calls[str(entry.call_id)]
        if call["outcome"] == "ok":
            used = (entry.prompt_tokens, entry.completion_tokens)
            assert (call["input_tokens"], call["output_tokens"]) == used
    spent = sum(r["usage"]["total_tokens"] or 0 for r in rows)
    assert spent == sum(result["usage"]["total_tokens"] or 0 for result in results)


def test_an_error_in_the_loop(make: Make, server: FakeServer, tmp_path: Path) -> None:
    async def fail(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        raise error("in the loop")

    broken = Tool("fail", "", {"type": "object"}, fail, "x", needs_sandbox=False)
    steps = [RUN, {"text": "Now.", "calls": [{"name": "fail"}]}, "Back."]
    prompt, results = say(*steps * len(CLASSES)), []
    with make(tools=[broken], save_trajectories=tmp_path / "run") as agent:
        for error in CLASSES:
            failed = agent.run_conversation(prompt)
            assert (failed["completed"], failed["final_response"]) == (False, "Now."), error
            texts = [m["content"] for m in failed["messages"] if m["role"] == "assistant"]
            assert texts[-2:] == ["I run it.", "Now."], error
            answered = agent.run_conversation("Continue.")
            assert answered["final_response"] == "Back.", error
            kept = answered["messages"][: len(failed["messages"]) - 1]
            assert kept == failed["messages"][:-1], error
            if results:
                before = results[-1]["messages"]
                assert failed["messages"][: len(before)] == before, error
            results += [failed, answered]
            prompt = "Again."
    check_usage(server, tmp_path / "run", results)


class Failing:
    """A backend that starts one sandbox, and then raises one error of each class."""

    name = "none"

    def __init__(self, folder: Path) -> None:
        self._inner, self._errors = Subprocess(state_dir=folder), [None, *CLASSES]

    async def lease(self, spec: SandboxSpec) -> Any:
        if error := self._errors.pop(0):
            raise error("at the beginning")
        return await self._inner.lease(spec)

    async def aclose(self) -> None:
        await self._inner.aclose()


def test_an_error_at_the_beginning(make: Make, server: FakeServer, tmp_path: Path) -> None:
    """Nothing was paid for then: it is raised, and the conversation is as it was."""
    backend = Failing(tmp_path / "state")
    with make(sandbox=backend, save_trajectories=tmp_path / "run") as agent:
        first = agent.run_conversation(say(RUN, "Fine."))
        for error in CLASSES:
            with pytest.raises(error):
                agent.run_conversation("Lost.", task_id="other")
        second = agent.run_conversation("SCRIPT: off")
        assert second["messages"][: len(first["messages"])] == first["messages"]
        assert len(second["messages"]) == len(first["messages"]) + 2
    check_usage(server, tmp_path / "run", [first, second])


class Session:
    """A session that cannot be written: it raises one error of each class."""

    session_id = "mine"

    def __init__(self) -> None:
        self._errors = [*CLASSES]

    def load(self) -> list[Message]:
        return []

    def append(self, kept: int, added: Sequence[Message], end_reason: str) -> None:
        if self._errors:
            raise self._errors.pop(0)("at the end")

    def close(self) -> None:
        pass

    @property
    def failed(self) -> bool:
        """It has raised all of them."""
        return not self._errors


def test_an_error_at_the_end(make: Make, server: FakeServer, tmp_path: Path) -> None:
    answers, session = [f"Answer {n}." for n in range(len(CLASSES))], Session()
    with make(session=session, save_trajectories=tmp_path / "run") as agent:
        results = [agent.run_conversation(say(RUN, *answers))]
        results += [agent.run_conversation("Next.") for _ in answers[1:]]
    assert session.failed
    assert [result["final_response"] for result in results] == answers
    for before, after in pairwise(results):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    check_usage(server, tmp_path / "run", results)


@pytest.mark.parametrize("fault", ["auth", "billing", "bad_request", "not_found", "too_large"])
def test_a_refused_summary_at_the_turn_limit(
    make: Make, server: FakeServer, tmp_path: Path, fault: str
) -> None:
    with make(limits=Limits(max_turns=2), save_trajectories=tmp_path / "run") as agent:
        result = agent.run_conversation(say(RUN, RUN, {"fault": fault}))
    assert [m["role"][0] for m in result["messages"]] == list("suatat")
    assert not result["completed"]
    check_usage(server, tmp_path / "run", [result])


turns = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(
            ["work", "work", "work", "large", "two", "answer", "empty", "cut", "fault", "refused",
             "stop the answer", "stop the tool", "stop the pause"]
        ),
        "steer": st.booleans(),
        "message": st.none() | st.just("Rather this."),
    }
)  # fmt: skip


class Story:
    """Plays a model by a list of turns, and the user who interrupts and steers."""

    def __init__(self, forms: list[dict[str, Any]]) -> None:
        self.forms = deque(forms)
        self._number = 0
        self.agent: AIAgent | None = None
        self.sent: list[ServedRequest] = []

    def play(self, request: ServedRequest) -> Any:
        assert self.agent is not None
        self.sent.append(request)
        if not request.tools:
            return "## Done\nA summary."
        form = self.forms.popleft() if self.forms else {"kind": "answer", "steer": False}
        kind, self._number = form["kind"], self._number + 1
        text = f"Answer {self._number}."
        if form["steer"]:
            self.agent.steer(f"Hint {self._number}.")
        if kind in ("fault", "refused"):
            return {"fault": "server_error" if kind == "fault" else "billing"}
        if kind == "empty":
            return {"text": ""}
        if kind == "stop the answer":
            self.agent.interrupt(form["message"])
            return {"text": "late", "latency_s": 60}
        if kind == "stop the pause":
            self.agent.interrupt(form["message"])
            return {"fault": "rate_limit_after"}
        if kind == "cut":
            return {"text": text, "finish": "length"}
        sizes = {"work": [50], "two": [50, 70], "large": [9_000], "stop the tool": [-1]}.get(
            kind, []
        )
        calls = [
            {"name": "work", "arguments": {"size": size}, "id": f"c{self._number}-{i}"}
            for i, size in enumerate(sizes)
        ]
        self.message = form.get("message")
        return {"text": text, "calls": calls}

    def work(self, size: int) -> str:
        """Work."""
        if size < 0:
            assert self.agent is not None
            self.agent.interrupt(self.message)
        return "z" * abs(size)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(forms=st.lists(turns, min_size=1, max_size=25))
def test_any_interrupts_faults_and_compressions(
    forms: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    story, folder = Story(forms), tmp_path_factory.mktemp("story")
    results: list[dict[str, Any]] = []
    with LoopThread() as home:
        server = FakeServer(FakeConfig(plays={"m": story.play}, window=3_000))
        home.run(server.__aenter__())
        model = ModelConfig(name="m", base_url=server.base_url)
        settings = {"toolsets": [], "tools": [story.work], "context": {"window": 3_000}}
        with AIAgent(model, save_trajectories=folder / "run", **settings) as agent:
            story.agent = agent
            for n in range(30):
                results.append(agent.run_conversation(f"Message {n}."))
                if results[-1]["completed"] and not story.forms:
                    break
        home.run(server.aclose())
    for request in story.sent:
        check_legal(request.messages)
    check_usage(server, folder / "run", results)
    messages = results[-1]["messages"]
    shown = "\n".join(m["content"] for m in messages if m["role"] == "assistant")
    for row in rows_of(folder / "run"):
        answers = [
            json.loads(text)["content"]
            for text, info in zip(row["messages"], row["message_info"], strict=True)
            if info["role"] == "assistant" and info["turn"] and not info["synthetic"]
        ]
        paid = [c for c in row["calls"] if c["purpose"] == "agent" and c["outcome"] == "ok"]
        assert len(answers) == sum(call["error"] is None for call in paid)
        assert [text for text in answers if text not in shown] == []
    calls = [c["id"] for m in messages for c in m.get("tool_calls", ())]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == calls
