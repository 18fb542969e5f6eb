"""llama.cpp's own `/completion` with a prompt of ids.

Wire: llama.cpp's server manual, read in November 2026. It stops at the end tokens that the model's
file names, and takes no others. Logprobs are asked for as they are behind temperature and filters
(`post_sampling_probs`), so that they are those of the distribution that was sampled from.
"""

from __future__ import annotations

import math
from typing import Any

from hermes_rl.models.base import ModelRequest
from hermes_rl.models.tokens.engines.base import Answer, Json, TokenWire, sampling_of
from hermes_rl.models.wire.usage import count_of
from hermes_rl.usage import Usage

_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
_NEUTRAL: Json = {
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
}
"""Its other samplers, each switched off."""


class LlamacppCompletion(TokenWire):
    """`/completion`."""

    name = "llamacpp_completion"
    path = "/completion"

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """See `TokenWire.body`."""
        sampling = request.sampling
        form: Json = {
            "prompt": prompt,
            **_NEUTRAL,
            **sampling_of(sampling),
            "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": False,
        }
        form["top_k"] = max(0, form["top_k"])  # 0 is all here
        if request.logprobs:
            form |= {"n_probs": 1, "post_sampling_probs": True}
        if sampling.seed is not None:
            form["seed"] = sampling.seed % 2**32  # its seeds have 32 bits
        return form | request.extra

    def read(self, form: Json) -> Answer:
        """See `TokenWire.read`."""
        if form.get("truncated"):
            raise TypeError("truncated: the engine cut the prompt")
        ids = form["tokens"]
        told = form.get("completion_probabilities") or []
        named = [one.get("id") for one in told]
        aligned = named == ids
        return Answer(
            ids=ids,
            logprobs=[_logprob(one) for one in told] if aligned else None,
            finish=_FINISH.get(str(form.get("stop_type"))),
            usage=Usage(
                input_tokens=count_of(form.get("tokens_evaluated")),
                output_tokens=count_of(form.get("tokens_predicted")),
                cache_read_tokens=count_of((form.get("timings") or {}).get("cache_n")),
            ),
            raw={name: form.get(name) for name in ("tokens_evaluated", "tokens_predicted")},
            answer_id=form.get("id"),
            model=form.get("model"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        """See `TokenWire.ask_likely`."""
        form["n_probs"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        """See `TokenWire.likely`."""
        first = form["completion_probabilities"][0]
        listed = first.get("top_probs") or first["top_logprobs"]
        pairs = ((one["id"], _logprob(one)) for one in listed)
        return {token: logprob for token, logprob in pairs if logprob is not None}


def _logprob(one: Json) -> Any:
    """Of the sampled token: as told, or of its probability."""
    if "prob" in one:
        prob = one["prob"]
        return math.log(prob) if type(prob) in (int, float) and prob > 0 else None
    return one.get("logprob")
