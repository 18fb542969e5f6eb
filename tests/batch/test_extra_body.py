"""`extra_body` and sampling: on every wire, in the rows, and in the identity of a run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import kit
import pytest
import yaml

from hermes_rl.config import RunConfig, parse_config
from hermes_rl.definitions import identity_of
from hermes_rl.errors import ModelError, UserError
from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models import DIALECTS, Conversation, Endpoint, ModelRequest, Sampling, connect
from hermes_rl.models.providers import resolve_env_targets, resolve_targets_by_model
from hermes_rl.models.wire import RESERVED_FIELDS as CLIENT_FIELDS
from hermes_rl.models.wire import Quirks
from hermes_rl.testing import Connection, FakeConfig, FakeServer, Incoming
from hermes_rl.text import encode_json

PINNED = {"provider": {"order": ["one", "two"], "allow_fallbacks": False}, "service_tier": "flex"}
OTHER = {"chat_template_kwargs": {"enable_thinking": False}}


class RecordingServer(FakeServer):
    """Keeps the bodies of all requests."""

    def __init__(self, config: FakeConfig | None = None) -> None:
        super().__init__(config)
        self.bodies: list[dict[str, Any]] = []

    def handle(self, connection: Connection, request: Incoming) -> None:
        if request.method == "POST":
            self.bodies.append(json.loads(request.body))
        super().handle(connection, request)


def config(model: Any, endpoint: Any = None, **sections: Any) -> RunConfig:
    return parse_config(
        {
            "dataset": {"path": "smoke"},
            "model": {"name": "fake", **model},
            "endpoint": {"base_url": "http://127.0.0.1:9/v1", **(endpoint or {})},
            **sections,
        }
    )


MODES_AND_TRANSPORTS = list(zip(DIALECTS, ("http", "sdk", "http"), strict=True))


@pytest.mark.parametrize(("mode", "transport"), MODES_AND_TRANSPORTS)
async def test_extra_body_is_sent_with_every_request_and_recorded(
    tmp_path: Path, mode: str, transport: str
) -> None:
    """The first model does not exist, so that a fallback with its own fields is called, too."""
    async with RecordingServer(FakeConfig(models=("fake",))) as server:
        made = kit.make_config(
            tmp_path,
            [kit.make_task(1)],
            model={"name": "gone", "extra_body": PINNED},
            endpoint={
                "base_url": server.base_url,
                "api_mode": mode,
                "transport": transport,
                "fallbacks": [{"model": "fake", "extra_body": OTHER}],
            },
        )
        report = await kit.run_config(made)
        assert report.exit_code == 0
        first, *others = server.bodies
    assert first == {**first, **PINNED}
    assert len(others) == 3
    assert all(body == {**body, **OTHER} and not set(PINNED) & set(body) for body in others)
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert json.loads(row["sampling"])["extra_body"] == PINNED
    written = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert written["model"]["extra_body"] == PINNED


TASKS = [{"prompt": f"Task {number}."} for number in range(3)]


async def run_tasks(
    tmp_path: Path, server: FakeServer, model: dict[str, Any], **agent: Any
) -> tuple[list[dict[str, Any]], Any]:
    """The rows and the report of a run of three tasks."""
    out, endpoint = tmp_path / "run", {"base_url": server.base_url}
    made = kit.make_config(
        tmp_path, TASKS, model=model, agent=agent, endpoint=endpoint, run={"concurrency": 1}
    )
    report = await kit.run_config(made)
    return [*kit.read_table(out, "trajectories"), *kit.read_table(out, "failures")], report


async def test_only_configured_sampling_is_sent_and_recorded(tmp_path: Path) -> None:
    async with RecordingServer() as server:
        rows, _ = await run_tasks(tmp_path, server, {})
    names = {"seed", "temperature", "top_p", "top_k", "stop", "max_tokens"}
    assert [body.keys() & names for body in server.bodies] == [set()] * len(server.bodies)
    assert {row["sampling"] for row in rows} == {"{}"}
    assert len({row["seed"] for row in rows}) == 3


async def test_seed_top_k_and_stop_are_sent_when_set(tmp_path: Path) -> None:
    async with RecordingServer() as server:
        rows, _ = await run_tasks(tmp_path, server, {"top_k": 20, "stop": "END"}, seed=3)
    sent = [(body["seed"], body["top_k"], body["stop"]) for body in server.bodies]
    assert {(top_k, *stop) for _, top_k, stop in sent} == {(20, "END")}
    assert {seed for seed, _, _ in sent} == {row["seed"] for row in rows}
    for row in rows:
        wanted = {"seed": row["seed"], "top_k": 20, "stop": ["END"]}
        assert json.loads(row["sampling"]) == wanted


async def test_a_refused_seed_costs_one_request_and_is_reported(
    tmp_path: Path,
) -> None:
    async with RecordingServer() as server:
        rows, report = await run_tasks(tmp_path, server, {"name": "fault-seed"}, seed=3)
    assert ["seed" in body for body in server.bodies] == [True, False, False, False]
    assert [(row["status"], row["sampling"]) for row in rows] == [("ok", "{}")] * 3
    assert sorted(len(row["calls"]) for row in rows) == [1, 1, 2]
    assert {metric["value"] for row in rows for metric in row["metrics"]} == {1.0}
    assert "not sent, since the endpoint refused it: seed (3 attempts)" in "\n".join(report.lines())


async def test_refused_exact_sampling_fails_and_names_the_parameters(tmp_path: Path) -> None:
    async with RecordingServer() as server:
        rows, _ = await run_tasks(tmp_path, server, {"name": "fault-sampling"}, preset="rl")
    assert {row["cause"] for row in rows} == {"model_protocol"}
    assert all("temperature, top_k, top_p" in row["error"] for row in rows)
    wanted = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert [json.loads(row["sampling"]) for row in rows] == [wanted] * len(rows)


def test_unset_sampling_keys_do_not_change_the_identity() -> None:
    plain = identity_of(config({}))
    assert not {"top_k", "stop"} & plain["model"].keys()
    assert (plain["model"]["seed"], plain["agent"]["seed"]) == (None, 0)
    assert identity_of(config({}, agent={"seed": 0})) == plain
    assert identity_of(config({"top_k": 20, "stop": "E"}))["model"] == {
        **plain["model"],
        "top_k": 20,
        "stop": ["E"],
    }


def test_extra_body_is_part_of_the_identity() -> None:
    plain = identity_of(config({}))
    assert "extra_body" not in plain["model"]
    assert identity_of(config({"extra_body": {}})) == plain
    pinned = identity_of(config({"extra_body": PINNED}))
    assert pinned["model"]["extra_body"] == {"fake": PINNED}
    mixed = {"mix": {"a": 1, "b": 1, "c": 1}, "extra_body": PINNED}
    places = {"b": {"extra_body": OTHER}, "c": {"base_url": "http://127.0.0.1:8/v1"}}
    merged = identity_of(config({**mixed, "name": "mix"}, {"places": places}))["model"][
        "extra_body"
    ]
    assert merged == {"a": PINNED, "b": OTHER}
    fallback = [{"model": "d", "extra_body": OTHER}]
    assert identity_of(config({"extra_body": PINNED}, {"fallbacks": fallback})) == pinned


def test_extra_body_is_not_sent_to_other_endpoints() -> None:
    made = config(
        {"extra_body": PINNED},
        {
            "fallbacks": [
                "here",
                {"model": "custom", "extra_body": OTHER},
                {"model": "none", "extra_body": {}},
                {"model": "away", "base_url": "http://127.0.0.1:8/v1"},
            ]
        },
        env={"name": "x", "judge": {"name": "j"}, "user": {"name": "u", "extra_body": OTHER}},
    )
    extras = [target.extra for target in resolve_targets_by_model(made)["fake"]]
    assert extras == [PINNED, PINNED, OTHER, {}, {}]
    others = {use: targets[0].extra for use, targets in resolve_env_targets(made).items()}
    assert others == {"judge": {}, "user": OTHER}
    assert made.env is not None
    assert made.env.judge is not None
    assert made.env.user is not None
    assert "extra_body" not in made.env.judge.identity
    assert made.env.user.identity["extra_body"] == OTHER


@pytest.mark.parametrize(
    ("mode", "field", "hint"),
    [
        ("chat_completions", "messages", "Remove it"),
        ("chat_completions", "temperature", "Use model.temperature"),
        ("chat_completions", "max_completion_tokens", "Use model.max_tokens"),
        ("chat_completions", "reasoning_effort", "Use model.reasoning"),
        ("chat_completions", "n", "Remove it"),
        ("codex_responses", "stream", "Use endpoint.stream"),
        ("codex_responses", "store", "Remove it"),
        ("anthropic_messages", "thinking", "Use model.reasoning"),
    ],
)
def test_extra_body_may_not_contain_fields_of_the_client(mode: str, field: str, hint: str) -> None:
    for made in (
        config({"extra_body": {field: 1}}, {"api_mode": mode}),
        config({}, {"fallbacks": [{"model": "m", "api_mode": mode, "extra_body": {field: 1}}]}),
    ):
        with pytest.raises(UserError) as caught:
            resolve_targets_by_model(made)
        assert str(caught.value) == f"extra_body has '{field}', which is reserved in {mode}. {hint}"


def test_extra_body_may_contain_fields_of_other_dialects() -> None:
    for extra in ({"thinking": {"type": "disabled"}}, {"reasoning": {"effort": "low"}}):
        made = config({"extra_body": extra})
        assert resolve_targets_by_model(made)["fake"][0].extra == extra


@pytest.mark.parametrize("value", [{"a": float("nan")}, {"a": {1, 2}}, {"a": b"x"}, ["a"]])
def test_extra_body_must_be_json(value: Any) -> None:
    with pytest.raises(UserError, match=r"'model\.extra_body"):
        config({"extra_body": value})


def test_extra_body_keys_become_strings() -> None:
    """YAML reads `yes:` as a truth value and `1:` as a number."""
    value = yaml.safe_load("logit_bias: {1: 2}\nkwargs: [{yes: 1, null: 2}]")
    extra = config({"extra_body": value}).model.extra_body
    assert extra == {"logit_bias": {"1": 2}, "kwargs": [{"true": 1, "null": 2}]}
    assert json.loads(encode_json(extra)) == extra


@pytest.mark.parametrize("name", ["api_key", "Authorization", "x-api-key"])
def test_extra_body_may_not_contain_api_keys(name: str) -> None:
    for extra in ({name: "sk-secret"}, {"router": [{"inner": {name: "sk-secret"}}]}):
        for made in ({"extra_body": extra}, {}):
            with pytest.raises(UserError, match=f"extra_body contains '{name.lower()}'") as caught:
                config(made, {"places": {"fake": {"extra_body": extra}}})
            assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mode", list(DIALECTS))
async def test_the_list_of_client_fields_is_complete(mode: str) -> None:
    """A request with all settings writes no field that `extra_body` may contain."""
    everything = Sampling(0.5, 0.5, 5, 0.1, 99, 7, ("stop",), None)
    call = ToolCall(id="c", name="t", arguments="{}")
    history = [
        SystemMessage(content="s"),
        UserMessage(content="u"),
        AssistantMessage(tool_calls=(call,)),
        ToolMessage(tool_call_id="c", name="t", content="r"),
    ]
    tool = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}
    async with RecordingServer() as server:
        quirks = Quirks(cache_key=True, max_tokens_field="max_completion_tokens")
        client = connect(Endpoint(server.base_url, api_mode=mode, quirks=quirks))
        for sampling in (everything, Sampling(reasoning="low", max_tokens=4000)):
            for tools in ((tool,), ()):
                request = ModelRequest(
                    "claude-opus-4-5", Conversation(history), "id", tools, sampling,
                    stream=True, logprobs=True, token_ids=True, cache="5m",
                )  # fmt: skip
                with suppress(ModelError):  # only the body counts
                    await client.complete(request)
        await client.aclose()
        written = {name for body in server.bodies for name in body}
    assert written - CLIENT_FIELDS[mode] == set()
    assert len(written) > 10
