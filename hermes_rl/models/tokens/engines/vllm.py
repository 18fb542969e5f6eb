"""vLLM: `/v1/completions` with a prompt of ids, and its own `/inference/v1/generate`.

Wire: vLLM's `CompletionRequest`, `GenerateRequest` and their answers, read in November 2026.
`token_ids` of an answer hold the end token that its text leaves out.
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
from hermes_rl.models.wire.usage import count_of, read_chat_usage
from hermes_rl.usage import Usage

_AS_ID = "token_id:"


class VllmCompletions(TokenWire):
    """`/v1/completions`."""

    name = "vllm_completions"
    path = "/completions"
    at_root = False

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """See `TokenWire.body`."""
        sampling = request.sampling
        form: Json = {
            "model": request.model,
            "prompt": prompt,
            **sampling_of(sampling),
            **PENALTIES,
            "max_tokens": sampling.max_tokens,  # None is the rest of the window
            "stop_token_ids": self._stop,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "request_id": request.call_id,
        }
        if request.logprobs:
            form["logprobs"] = 0
        if sampling.seed is not None:
            form["seed"] = sampling.seed
        return form | request.extra

    def read(self, form: Json) -> Answer:
        """See `TokenWire.read`."""
        choice = form["choices"][0]
        logprobs = choice.get("logprobs") or {}
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs"),
            named=_named(logprobs.get("tokens")),
            prompt_ids=choice.get("prompt_token_ids"),
            finish=choice.get("finish_reason"),
            usage=_told(form.get("usage")),
            raw=form.get("usage"),
            answer_id=form.get("id"),
            model=form.get("model"),
            version=form.get("policy_version"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        """See `TokenWire.ask_likely`."""
        form["logprobs"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        """See `TokenWire.likely`."""
        return dict(form["choices"][0]["logprobs"]["top_logprobs"][0])


class VllmGenerate(TokenWire):
    """`/inference/v1/generate`, where it is served. Older versions tell no usage."""

    name = "vllm_generate"
    path = "/inference/v1/generate"

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """See `TokenWire.body`."""
        sampling = request.sampling
        params: Json = {
            **sampling_of(sampling),
            **PENALTIES,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": self._stop,
            "skip_special_tokens": False,
        }
        if request.logprobs:
            params["logprobs"] = 0
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        return {
            "request_id": request.call_id,
            "model": request.model,
            "token_ids": prompt,
            "sampling_params": params | request.extra,
        }

    def read(self, form: Json) -> Answer:
        """See `TokenWire.read`."""
        choice = form["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=[one.get("logprob") for one in content] or None,
            named=_named([one.get("token") for one in content] or None),
            finish=choice.get("finish_reason"),
            usage=_told(form.get("usage")),
            raw=form.get("usage"),
            answer_id=form.get("id") or form.get("request_id"),
            model=form.get("model"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        """See `TokenWire.ask_likely`."""
        form["sampling_params"]["logprobs"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        """See `TokenWire.likely`. Tokens by their bytes: several may look alike."""
        first = form["choices"][0]["logprobs"]["content"][0]
        return {
            (one["token"], tuple(one.get("bytes") or ())): one["logprob"]
            for one in first["top_logprobs"]
        }


def _named(tokens: Any) -> list[int] | None:
    """The ids in `token_id:N`; None where a server writes words instead."""
    if not isinstance(tokens, list):
        return None
    texts = [t.removeprefix(_AS_ID) for t in tokens if isinstance(t, str) and t.startswith(_AS_ID)]
    whole = len(texts) == len(tokens) and all(text.isdecimal() for text in texts)
    return [int(text) for text in texts] if whole else None


def _told(usage: Any) -> Usage:
    """What an answer says of its usage; one of the two counts alone is evidence too."""
    form = usage if isinstance(usage, dict) else {}
    return read_chat_usage(form) or Usage(
        input_tokens=count_of(form.get("prompt_tokens")),
        output_tokens=count_of(form.get("completion_tokens")),
    )
