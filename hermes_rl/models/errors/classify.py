"""Classify failed model calls as typed errors, from status, headers and body, or an exception.

`body` reads the error body, and the first matching rule of `rules.toml` gives the reason.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from hermes_rl import errors as e
from hermes_rl.models.base import rate_headers, request_id
from hermes_rl.models.errors.body import (
    ErrorContent,
    read_error_body,
    read_error_facts,
    read_error_object,
    read_retry_delay,
    rules,
)
from hermes_rl.text import scrub

NO_STATUS = 0
"""The status of an error in an answer that began with status 200."""
_CHAIN = 5
"""How many chained exceptions are examined."""
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
_UNVERSIONED = re.compile(r"^(?!.*/v1).*/(completions|responses)$")
"""An address of OpenAI's routes without `/v1`."""
_NAMED = re.compile(r"model|deployment", re.IGNORECASE)
"""The server has the route, and misses a model."""
_SIZE_REASONS = ("format_error", "context_overflow", "payload_too_large")
"""Reasons with texts that may state the limits of a model."""
_MAYBE_SERVED = (502, 504, 520, 522, 524)
"""A gateway gave up on a server that may still have served, and billed, the call."""


def classify_response(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    secrets: Iterable[str] = (),
    now: float | None = None,
    url: str = "",
) -> e.ModelError:
    """Return the typed error of an answer without a success status.

    Args:
        status: HTTP status, not 2xx.
        headers: of the answer, names in lower case.
        body: of the answer; need not be JSON.
        secrets: texts that must not appear in the message.
        now: Unix time in seconds, for Retry-After dates.
        url: of the request, for the message.
    """
    content = read_error_body(body, headers)
    effective = status
    if status >= 500 and content.status is not None and content.status < 500:
        effective = content.status  # the gateway quotes the error of its upstream
    rule = table().find(effective, content)
    unix = time.time() if now is None else now
    return rule.kind(
        scrub(_write_message(status, content, body, rule.kind, headers, url), secrets),
        status=status,
        request_id=request_id(headers),
        retry_after_s=_read_delay(rule.reason, content, headers, unix),
        rate_limit=rate_headers(headers),
        served=status in _MAYBE_SERVED,
        reason=rule.reason,
        facts=_facts(rule, content),
    )


def classify_in_answer(
    error: Any, headers: Mapping[str, str], *, secrets: Iterable[str] = ()
) -> e.ModelError:
    """Return the typed error of an error object in an answer or stream with status 200.

    Args:
        error: the error object, or the whole event that holds it, of any dialect: `{"error": ...}`,
            `{"type": "error", ...}`, `{"type": "response.failed", "response": {"error": ...}}`.
    """
    content = read_error_object(error)
    rule = table().find(content.status or NO_STATUS, content)
    text = content.message or ", ".join(sorted(content.codes)) or "without a message"
    # The server accepted the request: its cost is unknown.
    return rule.kind(
        scrub(f"the answer contains an error: {text}", secrets),
        request_id=request_id(headers),
        retry_after_s=_read_delay(rule.reason, content, {}, 0.0),  # the headers belong to a success
        rate_limit=rate_headers(headers),
        served=True,
        reason=rule.reason,
        facts=_facts(rule, content),
    )


def classify_exception(error: BaseException, *, secrets: Iterable[str] = ()) -> e.ModelError | None:
    """Return the typed error of an exception from a package or the system; None for a bug.

    Examines up to 5 exceptions of its chain, the most specific meaning first: an attached response,
    a certificate, a timeout, a lost connection.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, e.ModelError):
            return link
    for link in chain:
        answer = _response_of_exception(link)
        if answer is not None:
            return classify_response(*answer, secrets=secrets)
    text = scrub(" < ".join(f"{type(x).__name__}: {x}" for x in chain), secrets)
    return _classify_transport_error(chain, text)


def _classify_transport_error(chain: list[BaseException], text: str) -> e.ModelError | None:
    """Classify an error below HTTP; how far the request got is unknown."""
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


def _response_of_exception(error: BaseException) -> tuple[int, dict[str, str], bytes] | None:
    """Return status, headers and body of an SDK's exception."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    if not isinstance(status, int) or not 300 <= status < 600:
        return None
    headers = getattr(response, "headers", None)
    low = {str(k).lower(): str(v) for k, v in headers.items()} if headers else {}
    text = getattr(response, "content", None) or getattr(response, "text", None) or str(error)
    return status, low, text if isinstance(text, bytes) else str(text).encode("utf-8", "replace")


@dataclass(frozen=True)
class Rule:
    """One rule of the table, with its statuses resolved."""

    reason: e.Reason
    statuses: frozenset[int]
    codes: frozenset[str]
    pattern: re.Pattern[str] | None
    kind: type[e.ModelError]
    no_images: bool = False
    upstream: bool = False

    def matches(self, status: int, content: ErrorContent, text: str) -> bool:
        """Return whether the rule matches an error with this message."""
        if status not in self.statuses or (self.upstream and not content.upstream):
            return False
        if not self.codes.isdisjoint(content.codes):
            return True
        return self.pattern is not None and self.pattern.search(text) is not None


@dataclass(frozen=True)
class Table:
    """The content of `rules.toml`."""

    rules: tuple[Rule, ...]
    by_status: Mapping[int, e.Reason]
    kinds: Mapping[e.Reason, type[e.ModelError]]
    """The error class of each reason. Its cause is the reason's cause (DESIGN 5.6)."""

    def find(self, status: int, content: ErrorContent) -> Rule:
        """Return the first matching rule, else one for the status alone."""
        text = content.message
        rule = next((rule for rule in self.rules if rule.matches(status, content, text)), None)
        return rule or self._by_status(status)

    def _by_status(self, status: int) -> Rule:
        other: e.Reason = "server_error" if status >= 500 else "format_error"
        reason = self.by_status.get(status, other if status != NO_STATUS else "unknown")
        return Rule(reason, frozenset((status,)), frozenset(), None, self.kinds[reason])


@lru_cache(maxsize=1)
def table() -> Table:
    """Return the table of `rules.toml`, compiled at the first failure."""
    form = rules()
    kinds = {reason: getattr(e, name) for reason, name in form["errors"].items()}
    named = {name: _statuses(listed) for name, listed in form["statuses"].items()}
    rows = tuple(_rule(row, kinds, named) for row in form["rules"])
    return Table(rows, {int(status): why for status, why in form["by_status"].items()}, kinds)


def _rule(row: Any, kinds: Mapping[Any, Any], named: Mapping[str, frozenset[int]]) -> Rule:
    statuses, patterns = row["statuses"], row.get("patterns")
    return Rule(
        reason=row["reason"],
        statuses=named[statuses] if isinstance(statuses, str) else _statuses(statuses),
        codes=frozenset(row.get("codes", ())),
        pattern=re.compile("|".join(patterns), re.IGNORECASE) if patterns else None,
        kind=getattr(e, row["error"]) if "error" in row else kinds[row["reason"]],
        no_images=row.get("no_images", False),
        upstream=row.get("upstream", False),
    )


def _statuses(listed: Iterable[int | str]) -> frozenset[int]:
    """Expand statuses written as numbers and ranges: `[0, "400-404"]`."""
    out: set[int] = set()
    for item in listed:
        first, _, last = str(item).partition("-")
        out.update(range(int(first), int(last or first) + 1))
    return frozenset(out)


def _facts(rule: Rule, content: ErrorContent) -> e.Facts:
    if rule.reason not in _SIZE_REASONS:
        return e.Facts()
    return read_error_facts(content.message, content.numbers, no_images=rule.no_images)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Read the delay from `retry-after-ms`, or from `retry-after` (seconds or a date)."""
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


def _read_delay(
    reason: e.Reason, content: ErrorContent, headers: Mapping[str, str], now: float
) -> float | None:
    """Read the delay from the headers, or from the text of a refusal for load."""
    seconds = retry_after(headers, now)
    if seconds is None and reason in ("rate_limit", "upstream_rate_limit", "overloaded"):
        return read_retry_delay(content.message)
    return seconds


def _write_message(
    status: int,
    content: ErrorContent,
    body: bytes,
    kind: type[e.ModelError],
    headers: Mapping[str, str],
    url: str,
) -> str:
    text = (
        content.message or " ".join(sorted(content.codes)) or body[:200].decode("utf-8", "replace")
    )
    hint = ""
    if status in (301, 302, 303, 307, 308):
        hint = f"redirected to {headers.get('location', 'nowhere')}: use that as base_url"
    elif kind is e.ModelNotFound and _UNVERSIONED.search(url) and not _NAMED.search(text):
        hint = "base_url does not end with /v1, which most servers need"
    parts = "; ".join(filter(None, (text.strip(), hint)))
    return f"{status}: {parts}" if parts else str(status)
