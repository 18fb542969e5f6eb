"""What one server process serves, as its command line says it; nothing there is secret."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.models.local.engine import EngineSettings

READY = "ready"
TAKEN = "another process is the server of this model already"


@dataclass(frozen=True)
class ServerSettings:
    """What one server process serves, and where its holders find it."""

    socket: Path
    """The pipes' socket, in a folder that only its user can enter."""
    model: str
    description: str
    engine: EngineSettings

    def arguments(self) -> list[str]:
        """The command line that gives these settings back; nothing on it is secret."""
        return [
            *("--socket", str(self.socket), "--model", self.model),
            *("--description", self.description, "--weights", str(self.engine.weights)),
            *("--slots", str(self.engine.slots), "--context", str(self.engine.context)),
            *("--threads", str(self.engine.threads)),
        ]


def parse_arguments(arguments: list[str]) -> ServerSettings:
    """The settings in a command line."""
    parser = argparse.ArgumentParser(prog="python -m hermes_rl.models.local.server")
    parser.add_argument("--socket", type=Path, required=True, help="where holders connect")
    parser.add_argument("--model", required=True, help="the name that requests give")
    parser.add_argument("--description", default="", help="what the model is")
    parser.add_argument("--weights", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--slots", type=int, default=4, help="requests decoded side by side")
    parser.add_argument("--context", type=int, default=4096, help="tokens per slot")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    given = parser.parse_args(arguments)
    engine = EngineSettings(
        weights=given.weights, slots=given.slots, context=given.context, threads=given.threads
    )
    return ServerSettings(
        socket=given.socket, model=given.model, description=given.description, engine=engine
    )
