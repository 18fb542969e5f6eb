"""How an agent behaves: its limits, and the named switches that change what the model sees."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

from hermes_rl.agent.prompt import LATEST, WORDINGS
from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown
from hermes_rl.models import Sampling
from hermes_rl.tools import Bounds

MAX_DEPTH = 3
"""How deep sub-agents may start further ones."""


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


@runtime_checkable
class Budget(Protocol):
    """Turns that agents may take together."""

    def consume(self) -> bool:
        """Take one turn; False when none is left. Called from the threads of all agents."""
        ...


@runtime_checkable
class Refunds(Protocol):
    """What a budget may offer beside `Budget`."""

    def refund(self) -> None:
        """Give one turn back."""
        ...


class IterationBudget:
    """A number of turns that runs, and agents in any thread, share. A run that gets none ends as
    `max_turns`.

    Args:
        max_total: turns in all.
    """

    def __init__(self, max_total: int) -> None:
        self.max_total = max_total
        self._used = 0
        self._lock = threading.Lock()  # consume is called from several threads

    @property
    def used(self) -> int:
        """Turns that were taken."""
        return self._used

    @property
    def remaining(self) -> int:
        """Turns that are left."""
        return self.max_total - self._used

    def consume(self) -> bool:
        """See `Budget`."""
        with self._lock:
            if self._used >= self.max_total:
                return False
            self._used += 1
            return True

    def refund(self) -> None:
        """See `Refunds`."""
        with self._lock:
            self._used = max(0, self._used - 1)


@dataclass(frozen=True)
class Policy:
    """Named switches; `PRESETS` has the sets that are in use.

    The default of a switch, but for `wording`, is what was done before it existed: a run that an
    earlier version began continues with it.

    An answer that a switch throws away is a recorded, paid call; what a switch writes itself is
    marked as synthetic.
    """

    name: str
    summary_on_limit: bool = False
    """At the turn limit, ask once more without tools for a summary."""
    continue_output: bool = False
    """Ask for the rest of a text that was cut at the output limit, with twice the limit."""
    continue_cut_streams: bool = False
    """Ask for the rest of a streamed text whose connection broke, instead of for all of it. Data
    makers leave it off: a fault of the network would stand in their conversations."""
    reask_cut_calls: bool = False
    """Ask again where a tool call was cut, with twice the output limit; then for smaller calls."""
    keep_given_text: bool = False
    """An empty answer behind parts of a cut one ends the run with these parts."""
    reuse_prior_text: bool = False
    """An empty answer after housekeeping tools: what was said before them is the answer."""
    nudge_empty: bool = False
    """An empty answer after tool results: say so to the model, once."""
    prefill_reasoning: bool = False
    """Reasoning without an answer: have the model go on from its thoughts, twice."""
    retry_empty: bool = False
    """An empty answer: ask again, three times."""
    fall_back_when_empty: bool = False
    """Still empty: go to the next route, where the endpoint names fallbacks."""
    repair_tool_names: bool = False
    """Take `Read-File`, `functions.read_file` or `read_fil` for `read_file`."""
    reask_arguments: bool = False
    """Ask again, twice, where the arguments of a call are no JSON; then tell the model."""
    drop_duplicate_calls: bool = False
    """Of equal calls in one turn, keep the first."""
    repair_history: bool = False
    """Send a history that any server takes (`models.prepare`) instead of the stored text as it
    is: what is recorded stays the model's own."""
    compress_context: bool = False
    """Compress a context that is full, instead of ending as `context_overflow`."""
    tool_loop_limit: int | None = None
    """End as `tool_loop` when one call gave one result this often in a row; None never does."""
    detect_cycles: bool = False
    """`tool_loop_limit` also bounds runs of one cycle of up to four calls (A B A B), and failures
    of one call, whatever its results."""
    tool_failure_limit: int | None = None
    """End as `tool_loop` when one tool failed this often and nothing that changes something
    succeeded in between; None never does."""
    loop_warnings: bool = False
    """Tell the model, behind a tool's result, that it repeats itself (`tools.guardrails`)."""
    budget_hints: bool = False
    """Tell the model, behind a tool's result, when 70 and 90 % of its turns are used."""
    command_timeout_s: int = 180
    """Seconds that a command of the tool `terminal` has when the model names none."""
    check_commands: bool = False
    """Check commands against patterns of dangerous ones (`tools.approval`)."""
    process_notices: bool = False
    """Tell the model, before its next turn, of background processes that ended, where it asked
    for that."""
    spill_results: bool = False
    """Save a result that is too long to a file of the sandbox and show its beginning, in the place
    of leaving out its middle; of all results of a turn 200,000 characters are shown."""
    short_rereads: bool = False
    """Of a file that is read again, and whose lines are as in an earlier result that the model
    still has before it, say just that."""
    fence_untrusted: bool = False
    """Put results of untrusted tools between marks that say that they are data."""
    context_files: bool = False
    """Join the project's instructions (`AGENTS.md` and the like) to the system prompt."""
    child_turns: int = 50
    """Turns of each sub-agent, at most as many as its parent may take."""
    children_share_turns: bool = False
    """Sub-agents take their turns from those of their parent, in the place of `child_turns`."""
    child_depth: int = 1
    """How deep sub-agents may start further ones, at most 3; 1 is not at all."""
    child_timeout_s: int = 600
    """Seconds that a sub-agent has, from its start."""
    child_sandbox: bool = False
    """Each sub-agent has a copy of its parent's sandbox, in the place of a shell session in it."""
    invalid_turn_limit: int = 3
    """End as `invalid_tool_calls` after so many turns in a row without one valid call."""
    wording: int = LATEST
    """Version of the system prompt and of what the harness says (`agent.prompt.WORDINGS`)."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sent where the user's sampling says nothing."""

    @property
    def loop_bounds(self) -> Bounds | None:
        """When calls that repeat end a run; None never."""
        limit, failures = self.tool_loop_limit, self.tool_failure_limit
        if limit is None and failures is None:
            return None
        more = limit if self.detect_cycles else None
        return Bounds(failing_call=more, failing_tool=failures, repeats=limit, cycles=more)

    def complete(self, chosen: Sampling) -> Sampling:
        """The user's sampling, filled up by this policy's own. Idempotent."""
        unset = {k: v for k, v in self.sampling.as_dict().items() if getattr(chosen, k) is None}
        return replace(chosen, **unset) if unset else chosen

    def switched(self, changes: Mapping[str, Any], place: str = "agent.switches") -> Policy:
        """This policy with single switches set otherwise.

        Args:
            place: where they were written, for the message.

        Raises: UserError for a switch that does not exist, or a value that is none of its kind.
        """
        known = {f.name: f.type for f in fields(self) if f.name not in ("name", "sampling")}
        for name, value in changes.items():
            if name not in known:
                raise UserError(f"{place}: {unknown('switch', name, known)}")
            if fault := _fault(str(known[name]), value):
                raise UserError(f"{place}.{name} must be {fault}, not {value!r}")
        if changes.get("wording", LATEST) not in WORDINGS:
            raise UserError(f"{place}.wording must be from 1 to {LATEST}, not {changes['wording']}")
        if changes.get("child_depth", 1) > MAX_DEPTH:
            depth = changes["child_depth"]
            raise UserError(f"{place}.child_depth must be from 1 to {MAX_DEPTH}, not {depth}")
        return replace(self, **changes) if changes else self


def _fault(kind: str, value: Any) -> str | None:
    """What a value ought to be; None when it is."""
    if kind == "bool":
        return None if isinstance(value, bool) else "true or false"
    if value is None and "None" in kind:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return None if whole else "a whole number from 1" + (" or null" if "None" in kind else "")


_HELPED = Policy(
    "datagen",
    summary_on_limit=True,
    continue_output=True,
    reask_cut_calls=True,
    keep_given_text=True,
    nudge_empty=True,
    prefill_reasoning=True,
    retry_empty=True,
    fall_back_when_empty=True,
    repair_tool_names=True,
    reask_arguments=True,
    drop_duplicate_calls=True,
    repair_history=True,
    compress_context=True,
    tool_loop_limit=5,
    command_timeout_s=60,
    detect_cycles=True,
    tool_failure_limit=8,
    loop_warnings=True,
    budget_hints=True,
    check_commands=True,
    process_notices=True,
    spill_results=True,
    short_rereads=True,
    fence_untrusted=True,
)

PRESETS: dict[str, Policy] = {
    "interactive": replace(
        _HELPED,
        name="interactive",
        continue_cut_streams=True,
        context_files=True,
        reuse_prior_text=True,
        command_timeout_s=180,
    ),
    "datagen": _HELPED,
    "rl": Policy(
        "rl", command_timeout_s=60, sampling=Sampling(temperature=1.0, top_p=1.0, top_k=-1)
    ),
}
"""`rl` turns off every switch that helps the model, and samples from the policy as it is."""


def preset(name: str | Policy) -> Policy:
    """The policy of that name; a policy is its own. Raises: UserError that lists the known ones."""
    if isinstance(name, Policy):
        return name
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(unknown("preset", str(name), PRESETS))
    return PRESETS[name]
