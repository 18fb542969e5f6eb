"""Whether a failure speaks of the server or of the request."""

from __future__ import annotations

from hermes_rl.errors import (
    ConnectionLost,
    ModelAborted,
    ModelError,
    Outage,
    Overloaded,
    ProtocolError,
    RateLimited,
)


def outage(error: ModelError, spent_s: float) -> Outage:
    """The error that parks the run: nobody was answered for as long as patience lasts."""
    span = f"{spent_s:.0f} s" if spent_s < 120 else f"{spent_s / 60:.0f} min"
    return Outage(
        f"no answer for {span}, the last error: {error}",
        status=error.status,
        request_id=error.request_id,
        served=error.served,
        reason=error.reason,
    )


def no_first_answer(error: ModelError, seconds: float) -> Outage:
    """The error that parks the run early: there never was a sign of life."""
    return Outage(
        f"nothing was answered within {seconds:g} s, the last error: {error}",
        status=error.status,
        request_id=error.request_id,
        served=error.served,
        reason=error.reason,
    )


def refused_alike(text: str, calls: int) -> Outage:
    """The error that parks the run when no request is accepted."""
    return Outage(f"{calls} calls were refused in the same words, none was answered: {text}")


def waiting_helps(error: ModelError) -> bool:
    """The server says that it is too much for now, or is not there."""
    if isinstance(error, RateLimited | Overloaded):
        return True
    return isinstance(error, ConnectionLost) and not error.served


def at_fault(error: ModelError) -> bool:
    """The server took the request on and began to answer: another request may do better, this one
    perhaps not."""
    if isinstance(error, RateLimited | Overloaded | ConnectionLost):
        return False
    return isinstance(error, ProtocolError | ModelAborted) or (
        error.served and error.status is None
    )
