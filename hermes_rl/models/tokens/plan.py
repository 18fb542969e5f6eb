"""How a run gets exact token ids: what was found at its start, for its workers and its manifest."""

from __future__ import annotations

from typing import Literal

import msgspec

from hermes_rl.events import LogprobsKind

Wanted = Literal["off", "auto", "chat", "vllm", "sglang", "llamacpp"]
"""What a configuration asks for."""
Way = Literal["off", "chat", "vllm", "vllm_generate", "sglang", "llamacpp"]
Spelling = Literal["vllm", "sglang"]
"""Whose names the ids in chat answers have."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the search, as the manifest lists it."""

    what: str
    seconds: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


class TokenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a run gets its ids."""

    way: Way = "off"
    logprobs: LogprobsKind = "unknown"
    """What the engine's logprobs are of."""
    filtered: bool = False
    """Logprobs of kind `sampling` are taken behind top-p, top-k and min-p too."""
    spelling: Spelling | None = None
    """Of a chat endpoint."""
    why: str = ""
    """For people, where there are no ids."""
    template: tuple[str, ...] = ()
    """What is known of the template: where it makes conversations fork."""
    calls: tuple[Asked, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether rows get segments."""
        return self.way != "off"

    def lines(self) -> list[str]:
        """For people, at the start of a run."""
        if not self.exact:
            return [f"no token ids: {self.why}. Rows get no segments"] if self.why else []
        kind = self.logprobs if self.calls else "shown by its answers"
        told = [f"token ids by {self.way}; logprobs: {kind}"]
        if kind == "sampling" and not self.filtered:
            told.append("logprobs do not show top_p, top_k, min_p: nothing trains where these cut")
        return told + [f"template: {line}" for line in self.template]


NO_IDS = TokenPlan()
"""For runs that want none."""
