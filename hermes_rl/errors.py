"""The error model.

The model, in four points:

1. An error is named after the boundary that it crossed (model, sandbox, task, ...), not the call.
2. Each class has a `cause`; `CAUSES` maps it to its consequences: the owner, whether the attempt is
   retried, whether it counts against `max_attempts`, and whether dispatch stops (the breaker).
3. An ending that the policy caused is not an error. `ENDINGS` lists those; they are graded.
4. A failed rollout is data. Only `hermes_rl.rollout` turns an error into a recorded failure;
   cancellation and internal errors pass through it.

    HermesError
    ├── UserError (ValueError)            bad input; one line with place and fix; exit 2
    ├── TaskFault                         bad row, setup failed, image missing
    ├── ModelError                        crossing to the model
    │   ├── AuthError · BillingError · ModelNotFound            open the breaker
    │   ├── RateLimited · Overloaded · ServerError · ModelTimeout · ConnectionLost
    │   ├── ProtocolError · ModelAborted                        like these, worth another try
    │   ├── BadRequest · ContentFiltered
    │   ├── Outage                                              no answer within the retry budget
    │   └── ContextOverflow · PayloadTooLarge                   the policy's, or the prompt's
    ├── SandboxError
    │   ├── SandboxStartError · SandboxDied                     infrastructure
    │   └── SandboxKilled                                       caused by the agent
    ├── ToolError                         shown to the model, ends nothing
    ├── VerifierFault · Stalled · DiskFull                      infrastructure
    ├── CostLimit · Interrupted           the operator's doing; the unit stays open
    ├── UnitCostLimit                     the operator's bound; the unit is given up
    └── StoreError                        run directory corrupt, foreign or of another configuration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Reason = Literal[
    "auth", "auth_permanent", "billing", "rate_limit", "upstream_rate_limit", "overloaded",
    "server_error", "timeout", "ssl_cert_verification", "context_overflow", "payload_too_large",
    "image_too_large", "model_not_found", "provider_policy_blocked", "content_policy_blocked",
    "format_error", "invalid_encrypted_content", "multimodal_tool_content_unsupported",
    "thinking_signature", "llama_cpp_grammar_pattern", "model_aborted", "unknown",
]  # fmt: skip
"""Why a model call failed, in the detail that recovery needs; causes are coarser
(docs/errors.md)."""


@dataclass(frozen=True)
class Facts:
    """Facts in the text of an error; None where it does not contain them."""

    max_output_tokens: int | None = None
    """The most output tokens that the model gives for this request."""
    context_limit: int | None = None
    """The model's window in tokens."""
    prompt_tokens: int | None = None
    """How many tokens the prompt has."""
    no_images: bool = False
    """The model takes no images at all."""
    refused: tuple[str, ...] = ()
    """Sampling parameters that are refused by name, whatever their value (names of `Sampling`)."""
    completion_cap: bool = False
    """The bound of an answer has to be called `max_completion_tokens`."""


Owner = Literal["policy", "infrastructure", "task", "operator"]
"""Who could have caused an ending (DESIGN 3)."""


@dataclass(frozen=True)
class Consequence:
    """The consequences of a cause of failure."""

    owner: Owner
    retry: bool = True
    """The unit is retried while attempts are left."""
    counted: bool = True
    """The failure counts against `max_attempts`."""
    breaker: bool = False
    """Dispatch stops, since all units would fail."""


@dataclass(frozen=True)
class Ending:
    """An ending that the policy caused: the row is in `trajectories` and graded."""

    truncated: bool = False
    """Ended by a limit."""


_INFRA = Consequence("infrastructure")
_UNCOUNTED = Consequence("infrastructure", counted=False)
_BREAKER = Consequence("infrastructure", counted=False, breaker=True)
_TASK = Consequence("task", retry=False)
_OPERATOR = Consequence("operator", counted=False)

CAUSES: dict[str, Consequence] = {
    "rate_limit": _INFRA,
    "overloaded": _INFRA,
    "auth": _BREAKER,
    "billing": _BREAKER,
    "model_not_found": _BREAKER,
    "outage": _BREAKER,
    "model_server": _INFRA,
    "model_timeout": _INFRA,
    "model_protocol": _INFRA,
    "model_aborted": _INFRA,
    "content_filter": _INFRA,
    "sandbox_start": _INFRA,
    "sandbox_died": _INFRA,
    "stalled": _INFRA,
    "tool": _INFRA,
    "verifier": Consequence("infrastructure", retry=False),  # tried in three sandboxes already
    "worker_lost": _UNCOUNTED,  # counted apart: three lost workers give a unit up
    "driver_lost": _UNCOUNTED,  # the driver died, or was suspended: the unit is not the cause
    "disk": _BREAKER,
    "harness": _INFRA,
    "duplicate": _UNCOUNTED,
    "task": _TASK,
    "interrupted": _OPERATOR,
    "cost_limit": Consequence("operator", counted=False, breaker=True),
    "unit_budget": Consequence("operator", retry=False),  # a higher one and --retry-failed
}
"""Cause -> what follows. The one table for retry, grading and exit codes (DESIGN 5.6)."""

ENDINGS: dict[str, Ending] = {
    "answered": Ending(),
    "refused": Ending(),
    "max_turns": Ending(truncated=True),
    "token_limit": Ending(truncated=True),
    "time_limit": Ending(truncated=True),
    "output_truncated": Ending(truncated=True),
    "context_overflow": Ending(truncated=True),
    "empty_response": Ending(),
    "invalid_tool_calls": Ending(),
    "tool_loop": Ending(),
    "sandbox_killed": Ending(),
}
"""end_reason -> its ending, for all endings that are graded."""

CANCELLED = ("interrupted", "cost_limit")
"""Causes whose end_reason is the cause itself; every other failure has end_reason `error`."""


class ExitCode:
    """Exit codes of every command."""

    DONE = 0
    GIVEN_UP = 1
    BAD_INPUT = 2
    STOPPED = 3
    INTERRUPTED = 130


class HermesError(Exception):
    """Root of all errors of hermes_rl."""

    cause: str = "harness"
    """Key of `CAUSES`; `harness` marks an internal error."""
    result: dict[str, Any] | None = None  # of the `AIAgent` run that it ended
    metrics: Mapping[str, float] = MappingProxyType({})  # of the run of the agent that it ended

    def _render_traceback_(self) -> list[str]:
        """Let notebooks show the message without a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UserError(HermesError, ValueError):
    """Bad input. The message is one line that names the place and the fix."""

    cause = "task"


class TaskFault(HermesError):
    """The task itself cannot be run: bad row, failed setup, missing image."""

    cause = "task"


class ModelError(HermesError):
    """A model call failed.

    Args:
        message: one line, without secrets.
        status: HTTP status, when there was one.
        request_id: the provider's id of the request, when it sent one.
        retry_after_s: seconds that the provider asked to wait.
        rate_limit: the rate-limit headers of the answer, names in lower case.
        served: whether the provider may have served (and billed) the request; True for a cut stream
            or a response that could not be read, False for a refusal before any work.
        reason: the reason, where it is not that of the class.
        facts: what the text says beside that.
    """

    cause = "model_server"
    reason: Reason = "unknown"
    """The reason, in the detail that recovery needs."""
    transient = False
    """Another attempt at the same call may succeed."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        rate_limit: Mapping[str, str] | None = None,
        served: bool = False,
        reason: Reason | None = None,
        facts: Facts | None = None,
    ) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
        self.facts = facts or Facts()
        self.status = status
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.rate_limit: Mapping[str, str] = rate_limit or {}
        self.served = served


class AuthError(ModelError):
    """401 or 403: the key is missing, wrong or not allowed."""

    cause = "auth"
    reason: Reason = "auth"


class BillingError(ModelError):
    """402, or a quota code: the account cannot pay for the call."""

    cause = "billing"
    reason: Reason = "billing"


class ModelNotFound(ModelError):
    """404 for the model or the route."""

    cause = "model_not_found"
    reason: Reason = "model_not_found"


class RateLimited(ModelError):
    """429: wait and try again."""

    cause = "rate_limit"
    reason: Reason = "rate_limit"
    transient = True


class Overloaded(ModelError):
    """529 or 503 with an overload code: the provider is overloaded, independent of our rate."""

    cause = "overloaded"
    reason: Reason = "overloaded"
    transient = True


class ServerError(ModelError):
    """5xx, 408 and other failures on the provider's side."""

    cause = "model_server"
    reason: Reason = "server_error"
    transient = True


class ModelTimeout(ModelError, TimeoutError):
    """No connection, no first byte, or no further byte in time."""

    cause = "model_timeout"
    reason: Reason = "timeout"
    transient = True


class ConnectionLost(ModelError, ConnectionError):
    """The connection could not be made, was reset, or broke off."""

    cause = "model_server"
    reason: Reason = "timeout"
    transient = True


class ProtocolError(ModelError):
    """The response cannot be read: cut body, no JSON, or a shape outside the dialect."""

    cause = "model_protocol"
    reason: Reason = "server_error"
    transient = True


class BadRequest(ModelError):
    """400 and other refusals of this very request: trying again cannot help."""

    cause = "model_protocol"
    reason: Reason = "format_error"


class ContentFiltered(ModelError):
    """The provider's filter withheld the answer."""

    cause = "content_filter"
    reason: Reason = "content_policy_blocked"


class ModelAborted(ModelError):
    """The engine gave the request up (finish reason `abort`)."""

    cause = "model_aborted"
    reason: Reason = "model_aborted"
    transient = True


class ContextOverflow(ModelError):
    """The window is full: graded (`context_overflow`); before any answer the cause is `task`."""

    cause = "model_protocol"
    reason: Reason = "context_overflow"


class PayloadTooLarge(ModelError):
    """413: the body is larger than the provider takes; handled as a context overflow."""

    cause = "model_protocol"
    reason: Reason = "payload_too_large"


class Outage(ModelError):
    """No answer within the retry budget: the run stops, and the unit stays open.

    Its reason is that of the last failure.
    """

    cause = "outage"


class SandboxError(HermesError):
    """A sandbox failed."""

    cause = "sandbox_died"
    in_command = False
    """A command was running in it at that moment."""


class SandboxStartError(SandboxError):
    """The sandbox could not be started."""

    cause = "sandbox_start"


class SnapshotLost(SandboxStartError):
    """A sandbox cannot start from a snapshot: it is damaged, or does not fit."""


class SandboxDied(SandboxError):
    """Lost by a fault of its backend or host; a second time under the same command of a unit ends
    as `sandbox_killed`, graded."""

    command: str | None = None
    """The tool call that was running (`agent.tool_calls`)."""


class SandboxKilled(SandboxError):
    """Ended by the agent on a healthy host: the rollout ends as `sandbox_killed`, graded."""


class ToolError(HermesError):
    """A tool failed in a way that the model should see; the text goes back as the tool's result."""

    cause = "tool"
    kind: str | None = None
    """For programs: the result has it as `type`."""


class NoAnswer(ToolError):
    """A question to the user has no answer.

    Args:
        kind: `no_user`, where none can answer; `no_answer`, where the user gave none; `timeout`.
    """

    def __init__(
        self, message: str, kind: Literal["no_user", "no_answer", "timeout"] = "no_answer"
    ) -> None:
        super().__init__(f"{message}; make a reasonable decision and continue")
        self.kind = kind


class VerifierFault(HermesError):
    """The verifier cannot judge this state."""

    cause = "verifier"


class CannotJudge(VerifierFault):
    """Raised by `compute_reward`: no reward, not 0. It is called twice more on the workspace."""


class NoVerdict(CannotJudge):
    """No verdict after all allowed attempts: another one would only cost more."""


class Stalled(HermesError):
    """The wall limit of an attempt was reached."""

    cause = "stalled"


class DiskFull(HermesError, OSError):
    """The run directory cannot take more bytes."""

    cause = "disk"


class CostLimit(HermesError):
    """A budget is used up."""

    cause = "cost_limit"


class UnitCostLimit(HermesError):
    """The budget of one unit is used up: the unit is given up, and the run continues."""

    cause = "unit_budget"


class Interrupted(HermesError):
    """The operator stopped the rollout."""

    cause = "interrupted"


class StoreError(HermesError):
    """A run directory is corrupt, foreign, locked, newer or of another configuration."""


def cause_of(error: BaseException) -> str:
    """The cause (key of `CAUSES`) of any exception: `disk` for a full disk, else `harness`."""
    if isinstance(error, HermesError):
        return error.cause
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        return "disk"
    return "harness"


def end_reason_of(cause: str) -> str:
    """The end_reason of a failure with this cause: the operator's causes name themselves."""
    return cause if cause in CANCELLED else "error"
