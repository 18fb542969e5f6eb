"""verifiers, harbor, Atropos' server and the types of OpenAI's package validate the exports."""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from atroposlib.api.server import app
from conftest import ExportedRun
from fastapi.testclient import TestClient
from harbor.models.trajectories import Trajectory
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from verifiers.v1.episode import WireEpisode


@pytest.fixture
def tokenizer(synthetic_run: ExportedRun) -> Tokenizer:
    return Tokenizer.from_file(str(synthetic_run.folder / "tokenizer.json"))


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.reads("prime-rl")
def test_verifiers_reads_episodes_with_their_tokens(exported_run: ExportedRun) -> None:
    trained = []
    logprobs = []
    for line in lines(exported_run.export("prime-rl")):
        episode = WireEpisode.model_validate(line)
        facts = exported_run.truth[episode.id]
        assert episode.ok
        assert episode.group is not None
        assert episode.group.id == facts["group"]
        (trace,) = episode.traces
        assert trace.reward == facts["reward"]
        assert len(trace.assistant_messages) == len(facts["texts"])
        for branch in trace.branches:
            assert branch.trainable
            assert len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs)
            trained.append((branch.token_ids, branch.sampled_mask))
            pairs = zip(branch.logprobs, branch.sampled_mask, strict=True)
            logprobs += [p for p, sampled in pairs if sampled]
            assert branch.tools
        assert WireEpisode.model_validate(episode.to_record()).id == episode.id
    exported_run.check_tokens(trained)
    assert sorted(logprobs) == pytest.approx(sampled_logprobs(exported_run), abs=1e-5)


def sampled_logprobs(run: ExportedRun) -> list[float]:
    return sorted(p for facts in run.truth.values() for lps in facts["logprobs"] for p in lps)


@pytest.mark.reads("prime-rl")
def test_a_node_contains_the_tokens_of_its_message(
    synthetic_run: ExportedRun, tokenizer: Tokenizer
) -> None:
    for line in lines(synthetic_run.export("prime-rl")):
        for node in line["traces"][0]["nodes"]:
            text = tokenizer.decode(node["token_ids"], skip_special_tokens=False)
            if node["message"]["role"] == "assistant" and any(node["mask"]):
                assert node["message"]["content"] in text
            assert len(node["mask"]) == len(node["token_ids"])


@pytest.mark.reads("atif")
def test_harbor_validates_trajectories_with_their_tokens(exported_run: ExportedRun) -> None:
    read = [Trajectory.model_validate(line) for line in lines(exported_run.export("atif"))]
    assert {t.session_id for t in read} == set(exported_run.truth)
    names = [t.trajectory_id for t in read]
    assert len(set(names)) == len(names)
    for name, facts in exported_run.truth.items():
        documents = [t for t in read if t.session_id == name]
        assert documents[0].extra is not None
        assert documents[0].extra["reward"] == facts["reward"]
        assert all(t.agent.tool_definitions for t in documents)
        metrics = [s.metrics for t in documents for s in t.steps if s.metrics]
        assert [m.prompt_token_ids for m in metrics] == facts["prompts"]
        assert [m.completion_token_ids for m in metrics] == facts["ids"]
        for found, sampled in zip(metrics, facts["logprobs"], strict=True):
            assert found.logprobs == pytest.approx(sampled, abs=1e-5)


@pytest.fixture(scope="module")
def conversations_of() -> Callable[[Path, dict[str, None]], list[dict[str, Any]]]:
    """harbor's own reader of traces.

    Its module imports one that Python 3.11 cannot compile and that this function does not use.
    """
    absent = ModuleType("harbor.agents.factory")
    vars(absent)["AgentFactory"] = object
    with mock.patch.dict(sys.modules, {absent.__name__: absent}):
        traces = importlib.import_module("harbor.utils.traces_utils")
    read: Callable[[Path, dict[str, None]], list[dict[str, Any]]]
    read = traces.extract_conversations_from_trajectory
    return read


@pytest.mark.reads("atif")
def test_harbor_trains_on_sampled_texts(
    exported_run: ExportedRun,
    conversations_of: Callable[[Path, dict[str, None]], Any],
    tmp_path: Path,
) -> None:
    """harbor makes one conversation per trained agent step, which ends with that step's answer."""
    names = ("agent_name", "model_name", "model_provider", "start_time", "run_id")
    trained: Counter[str] = Counter()
    for number, line in enumerate(lines(exported_run.export("atif"))):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(line), encoding="utf-8")
        for made in conversations_of(path, dict.fromkeys(names)):
            assert made["conversations"][-1]["role"] == "assistant"
            trained[normalize(made["conversations"][-1]["content"])] += 1
    assert trained == Counter(normalize(text) for text in exported_run.sampled_texts().elements())


def normalize(text: str) -> str:
    """Remove white space, which formats add between the parts of an answer, and the end token."""
    return "".join(text.removesuffix("<|im_end|>").split())


@pytest.mark.reads("atif")
def test_harbor_finds_contexts_and_results(synthetic_run: ExportedRun) -> None:
    read = [Trajectory.model_validate(line) for line in lines(synthetic_run.export("atif"))]
    copied = [s for t in read for s in t.steps if s.is_copied_context]
    assert Counter(s.source for s in copied) == {"user": 2, "agent": 6}  # 4 were not sampled
    results = [
        r.content for t in read for s in t.steps if s.observation for r in s.observation.results
    ]
    assert results.count("not JSON") == 2


@pytest.mark.reads("atropos")
def test_atropos_accepts_groups_and_returns_them_as_batches(exported_run: ExportedRun) -> None:
    groups = lines(exported_run.export("atropos"))
    trained = []
    sampled = []
    for size in {len(group["tokens"]) for group in groups}:  # a batch has groups of one size
        batch = exchange_with_atropos([g for g in groups if len(g["tokens"]) == size], size)
        for group in batch:
            for ids, masks, logprobs in zip(
                group["tokens"], group["masks"], group["inference_logprobs"], strict=True
            ):
                assert len(ids) == len(masks) == len(logprobs)
                assert all(m in (-100, i) for i, m in zip(ids, masks, strict=True))
                assert {p for p, m in zip(logprobs, masks, strict=True) if m == -100} == {1.0}
                sampled += [p for p, m in zip(logprobs, masks, strict=True) if m != -100]
                trained.append((ids, [m != -100 for m in masks]))
    exported_run.check_tokens(trained)
    assert sorted(sampled) == pytest.approx(sampled_logprobs(exported_run), abs=1e-5)


def exchange_with_atropos(groups: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Post groups of one size to the server as an environment does, and return the batch."""
    trainer = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": size * len(groups),
        "max_token_len": 8192,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 1,
    }
    with TestClient(app) as client:
        client.get("/reset_data")
        assert client.post("/register", json=trainer).status_code == 200
        for group in groups:
            assert client.post("/scored_data", json=group).json()["status"] == "received"
        batch: list[dict[str, Any]] = client.get("/batch").json()["batch"]
    assert len(batch) == len(groups)
    return batch


@pytest.mark.reads("openai")
def test_openai_types_accept_every_line(exported_run: ExportedRun) -> None:
    message = TypeAdapter(ChatCompletionMessageParam)
    tool = TypeAdapter(ChatCompletionToolParam)
    trained = []
    for line in lines(exported_run.export("openai")):
        assert line["messages"][-1]["role"] == "assistant"
        for form in line["messages"]:
            weight = form.pop("weight", None)
            message.validate_python(form)
            assert weight in (None, 0)
            if form["role"] == "assistant" and weight is None:
                trained.append(normalize(sampled_text(form)))
        for form in line["tools"]:
            tool.validate_python(form)
    assert Counter(trained) == Counter(
        normalize(text) for text in sampled_without_reasoning(exported_run)
    )


def sampled_text(message: dict[str, Any]) -> str:
    """The text that the policy samples for a message."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return (message["content"] or "") + "".join(
        f'<tool_call>{{"name": "{c["name"]}", "arguments": {c["arguments"]}}}</tool_call>'
        for c in calls
    )


def sampled_without_reasoning(run: ExportedRun) -> list[str]:
    """The sampled texts without reasoning, for which the format has no field."""
    return [
        re.sub("<think>.*?</think>", "", text, flags=re.DOTALL)
        for text in run.sampled_texts().elements()
    ]
