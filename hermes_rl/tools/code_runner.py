"""The program that runs in the sandbox for `execute_code`; Python 3.6 or newer, standard library.

Standard input and output are the channel: lines of JSON. In: {code, tools: {name: parameters}},
then a reply {ok, text} for each call. Out: {call, arguments}, {out: printed bytes as Latin-1},
{end: exit code}. What the code prints goes through a pipe of its own. Code could write to the
channel, too; it gains nothing by that, since calls are what it is given.
"""

import functools
import json
import linecache
import os
import sys
import threading
import traceback
import types
from typing import Any

NAME = "<execute_code>"


class ToolError(Exception):
    """A tool that failed; its text is the message of the tool."""


def main() -> None:
    """Run the code of the first line."""
    replies, channel = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    writing, calling = threading.Lock(), threading.Lock()

    def send(message: Any) -> None:
        with writing:
            channel.write(json.dumps(message).encode() + b"\n")
            channel.flush()

    def call(name: str, parameters: Any, *values: Any, **named: Any) -> Any:
        placed = {parameters[place]: value for place, value in enumerate(values)}
        with calling:
            send({"call": name, "arguments": {**placed, **named}})
            reply = json.loads(replies.readline())
        if not reply["ok"]:
            raise ToolError(reply["text"])
        try:
            return json.loads(reply["text"])
        except ValueError:
            return reply["text"]

    first = json.loads(replies.readline())
    printed, into = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (into, 1), (into, 2)):
        os.dup2(source, target)
    os.close(into)

    def pass_on() -> None:
        for data in iter(lambda: os.read(printed, 1 << 16), b""):
            send({"out": data.decode("latin-1")})

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    module: Any = types.ModuleType("hermes_tools")
    module.ToolError = ToolError
    for name, parameters in first["tools"].items():
        setattr(module, name, functools.partial(call, name, parameters))
    sys.modules["hermes_tools"], sys.argv = module, ["execute_code"]
    code = run(first["code"])
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    reader.join(2)
    send({"end": code})
    os._exit(code)


def run(text: str) -> int:
    """Run a program as `__main__`; its exit code."""
    linecache.cache[NAME] = (len(text), None, text.splitlines(True), NAME)
    try:
        exec(compile(text, NAME, "exec"), {"__name__": "__main__"})
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 255
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        traceback.print_exception(type(error), error, frames and frames.tb_next)
        return 1
    return 0


if __name__ == "__main__":
    main()
