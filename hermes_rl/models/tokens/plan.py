"""How a run gets exact token ids: found when it starts, for its workers and its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from hermes_rl.events import LogprobsKind
from hermes_rl.models.base import Sampling
from hermes_rl.models.tokens.logprobs import shaped_by

Wanted = Literal["off", "auto", "chat", "vllm", "sglang", "llamacpp"]
"""The values of `endpoint.tokens`."""
Way = Literal["off", "chat", "vllm", "vllm_generate", "sglang", "llamacpp"]
Spelling = Literal["vllm", "sglang"]
"""The engine whose field names the ids in chat answers have."""


PROBLEMS = ("no token ids: ", "nothing will be trainable: ")
"""How the lines of a plan begin that leave a trainer nothing to train on."""


class PlanCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the search, as the manifest lists it."""

    what: str
    seconds: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


class TokenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which a run gets token ids, and what is known of its logprobs."""

    way: Way = "off"
    logprobs: LogprobsKind = "unknown"
    """The kind of the engine's logprobs."""
    filtered: bool = False
    """Logprobs of kind `sampling` are taken after top-p, top-k and min-p too."""
    version: str | None = None
    """Of the weights, as the engine named it."""
    spelling: Spelling | None = None
    """Of a chat endpoint."""
    why: str = ""
    """Why there are no ids, for people."""
    template: tuple[str, ...] = ()
    """Where the chat template makes conversations fork."""
    calls: tuple[PlanCall, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether rows get segments."""
        return self.way != "off"

    def lines(
        self, sampling: Sampling | None = None, extra: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return lines of text for the start of a run.

        Args:
            sampling: how the run samples; None leaves out whether that is trainable.
            extra: further fields of its requests' bodies.
        """
        if not self.exact:
            return [f"{PROBLEMS[0]}{self.why}. Rows get no segments"] if self.why else []
        kind = self.logprobs if self.calls else "as its answers report"
        lines = [f"token ids by {self.way}; logprobs: {kind}"]
        if sampling is not None and (
            why := self._untrainable(with_explicit_filters(sampling), extra or {})
        ):
            lines.append(f"{PROBLEMS[1]}{why}")
        return lines + [f"template: {line}" for line in self.template]

    def _untrainable(self, sent: Sampling, extra: Mapping[str, Any]) -> str | None:
        """Return why this sampling gives logprobs that cannot be trained on; None if it does
        not."""
        cut = sent.top_p != 1 or sent.top_k != -1 or sent.min_p != 0
        if self.logprobs == "raw" and (cut or sent.temperature != 1):
            return (
                "logprobs are of the model before temperature and filters. Use temperature 1 and "
                "top_p 1, or an engine that returns those it sampled from"
            )
        if self.logprobs == "raw" and (shaped := shaped_by(extra)):
            return f"logprobs are of the model before {', '.join(shaped)}. Leave that out"
        if self.logprobs == "sampling" and sent.temperature == 0:
            return "at temperature 0 the likeliest token is taken, whatever its logprob"
        if self.logprobs == "sampling" and cut and not self.filtered:
            return "logprobs do not show top_p, top_k, min_p. Leave these out"
        return None


def with_explicit_filters(sampling: Sampling) -> Sampling:
    """Return the sampling with temperature and filters set, neutral where they were not. Servers
    take what is left out from the model's files (`generation_config.json`) or their own defaults,
    and the logprobs would be of another distribution."""
    unlimited = sampling.top_k is None or sampling.top_k <= 0
    return replace(
        sampling,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=-1 if unlimited else sampling.top_k,
        min_p=0.0 if sampling.min_p is None else sampling.min_p,
    )


NO_IDS = TokenPlan()
"""For runs that want none."""
