"""`Environment.play`: the environment runs the episode, and calls the policy itself."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runs import Lab, count_answers, start_server

from hermes_rl.testing import ExactConfig, ExactEngine, write_tiny_tokenizer

HEAD = """
import asyncio

class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()
    group_size: int = 1

def user(text):
    return {"role": "user", "content": text}

def assistant(completion):
    return {"role": "assistant", "content": completion.message.content}
"""
BODY = """
Config = Config

def tasks(self, split, seed):
    yield make_task("What is it?", id="t")

async def compute_reward(self, task, trajectory, ctx):
    return len(ctx.state.get("answers", ())) / 10
"""
FORKS = """
async def play(self, task, policy, ctx):
    prompt = [user("What is it?")]
    answers = ctx.state["answers"] = await asyncio.gather(*(policy.complete(prompt) for _ in "abc"))
    talk = [*prompt, assistant(await policy.complete(prompt)), user("And?")]
    answers.append(await policy.complete(talk))
    await policy.complete([*talk, {"role": "assistant", "content": "Edited."}, user("Sure?")])
    await policy.complete([*talk, assistant(answers[-1]), user("Sure?")])
    ctx.state["answers"] = [a.message.content for a in answers]
"""


async def played(lab: Lab, play: str, **sections: Any) -> dict[str, Any]:
    """Run one rollout whose policy counts its answers in a conversation; return the row."""
    sections.setdefault("dataset", {"limit": 1})
    env = lab.write(f"{BODY}\n{play}", HEAD).path
    async with start_server(policy=lambda r: {"text": f"answer {count_answers(r)}"}) as server:
        await lab.run(env, server, **sections)
    (row,) = lab.rows() + lab.rows("failures")
    return row


async def test_side_by_side_and_edited_conversations_are_contexts_of_the_row(lab: Lab) -> None:
    row = await played(lab, FORKS)
    assert (row["reward"], row["end_reason"], row["turns"]) == (0.4, "answered", 7)
    messages = [json.loads(message) for message in row["messages"]]
    info = row["message_info"]
    seen = []
    ends = [context["start"] for context in row["contexts"][1:]] + [len(messages)]
    for context, end in zip(row["contexts"], ends, strict=True):
        indices = [*context["kept"], *range(context["start"], end)]
        seen.append([messages[index]["content"] for index in indices])
    first = ["What is it?", "answer 0"]
    edited = [*first, "And?", "Edited.", "Sure?", "answer 2"]
    talk = [*first, "And?", "answer 1"]
    assert seen[:4] == [first] * 4
    # The fourth answer is the same text again: the conversation continues from the first one.
    assert [edited, [*talk, "Sure?", "answer 2"]] == seen[-2:]
    sampled = [i["turn"] for i in info if i["role"] == "assistant" and not i["synthetic"]]
    assert sorted(sampled) == [1, 2, 3, 4, 5, 6, 7]
    assert [m["content"] for m, i in zip(messages, info, strict=True) if i["synthetic"]] == [
        "Edited."
    ]


async def test_every_sampled_token_of_every_call_is_in_the_segments_once(
    lab: Lab, tmp_path: Path
) -> None:
    env = lab.write(f"{BODY}\n{FORKS}", HEAD).path
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    async with ExactEngine(ExactConfig(tokenizer=tokenizer)) as engine:
        await lab.run(
            env,
            engine,
            dataset={"limit": 1},
            endpoint={"tokens": "vllm", "tokenizer": str(tokenizer)},
        )
        truth = Counter(tuple(entry.sampled_ids) for entry in engine.truth)
    found: Counter[tuple[int, ...]] = Counter()
    for row in lab.rows("segments"):
        assert row["trainable"], row["exclude_reason"]
        turns = {t for t, mask in zip(row["turn_ids"], row["loss_mask"], strict=True) if mask}
        for turn in turns:
            marks = zip(row["input_ids"], row["turn_ids"], row["loss_mask"], strict=True)
            found[tuple(token for token, at, mask in marks if mask and at == turn)] += 1
    assert sum(found.values()) == 7
    assert not found - truth
    assert {len(ids) for ids in truth - found} == {1}  # probes of the run's start


@pytest.mark.parametrize(
    ("play", "limits", "end_reason", "reward"),
    [
        ("await ask(1); await ask(2); await ask(3)", {"max_turns": 2}, "max_turns", 0.2),
        ("await ask(1); await ask(2)", {"max_tokens": 5}, "token_limit", 0.1),
        ("await asyncio.gather(*map(ask, range(5)))", {"max_turns": 3}, "max_turns", 0.3),
        (
            "async with asyncio.TaskGroup() as tasks:\n"
            "        tasks.create_task(ask(1)); tasks.create_task(ask(2))",
            {"max_turns": 1},
            "max_turns",
            0.1,
        ),
        ("await ask(1)\n    raise KeyError('lost')", {}, "error", None),
        ("await policy.complete([])", {}, "error", None),
        ("await policy.complete([{'role': 'robot'}])", {}, "error", None),
    ],
)
async def test_limits_end_a_rollout_and_faults_are_of_the_task(
    lab: Lab, play: str, limits: dict[str, int], end_reason: str, reward: float | None
) -> None:
    code = f"""
async def play(self, task, policy, ctx):
    answers = ctx.state["answers"] = []
    async def ask(n):
        answers.append((await policy.complete([user(str(n))])).message.content)
    {play}
"""
    row = await played(lab, code, agent={"limits": limits})
    assert (row["end_reason"], row["reward"]) == (end_reason, reward)
    assert row["cause"] == (None if reward else "task")
    assert row["truncated"] == (reward is not None)


async def test_the_environments_sampling_and_tools_are_sent_where_the_run_has_none(
    lab: Lab,
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    seen = []

    def look(request: Any) -> dict[str, Any]:
        seen.append(request)
        return (
            {"text": "Done."} if len(seen) > 1 else {"calls": [{"name": "look", "arguments": {}}]}
        )

    code = f"""
async def play(self, task, policy, ctx):
    from hermes_rl.models import Sampling
    sampling = Sampling(temperature=0.5, max_tokens=77)
    how = {{"sampling": sampling, "extra": {{"tool_choice": "auto"}}}}
    made = (await policy.complete([user("Look.")], [{tool}], **how)).message
    (call,) = made.tool_calls
    function = {{"name": call.name, "arguments": call.arguments}}
    calls = [{{"id": call.id, "type": "function", "function": function}}]
    answer = {{"role": "assistant", "content": None, "tool_calls": calls}}
    result = {{"role": "tool", "tool_call_id": call.id, "content": "seen"}}
    await policy.complete([user("Look."), answer, result], [{tool}], **how)
"""
    env = lab.write(f"{BODY}\n{code}", HEAD).path
    async with start_server(policy=look) as server:
        await lab.run(
            env, server, dataset={"limit": 1}, model={"name": "policy", "temperature": 1.5}
        )
    row = lab.row()
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in seen} == {(1.5, 77)}
    assert [r.tools for r in seen] == [(tool,)] * 2
    assert json.loads(row["tools"]) == [tool]
    assert [i["role"] for i in row["message_info"]] == ["user", "assistant", "tool", "assistant"]
    assert [stat["tool"] for stat in row["tool_stats"]] == ["look"]
    assert [context["start"] for context in row["contexts"]] == [0]


CALLING = """
async def play(self, task, policy, ctx):
    from hermes_rl.messages import to_openai
    talk = [user("Look.")]
    for n in range(3):
        answer = (await policy.complete(talk)).message
        (call,) = answer.tool_calls
        talk += [to_openai(answer), {"role": "tool", "tool_call_id": call.id, "content": "."}]
    self.late = asyncio.create_task(policy.complete([user("Late.")]))
    await asyncio.sleep(0)

async def compute_reward(self, task, trajectory, ctx):
    return float(self.late.cancelled())
"""


@pytest.mark.parametrize("call_id", ["call_0", ""])
async def test_repeated_ids_and_a_call_that_outlives_play(lab: Lab, call_id: str) -> None:
    call = {"name": "look", "arguments": "{bad", "id": call_id}
    env = lab.write(f"{BODY}\n{CALLING}", HEAD).path
    async with start_server(policy=lambda request: {"calls": [call]}) as server:
        await lab.run(env, server, dataset={"limit": 1})
    row = lab.row()
    assert row["reward"] == 1.0  # the call that outlived `play` was cancelled
    # Servers that count the calls of each answer from 0: the conversation is one context.
    assert [context["start"] for context in row["contexts"]] == [0]
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [i["role"] for i in row["message_info"]] == roles
    assert not any(i["synthetic"] for i in row["message_info"])


@pytest.mark.parametrize(
    ("code", "answers"),
    [
        ("await asyncio.sleep(60)", 1),
        ("while True: time.sleep(0.01)", 1),
        (
            "try: await asyncio.sleep(60)\n    except BaseException: await ask(2)",
            1,
        ),
        ("await asyncio.gather(ask(2), ask('slow')); await asyncio.sleep(60)", 3),
        (
            "call = asyncio.create_task(ask('slow'))\n"
            "    await asyncio.sleep(0.1)\n"
            "    while True: time.sleep(0.01)",
            2,
        ),
    ],
)
async def test_an_episode_ends_at_the_limit_of_active_seconds_and_is_graded(
    lab: Lab, code: str, answers: int
) -> None:
    """Active seconds are those without a call of the policy."""
    play = f"""
async def play(self, task, policy, ctx):
    import time
    answers = ctx.state["answers"] = []
    async def ask(n):
        answers.append((await policy.complete([user(str(n))])).message.content)
    await ask(1)
    {code}
"""
    env = lab.write(f"{BODY}\n{play}", HEAD).path

    def answer(request: Any) -> dict[str, Any]:
        slow = request.messages[-1].content == "slow"
        return {"text": "Well.", **({"latency_s": 2.4} if slow else {})}

    async with start_server(policy=answer) as server:
        await lab.run(env, server, dataset={"limit": 1}, agent={"limits": {"max_seconds": 2.0}})
    (row,) = lab.rows() + lab.rows("failures")
    assert (row["end_reason"], row["reward"]) == ("time_limit", answers / 10)
    assert (row["cause"], row["truncated"], row["attempt"]) == (None, True, 0)
    assert len(row["calls"]) == answers


async def test_text_that_cannot_be_sent_is_refused_before_a_call(lab: Lab) -> None:
    tool = '{"type": "function", "function": {"name": "look", "description": "\\ud800"}}'
    code = f"""
async def play(self, task, policy, ctx):
    await policy.complete([user("Look.")], [{tool}])
"""
    row = await played(lab, code)
    assert (row["cause"], len(row["calls"]), row["attempt"]) == ("task", 0, 0)
    assert "the tools of a model call" in row["error"]
    assert "is not valid Unicode text (lone surrogates)" in row["error"]
    assert "made_up.py:" in row["error"]
