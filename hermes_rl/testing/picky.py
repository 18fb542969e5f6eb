"""Refusals of what a request holds: given each time it is there, and never when it is not.

A step's fault (or a model `fault-KIND`) may be one of these. A client that sends the request again
without the thing gets the step's answer, so recovery is tried over a real socket.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from hermes_rl.messages import UserMessage
from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.testing.faults import Refusal

OUTPUT_CAP = 4096
"""The most output tokens of the fault `over_cap`."""
WINDOW = 8192
PROMPT = 6192
"""The window of the fault `over_window`, and what it takes every prompt to be."""
MESSAGES = 3
"""As many messages does the fault `too_many` take."""
IMAGE_CHARS = 300_000
"""Characters of the longest image that the fault `heavy_images` takes, in base64."""

_BASE64 = re.compile(rb"[A-Za-z0-9+/]+")


class Picky(NamedTuple):
    """A refusal, and when it is given."""

    refusal: Refusal
    minds: Callable[[ServedRequest, bytes], bool]


def _refuse(message: str, *, code: str | None = None, status: int = 400) -> Refusal:
    return Refusal(status, "invalid_request_error", code, message)


def _images(request: ServedRequest, body: bytes) -> bool:
    return any(kind in body for kind in (b'"image_url"', b'"input_image"', b'"image"'))


def _heavy(request: ServedRequest, body: bytes) -> bool:
    return any(len(found[0]) > IMAGE_CHARS for found in _BASE64.finditer(body))


def _parts(request: ServedRequest, body: bytes) -> bool:
    users = (m for m in request.messages if isinstance(m, UserMessage))
    return any(isinstance(m.content, list) for m in users)


def _over(cap: int) -> Callable[[ServedRequest, bytes], bool]:
    def minds(request: ServedRequest, body: bytes) -> bool:
        asked = request.sampling.max_tokens
        return asked is None or asked > cap

    return minds


PICKY: dict[str, Picky] = {
    "images": Picky(_refuse("This model does not support image input."), _images),
    "large_images": Picky(
        _refuse("messages.0.content.1.image: image exceeds 5 MB maximum: 7340032 bytes"), _images
    ),
    "heavy_images": Picky(
        _refuse("messages.0.content.1.image: image exceeds 5 MB maximum: 7340032 bytes"), _heavy
    ),
    "parts": Picky(_refuse("Invalid 'content': tool content must be a string"), _parts),
    "signatures": Picky(
        _refuse("messages.1.content.0: Invalid `signature` in `thinking` block"),
        lambda request, body: b'"signature"' in body or b'"redacted_thinking"' in body,
    ),
    "details": Picky(
        _refuse("'messages.1' : property 'reasoning_details' is unsupported"),
        lambda request, body: b'"reasoning_details"' in body,
    ),
    "encrypted": Picky(
        _refuse(
            "The encrypted content gAAA could not be verified.", code="invalid_encrypted_content"
        ),
        lambda request, body: b'"encrypted_content"' in body,
    ),
    "grammar": Picky(
        _refuse("JSON schema conversion failed: Pattern must start with '^' and end with '$'"),
        lambda request, body: b'"pattern"' in body or b'"format"' in body,
    ),
    "old_cap": Picky(
        _refuse(
            "Unsupported parameter: 'max_tokens' is not supported with this model."
            " Use 'max_completion_tokens' instead.",
            code="unsupported_parameter",
        ),
        lambda request, body: b'"max_tokens"' in body,
    ),
    "seed": Picky(
        _refuse(
            "Unsupported parameter: 'seed' is not supported with this model.",
            code="unsupported_parameter",
        ),
        lambda request, body: b'"seed"' in body,
    ),
    "sampling": Picky(
        _refuse("Unrecognized request arguments supplied: temperature, top_k, top_p"),
        lambda request, body: any(
            name in body for name in (b'"temperature"', b'"top_p"', b'"top_k"')
        ),
    ),
    "over_cap": Picky(
        _refuse(
            "max_tokens is too large: 99999. This model supports at most"
            f" {OUTPUT_CAP} completion tokens, whereas you provided 99999."
        ),
        _over(OUTPUT_CAP),
    ),
    "over_window": Picky(
        _refuse(
            "input length and `max_tokens` exceed context limit:"
            f" {PROMPT} + 99999 > {WINDOW}, decrease input length or `max_tokens` and try again"
        ),
        _over(WINDOW - PROMPT),
    ),
    "too_many": Picky(
        _refuse("Your input exceeds the context window.", code="context_length_exceeded"),
        lambda request, body: len(request.messages) > MESSAGES,
    ),
}
"""Fault kind -> what is refused, as long as it is in the request."""


def picky_refusal(fault: str, request: ServedRequest, body: bytes) -> Refusal | None:
    """The refusal of a request; None when it holds nothing that the fault minds."""
    picky = PICKY.get(fault)
    return picky.refusal if picky is not None and picky.minds(request, body) else None
