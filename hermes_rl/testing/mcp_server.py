"""An MCP server that misbehaves on request, as one file of plain Python, over its standard input
and output: `python3 -c SOURCE [MODE]`, so that it also runs in a sandbox.

Tools: `echo`, `count` (calls so far), `environment`, and one for each thing that can go wrong:
`hang`, `die`, `flood` (a line without an end), `chatter` (notifications without an end), `noise`
(lines before the answer), `big` (a text of SIZE characters), `image`,
`wrong` (an answer of another form), `structured` (not what its schema says), `ask` (a request to
the client, whose error it returns), `fail`.

Modes: `silent` answers nothing; `late` needs MODE's seconds, as in `late:3`; `other` has another
list; `many` has 1,000 tools; `odd` has a tool whose schema is not one; `relist:PATH` changes the
arguments of `echo` once there is a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = (
    "echo", "count", "environment", "hang", "die", "flood", "chatter", "noise", "big", "image",
    "wrong", "structured", "ask", "fail",
)  # fmt: skip
_PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)


def mcp_server_source() -> str:
    """The program, for `python3 -c`."""
    return Path(__file__).read_text(encoding="utf-8")


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def _tools(mode: str, path: str) -> list[dict[str, Any]]:
    properties: dict[str, Any] = {"text": {"type": "string"}, "size": {"type": "integer"}}
    if mode == "relist" and os.path.exists(path):
        properties["text"] = {"type": "integer"}
    schema: Any = {"type": "object", "properties": properties}
    names = {"many": [f"t{n}" for n in range(1000)], "other": ["echo", "more"]}.get(mode, TOOLS)
    made = [{"name": n, "description": f"The tool {n}.", "inputSchema": schema} for n in names]
    for tool in made:
        if tool["name"] == "structured":
            pattern = {"type": "string", "pattern": "^(a+)+$"}
            tool["outputSchema"] = {"type": "object", "properties": {"x": pattern}}
    if mode == "odd":
        made[0]["inputSchema"] = {"type": "string"}
    return made


def _result(name: str, arguments: dict[str, Any], calls: int) -> dict[str, Any]:
    text = {
        "echo": str(arguments.get("text", "")),
        "count": str(calls),
        "environment": json.dumps(dict(os.environ)),
        "big": "x" * int(arguments.get("size", 0)),
    }.get(name, name)
    if name == "wrong":
        return {"content": "text", "isError": "perhaps"}
    if name == "image":
        return {"content": [{"type": "image", "data": _PIXEL, "mimeType": "image/png"}]}
    if name == "structured":
        return {"content": [], "structuredContent": {"x": "a" * 60 + "!"}}
    return {"content": [{"type": "text", "text": text}], "isError": name == "fail"}


def _misbehave(name: str) -> None:
    while name == "hang":
        time.sleep(3600)
    if name == "die":
        os._exit(3)
    while name == "flood":
        sys.stdout.write("x" * 65_536)
    while name == "chatter":
        _send({"method": "notifications/message", "params": {"level": "info", "data": "x" * 9000}})
    if name == "noise":
        print("starting\n{not json\n[]\n{}\n" + '{"id": 99, "result": {}}', flush=True)


def main() -> None:
    """Serve until standard input ends."""
    mode, _, value = (sys.argv[1] if len(sys.argv) > 1 else "").partition(":")
    calls, request = 0, None
    if mode == "late":
        time.sleep(float(value))
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if mode == "silent" or number is None:
            continue
        if method is None and request is not None:
            text = json.dumps(message.get("error") or message)
            _send({"id": request, "result": {"content": [{"type": "text", "text": text}]}})
        elif method == "initialize":
            about = {"name": "bad", "version": "1"}
            version = message["params"]["protocolVersion"]
            answer = {"protocolVersion": version, "capabilities": {"tools": {}}}
            _send({"id": number, "result": {**answer, "serverInfo": about}})
        elif method == "tools/list":
            _send({"id": number, "result": {"tools": _tools(mode, value)}})
        elif method == "tools/call":
            name, calls = message["params"]["name"], calls + 1
            _misbehave(name)
            if name == "ask":
                request = number
                params = {"messages": [], "maxTokens": 9}
                _send({"id": "s1", "method": "sampling/createMessage", "params": params})
            else:
                result = _result(name, message["params"].get("arguments") or {}, calls)
                _send({"id": number, "result": result})
        else:
            _send({"id": number, "error": {"code": -32601, "message": "unknown method"}})


if __name__ == "__main__":
    main()
