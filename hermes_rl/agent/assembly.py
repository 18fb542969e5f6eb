"""What `AIAgent` needs from the floors above: clients and sandboxes made from what people write."""

from __future__ import annotations

from typing import Protocol

from hermes_rl.agent.parts import Caller
from hermes_rl.models.base import Sampling
from hermes_rl.ports import Recorder
from hermes_rl.sandboxes.base import Sandbox


class Link(Protocol):
    """An open connection to a model, kept for the life of an agent."""

    model: str
    api_mode: str
    endpoint: str
    """Host (and port), for records."""
    sampling: Sampling

    def caller(self, recorder: Recorder) -> Caller:
        """A caller that records its calls there; one for each run of the agent."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


class Assembly(Protocol):
    """Makes parts, on the agent's loop. `hermes_rl.wiring` has the real one."""

    async def connect(self, model: object) -> Link:
        """A link to a model: a name or a `ModelConfig`. Raises: UserError."""
        ...

    async def lease(self, sandbox: object) -> Sandbox:
        """A sandbox: a specification, a backend, a name, or None for the default.

        The agent closes it. Raises: UserError, SandboxStartError.
        """
        ...
