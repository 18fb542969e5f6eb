"""verl's agent loops take rollouts of `rollouts()`: every sampled token is in verl's loss, once.

verl's own worker processes, queue, replay buffer, advantages, engine and loss; only the GPUs' part
is absent: the inference engine is ours, and the trained model is not sharded.
"""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from conftest import live_engine, write_tiny_model
from hydra import compose, initialize_config_module
from live_truth import Term, context, read_truth, row_digest
from omegaconf import DictConfig
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle
from verl_engine import Actor, LossRow

from hermes_rl.store import load_run

ROOT = Path(__file__).parents[3]
PROMPTS, SIZE = 2, 4


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tiny model on disk and, for `url`, an engine with its tokenizer."""
    with live_engine(request.config.getoption("--producer"), tmp_path) as url:
        (tmp_path / "url").write_text(url)
        write_tiny_model(tmp_path / "model")
        yield tmp_path


@pytest.fixture
def config(folder: Path) -> DictConfig:
    """verl's configuration, as its command line makes it."""
    loops = folder / "agent.yaml"
    env = f"{ROOT / 'tests/consumers/talk.py'}:Talk"
    target = "verl_agent_loop.HermesAgentLoop"
    loops.write_text(f"- {{name: ours, _target_: {target}, env: '{env}', out: {folder / 'out'}}}\n")
    rollout = "actor_rollout_ref.rollout"
    options = {
        "actor_rollout_ref.model.path": folder / "model",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": SIZE,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.agent_loop_config_path": loops,
        f"{rollout}.agent.default_agent_loop": "ours",
        "trainer.default_local_dir": folder / "checkpoints",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": "true",  # the loss takes our logprobs
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"{name}={value}" for name, value in options.items()])


@pytest.fixture
def manager(folder: Path, config: DictConfig) -> Iterator[AgentLoopManagerTQ]:
    """verl's workers, which get their engine's address from verl's load balancer."""
    paths = f"{ROOT / 'examples'}:{ROOT}"
    start_ray({"env_vars": {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}})
    try:
        tq.init(config.transfer_queue)
        address = (folder / "url").read_text().removeprefix("http://").removesuffix("/v1")
        client = LLMServerClient(config, get_router_handle({address: None}))
        yield AgentLoopManagerTQ.create(config=config, llm_client=client)
        tq.close()
    finally:
        ray.shutdown()


def start_ray(runtime_env: dict[str, Any], tries: int = 3) -> None:
    """Start Ray, which gives up after 30 s; on a busy machine that can be too early."""
    try:
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=runtime_env)
    except Exception as error:  # Ray raises no other class here
        ray.shutdown()
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        start_ray(runtime_env, tries - 1)


def submit(manager: AgentLoopManagerTQ, step: int) -> None:
    """Hand verl's workers the prompts of a step, as its trainer does."""
    uids = [f"step{step}p{n}" for n in range(PROMPTS)]
    row = {"raw_prompt": [{"role": "user", "content": ""}], "index": 0, "data_source": "ours"}
    batch = tensordict_utils.get_tensordict(
        {"uid": uids, **{name: [value] * PROMPTS for name, value in row.items()}},
        {"global_steps": step},
    )
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step}] * PROMPTS
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    manager.generate_sequences(batch)


def terms_of(row: LossRow) -> tuple[list[Term], float]:
    """The loss terms of a row, and the one advantage of its trained tokens."""
    trained = [n for n, kept in enumerate(row.mask) if kept]
    terms = [
        (context(row.ids[: row.first + n]), row.ids[row.first + n], row.old_logprobs[n])
        for n in trained
    ]
    (advantage,) = {row.advantages[n] for n in trained}
    return terms, advantage


def check_logprobs(model: torch.nn.Module, rows: list[LossRow], temperature: float) -> None:
    """In the loss, each token has the logprob that the trained model gives it after its context."""
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row.ids])).logits[0, row.first - 1 : -1] / temperature
        found = logits.log_softmax(-1).gather(1, torch.tensor(row.ids[row.first :])[:, None])
        assert row.logprobs == pytest.approx(found[:, 0].tolist(), abs=1e-4)


def test_verl_trains_each_sampled_token_once(
    folder: Path, config: DictConfig, manager: AgentLoopManagerTQ
) -> None:
    buffer = ReplayBuffer("sync", config.trainer, None, "drop", DictConfig({}), poll_interval=0.2)
    actor, before = Actor(folder / "model", config), Actor(folder / "model", config).module
    rewards: list[float] = []
    for step in (1, 2):
        submit(manager, step)
        batch, _ = buffer.sample(step, "train", PROMPTS)
        for prepare in (PPOTrainer._compute_old_log_prob, PPOTrainer._compute_advantage):
            batch = prepare(SimpleNamespace(config=config), batch, {})
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        rewards += [scores.sum().item() for scores in data["rm_scores"].unbind()]
        actor.update(data, micro_batch_size=4)
        if step == 1:
            check_logprobs(before, actor.rows, actor.temperature)
        tq.kv_clear(keys=[*batch.keys], partition_id="train")
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before.parameters(), actor.module.parameters(), strict=True)
    )
    rows = [(*terms_of(row), reward) for row, reward in zip(actor.rows, rewards, strict=True)]
    out = folder / "out" / "worker-0"
    truth = read_truth(folder, out)
    deliveries = load_run(out).deliveries
    assert deliveries.event.tolist() == ["acknowledged"] * 4
    assert deliveries.step.tolist() == [1, 1, 2, 2]
    digests = Counter(row_digest(terms, reward) for terms, _, reward in rows)
    assert digests == sum((group.digests for group in truth.values()), Counter())
    assert len(truth) == 2 * PROMPTS
    assert sum(len(terms) for terms, _, _ in rows) == sum(g.tokens for g in truth.values())
    assert sum(group.forked for group in truth.values()) == 2 * PROMPTS * SIZE / 2
    for _, advantage, reward in rows:  # of rollouts, although half of them have two rows
        assert advantage == pytest.approx(math.copysign(math.sqrt(3) / 2, reward - 0.5), abs=1e-4)
