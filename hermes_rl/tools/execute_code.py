"""The tool `execute_code`: a Python program in the sandbox that calls other tools.

`code_runner` runs there, and sends calls over its standard output; the answers come over its
standard input. Calls pass the same checks, hooks and records as those of the model, and no key or
descriptor of the harness is in the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.sandboxes import Process
from hermes_rl.text import cut_middle, strip_ansi, to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool

EXECUTE_CODE = "execute_code"
CALLABLE = (
    *("terminal", "read_file", "write_file", "search_files", "patch"),
    *("web_search", "web_extract"),
)
"""Tools that a program may call, where they are offered."""
MAX_SECONDS = 300.0
MAX_CALLS = 50
MAX_OUTPUT_CHARS = 50_000
_KEPT_CHARS = 2 * MAX_OUTPUT_CHARS
_MAX_LINE = 4 * 2**20
"""Bytes of one message of the program: a call that writes a large file."""
_WRITE_S = 30.0
"""How long a program may take to read an answer."""


@cache
def _runner() -> str:
    return Path(__file__).with_name("code_runner.py").read_text(encoding="utf-8")


@dataclass
class _Program:
    """A running program, and what it has done so far."""

    ctx: ToolContext
    process: Process
    output: str = ""
    dropped: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    untrusted: bool = False
    """It has read web pages or the like: what it prints may come from them."""
    _rest: bytes = b""

    async def run(self, until: float) -> None:
        """Answer its calls until it ends. Raises: TimeoutError; ToolError; errors of tools."""
        while self.exit_code is None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            data = await self.process.read()
            if not data and (ended := await self.process.wait(left, output=True)) is not None:
                data = await self.process.read()
                if not data:
                    self.exit_code = ended
            for line in self._lines(data):
                # A program that does not wait for answers has no more time than others.
                if self.exit_code is not None or time.monotonic() >= until:
                    break
                await self._take(line)

    def _lines(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ToolError(f"the program sent a call of more than {_MAX_LINE:,} bytes")
        return lines

    async def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return  # the program wrote to the channel
        if not isinstance(message, dict):
            return
        if isinstance(text := message.get("out"), str):
            self._print(text.encode("latin-1", "replace").decode("utf-8", "replace"))
        elif isinstance(code := message.get("end"), int):
            self.exit_code = code & 255
        elif isinstance(name := message.get("call"), str):
            answer = await self._call(name, message.get("arguments"))
            async with asyncio.timeout(_WRITE_S):
                await self.process.write(json.dumps(answer).encode() + b"\n")

    def _print(self, text: str) -> None:
        self.output += text
        if len(self.output) > 2 * _KEPT_CHARS:
            cut = cut_middle(self.output, _KEPT_CHARS)
            self.dropped += len(self.output) - len(cut)
            self.output = cut

    async def _call(self, name: str, arguments: Any) -> dict[str, Any]:
        """The answer to a call."""
        if len(self.calls) >= MAX_CALLS:
            return {"ok": False, "text": f"at most {MAX_CALLS} calls of tools in one program"}
        if name not in CALLABLE or self.ctx.call_tool is None:
            return {"ok": False, "text": f"the tool {name} cannot be called from a program"}
        try:
            text = json.dumps(arguments)
        except RecursionError:
            return {"ok": False, "text": "the arguments are nested too deeply"}
        result = await self.ctx.call_tool(name, text)
        self.calls.append({"tool": name, "ok": result.ok})
        self.untrusted |= result.untrusted
        return {"ok": result.ok, "text": result.text}


@tool(name=EXECUTE_CODE, **schema(EXECUTE_CODE), toolset="code_execution")
async def _execute_code(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {status, output, exit_code, tool_calls}."""
    assert ctx.sandbox is not None, "the agent refuses tools that lack their sandbox"
    seconds = min(MAX_SECONDS, ctx.max_timeout_s)
    check = "command -v python3 >/dev/null || exit 127; exec python3 -c "
    process = await ctx.sandbox.start_process(check + shlex.quote(_runner()), lossless=True)
    program, status = _Program(ctx, process), "success"
    try:
        tools = {name: order for name, order in ctx.parameters.items() if name in CALLABLE}
        first = json.dumps({"code": args["code"], "tools": tools}).encode() + b"\n"
        async with asyncio.timeout(_WRITE_S):
            await process.write(first)
        await program.run(time.monotonic() + seconds)
    except TimeoutError:
        status = "timeout"
    except BrokenPipeError:
        program.exit_code = await process.wait(1.0)
    finally:
        await process.kill()
    if program.exit_code == 127 and not program.output:
        raise ToolError("there is no python3 in the sandbox; use the terminal")
    if status != "timeout" and program.exit_code != 0:
        status = "error"
    fields: dict[str, Any] = {
        "status": status,
        "output": cut_middle(strip_ansi(program.output), MAX_OUTPUT_CHARS),
        "exit_code": 124 if status == "timeout" else program.exit_code,
        "tool_calls": program.calls,
    }
    if status == "timeout":
        fields["error"] = f"ended after {seconds:g} s"
    ok = status == "success"
    return ToolResult(text=to_json(fields), ok=ok, data=fields, untrusted=program.untrusted)


execute_code = replace(_execute_code, refunds_turn=True, calls_tools=True)
