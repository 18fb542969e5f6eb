"""Environments of the package verifiers, run here with their rewards.

    hermes-rl env process hermes_rl.rl.verifiers_env:Verifiers --set env.config.id=NAME \\
        --set env.config.python=PATH

verifiers runs each episode in a process of its own (`verifiers_worker`), in the Python that has the
environment. Its model is a loopback endpoint here, so every call is one of the rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hermes_rl.config_agent import LimitsSection
from hermes_rl.errors import HermesError, NoVerdict, SandboxDied, TaskFault, UserError
from hermes_rl.messages import to_openai
from hermes_rl.models import Completion, Sampling
from hermes_rl.rl.context import RolloutContext
from hermes_rl.rl.environment import EnvConfig, Environment, make_task
from hermes_rl.rl.policy_calls import LimitReached, PolicyCalls
from hermes_rl.rl.rewards import Rewards, part
from hermes_rl.rl.view import Rollout
from hermes_rl.tasks import Task

if TYPE_CHECKING:
    from aiohttp import web

_WORKER = str(Path(__file__).with_name("verifiers_worker.py"))
# With -c, the folder of the worker, whose modules have common names, is not on its path.
_START = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_START_S = 300.0
_STOP_S = 10.0
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_HANDLED = (
    *_SAMPLING, "model", "messages", "tools", "stop", "max_tokens", "max_completion_tokens",
    "reasoning_effort", "n", "stream", "stream_options", "logprobs", "top_logprobs",
)  # fmt: skip
"""Fields of a request that are not passed on as they are."""


class VerifiersConfig(EnvConfig):
    """What `--set env.config.KEY=VALUE` may say."""

    id: str = ""
    """Name of the environment: its package or module, `module:function` for another function than
    `load_environment`, or the id of a taskset."""
    python: str = sys.executable
    """Path of the Python that has verifiers and the environment."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `load_environment`; for a taskset, the configuration of verifiers' `env`."""
    tasks: int | None = None
    """How many tasks, from the first on; None is all. Endless tasksets need it."""
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()
    limits: LimitsSection | None = LimitsSection(max_turns=1_000_000)
    """The environment has its own."""
    reward_range: tuple[float, float] = (-1e9, 1e9)


class Verifiers(Environment[VerifiersConfig]):
    """verifiers runs the episode and computes the reward."""

    name = "verifiers"
    Config = VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__(config)
        if not config.id:
            raise UserError("name an environment: --set env.config.id=NAME")
        self._worker = _Worker(_command(config, "serve"))

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the rows of its dataset, in their order."""
        for number, form in enumerate(_read_tasks(_command(self.config, "tasks", split))):
            text = form["prompt"].strip() or f"Task {number} of {self.config.id}."
            yield make_task(text, id=f"row{number}", row=form["row"], package=form["package"])

    async def setup(self) -> None:
        """Start the process."""
        await self._worker.start()

    async def play(self, task: Task, policy: PolicyCalls, ctx: RolloutContext) -> None:
        """Have verifiers run the episode."""
        ctx.state.update(await self._worker.run(task.metadata["row"], policy))

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """Return what verifiers computed."""
        if "reward" not in ctx.state:
            raise NoVerdict(f"verifiers gave no reward: {trajectory.end_reason}")
        parts = [part(name, score, weight=weight) for name, score, weight in ctx.state["parts"]]
        return Rewards(parts, ctx.state["metrics"])

    async def close(self) -> None:
        """End the process."""
        await self._worker.close()


def _command(config: VerifiersConfig, mode: str, split: str = "train") -> list[str]:
    about = {"id": config.id, "args": config.args, "split": split, "tasks": config.tasks}
    return [config.python, "-c", _START, _WORKER, mode, json.dumps(about)]


def _read_tasks(command: list[str]) -> Iterator[dict[str, Any]]:
    """Raises: UserError."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise UserError(f"verifiers: env.config.python: {error}") from None
    with process:
        assert process.stdout
        try:
            for line in process.stdout:
                form = _checked(line)
                if "end" in form:
                    return
                yield form
            _checked(b"")
        finally:
            process.kill()


def _checked(line: bytes) -> dict[str, Any]:
    """Read a line of the process. Raises: UserError for its failure."""
    try:
        form: dict[str, Any] = json.loads(line)
        why = form.get("failed")
    except (ValueError, AttributeError):
        why = f"its Python wrote {line[:200]!r}" if line else "its process was lost"
    if why is not None:
        raise UserError(f"verifiers: {why}")
    return form


class _Episode:
    """An episode that verifiers runs."""

    def __init__(self, policy: PolicyCalls) -> None:
        self.policy, self.calls = policy, set[asyncio.Task[Any] | None]()
        self.ended: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)


class _Worker:
    """The process that runs episodes, and the endpoint of their model calls.

    A process that was lost is started again for the next episode.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._lock = asyncio.Lock()  # one process, however many rollouts start
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._endpoint: web.AppRunner | None = None
        self._episodes: dict[str, _Episode] = {}

    async def start(self) -> None:
        """Start the endpoint and the process, unless they run. Raises: UserError."""
        async with self._lock:
            if self._endpoint is None:
                self._endpoint = await _listen(self._answer, self._is_over)
            if self._reading is None or self._reading.done():
                await self._stop()
                await self._spawn()

    async def _spawn(self) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                limit=1 << 30,
            )
        except OSError as error:
            raise UserError(f"verifiers: env.config.python: {error}") from None
        self._process = process
        assert process.stdout
        try:
            async with asyncio.timeout(_START_S):
                _checked(await process.stdout.readline())
        except TimeoutError:
            raise UserError(f"verifiers: it did not start within {_START_S:g} s") from None
        self._reading = asyncio.create_task(self._read(process.stdout))

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """Take the ends of episodes until the process is gone."""
        why = "verifiers: its process was lost"
        try:
            while line := await lines.readline():
                episode = self._episodes.get(str((form := _checked(line)).get("id")))
                if episode is not None and not episode.ended.done():
                    episode.ended.set_result(form)
        except UserError as error:
            why = str(error)
        finally:
            for episode in self._episodes.values():
                episode.fail(SandboxDied(why))

    async def run(self, row: Any, policy: PolicyCalls) -> dict[str, Any]:
        """Run an episode; returns its `reward`, `parts` and `metrics`, or nothing if a limit of
        the run ended it and verifiers does not grade that.

        Raises: TaskFault for what the environment raises; errors of the model calls.
        """
        await self.start()
        assert self._endpoint is not None
        port, key, episode = self._endpoint.addresses[0][1], secrets.token_hex(16), _Episode(policy)
        self._episodes[key] = episode
        try:
            base_url = f"http://127.0.0.1:{port}/{key}/v1"
            self._send(run=key, row=row, model=policy.model, base_url=base_url)
            form = await episode.ended
        finally:
            del self._episodes[key]
            for call in episode.calls:
                if call is not None:
                    call.cancel()
            self._send(cancel=key)  # without waiting: it may block
        why = form.get("error")
        if why and not policy.limited:
            raise TaskFault(f"verifiers: {why}")
        return {} if why else {name: form[name] for name in ("reward", "parts", "metrics")}

    def _send(self, **form: Any) -> None:
        """Send an order. If the process is lost, `_read` ends its episodes."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.write(json.dumps(form).encode() + b"\n")

    async def _answer(self, request: web.Request) -> web.Response:
        """Answer a model call of an episode."""
        from aiohttp import web

        episode, task = self._episodes.get(request.match_info["key"]), asyncio.current_task()
        if episode is None:
            return web.json_response({"error": {"message": "this episode is over"}}, status=404)
        episode.calls.add(task)
        try:
            body = await request.json()
            form = _to_openai(await _complete(episode.policy, body), episode.policy.model)
            if not body.get("stream"):
                return web.json_response(form)
            events = f"data: {json.dumps(_as_chunk(form))}\n\ndata: [DONE]\n\n"
            return web.Response(text=events, content_type="text/event-stream")
        except LimitReached as error:
            # With these words verifiers up to 0.3 ends an episode and grades it.
            text = f"{error}. The prompt exceeds the model's context length"
        except Exception as error:  # a boundary: whatever ends the call ends the rollout
            text = str(error) or type(error).__name__
            known = isinstance(error, HermesError)
            episode.fail(error if known else TaskFault(f"verifiers: a bad model call: {text}"))
        finally:
            episode.calls.discard(task)
        return web.json_response({"error": {"message": text}}, status=400)

    async def _is_over(self, request: web.Request) -> web.Response:
        """Answer whether a limit of the run refuses the episode's next call: verifiers from 0.4 on
        asks before it."""
        from aiohttp import web

        episode = self._episodes.get(request.match_info["key"])
        return web.json_response(episode is None or await episode.policy.is_over())

    async def close(self) -> None:
        """End the process and the endpoint."""
        await self._stop()
        if self._endpoint is not None:
            await self._endpoint.cleanup()

    async def _stop(self) -> None:
        """End the process and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin
        process.stdin.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _complete(policy: PolicyCalls, body: dict[str, Any]) -> Completion:
    """Raises: what `PolicyCalls.complete` raises; TaskFault for several answers."""
    if (body.get("n") or 1) != 1:
        raise TaskFault("verifiers: n > 1 is not supported; send several requests")
    stop = body.get("stop") or ()
    sampling = Sampling(
        **{name: body[name] for name in _SAMPLING if name in body},
        max_tokens=body.get("max_tokens") or body.get("max_completion_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        reasoning=body.get("reasoning_effort"),
    )
    extra = {k: v for k, v in body.items() if k not in _HANDLED and v is not None}
    tools = body.get("tools") or ()
    return await policy.complete(body["messages"], tools, sampling=sampling, extra=extra)


def _to_openai(completion: Completion, model: str) -> dict[str, Any]:
    """The body of a response with an answer."""
    usage, reason = completion.usage, completion.finish_reason
    if reason not in ("stop", "length", "tool_calls"):
        reason = "tool_calls" if completion.message.tool_calls else "stop"
    choice = {"index": 0, "message": to_openai(completion.message), "finish_reason": reason}
    form: dict[str, Any] = {
        "id": f"chatcmpl-{completion.request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completion.served_model or model,
        "choices": [choice],
    }
    if usage is not None and usage.total_tokens is not None:
        form["usage"] = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        }
    return form


def _as_chunk(form: dict[str, Any]) -> dict[str, Any]:
    """The body of a response as the only chunk of a stream."""
    (choice,) = form["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": n, **c} for n, c in enumerate(delta["tool_calls"])]
    choices = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
    return {**form, "object": "chat.completion.chunk", "choices": choices}


async def _listen(answer: Any, is_over: Any) -> web.AppRunner:
    """Serve Chat Completions at a free port of the loopback interface."""
    from aiohttp import web

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/{key}/v1/chat/completions", answer), web.get("/{key}/v1", is_over)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner
