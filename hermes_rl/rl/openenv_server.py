"""An environment of hermes_rl as an OpenEnv server: its clients are the policy.

    python -m hermes_rl.rl.openenv_server my_env --port 8000

`reset(index=3)` starts a rollout of the task at that position. An observation has the `messages`
since the last one, in OpenAI's form, and the `tools` that may be called; an action is the answer.
Tools, sandbox, limits and rewards are those of every rollout. The end has the reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes_rl.config import parse_config
from hermes_rl.errors import HermesError, UserError
from hermes_rl.events import EventLog
from hermes_rl.messages import AssistantMessage, ToolCall, to_openai
from hermes_rl.models import Completion, ModelRequest, NoopClient
from hermes_rl.models.providers import Routes
from hermes_rl.record import Trajectory
from hermes_rl.rl.episodes import Host, open_host
from hermes_rl.rl.loading import Opened, env_rows, settle_env
from hermes_rl.rl.trial import item_of
from hermes_rl.rollout import run_attempt
from hermes_rl.tasks import LazyRow
from hermes_rl.wiring import RunContext, open_run_context

if TYPE_CHECKING:
    from aiohttp import web

_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": ["object", "string"]},
    },
    "required": ["name"],
}
_ACTION = {
    "title": "Answer",
    "type": "object",
    "properties": {
        "content": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL},
    },
    "required": ["content"],
}
_OBSERVATION = {
    "title": "Request",
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "end_reason": {"type": "string"},
    },
}


class _Guest(NoopClient):
    """A model whose answers come from a client of the server."""

    endpoint = "openenv"

    def __init__(self) -> None:
        self.requests: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[AssistantMessage] = asyncio.Queue()

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        await self.requests.put(request)
        message = await self.answers.get()
        reason = "tool_calls" if message.tool_calls else "stop"
        return replace(await super().complete(request), message=message, finish_reason=reason)


class _Session:
    """One WebSocket: one rollout at a time."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._work: asyncio.Task[Trajectory] | None = None
        self._guest = _Guest()
        self._seen = self.steps = 0

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start a rollout. Raises: UserError."""
        await self.close()
        index = data.get("index", 0)
        if not isinstance(index, int) or index < 0:
            raise UserError(f"index must be a position in the task stream, not {index!r}")
        row = await asyncio.to_thread(self._server.row, index)
        self._guest, self._seen, self.steps = _Guest(), 0, 0
        context = self._server.context
        context = replace(context, models=Routes.to(self._guest, context.share))
        attempt = run_attempt(
            context, item_of(context, row), EventLog(), make=self._server.host.episode
        )
        self._work = asyncio.create_task(attempt)
        return await self._observe()

    async def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the model request. Raises: UserError."""
        if self._work is None or self._work.done():
            raise UserError("no rollout is running. Call reset first")
        calls = data.get("tool_calls") or []
        try:
            made = tuple(
                ToolCall(
                    id=str(call.get("id") or f"call_{self.steps}_{number}"),
                    name=str(call["name"]),
                    arguments=_text(call.get("arguments") or {}),
                )
                for number, call in enumerate(calls)
            )
        except (TypeError, KeyError, AttributeError):
            raise UserError("tool_calls must be objects with name and arguments") from None
        self.steps += 1
        content = str(data.get("content") or "")
        await self._guest.answers.put(AssistantMessage(content=content, tool_calls=made))
        return await self._observe()

    async def close(self) -> None:
        """Cancel the rollout."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work

    async def _observe(self) -> dict[str, Any]:
        """Wait for the next model request, or the end."""
        assert self._work is not None
        requested = asyncio.create_task(self._guest.requests.get())
        await asyncio.wait((requested, self._work), return_when=asyncio.FIRST_COMPLETED)
        if requested.done():
            request = requested.result()
            messages = [to_openai(message) for message in request.conversation]
            new, self._seen = messages[self._seen :], len(messages) + 1
            return _observed({"messages": new, "tools": list(request.tools)})
        requested.cancel()
        row = self._work.result()
        if row.cause is not None:
            raise HermesError(f"{row.cause}: {row.error}")
        return _observed({"messages": [], "tools": [], "end_reason": row.end_reason}, row.reward)


def _observed(observation: dict[str, Any], reward: float | None = None) -> dict[str, Any]:
    return {"observation": observation, "reward": reward, "done": "end_reason" in observation}


def _text(arguments: object) -> str:
    """Arguments as a model writes them: text stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


class OpenEnvServer:
    """The server; made by `open_openenv_server`."""

    def __init__(self, context: RunContext, host: Host, opened: Opened) -> None:
        self.context, self.host = context, host
        self._stream, self._rows = iter(env_rows(opened, None)), list[LazyRow]()

    def row(self, index: int) -> LazyRow:
        """The task at a position of the stream. Blocking. Raises: UserError."""
        while len(self._rows) <= index:
            try:
                self._rows.append(next(self._stream))
            except StopIteration:
                raise UserError(f"there are {len(self._rows)} tasks") from None
        return self._rows[index]

    def app(self) -> web.Application:
        """The routes of an OpenEnv server."""
        from aiohttp import web

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "healthy"})

        async def schema(request: web.Request) -> web.Response:
            state = {"type": "object", "properties": {"step_count": {"type": "integer"}}}
            return web.json_response(
                {"action": _ACTION, "observation": _OBSERVATION, "state": state}
            )

        app = web.Application()
        app.add_routes([web.get("/health", health), web.get("/schema", schema)])
        app.add_routes([web.get("/ws", self._serve)])
        return app

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        from aiohttp import web

        socket = web.WebSocketResponse(max_msg_size=64 << 20)
        await socket.prepare(request)
        session = _Session(self)
        try:
            async for message in socket:
                answer = await _answer(session, str(message.data))
                if answer is None:
                    break
                await socket.send_json(answer)
        finally:
            await session.close()
        return socket


async def _answer(session: _Session, text: str) -> dict[str, Any] | None:
    """The answer to a message; None for `close`."""
    try:
        form = json.loads(text)
        kind, data = form["type"], form.get("data") or {}
    except (ValueError, TypeError, KeyError):
        return _error("INVALID_JSON", "a message is a JSON object with type and data")
    try:
        match kind:
            case "reset":
                return {"type": "observation", "data": await session.reset(data)}
            case "step":
                return {"type": "observation", "data": await session.step(data)}
            case "state":
                return {"type": "state", "data": {"step_count": session.steps}}
            case "close":
                return None
    except UserError as error:
        return _error("VALIDATION_ERROR", str(error))
    except HermesError as error:
        return _error("SESSION_ERROR", str(error))
    return _error("UNKNOWN_TYPE", f"no message {kind!r}")


def _error(code: str, text: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": text, "code": code}}


@asynccontextmanager
async def open_openenv_server(
    env: str,
    *,
    split: str = "train",
    seed: int = 0,
    port: int = 0,
    host: str = "127.0.0.1",
    sections: Mapping[str, Any] | None = None,
) -> AsyncIterator[str]:
    """Serve an environment to OpenEnv's clients; yields the base URL.

    Args:
        env: as `hermes-rl env` takes it.
        port: 0 takes a free one.
        host: the address to listen at. There is no authentication.
        sections: further sections of a run's configuration, such as `{"sandbox": {...}}`.

    Raises: UserError.
    """
    from aiohttp import web

    data: dict[str, Any] = {"model": {"name": "noop"}, **(sections or {})}
    data["env"] = {"name": env, "split": split, "seed": seed, "mode": "live", **data.get("env", {})}
    settled, opened = settle_env(parse_config(data, "openenv"))
    assert opened is not None
    async with (
        open_run_context(settled, run_id="openenv", concurrency=1024) as context,
        open_host(opened.section) as hosted,
    ):
        runner = web.AppRunner(OpenEnvServer(context, hosted, opened).app())
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _main(arguments: argparse.Namespace) -> None:
    async with open_openenv_server(**vars(arguments)) as url:
        print(json.dumps({"base_url": url}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", help="as `hermes-rl env` takes it")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="there is no authentication")
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
