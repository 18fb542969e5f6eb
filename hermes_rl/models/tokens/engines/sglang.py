"""SGLang's own `/generate` with `input_ids`.

Wire: SGLang's `GenerateReqInput` and the `meta_info` of its answers, read in November 2026. The
logprobs of the answer are triples (logprob, id, text), so they name their tokens.
"""

from __future__ import annotations

from typing import Any

from hermes_rl.models.base import ModelRequest
from hermes_rl.models.tokens.engines.base import (
    PENALTIES,
    Answer,
    Json,
    TokenWire,
    sampling_of,
)
from hermes_rl.models.wire.usage import count_of
from hermes_rl.usage import Usage


class SglangGenerate(TokenWire):
    """`/generate`."""

    name = "sglang_generate"
    path = "/generate"

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """See `TokenWire.body`."""
        sampling = request.sampling
        params: Json = {
            **sampling_of(sampling),
            **PENALTIES,
            "max_new_tokens": sampling.max_tokens,  # None is the rest of the window
            "stop_token_ids": self._stop,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        return {
            "rid": request.call_id,
            "input_ids": prompt,
            "sampling_params": params | request.extra,
            "return_logprob": request.logprobs,
            "stream": False,
        }

    def read(self, form: Json) -> Answer:
        """See `TokenWire.read`."""
        meta = form["meta_info"]
        triples = meta.get("output_token_logprobs")
        named = None if triples is None else [triple[1] for triple in triples]
        return Answer(
            ids=_sampled(form.get("output_ids"), named, meta.get("finish_reason")),
            logprobs=None if triples is None else [triple[0] for triple in triples],
            named=named,
            finish=_finish(meta.get("finish_reason")),
            usage=Usage(
                input_tokens=count_of(meta.get("prompt_tokens")),
                output_tokens=count_of(meta.get("completion_tokens")),
                cache_read_tokens=count_of(meta.get("cached_tokens")),
            ),
            raw={
                name: meta.get(name)
                for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
            },
            answer_id=meta.get("id"),
            version=meta.get("weight_version"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        """See `TokenWire.ask_likely`."""
        form["top_logprobs_num"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        """See `TokenWire.likely`."""
        return {triple[1]: triple[0] for triple in form["meta_info"]["output_top_logprobs"][0]}


def _sampled(ids: Any, named: list[Any] | None, reason: Any) -> Any:
    """The sampled ids. Some versions leave the stop token that was matched out of `output_ids`, and
    give its logprob all the same: it was sampled."""
    if named is None:
        return ids
    matched = reason.get("matched") if isinstance(reason, dict) else None
    if ids is None or (named[:-1] == ids and named[-1:] == [matched]):
        return named
    return ids


def _finish(reason: Any) -> str | None:
    """`{"type": "stop", "matched": 2}` -> stop."""
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return kind if isinstance(kind, str) else None
