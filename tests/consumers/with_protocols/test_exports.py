"""Other programs validate the exports: verifiers' episodes, harbor's ATIF, Atropos' server, the
types of OpenAI's package."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from atroposlib.api.server import app
from conftest import Told
from fastapi.testclient import TestClient
from harbor.models.trajectories import Trajectory
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from verifiers.v1.episode import WireEpisode


@pytest.fixture
def words(told: Told) -> Tokenizer:
    return Tokenizer.from_file(str(told.folder / "tokenizer.json"))


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_verifiers_reads_episodes_with_their_tokens(told: Told, words: Tokenizer) -> None:
    trained = []
    for line in lines(told.export("prime-rl")):
        episode = WireEpisode.model_validate(line)
        facts = told.truth[episode.id]
        assert episode.ok
        assert episode.group is not None
        assert episode.group.id == facts["group"]
        (trace,) = episode.traces
        assert trace.reward == facts["reward"]
        assert len(trace.assistant_messages) == len(facts["said"])
        for branch in trace.branches:
            assert branch.trainable
            assert len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs)
            pairs = list(zip(branch.token_ids, branch.sampled_mask, strict=True))
            trained.append(words.decode([i for i, own in pairs if own], skip_special_tokens=False))
            sampled = zip(branch.logprobs, branch.sampled_mask, strict=True)
            assert {p for p, own in sampled if own} == {-0.5}
            assert branch.tools
        assert WireEpisode.model_validate(episode.to_record()).id == episode.id
    told.check(trained)


def test_a_node_holds_the_tokens_of_its_message(told: Told, words: Tokenizer) -> None:
    for line in lines(told.export("prime-rl")):
        for node in line["traces"][0]["nodes"]:
            text = words.decode(node["token_ids"], skip_special_tokens=False)
            if node["message"]["role"] == "assistant" and any(node["mask"]):
                assert node["message"]["content"] in text
            assert len(node["mask"]) == len(node["token_ids"])


def test_harbor_validates_trajectories(told: Told) -> None:
    read = [Trajectory.model_validate(line) for line in lines(told.export("atif"))]
    roots = {t.session_id for t in read}
    assert roots == set(told.truth)
    for name, facts in told.truth.items():
        documents = [t for t in read if t.session_id == name]
        own = [s for t in documents for s in t.steps if s.source == "agent" and s.metrics]
        assert len(own) == len(facts["said"])
        assert documents[0].extra is not None
        assert documents[0].extra["reward"] == facts["reward"]
        assert all(t.agent.tool_definitions for t in documents)
    copied = [s for t in read for s in t.steps if s.is_copied_context]
    assert Counter(s.source for s in copied) == {"user": 2, "agent": 2}
    results = [
        r.content for t in read for s in t.steps if s.observation for r in s.observation.results
    ]
    assert results.count("not JSON") == 2


def test_atropos_takes_groups_and_hands_them_out(told: Told, words: Tokenizer) -> None:
    groups = lines(told.export("atropos"))
    trained = []
    for size in {len(group["tokens"]) for group in groups}:  # it packs no mixture that has a rest
        batch = through_atropos([g for g in groups if len(g["tokens"]) == size], size)
        for group in batch:
            for ids, masks, logprobs in zip(
                group["tokens"], group["masks"], group["inference_logprobs"], strict=True
            ):
                assert len(ids) == len(masks) == len(logprobs)
                assert all(m in (-100, i) for i, m in zip(ids, masks, strict=True))
                assert {p for p, m in zip(logprobs, masks, strict=True) if m == -100} == {1.0}
                own = [m for m in masks if m != -100]
                trained.append(words.decode(own, skip_special_tokens=False))
    told.check(trained)


def through_atropos(groups: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Post groups of one size to its server as an environment does; the batch that it forms."""
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


def test_openai_types_take_every_line(told: Told) -> None:
    message = TypeAdapter(ChatCompletionMessageParam)
    tool = TypeAdapter(ChatCompletionToolParam)
    said = 0
    for line in lines(told.export("openai")):
        assert line["messages"][-1]["role"] == "assistant"
        for form in line["messages"]:
            weight = form.pop("weight", None)
            message.validate_python(form)
            assert weight in (None, 0)
            said += form["role"] == "assistant" and weight is None
        for form in line["tools"]:
            tool.validate_python(form)
    assert said == sum(told.said().values())
