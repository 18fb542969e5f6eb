"""Why a model call failed, and what its error says beside that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "auth", "auth_permanent", "billing", "rate_limit", "upstream_rate_limit", "overloaded",
    "server_error", "timeout", "ssl_cert_verification", "context_overflow", "payload_too_large",
    "image_too_large", "model_not_found", "provider_policy_blocked", "content_policy_blocked",
    "format_error", "invalid_encrypted_content", "multimodal_tool_content_unsupported",
    "thinking_signature", "llama_cpp_grammar_pattern", "model_aborted", "unknown",
]  # fmt: skip
"""Why a model call failed, as finely as recovery needs it; the cause is coarser (docs/errors.md).
"""


@dataclass(frozen=True)
class Facts:
    """What an error's text says beside its reason; None where it does not say."""

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
