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
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import HermesError, UserError
from hermes_rl.messages import ToolCall
from hermes_rl.network import open_listener
from hermes_rl.rl.guests import Guests, Step, open_guests

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


class _Session:
    """One WebSocket: one rollout at a time."""

    def __init__(self, guests: Guests) -> None:
        self._rollout = guests.rollout()

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start a rollout. Raises: UserError."""
        index = data.get("index", 0)
        if not isinstance(index, int) or index < 0:
            raise UserError(f"index must be a position in the task stream, not {index!r}")
        return _observed(await self._rollout.reset(index))

    async def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the model request. Raises: UserError."""
        calls = data.get("tool_calls") or []
        try:
            made = [
                ToolCall(
                    id=str(call.get("id") or f"call_{self.steps}_{number}"),
                    name=str(call["name"]),
                    arguments=_text(call.get("arguments") or {}),
                )
                for number, call in enumerate(calls)
            ]
        except (TypeError, KeyError, AttributeError):
            raise UserError("tool_calls must be objects with name and arguments") from None
        return _observed(await self._rollout.step(str(data.get("content") or ""), made))

    @property
    def steps(self) -> int:
        """Answers in this rollout."""
        return self._rollout.steps

    async def close(self) -> None:
        """Cancel the rollout."""
        await self._rollout.close()


def _observed(step: Step) -> dict[str, Any]:
    """Raises: HermesError for a rollout that failed."""
    observation: dict[str, Any] = {"messages": step.messages, "tools": step.tools}
    if (row := step.end) is None:
        return {"observation": observation, "reward": None, "done": False}
    if row.cause is not None:
        raise HermesError(f"{row.cause}: {row.error}")
    observation["end_reason"] = row.end_reason
    return {"observation": observation, "reward": row.reward, "done": True}


def _text(arguments: object) -> str:
    """Arguments as a model writes them: text stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _app(guests: Guests) -> web.Application:
    """The routes of an OpenEnv server."""
    from aiohttp import web

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def schema(request: web.Request) -> web.Response:
        state = {"type": "object", "properties": {"step_count": {"type": "integer"}}}
        return web.json_response({"action": _ACTION, "observation": _OBSERVATION, "state": state})

    async def serve(request: web.Request) -> web.WebSocketResponse:
        if "Origin" in request.headers:  # a browser's; any site can connect to this machine
            raise web.HTTPForbidden(text="requests of web pages are refused\n")
        socket = web.WebSocketResponse(max_msg_size=64 << 20)
        await socket.prepare(request)
        session = _Session(guests)
        try:
            async for message in socket:
                answer = await _answer(session, str(message.data))
                if answer is None:
                    break
                await socket.send_json(answer)
        finally:
            await session.close()
        return socket

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/schema", schema), web.get("/ws", serve)])
    return app


async def _answer(session: _Session, text: str) -> dict[str, Any] | None:
    """The answer to a message; None for `close`."""
    try:
        form = json.loads(text)
        kind, data = form["type"], dict(form.get("data") or {})
    except (ValueError, TypeError, KeyError, RecursionError):
        return _error("INVALID_JSON", "a message is a JSON object with type and data, an object")
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

    async with open_guests(env, split=split, seed=seed, sections=sections) as guests:
        runner = web.AppRunner(_app(guests))
        await runner.setup()
        try:
            listener = open_listener(host, port)
            await web.SockSite(runner, listener).start()
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listener.getsockname()[1]}"
        finally:
            await runner.cleanup()


async def _serve(arguments: argparse.Namespace) -> None:
    async with open_openenv_server(**vars(arguments)) as url:
        print(json.dumps({"base_url": url}), flush=True)
        await asyncio.Event().wait()


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", help="as `hermes-rl env` takes it")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="there is no authentication")
    arguments = parser.parse_args()
    try:
        asyncio.run(_serve(arguments))
    except KeyboardInterrupt:
        pass
    except HermesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
