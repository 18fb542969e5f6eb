"""One long episode, compared with what was recorded once; the same through every entry point."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from runs import run_environment, start

from batch_runner import Silent, arun_batch
from hermes_rl import AIAgent, ModelConfig, load_run
from hermes_rl.agent import Limits
from hermes_rl.cli import main
from hermes_rl.config import parse_config
from hermes_rl.events import Event, MessageAdded
from hermes_rl.messages import AssistantMessage, UserMessage, text_of
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

GOLDEN = Path(__file__).parents[1] / "data" / "golden_episode.json"
WINDOW, TURNS = 6_000, 50
TOOLSETS = ["terminal", "file", "delegation"]
TASK, QUESTION, ANSWER = "Do all steps.", "May I continue?", "Yes, continue."
TASK_ALONE = "Do all steps, and do not ask."
STEERED, COMMAND_CUT, FALL_BACK, ASKS, DELEGATES, ANSWER_CUT, STOPPED = 5, 11, 12, 15, 16, 22, 30
CHILDREN_AT_WORK, IN_A_COMPRESSED_CONTEXT = 20, 40
"""Requests at which a run is killed."""
"""Steps at which the user says something, the first model refuses, or sub-agents work."""


def run(*commands: str) -> dict[str, Any]:
    return {"calls": [call("terminal", command=command) for command in commands]}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


STEPS: Mapping[int, dict[str, Any]] = {
    1: run("mkdir notes; cd notes; export WHO=agent; pwd"),
    2: {"calls": [call("write_file", path="one", content="1\n2\n")]},
    3: {"calls": [call("read_file", path="one"), call("read_file", path="two")]},
    4: {"calls": [call("patch", path="one", old_string="2", new_string="two")]},
    6: {**run("cat one; false"), "reasoning": "It may fail."},
    8: {"text": "A part of it", "finish": "length"},
    9: run("echo the rest"),
    10: {"calls": [call("Read-File", path="one")]},
    13: {"calls": [call("search_files", pattern="two")]},
    14: run("head -c 120000 /dev/zero | tr '\\0' x"),
    ASKS: {"text": QUESTION},
    DELEGATES: {
        "calls": [
            call("delegate_task", tasks=[{"goal": f"Child {n}: write a file."} for n in "ab"])
        ]
    },
    17: run("ls; cat a b; pwd; echo $WHO"),
    40: {"text": "All steps are done."},
}


def policy(request: ServedRequest) -> Any:
    """The next step. It follows from the messages alone, whatever brought them."""
    if not request.tools:
        return "## Done\nThe steps so far."
    texts = [text_of(m) for m in request.messages if isinstance(m, AssistantMessage)]
    first = next(text_of(m) for m in request.messages if isinstance(m, UserMessage))
    if child := re.match(r"Child (\w)", first):
        name = child[1]
        write = run(f"pwd; echo $WHO; export WHO=child; echo {name} > {name}; cd /")
        return {**write, "latency_s": 0.3} if not texts else f"I wrote {name}."
    number = 1 + max([0, *map(step_of, texts)])
    if request.model == "policy" and number >= FALL_BACK:
        return {"fault": "billing"}
    if number == 7 and texts[-1] != "(empty)":
        return {"text": ""}
    fill = run(f"echo step {number}; head -c 1500 /dev/zero | tr '\\0' {number % 10}")
    made = fill if number == ASKS and first.startswith(TASK_ALONE) else STEPS.get(number, fill)
    return {**made, "text": f"Step {number}. {made.get('text', '')}".strip()}


def step_of(text: str) -> int:
    found = re.match(r"Step (\d+)\.", text)
    return int(found[1]) if found else 0


class Person:
    """Answers the agent's question; an impatient one interrupts and steers it as well."""

    def __init__(self, *, impatient: bool) -> None:
        self.agent: AIAgent | None = None
        self._impatient = impatient
        self._spoken: set[int] = set()

    def play(self, request: ServedRequest) -> Any:
        """The model; the person speaks while it works on a step."""
        made, agent = policy(request), self.agent
        assert agent is not None
        number = step_of(made.get("text", "")) if isinstance(made, dict) else 0
        if number in self._spoken or not number:
            return made
        self._spoken.add(number)
        if number == ASKS and QUESTION in made["text"]:
            agent.steer(ANSWER)
        elif self._impatient and number == STEERED:
            agent.steer("Be quick.")
        elif self._impatient and number == COMMAND_CUT:
            return {**run("echo before", "sleep 60; touch late"), "text": f"Step {number}."}
        elif self._impatient and number in (ANSWER_CUT, STOPPED):
            agent.interrupt("Write less." if number == ANSWER_CUT else None)
            return {**made, "latency_s": 60}
        return made

    def listen(self, event: Event) -> None:
        """Interrupt the second command of a turn after the first has ended."""
        if isinstance(event, MessageAdded) and event.turn and "before" in text_of(event.message):
            if isinstance(event.message, AssistantMessage) or self.agent is None:
                return
            asyncio.get_running_loop().call_later(0.5, self.agent.interrupt, "Do not wait.")


async def by_agent(folder: Path, task: str, *, impatient: bool = False) -> list[dict[str, Any]]:
    """The results of the episode through `AIAgent`."""
    person = Person(impatient=impatient)
    plays = {"policy": person.play, "backup": person.play}
    async with FakeServer(FakeConfig(plays=plays, window=WINDOW)) as server:
        model = ModelConfig(name="policy", base_url=server.base_url, fallbacks=["backup"])
        async with AIAgent(
            model,
            preset="datagen",
            toolsets=TOOLSETS,
            limits=Limits(max_turns=TURNS),
            context={"window": WINDOW},
            on_event=person.listen,
        ) as agent:
            person.agent = agent
            results = [await agent.run(task)]
            agent.save_trajectory(folder)
            if impatient:
                results.append(await agent.run("Continue."))
                agent.save_trajectory(folder)
        assert sum(len(result["calls"]) for result in results) == len(server.entries)
    return results


def recorded(folder: Path) -> list[dict[str, Any]]:
    """What a run recorded, without ids of rows and times."""
    tables = ("trajectories", "failures", "subagents")
    done, failed, children = (load_run(folder).arrow(name).to_pylist() for name in tables)
    rows = sorted([*done, *failed], key=lambda row: row["started_at"])
    return [
        {
            **shown(row),
            "tokens": row["usage"]["total_tokens"],
            "calls": [
                f"{c['turn']} {c['purpose']} {c['model']} {c['outcome']}"
                for c in row["calls"]
                if c["agent"] == "main"
            ],
            "children": [
                shown(child)
                for child in children
                if child["root_trajectory_id"] == row["trajectory_id"]
            ],
        }
        for row in rows
    ]


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The messages and what is known of them; long ones by their beginning and their hash."""
    return {
        "end": f"{row['end_reason']} after {row['turns']} turns: {row['final_response']}",
        "messages": [
            f"{info['turn']}.{info['context']}{'*' * info['synthetic']} {brief(text)}"
            for text, info in zip(row["messages"], row["message_info"], strict=True)
        ],
        "contexts": [f"{c['start']}: {c['reason']}; {c['kept']}" for c in row["contexts"]],
        "metrics": {m["name"]: m["value"] for m in row["metrics"]},
    }


def brief(text: str) -> str:
    if len(text) < 400:
        return text
    return f"{text[:200]}... {len(text)} characters {sha256(text.encode()).hexdigest()[:16]}"


async def test_a_golden_episode_with_interrupts_steering_fallback_compression_and_sub_agents(
    tmp_path: Path,
) -> None:
    """To accept a change, copy the file that the message names to tests/data."""
    stopped, result = await by_agent(tmp_path / "run", TASK, impatient=True)
    found = {
        "result": [brief(json.dumps(message)) for message in result["messages"]],
        "rows": recorded(tmp_path / "run"),
    }
    now = tmp_path / GOLDEN.name
    now.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert (stopped["end_reason"], result["end_reason"]) == ("interrupted", "answered")
    assert main(["check", str(tmp_path / "run")]) == 0
    assert found == json.loads(GOLDEN.read_text()), f"compare {now} with {GOLDEN}"


ENVIRONMENT = f"""
from hermes_rl.rl import EnvConfig, Environment, make_task

class Golden(Environment[EnvConfig]):
    name = "golden"

    def tasks(self, split, seed):
        yield make_task({TASK!r})

    async def reply(self, task, trajectory, ctx):
        return {ANSWER!r} if {QUESTION!r} in trajectory.final_response else None

    async def compute_reward(self, task, trajectory, ctx):
        left = await ctx.grading.run('cd "$WORKSPACE"/notes; cat a b one')
        return float(left.output.split() == ["a", "b", "1", "two"])
"""


SECTIONS: Mapping[str, Any] = {
    "model": {"name": "policy"},
    "agent": {
        "preset": "datagen",
        "toolsets": TOOLSETS,
        "limits": {"max_turns": TURNS},
        "context": {"window": WINDOW},
    },
}


def server() -> FakeServer:
    return FakeServer(FakeConfig(plays={"policy": policy, "backup": policy}, window=WINDOW))


async def test_an_agent_and_an_environment_record_the_same_episode(tmp_path: Path) -> None:
    await by_agent(tmp_path / "agent", TASK)
    (tmp_path / "golden.py").write_text(ENVIRONMENT)
    async with server() as served:
        sections = {
            **SECTIONS,
            "dataset": {"repeats": 1},
            "sandbox": {"backend": "bubblewrap"},
            "endpoint": {"base_url": served.base_url, "fallbacks": ["backup"]},
        }
        env, out = tmp_path / "golden.py", tmp_path / "run"
        await run_environment(f"{env}:Golden", out, served, **sections)
    (row,) = recorded(tmp_path / "run")
    assert [row] == recorded(tmp_path / "agent")
    assert [r["reward"] for r in rows(tmp_path / "run")] == [1.0]
    assert main(["check", str(tmp_path / "run")]) == 0


@pytest.mark.slow
async def test_an_agent_and_a_batch_run_record_the_same_episode_killed_or_not(
    tmp_path: Path,
) -> None:
    """Killed while sub-agents work, and in a compressed context."""
    await by_agent(tmp_path / "agent", TASK_ALONE)
    (expected,) = recorded(tmp_path / "agent")
    assert len(expected["children"]) == 2
    assert any("summary" in context for context in expected["contexts"])
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": TASK_ALONE}))
    data = {**SECTIONS, "dataset": {"path": str(tmp_path / "tasks.jsonl")}}
    async with server() as served:
        await arun_batch(
            parse_config(configured(data, served, tmp_path / "run")), progress=Silent()
        )
        assert recorded(tmp_path / "run") == [expected]
    async with server() as served:
        out = tmp_path / "killed"
        (tmp_path / "run.yaml").write_text(json.dumps(configured(data, served, out)))
        arguments = ("--config", tmp_path / "run.yaml", "--checkpoint-turns", "1")
        for requests in (CHILDREN_AT_WORK, IN_A_COMPRESSED_CONTEXT):
            run = await start(*arguments, command="run")
            while served.requests < requests:
                assert run.returncode is None, await run.communicate()
                await asyncio.sleep(0.01)
            run.kill()
            await run.communicate()
        before = served.requests
        run = await start(*arguments, command="run")
        _, errors = await run.communicate()
        assert run.returncode == 0, errors
        assert served.requests - before < 25
    calls = {call["call_id"]: call for row in rows(out) for call in row["calls"]}
    assert len(calls) == sum(len(row["calls"]) for row in rows(out))
    sent = Counter(str(entry.call_id) for entry in served.entries)
    assert set(sent.values()) == {1}
    # A call is recorded before its request leaves, so that a kill may come between the two.
    never_sent = [call for name, call in calls.items() if name not in sent]
    assert {call["outcome"] for call in never_sent} <= {"unknown"}
    assert set(sent) <= set(calls)
    assert main(["check", str(out)]) == 0
    *lost, found = recorded(out)
    assert len(lost) == 2
    for resumed, whole in zip(
        [found, *found["children"]], [expected, *expected["children"]], strict=True
    ):
        for name in ("end", "messages", "contexts"):
            assert resumed[name] == whole[name], name
    assert [child["metrics"]["resumed_turns"] for child in found["children"]] == [2.0, 2.0]


def configured(data: Mapping[str, Any], served: FakeServer, out: Path) -> dict[str, Any]:
    endpoint = {"base_url": served.base_url, "fallbacks": ["backup"]}
    return {**data, "endpoint": endpoint, "run": {"out": str(out), "workers": 0}}


def rows(folder: Path) -> list[dict[str, Any]]:
    run = load_run(folder)
    return [row for name in ("trajectories", "failures") for row in run.arrow(name).to_pylist()]
