"""Tools in real sandboxes: plain shells, and bubblewrap."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.sandboxes import Bubblewrap, Sandbox, SandboxBackend, SandboxSpec, Subprocess
from hermes_rl.tools import TOOLS, ToolContext, ToolResult, read_arguments


@dataclass
class Bench:
    """Calls tools as the agent does: arguments by way of the schema."""

    sandbox: Sandbox
    context: ToolContext

    async def result(self, name: str, /, **arguments: Any) -> ToolResult:
        tool = TOOLS[name]
        read = read_arguments(json.dumps(arguments), tool.parameters)
        result = await tool.handler(self.context, read)
        assert len(result.text) <= tool.max_chars
        return result

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        """The result as the JSON that the model reads."""
        return json.loads((await self.result(name, **arguments)).text)

    async def sh(self, command: str) -> str:
        return (await self.sandbox.run(command, timeout_s=30)).output


async def bench_of(backend: SandboxBackend, **spec: Any) -> AsyncIterator[Bench]:
    try:
        async with await backend.lease(SandboxSpec(lease="tools-test", **spec)) as sandbox:
            yield Bench(sandbox, ToolContext(sandbox=sandbox))
    finally:
        await backend.aclose()


@pytest.fixture
def open_bench() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """Of a backend and fields of the lease: a context with the tools in such a sandbox."""
    return asynccontextmanager(bench_of)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """In a plain shell: quick, and the same shell protocol as everywhere."""
    async for bench in bench_of(Subprocess(state_dir=tmp_path)):
        yield bench


@pytest.fixture(params=["none", "bubblewrap"])
async def each_bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """In each backend: for one test of each tool's main business."""
    plain = request.param == "none"
    async for bench in bench_of(Subprocess(state_dir=tmp_path) if plain else Bubblewrap()):
        yield bench
