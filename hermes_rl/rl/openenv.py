"""Environments of OpenEnv servers, run here with their rewards.

    hermes-rl env process hermes_rl.rl.openenv:OpenEnv --set env.config.base_url=http://HOST:8000

The wire is that of the package `openenv` 0.10, which is not needed: JSON over the WebSocket `/ws`.
`hermes_rl.rl.openenv_server` is the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from hermes_rl.errors import SandboxDied, TaskFault, UserError
from hermes_rl.messages import Message, UserMessage
from hermes_rl.rl.context import RolloutContext
from hermes_rl.rl.environment import EnvConfig, Environment, make_task
from hermes_rl.rl.view import Rollout
from hermes_rl.tasks import Task

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

_PROMPT = """You act in an environment. Each of your answers is one action: a JSON object of the \
schema below, and nothing else. You get the next observation for it, until the episode ends.

Schema of actions: {schema}
"""
_MODELS_FAULT = ("VALIDATION_ERROR", "EXECUTION_ERROR", "INVALID_JSON")
"""Codes of errors that an action causes."""


class OpenEnvConfig(EnvConfig):
    """What `--set env.config.KEY=VALUE` may say."""

    base_url: str = ""
    """Of the server, `http://HOST:PORT`."""
    resets: tuple[dict[str, Any], ...] = ({},)
    """One task for each: the arguments of `reset`, such as `{"seed": 1}`."""
    observe: bool = True
    """The first observation is in the prompt. It must then be the same after each `reset` with the
    same arguments. False: the model gets it after its first answer, which is not an action."""
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()
    reward_range: tuple[float, float] = (-1e9, 1e9)


class OpenEnv(Environment[OpenEnvConfig]):
    """Each answer of the model is an action; the reward is the sum of the rewards of its steps."""

    name = "openenv"
    Config = OpenEnvConfig

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """One task for each entry of `resets`, in every split."""
        schema = self._ask("/schema")["action"]
        for number, arguments in enumerate(self.config.resets):
            prompt, first = _PROMPT.format(schema=json.dumps(schema)), None
            if self.config.observe:
                first = self._ask("/reset", arguments)["observation"]
                prompt += f"\nFirst observation: {json.dumps(first, ensure_ascii=False)}"
            else:
                prompt += '\nAnswer "start" to get the first observation.'
            yield make_task(
                prompt, id=f"reset{number}", reset=arguments, first=first, schema=schema
            )

    def _ask(self, path: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = None if data is None else json.dumps(data).encode()
        address = self.config.base_url.rstrip("/") + path
        try:
            request = Request(address, body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=60) as answer:
                made: dict[str, Any] = json.load(answer)
        except (URLError, ValueError) as error:
            hint = "env.config.base_url must be that of a running OpenEnv server"
            raise UserError(f"openenv: {address}: {error}. {hint}") from None
        return made

    async def start(self, task: Task, ctx: RolloutContext) -> None:
        """Open a session of the server and reset it."""
        episode = await _Episode.open(self.config.base_url)
        ctx.state.update(episode=episode, reward=0.0, shown=self.config.observe)
        answer = await episode.exchange("reset", task.metadata["reset"])
        ctx.state["first"] = answer["observation"]
        if self.config.observe and answer["observation"] != task.metadata["first"]:
            await episode.session.close()
            raise TaskFault("openenv: `reset` gave another first observation; set observe to false")

    async def reply(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Message | None:
        """Step, and return the observation; None at the end of the episode."""
        if not ctx.state["shown"]:
            ctx.state["shown"] = True
            return _user_message(ctx.state["first"])
        try:
            action = parse_action(trajectory.final_response or "", task.metadata["schema"])
        except ValueError as error:
            return UserMessage(content=f"That is not an action: {error}")
        answer = await ctx.state["episode"].exchange("step", action)
        if "message" in answer:
            return UserMessage(content=f"The action failed: {answer['message']}")
        ctx.state["reward"] += answer.get("reward") or 0.0
        return None if answer.get("done") else _user_message(answer["observation"])

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        """Close the session; return the sum of the rewards."""
        await ctx.state["episode"].session.close()
        return float(ctx.state["reward"])


@dataclass
class _Episode:
    """A session of the server."""

    session: ClientSession
    socket: ClientWebSocketResponse

    @classmethod
    async def open(cls, base_url: str) -> Self:
        """Raises: SandboxDied."""
        from aiohttp import ClientError, ClientSession

        session = ClientSession()
        address = base_url.rstrip("/").replace("http", "ws", 1) + "/ws"
        try:
            return cls(session, await session.ws_connect(address, max_msg_size=0))
        except (ClientError, OSError) as error:
            await session.close()
            raise SandboxDied(f"openenv: {address}: {error}") from None

    def __deepcopy__(self, memo: object) -> Self:
        """States are copied before they are graded; a connection has no copy."""
        return self

    async def exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer. Raises: SandboxDied."""
        from aiohttp import ClientError, WSMsgType

        try:
            await self.socket.send_json({"type": kind, "data": data})
            answer = await self.socket.receive()
        except (ClientError, OSError) as error:
            raise SandboxDied(f"openenv: {error}") from None
        if answer.type != WSMsgType.TEXT:
            raise SandboxDied("openenv: the server closed the session")
        form = json.loads(answer.data)
        made: dict[str, Any] = form["data"]
        if form["type"] == "error" and (kind != "step" or made.get("code") not in _MODELS_FAULT):
            raise SandboxDied(f"openenv: {made.get('code')}: {made.get('message')}")
        return made


def parse_action(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Read an action: a JSON object, in a code block or not, or the value of the one required key.

    Raises: ValueError.
    """
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    try:
        action = json.loads(text)
    except ValueError:
        action = text
    if isinstance(action, dict):
        return action
    required = schema.get("required", [])
    if len(required) != 1:
        raise ValueError("it is not a JSON object")
    return {required[0]: action}


def _user_message(observation: object) -> UserMessage:
    return UserMessage(content=json.dumps(observation, ensure_ascii=False))
