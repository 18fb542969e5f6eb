"""Which typed error a failure is: from status, headers, body or exception, with the key scrubbed.

The body is read by `body`, its reason found by the table of `rules`, the numbers
in its text by `facts`.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from hermes_rl import errors as e
from hermes_rl.models.errors.body import Fault, fault_in, fault_of
from hermes_rl.models.errors.facts import facts_of, wait_of
from hermes_rl.models.errors.rules import KINDS, NO_STATUS, reason_by_status, rule_of
from hermes_rl.text import scrub

_CHAIN = 5
"""As many chained exceptions are looked at."""
_TRUST = re.compile(
    r"certificate.{0,3}verify.{0,3}failed|self[- ]signed certificate|certificate has expired"
    r"|unable to get local issuer|hostname mismatch|certificate is not valid",
    re.IGNORECASE,
)
_SILENCE = re.compile(r"timed?[- ]?out|timeout", re.IGNORECASE)
_LOST = re.compile(
    r"connection (error|reset|refused|aborted|closed)|server disconnected|broken pipe"
    r"|network is unreachable|name or service not known|tls|ssl",
    re.IGNORECASE,
)
_RATE_HEADERS = ("x-ratelimit-", "anthropic-ratelimit-", "ratelimit-", "retry-after")
_OF_SIZE = ("format_error", "context_overflow", "payload_too_large")
"""Reasons whose texts may say how much a model takes."""
_MAYBE_SERVED = (502, 504, 520, 522, 524)
"""A gateway gave up on a server that may have worked, and billed, all the same."""


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
    fault = fault_of(body, headers)
    meant = status
    if status >= 500 and fault.status is not None and fault.status < 500:
        meant = fault.status  # a gateway's own trouble is not what it quotes
    found = _find(meant, fault)
    unix = time.time() if now is None else now
    return found.kind(
        scrub(_sentence(status, fault, body, found.kind, headers), secrets),
        status=status,
        request_id=request_id(headers),
        retry_after_s=_wait(found.reason, fault, headers, unix),
        rate_limit=rate_headers(headers),
        served=status in _MAYBE_SERVED,
        reason=found.reason,
        facts=found.facts,
    )


def classify_in_answer(
    error: Any, headers: Mapping[str, str], *, secrets: Iterable[str] = ()
) -> e.ModelError:
    """The typed error of an error inside an answer with status 200, stream or not.

    Args:
        error: the error object, or the whole event that holds it, of any dialect: `{"error": ...}`,
            `{"type": "error", ...}`, `{"type": "response.failed", "response": {"error": ...}}`.
    """
    fault = fault_in(error)
    found = _find(fault.status or NO_STATUS, fault)
    said = fault.message or ", ".join(sorted(fault.codes)) or "without a message"
    # The request was taken on: what it cost is not known.
    return found.kind(
        scrub(f"the answer holds an error: {said}", secrets),
        request_id=request_id(headers),
        retry_after_s=_wait(found.reason, fault, {}, 0.0),  # the headers spoke of a success
        rate_limit=rate_headers(headers),
        served=True,
        reason=found.reason,
        facts=found.facts,
    )


def classify_exception(error: BaseException, *, secrets: Iterable[str] = ()) -> e.ModelError | None:
    """The typed error of an exception of a package or of the system; None for what is no failure of
    a model call (a bug).

    Looks at up to 5 exceptions of its chain, innermost meaning first: an answer that one of them
    holds, a certificate, a timeout, a lost connection.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, e.ModelError):
            return link
    for link in chain:
        answer = _answer_of(link)
        if answer is not None:
            return classify(*answer, secrets=secrets)
    text = scrub(" < ".join(f"{type(x).__name__}: {x}" for x in chain), secrets)
    return _of_transport(chain, text)


def _of_transport(chain: list[BaseException], text: str) -> e.ModelError | None:
    """What went wrong below HTTP; it is not known how far the request came."""
    names = " ".join(type(link).__name__ for link in chain)
    if any(isinstance(x, ssl.SSLCertVerificationError) for x in chain) or _TRUST.search(text):
        return e.AuthError(text, reason="ssl_cert_verification")
    if any(isinstance(x, TimeoutError) for x in chain) or _SILENCE.search(names):
        return e.ModelTimeout(text, served=True)
    if any(isinstance(x, ConnectionRefusedError) for x in chain):
        return e.ConnectionLost(text)
    if any(isinstance(x, OSError) for x in chain) or (
        re.search(r"Connection|Transport|Network|Protocol|ReadError|WriteError", names)
        and (_LOST.search(text) or "API" in names or "HTTP" in names)
    ):
        return e.ConnectionLost(text, served=True)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and len(seen) < _CHAIN and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _answer_of(error: BaseException) -> tuple[int, dict[str, str], bytes] | None:
    """Status, headers and body that an exception of an SDK holds."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    if not isinstance(status, int) or not 300 <= status < 600:
        return None
    headers = getattr(response, "headers", None)
    low = {str(k).lower(): str(v) for k, v in headers.items()} if headers else {}
    text = getattr(response, "content", None) or getattr(response, "text", None) or str(error)
    return status, low, text if isinstance(text, bytes) else str(text).encode("utf-8", "replace")


class _Found(NamedTuple):
    """Class, reason and facts of a fault."""

    kind: type[e.ModelError]
    reason: e.Reason
    facts: e.Facts


def _find(status: int, fault: Fault) -> _Found:
    """By the table; where no row fits, by the status."""
    rule = rule_of(status, fault)
    reason = rule.reason if rule else reason_by_status(status)
    kind = (rule.kind if rule else None) or KINDS[reason]
    facts = e.Facts()
    if reason in _OF_SIZE:
        no_images = rule.no_images if rule else False
        facts = facts_of(fault.message, fault.numbers, no_images=no_images)
    return _Found(kind, reason, facts)


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


def _wait(reason: e.Reason, fault: Fault, headers: Mapping[str, str], now: float) -> float | None:
    """What the headers ask to wait, else what the text of a refusal for load does."""
    asked = retry_after(headers, now)
    if asked is None and reason in ("rate_limit", "upstream_rate_limit", "overloaded"):
        return wait_of(fault.message)
    return asked


def _sentence(
    status: int,
    fault: Fault,
    body: bytes,
    kind: type[e.ModelError],
    headers: Mapping[str, str],
) -> str:
    said = fault.message or " ".join(sorted(fault.codes)) or body[:200].decode("utf-8", "replace")
    hint = ""
    if status in (301, 302, 303, 307, 308):
        hint = f" redirected to {headers.get('location', 'nowhere')}: use that as base_url"
    elif kind is e.ModelNotFound and fault.message in ("", "Not Found"):
        hint = " (does base_url need /v1 at its end?)"
    return f"{status}{': ' if said.strip() else ''}{said}{hint}"
