"""verl's AgentLoop: each prompt of verl gets the next group of rollouts of an environment.

    # agent.yaml
    - {name: ours, _target_: verl_agent_loop.HermesAgentLoop, env: gsm8k_python, out: runs/verl}

    PYTHONPATH=examples python -m verl.trainer.main_ppo trainer.val_before_train=false \
        actor_rollout_ref.rollout.agent.agent_loop_config_path=$PWD/agent.yaml \
        actor_rollout_ref.rollout.agent.default_agent_loop=ours ...

The environment owns tasks, tools and rewards; verl's data only count prompts. A rollout whose
history forked has several outputs, and verl's V1 trainer (GRPO) gives them the rollout's advantage.
"""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Self

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from hermes_rl.rl import LiveGroup, Policy, RolloutStream, Row, make_rows, rollouts


class Groups:
    """The stream of one worker process of verl, open until the process ends."""

    opened: ClassVar[Self | None] = None

    def __init__(self, stream: RolloutStream, policy: Policy) -> None:
        self.stream, self.policy = stream, policy
        self.start = asyncio.ensure_future(stream.__aenter__())
        self.taken: dict[str, asyncio.Future[LiveGroup]] = {}
        self.sessions = Counter[str]()

    async def next(self) -> LiveGroup:
        await self.start
        return await anext(self.stream)

    async def take(self, uid: str, step: int, size: int) -> LiveGroup:
        """Return the group of a prompt; the last of its sessions acknowledges it."""
        if uid not in self.taken:
            self.taken[uid] = asyncio.ensure_future(self.next())
        group = await asyncio.shield(self.taken[uid])
        self.sessions[uid] += 1
        if self.sessions[uid] == size:
            del self.taken[uid], self.sessions[uid]
            await group.ack(step)
        return group


class HermesAgentLoop(AgentLoopBase):
    """`env` and `out` come from the agent loop's configuration."""

    def __init__(self, *args: Any, env: str, out: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self.env, self.out, self.size = env, Path(out), self.rollout_config.n

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        uid, session, step = row["uid"], int(row["session_id"]), int(row["global_steps"])
        if Groups.opened is None:
            server, _ = await self.server_manager._acquire_server(uid)
            self.server_manager._release_server(server, uid)
            Groups.opened = Groups.opened or self.open(server, sampling_params)
        groups = Groups.opened
        await groups.policy.set_version(step)
        group = await groups.take(uid, step, self.size)
        rows = make_rows(group, group.members[session], lambda _: step)
        return [self.output(each, step) for each in rows]  # none: verl leaves the session out

    def open(self, server: str, sampling: dict[str, Any]) -> Groups:
        """Start the stream of this process, after the last checkpoint if there is one."""
        name = ray.get_runtime_context().get_actor_name() or "0"
        index = int((re.search(r"\d+", name) or "0")[0])
        saved = Path(self.config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"
        model = self.config.actor_rollout_ref.model.path
        policy = Policy(model=model, base_url=f"http://{server}/v1", tokenizer=model)
        params = {name: sampling[name] for name in ("temperature", "top_p", "top_k")}
        stream = rollouts(
            self.env, policy, out=self.out / f"worker-{index}", seed=index, group_size=self.size,
            ahead=0, resume_step=int(saved.read_text()) if saved.exists() else 0,
            config={"model": params},
        )  # fmt: skip
        return Groups(stream, policy)

    def output(self, row: Row, step: int) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.completion_ids,
            response_mask=row.completion_mask,
            response_logprobs=row.logprobs[row.segment.prompt_len :],
            reward_score=row.member.reward,
            num_turns=row.member.trajectory["turns"],
            metrics={},
            extra_fields={"reward_extra_info": {}, "min_global_steps": row.version},
        )
