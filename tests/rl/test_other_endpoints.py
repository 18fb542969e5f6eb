"""A user and a judge with their own endpoints, keys, usage records, budgets and rate limits."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from runs import Lab, count_answers

from batch_runner import read_manifest
from hermes_rl.store import RunDir
from hermes_rl.testing import Connection, FakeConfig, FakeServer, Incoming, RateLimits, any_key

TALK = """
uses = ("user", "judge")

class Config(EnvConfig):
    sandboxed: bool = False

def tasks(self, split, seed):
    for n in range(4):
        yield make_task(f"Sell thing {n}.", id=f"t{n}")

async def reply(self, task, trajectory, ctx):
    if len(trajectory.answers) > 2:
        return None
    return await ctx.user.answer("You buy.", trajectory)

async def compute_reward(self, task, trajectory, ctx):
    data = {"talk": " ".join(trajectory.answers)}
    verdict = await ctx.judge.verdict("Was it good?", data)
    return Rewards([verdict.part("good", {"yes": 1.0, "no": 0.0})])
"""

WHO = ("policy", "buyer", "critic")
USES = {"buyer": "user", "critic": "judge"}
PURPOSES = dict(zip(WHO, ("agent", "user", "judge"), strict=True))
PLAYS: dict[str, Any] = {
    "policy": lambda request: f"Offer {count_answers(request)}.",
    "buyer": lambda request: "Less, please.",
    "critic": lambda request: '{"reason": "It was.", "verdict": "yes"}',
}
MOST = {"policy": 30, "buyer": 40, "critic": 60}
"""Output tokens of a call."""
PRICES = {name: {"input": n, "cache_read": n, "output": 10 * n} for n, name in enumerate(WHO, 1)}


class KeyRecorder(FakeServer):
    """A server that records every key that it receives."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.keys: set[str] = set()

    def handle(self, connection: Connection, request: Incoming) -> None:
        self.keys.add(any_key(request.headers))
        super().handle(connection, request)


@dataclass
class Servers:
    """A server for each model, with its own key."""

    servers: dict[str, KeyRecorder]

    def sections(self, **run: Any) -> dict[str, Any]:
        places = {n: {"base_url": self.servers[n].base_url, "api_key_env": f"{n}_KEY"} for n in WHO}
        return {
            "endpoint": {**places["policy"], "prices": PRICES},
            "env": {
                "user": {"name": "buyer", "max_tokens": MOST["buyer"], **places["buyer"]},
                "judge": {
                    "name": "critic",
                    "max_tokens": MOST["critic"],
                    "temperature": 0,
                    **places["critic"],
                },
            },
            "model": {"max_tokens": MOST["policy"]},
            "dataset": {"limit": None, "repeats": 2},
            "run": run,
        }


@asynccontextmanager
async def start_servers(
    monkeypatch: pytest.MonkeyPatch, **rates: RateLimits
) -> AsyncIterator[Servers]:
    for name in WHO:
        monkeypatch.setenv(f"{name}_KEY", f"secret-of-{name}")

    made = {
        name: KeyRecorder(
            FakeConfig(key=f"secret-of-{name}", models=(name,), plays=PLAYS, rate=rates.get(name))
        )
        for name in WHO
    }
    async with made["policy"], made["buyer"], made["critic"]:
        yield Servers(made)


def by_model(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    calls = [call for row in rows for call in row["calls"]]
    return {name: [c for c in calls if c["purpose"] == PURPOSES[name]] for name in WHO}


async def test_each_model_is_called_at_its_endpoint_with_its_key(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = lab.out
    async with start_servers(monkeypatch) as at:
        report = await lab.run(TALK, at.servers["policy"], **at.sections())
        hosts = {name: server.base_url.split("/")[2] for name, server in at.servers.items()}
    assert (report.done, report.solved, report.causes) == (8, 8, {})
    for name, server in at.servers.items():
        assert server.keys == {f"secret-of-{name}"}
        assert {e.model for e in server.entries} == {name}
        assert {e.max_tokens for e in server.entries} == {MOST[name]}
    rows = lab.rows()
    for name, calls in by_model(rows).items():
        served = {e.call_id: e for e in at.servers[name].entries}
        assert {c["call_id"] for c in calls} == set(served)
        for one in calls:
            entry, price = served[one["call_id"]], PRICES[name]
            assert one["model"] == name
            used = (one["input_tokens"], one["output_tokens"])
            assert used == (entry.prompt_tokens, entry.completion_tokens)
            cost = (price["input"] * used[0] + price["output"] * used[1]) / 1e6
            assert one["cost_usd"] == pytest.approx(cost)
    for row in rows:
        purposes = [call["purpose"] for call in row["calls"]]
        assert purposes == ["agent", "user", "agent", "user", "agent", "judge"]
        assert row["usage"]["input_tokens"] == sum(c["input_tokens"] for c in row["calls"])
        assert row["cost_usd"] == pytest.approx(sum(c["cost_usd"] for c in row["calls"]))
        assert row["rewards"][0]["score"] == 1.0
        assert json.loads(row["rewards"][0]["detail"])["judge"] == "critic"
        assert (row["model"], row["served_models"]) == ("policy", sorted(WHO))
    stored = b"".join(p.read_bytes() for p in out.rglob("*") if p.is_file())
    assert b"secret-of-" not in stored
    limits = read_manifest(RunDir(out))["rate_limits"]
    lanes = {(lane["endpoint"], lane["account"], lane["model"]) for lane in limits}
    assert lanes == {(hosts[name], f"{name}_KEY", name) for name in WHO}


@pytest.mark.parametrize("name", ["buyer", "critic"])
async def test_a_user_and_a_judge_have_their_own_budgets(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An exhausted budget stops the run; the same command with more continues it."""
    env, out = lab.write(TALK).path, lab.out
    async with start_servers(monkeypatch) as at:
        policy = at.servers["policy"]
        most = {"buyer": 500, "critic": 900}[name]
        sections = at.sections(model_token_budgets={name: most}, concurrency=1)
        first = await lab.run(env, policy, **sections)
        assert first.stopped == "cost_limit"
        assert name in (first.detail or "")
        used = sum(e.prompt_tokens + e.completion_tokens for e in at.servers[name].entries)
        assert 0 < used <= most
        budgets = read_manifest(RunDir(out))["budgets"]
        assert budgets == {f"model:{name}:tokens": {"budget": most, "spent": used}}
        rest = await lab.run(env, policy, **at.sections(model_token_budgets={name: 10**6}))
        assert (rest.stopped, rest.done) == (None, 8)


@pytest.mark.parametrize("name", ["buyer", "critic"])
async def test_a_refused_key_of_a_user_or_judge_stops_the_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    env = lab.write(TALK).path
    async with start_servers(monkeypatch) as at:
        sections, policy = at.sections(), at.servers["policy"]
        monkeypatch.setenv(f"{name}_KEY", "an-old-one")
        first = await lab.run(env, policy, **sections)
        assert (first.stopped, first.done, first.exit_code) == ("auth", 0, 3)
        host = at.servers[name].base_url.split("/")[2]
        assert (first.detail or "").startswith(f"401 from {host} for env.{USES[name]} (")
        assert first.hint == f"Set {name}_KEY"
        assert {row["reward"] for row in lab.rows("failures")} == {None}
        monkeypatch.setenv(f"{name}_KEY", f"secret-of-{name}")
        assert (await lab.run(env, policy, **sections)).done == 8


async def test_an_unknown_judge_model_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_servers(monkeypatch) as at:
        sections, policy = at.sections(), at.servers["policy"]
        sections["env"]["judge"]["name"] = "nobody"
        stopped = await lab.run(TALK, policy, **sections)
    assert (stopped.stopped, stopped.exit_code) == ("model_not_found", 3)
    assert "for env.judge" in (stopped.detail or "")
    assert stopped.hint == "Correct env.judge.name or env.judge.base_url"


def fail_first(faults: Iterator[str], play: Callable[[Any], Any], request: Any) -> Any:
    fault = next(faults, None)
    return play(request) if fault is None else {"fault": fault}


async def test_errors_of_a_user_or_judge_are_retried_within_the_rollout(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_servers(monkeypatch) as at:
        for name in USES:
            faults = iter(["unavailable", "cut", "reset"])
            plays = {name: partial(fail_first, faults, PLAYS[name])}
            at.servers[name].config = replace(at.servers[name].config, plays=plays)
        report = await lab.run(TALK, at.servers["policy"], **at.sections())
    assert (report.done, report.solved, report.failed_attempts) == (8, 8, 0)
    assert len(at.servers["policy"].entries) == 8 * 3, "no call of the policy is repeated"
    for name, calls in by_model(lab.rows()).items():
        served = [e for e in at.servers[name].entries if e.outcome == "served"]
        assert len([c for c in calls if c["outcome"] == "ok"]) == len(served)
        faults = [e.fault for e in at.servers[name].entries if e.fault]
        assert sorted(faults) == ([] if name == "policy" else ["cut", "reset", "unavailable"])


async def test_a_run_waits_for_a_judge_with_a_low_rate_limit(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = RateLimits(requests=600, burst_s=0.2)
    async with start_servers(monkeypatch, critic=few) as at:
        report = await lab.run(TALK, at.servers["policy"], **at.sections())
    assert (report.done, report.solved, report.causes) == (8, 8, {})
    outcomes = {n: {e.outcome for e in at.servers[n].entries} for n in WHO}
    assert (outcomes["policy"], outcomes["buyer"]) == ({"served"}, {"served"})
