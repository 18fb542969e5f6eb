"""An environment on OpenEnv's own server: guess a number that grows with the seed.

Prints its address as JSON; serves until it is killed.
"""

import asyncio
import json
import socket
from typing import Any

import absent  # noqa: F401
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.secret, self._state = 10 + (seed or 0), State(episode_id=episode_id)
        return Hint(text="A number from 10 to 99.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.number == self.secret:
            return Hint(text="Yes.", reward=1.0, done=True)
        return Hint(text="More." if action.number < self.secret else "Less.", reward=-0.25)

    @property
    def state(self) -> State:
        return self._state


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"base_url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener])


if __name__ == "__main__":
    asyncio.run(main())
