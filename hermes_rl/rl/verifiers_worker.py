"""Runs episodes of a verifiers environment for `hermes_rl.rl.verifiers_env`, in the Python that
has it. hermes_rl is not needed there.

    python verifiers_worker.py tasks|serve '{"id": NAME, "args": {}, "split": "train"}'

`tasks` writes a JSON line for each task. `serve` reads orders, `{"run": ID, "row": ..., "model":
..., "base_url": ...}` or `{"cancel": ID}`, and writes `{"id": ID, ...}` at the end of each episode.
It ends with its input.
"""

import asyncio
import contextlib
import importlib
import io
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions, version
from itertools import islice
from typing import Any

NO_KEY = "HERMES_RL_NO_KEY"
"""A variable that is not set: the endpoint takes no key."""
_STOP_S = 5.0


class LoadedEnvironment:
    """An environment of verifiers up to 0.3: a module with `load_environment`."""

    def __init__(self, load: Callable[..., Any], config: dict[str, Any]) -> None:
        self._env = load(**config["args"])
        rubric = getattr(self._env, "rubric", None)
        if getattr(rubric, "has_group_rewards", False):
            raise ValueError("it rewards whole groups, which is not supported")

    def rows(self, split: str) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield each row of the dataset with its prompt."""
        env = self._env
        for row in env.get_eval_dataset() if split == "eval" else env.get_dataset():
            yield row, row["prompt"]

    def serving(self) -> Any:
        """Open what all episodes share."""
        return contextlib.AsyncExitStack()

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run an episode."""
        from verifiers.types import ClientConfig

        client = ClientConfig(api_base_url=order["base_url"], api_key_var=NO_KEY, max_retries=0)
        made = await self._env.run_rollout(order["row"], client, order["model"], {})
        if error := made.get("error"):
            return {"error": str(error)}
        metrics = {name: _plain(value) for name, value in (made.get("metrics") or {}).items()}
        reward = _plain(made["reward"])
        return {"reward": reward, "parts": [["reward", reward, 1.0]], "metrics": metrics}


def _plain(value: Any) -> Any:
    """Convert a number of numpy or torch."""
    return value.item() if hasattr(value, "item") else value


class TasksetEnvironment:
    """An environment of verifiers from 0.4 on: a taskset and its agents."""

    def __init__(self, config: dict[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        data = dict(config["args"])
        data["taskset"] = {**data.get("taskset", {}), "id": config["id"]}
        self._env = load_environment(resolve_env_config(data))
        if len(agent_config_fields(self._env.config)) != 1:
            raise ValueError("it has several agents; one is supported")
        self._task_class = type(self._env.taskset).task_type()
        self._endless = self._env.taskset.INFINITE and config["tasks"] is None

    def rows(self, split: str) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield the data of each task with its prompt. There are no splits."""
        if self._endless:
            raise ValueError("it has endless tasks: set env.config.tasks")
        for task in self._env.taskset:
            yield task.data.model_dump(mode="json"), task.data.prompt_text

    def serving(self) -> Any:
        """Open what all episodes share."""
        return self._env.serving()

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run an episode."""
        from verifiers.v1 import ModelContext
        from verifiers.v1.clients import EvalClientConfig

        data = self._task_class.data_type().model_validate(order["row"])
        task_class = _with_limits(self._task_class, order["base_url"])
        task = task_class(data, self._env.config.taskset.task)
        client = EvalClientConfig(base_url=order["base_url"], api_key_var=NO_KEY)
        episode = await self._env.run_episode(task, ModelContext(order["model"], client))
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            return {"error": "; ".join(f"{e.type}: {e.message}" for e in errors) or "it failed"}
        if len(episode.traces) != 1:
            return {"error": f"an episode of {len(episode.traces)} agents; one is supported"}
        trace = episode.traces[0]
        parts = [[name, r.score, r.weight] for name, r in trace.rewards.items() if r is not None]
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": trace.reward, "parts": parts, "metrics": metrics}


def _with_limits(task_class: Any, base_url: str) -> Any:
    """Return the class of an episode's task, with a stop: where a limit of the run would refuse the
    next call, verifiers ends and grades the episode."""
    from verifiers.v1 import Trace, stop

    async def limit_of_the_run(self: Any, trace: Any) -> bool:
        def ask() -> bool:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(base_url) as it:
                return bool(json.load(it))

        return await asyncio.to_thread(ask)

    limit_of_the_run.__annotations__ = {"trace": Trace, "return": bool}
    return type(task_class.__name__, (task_class,), {"limit_of_the_run": stop(limit_of_the_run)})


def load(config: dict[str, Any]) -> LoadedEnvironment | TasksetEnvironment:
    """Load an environment by name: of a module, `module:function`, or of a taskset."""
    name, _, function = config["id"].partition(":")
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        found = getattr(importlib.import_module(module), function or "load_environment", None)
    except ModuleNotFoundError as error:
        if error.name != module or function:
            raise
        found = None  # verifiers finds the tasksets that it ships by shorter names
    if function and found is None:
        raise AttributeError(f"{module} has no function {function!r}")
    return LoadedEnvironment(found, config) if found else TasksetEnvironment(config)


def package_of(config: dict[str, Any]) -> str:
    """Return names and versions of the packages that decide about rewards."""
    module = config["id"].partition(":")[0].rsplit("/", 1)[-1].replace("-", "_").split(".")[0]
    names = {"verifiers", *packages_distributions().get(module, ())}
    return " ".join(f"{name}=={version(name)}" for name in sorted(names))


def text_of(prompt: Any) -> str:
    """Return the text of a prompt's last message."""
    content = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def describe(error: BaseException) -> str:
    """Return an error with its causes, on one line."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 4:
        texts.append(" ".join(f"{type(cause).__name__}: {cause}".split()))
        cause = cause.__cause__
    return " <- ".join(texts)[:2000]


class Server:
    """Runs the episodes that its input orders, side by side."""

    def __init__(self, env: LoadedEnvironment | TasksetEnvironment, write: Callable[..., None]):
        self._env, self._write = env, write
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Run until the input ends."""
        reader = asyncio.StreamReader(limit=1 << 30)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self._env.serving():
            self._write(ready=True)
            while line := await reader.readline():
                order = json.loads(line)
                if "run" in order:
                    key = order["run"]
                    self._tasks[key] = asyncio.create_task(self._run(key, order))
                elif order["cancel"] in self._tasks:
                    self._tasks[order["cancel"]].cancel()
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=_STOP_S)

    async def _run(self, key: str, order: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            try:
                self._write(id=key, **await self._env.run(order))
            # A boundary: the environment's code, which may also exit, or cancel itself.
            except BaseException as error:
                self._write(id=key, error=describe(error))
            finally:
                del self._tasks[key]


def end_with_input() -> None:
    """End this process and what it started after its input, even if the environment blocks."""
    input_ = select.poll()
    input_.register(0, 0)
    input_.poll()
    time.sleep(_STOP_S + 2)
    os.killpg(0, signal.SIGKILL)


def exit_with_input() -> None:
    """End this process with the program that reads its tasks, even if the environment blocks."""
    os.read(0, 1)
    os._exit(0)


def main() -> None:
    """Do what the command line says."""
    mode, config = sys.argv[1], json.loads(sys.argv[2])
    # What the environment prints must not mix with the lines.
    pipe = io.FileIO(os.dup(1), "w")
    os.register_at_fork(after_in_child=pipe.close)  # it ends with this process
    out = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="utf-8")
    os.dup2(2, 1)
    os.environ["no_proxy"] = f"{os.environ.get('no_proxy', '')},127.0.0.1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    logging.disable(logging.INFO)

    def write(**form: Any) -> None:
        out.write(json.dumps(form) + "\n")
        out.flush()

    if mode == "tasks":
        threading.Thread(target=exit_with_input, daemon=True).start()
    try:
        env = load(config)
        if mode == "serve":
            threading.Thread(target=end_with_input, daemon=True).start()
            asyncio.run(Server(env, write).serve())
            os.killpg(0, signal.SIGKILL)  # what the environment started ends too
        else:
            package = package_of(config)
            for row, prompt in islice(env.rows(config["split"]), config["tasks"]):
                write(row=row, prompt=text_of(prompt), package=package)
            write(end=True)
    except BrokenPipeError:
        pass  # no more tasks are wanted
    except Exception as error:  # a boundary: the environment's code
        with contextlib.suppress(BrokenPipeError):
            write(failed=describe(error))
    os._exit(0)  # threads of the environment must not hold the process


if __name__ == "__main__":
    main()
