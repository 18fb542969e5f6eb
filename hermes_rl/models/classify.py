"""Which typed error a failed answer is: from status, headers and body, with the key scrubbed."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from hermes_rl import errors as e
from hermes_rl.models.dialects.lenient import decode_json

_MAX_TEXT = 500

_OVERFLOW_CODES = (
    "context_length_exceeded",
    "exceed_context_size_error",
    "string_above_max_length",
)
_OVERFLOW = re.compile(
    r"maximum context length|context length exceeded|context window|max_model_len"
    r"|exceeds? (the |its )?(available |maximum |model'?s )?(context|allowed length)"
    r"|longer than the (model's )?(maximum )?(model |context )"
    r"|prompt is too long|input is too long|input length .{0,60}exceed|too many (input )?tokens"
    r"|maximum (model|prompt|input) length|exceed_context_size",
    re.IGNORECASE,
)
_BILLING_CODES = (
    "insufficient_quota", "billing_hard_limit_reached", "billing_not_active",
    "insufficient_balance", "insufficient_credits", "quota_exceeded", "payment_required",
    "account_deactivated",
)  # fmt: skip
_BILLING = re.compile(
    r"insufficient (credits?|balance|quota|funds)|exceeded your current quota"
    r"|credit balance is too low|requires more credits|billing (hard )?limit",
    re.IGNORECASE,
)
_FILTER_CODES = ("content_filter", "content_policy_violation", "responsibleaipolicyviolation")
_FILTER = re.compile(
    r"content (management )?policy|content[_ ]filter|flagged (by|for)|safety system|usage policies",
    re.IGNORECASE,
)
_OVERLOAD_CODES = ("overloaded_error", "overloaded", "engine_overloaded", "server_overloaded")
_OVERLOAD = re.compile(r"overloaded|over capacity|at capacity|queue is full", re.IGNORECASE)
_NO_MODEL_CODES = ("model_not_found", "model_not_supported", "not_found_error", "invalid_model")
_NO_MODEL = re.compile(
    r"model\b.{0,120}(does not exist|not found|not exist|is not supported|not available)"
    r"|no such model|unknown model",
    re.IGNORECASE,
)
_KEYS = re.compile(
    r"(?i)\bbearer\s+[^\s\"',;]+|\b(?:sk|pk|gsk|xai|key|hf|nvapi|or)[-_][a-z0-9_\-*.]{8,}"
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""What a server says stands in logs and on terminals, and must not command them."""

_RATE_HEADERS = ("x-ratelimit-", "anthropic-ratelimit-", "ratelimit-", "retry-after")
_MAYBE_SERVED = (502, 504, 520, 522, 524)
"""A gateway gave up on a server that may have worked, and billed, all the same."""


class _Fault(NamedTuple):
    """What an error body says."""

    codes: tuple[str, ...]
    """Its code and type, lower case."""
    message: str


def classify(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    secrets: Iterable[str] = (),
    now: float | None = None,
) -> e.ModelError:
    """The typed error of an answer that is no success.

    Args:
        status: HTTP status, not 2xx.
        headers: of the answer, names in lower case.
        body: of the answer; need not be JSON.
        secrets: texts that must not appear in the message.
        now: Unix time in seconds, for Retry-After dates.
    """
    fault = _fault_of(body)
    kind = _kind(status, fault)
    text = _sentence(status, fault, body, kind, headers)
    return kind(
        scrub(text, secrets),
        status=status,
        request_id=request_id(headers),
        retry_after_s=retry_after(headers, time.time() if now is None else now),
        served=status in _MAYBE_SERVED,
    )


def classify_in_answer(
    error: Any, headers: Mapping[str, str], *, secrets: Iterable[str] = ()
) -> e.ModelError:
    """The typed error of an error object inside an answer with status 200, stream or not."""
    fault = _fault_in(error)
    code = error.get("code") if isinstance(error, Mapping) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    kind = _kind(status, fault)
    text = f"the answer holds an error: {fault.message or fault.codes or 'without a message'}"
    # The request was taken on: what it cost is not known.
    return kind(scrub(text, secrets), request_id=request_id(headers), served=True)


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """One line of at most 500 characters, without keys (as they are, or in base64)."""
    for secret in secrets:
        text = text.replace(secret, "***")
        text = text.replace(base64.b64encode(secret.encode()).decode(), "***")
    text = _KEYS.sub("***", " ".join(_CONTROL.sub(" ", text).split()))
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def request_id(headers: Mapping[str, str]) -> str | None:
    """The provider's id of a request."""
    return headers.get("x-request-id") or headers.get("request-id")


def rate_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The rate-limit headers of an answer."""
    return {k: v for k, v in headers.items() if k.startswith(_RATE_HEADERS)}


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that the server asks to wait: `retry-after-ms`, or `retry-after` as seconds or
    date."""
    millis = _number(headers.get("retry-after-ms"))
    if millis is not None:
        return millis / 1000
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


def _number(value: str | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < 1e9 else None


def _kind(status: int, fault: _Fault) -> type[e.ModelError]:
    """The class, from what the fault says first and the status after."""
    if status < 500 or status == 503:
        for kind, codes, words in _BY_TEXT.get(status, _BY_TEXT[400]):
            if any(c in codes for c in fault.codes) or words.search(fault.message):
                return kind
    elif _overflows(fault):
        return e.ContextOverflow  # some engines answer 500 to a prompt that does not fit
    return _BY_STATUS.get(status) or (e.ServerError if status >= 500 else e.BadRequest)


def _overflows(fault: _Fault) -> bool:
    return any(c in _OVERFLOW_CODES for c in fault.codes) or bool(_OVERFLOW.search(fault.message))


_Rule = tuple[type[e.ModelError], tuple[str, ...], re.Pattern[str]]
_NEVER = re.compile(r"(?!)")
_QUOTA: _Rule = (e.BillingError, _BILLING_CODES, _BILLING)
_FULL: _Rule = (e.ContextOverflow, _OVERFLOW_CODES, _OVERFLOW)
_WITHHELD: _Rule = (e.ContentFiltered, _FILTER_CODES, _FILTER)
_BUSY: _Rule = (e.Overloaded, _OVERLOAD_CODES, _OVERLOAD)
_ABSENT: _Rule = (e.ModelNotFound, _NO_MODEL_CODES, _NO_MODEL)

_BY_TEXT: dict[int, tuple[_Rule, ...]] = {
    400: (_QUOTA, _FULL, _WITHHELD, _ABSENT),
    401: (),
    403: (_QUOTA, _WITHHELD),
    404: (_QUOTA,),
    408: (),
    413: (_FULL,),
    # A rate limit may speak of "tokens" and "capacity": only codes tell it from an overload.
    429: (_QUOTA, (e.Overloaded, _OVERLOAD_CODES, _NEVER)),
    503: (_QUOTA, _BUSY),
}
"""Status -> what its body may say beyond it; 400 stands for all others below 500."""

_BY_STATUS: dict[int, type[e.ModelError]] = {
    401: e.AuthError,
    402: e.BillingError,
    403: e.AuthError,
    404: e.ModelNotFound,
    408: e.ServerError,
    409: e.ServerError,
    413: e.PayloadTooLarge,
    425: e.ServerError,
    429: e.RateLimited,
    529: e.Overloaded,
}


def _fault_of(body: bytes) -> _Fault:
    try:
        form = decode_json(body)
    except ValueError:
        return _Fault((), "")
    if isinstance(form, list) and form:
        form = form[0]
    if isinstance(form, Mapping):
        inner = form.get("error", form)
        return _fault_in(inner if isinstance(inner, Mapping | str) else form)
    return _fault_in(form)


def _fault_in(error: Any) -> _Fault:
    if not isinstance(error, Mapping):
        return _Fault((), error if isinstance(error, str) else "")
    codes = tuple(
        str(error[k]).lower() for k in ("code", "type", "status") if isinstance(error.get(k), str)
    )
    found = (error.get(k) for k in ("message", "detail", "error", "msg"))
    message = next((str(m) for m in found if m), "")
    # Aggregators wrap what the provider behind them said.
    meta = error.get("metadata")
    raw = meta.get("raw") if isinstance(meta, Mapping) else None
    return _Fault(codes, f"{message} {raw}" if isinstance(raw, str) else message)


def _sentence(
    status: int,
    fault: _Fault,
    body: bytes,
    kind: type[e.ModelError],
    headers: Mapping[str, str],
) -> str:
    said = fault.message or " ".join(fault.codes) or body[:200].decode("utf-8", "replace")
    hint = ""
    if kind is e.ModelNotFound and fault.message in ("", "Not Found"):
        hint = " (does base_url need /v1 at its end?)"
    elif status in (301, 302, 307, 308):
        hint = f" redirected to {headers.get('location', 'nowhere')}: use that as base_url"
    return f"{status}{': ' if said.strip() else ''}{said}{hint}"
