"""How an agent behaves: its limits, and the named switches that change what the model sees."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hermes_rl.errors import UserError
from hermes_rl.models.base import Sampling


@dataclass(frozen=True)
class Limits:
    """Bounds of one run of the agent; None is no bound."""

    max_turns: int | None = 30
    """Model calls of the agent."""
    max_tokens: int | None = None
    """Input and output tokens of all calls together."""
    max_seconds: float | None = None
    """Active time: seconds spent in tools and on the sandbox's start and setup."""
    wall_seconds: float | None = None
    """All time; reaching it is nobody's ending but a `Stalled` error."""


@dataclass(frozen=True)
class Policy:
    """Named switches; `PRESETS` has the sets that are in use."""

    name: str
    summary_on_limit: bool = False
    """At the turn limit, ask once more without tools for a summary."""
    repair_tool_names: bool = False
    """Take `Read-File` or `functions.read_file` for `read_file`."""
    repair_history: bool = False
    """Send a history that any server takes (`models.pipeline`) instead of the stored text as it
    is: what is recorded stays the model's own."""
    tool_loop_limit: int | None = None
    """End as `tool_loop` when one call gave one result this often in a row; None never does."""
    invalid_turn_limit: int = 3
    """End as `invalid_tool_calls` after so many turns in a row without one valid call."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sent where the user's sampling says nothing."""

    def complete(self, given: Sampling) -> Sampling:
        """The user's sampling, filled up by this policy's own. Idempotent."""
        unset = {k: v for k, v in self.sampling.as_dict().items() if getattr(given, k) is None}
        return replace(given, **unset) if unset else given


PRESETS: dict[str, Policy] = {
    "interactive": Policy(
        "interactive",
        summary_on_limit=True,
        repair_tool_names=True,
        repair_history=True,
        tool_loop_limit=5,
    ),
    "datagen": Policy(
        "datagen",
        summary_on_limit=True,
        repair_tool_names=True,
        repair_history=True,
        tool_loop_limit=5,
    ),
    "rl": Policy("rl", sampling=Sampling(temperature=1.0, top_p=1.0, top_k=-1)),
}
"""`rl` turns every switch off and samples from the policy as it is."""


def preset(name: str) -> Policy:
    """The policy of that name. Raises: UserError that lists the known ones."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r} (known: {', '.join(PRESETS)})")
    return PRESETS[name]
