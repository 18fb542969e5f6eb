"""The wires of the exact engine: the requests and responses of real engines, with ids.

Sources: vLLM's and SGLang's request and response classes and llama.cpp's server manual, read in
November 2026. Each wire parses a body to an `EngineRequest` and writes an `EngineAnswer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from hermes_rl.testing.exact_engine_model import (
    LogprobsOf,
    Params,
    Sampled,
    Vocabulary,
    reported,
)

Json = dict[str, Any]


class InvalidRequest(ValueError):
    """A request that no engine would accept; answered with 400 and this text."""


@dataclass(frozen=True)
class EngineRequest:
    """A request, whatever its wire."""

    params: Params
    prompt: tuple[int, ...] | None = None
    """None if a chat template makes it."""
    text: str | None = None
    """The prompt as text."""
    model: str | None = None
    top: int | None = None
    """Likeliest tokens to report at each position; None reports no logprobs."""
    ids: bool = True
    """Whether the answer has ids."""
    ids_as_text: bool = False
    """Write tokens beside logprobs as `token_id:N`."""
    skip_special: bool = True
    after_sampling: bool = False
    """Report probabilities of the distribution that was sampled from (llama.cpp)."""
    messages: tuple[Json, ...] = ()
    tools: tuple[Json, ...] = ()


@dataclass(frozen=True)
class EngineAnswer:
    """An answer, before a wire writes it."""

    request: EngineRequest
    prompt: tuple[int, ...]
    sampled: Sampled
    vocabulary: Vocabulary
    kind: LogprobsOf
    request_id: str
    cached: int
    version: str | None
    spelling: str = "vllm"
    """The engine whose field names a chat answer uses for ids."""
    message: Json = field(default_factory=dict)
    """Of a chat answer."""

    @property
    def text(self) -> str:
        """The text of the answer, without its stop token."""
        ids = self.sampled.ids
        shown = ids[:-1] if self.sampled.stop_id is not None else ids
        return self.vocabulary.text(shown, skip_special=self.request.skip_special)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.request.model or "toy"

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One for each sampled token, of the kind that this engine reports."""
        kinds = {"raw": self.sampled.raw, "scaled": self.sampled.scaled}
        return kinds.get(self._kind, self.sampled.processed)

    @property
    def usage(self) -> Json:
        """OpenAI's usage object."""
        prompt, output = len(self.prompt), len(self.sampled.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def likely(self, place: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens of a position."""
        most = self.request.top or 0
        if not most:
            return []
        return reported(self.sampled.top[place], self._kind, self.request.params, most)

    @property
    def _kind(self) -> LogprobsOf:
        return "processed" if self.request.after_sampling else self.kind

    def label(self, token: int) -> str:
        """Return how a token is written beside its logprob."""
        if self.request.ids_as_text:
            return f"token_id:{token}"
        return self.vocabulary.text([token])


class Wire(NamedTuple):
    """One wire."""

    name: str
    read: Callable[[Json], EngineRequest]
    write: Callable[[EngineAnswer], Json]


def _params(form: Mapping[str, Any], limit: str, *, default: int | None) -> Params:
    if form.get("stop"):
        raise InvalidRequest("stop strings: this engine stops only at token ids")
    temperature = form.get("temperature")
    seed = form.get("seed", form.get("sampling_seed"))
    return Params(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=float(form.get("top_p") or 1.0),
        top_k=int(form.get("top_k") or 0),
        min_p=float(form.get("min_p") or 0.0),
        seed=None if seed is None else int(seed),
        max_tokens=form.get(limit, default),
        stop_ids=frozenset(form.get("stop_token_ids") or ()),
    )


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(v) is int for v in value):
        raise InvalidRequest(f"{name} must be a list of token ids")
    return tuple(value)


def _read_completions(form: Json) -> EngineRequest:
    prompt = form.get("prompt")
    request = EngineRequest(
        params=_params(form, "max_tokens", default=16),
        model=form.get("model"),
        top=form.get("logprobs"),
        ids=bool(form.get("return_token_ids")),
        ids_as_text=bool(form.get("return_tokens_as_token_ids")),
        skip_special=form.get("skip_special_tokens", True),
    )
    if isinstance(prompt, str):
        return replace(request, text=prompt)
    return replace(request, prompt=_ids(prompt, "prompt"))


def _write_completions(answer: EngineAnswer) -> Json:
    sampled = answer.sampled
    choice: Json = {
        "index": 0,
        "text": answer.text,
        "logprobs": None,
        "finish_reason": sampled.finish,
        "stop_reason": sampled.stop_id
        if sampled.stop_id in answer.request.params.stop_ids
        else None,
        "prompt_logprobs": None,
    }
    if answer.request.top is not None:
        choice["logprobs"] = {
            "text_offset": [0] * len(sampled.ids),
            "token_logprobs": list(answer.logprobs),
            "tokens": [answer.label(token) for token in sampled.ids],
            "top_logprobs": [
                {answer.label(t): p for t, p in answer.likely(place)}
                for place in range(len(sampled.ids))
            ],
        }
    if answer.request.ids:
        choice |= {"prompt_token_ids": list(answer.prompt), "token_ids": list(sampled.ids)}
    return {
        "id": f"cmpl-{answer.request_id}",
        "object": "text_completion",
        "created": 0,
        "model": answer.model,
        "choices": [choice],
        "usage": answer.usage,
    }


def _read_generate(form: Json) -> EngineRequest:
    sampling = form.get("sampling_params")
    if not isinstance(sampling, dict):
        raise InvalidRequest("sampling_params must be an object")
    return EngineRequest(
        params=_params(sampling, "max_tokens", default=16),
        prompt=_ids(form.get("token_ids"), "token_ids"),
        model=form.get("model"),
        top=sampling.get("logprobs"),
        ids_as_text=True,
    )


def _write_generate(answer: EngineAnswer) -> Json:
    logprobs = {"content": _content(answer)} if answer.request.top is not None else None
    choice = {
        "index": 0,
        "logprobs": logprobs,
        "finish_reason": answer.sampled.finish,
        "token_ids": list(answer.sampled.ids),
    }
    return {
        "request_id": answer.request_id,
        "id": f"generate-tokens-{answer.request_id}",
        "model": answer.model,
        "choices": [choice],
        "usage": answer.usage,
        "prompt_logprobs": None,
    }


def _content(answer: EngineAnswer) -> list[Json]:
    """Return logprobs in the format of Chat Completions."""
    return [
        {
            "token": answer.label(token),
            "logprob": logprob,
            "bytes": list(answer.vocabulary.bytes_of(token)),
            "top_logprobs": [
                {
                    "token": answer.label(t),
                    "logprob": p,
                    "bytes": list(answer.vocabulary.bytes_of(t)),
                }
                for t, p in answer.likely(place)
            ],
        }
        for place, (token, logprob) in enumerate(
            zip(answer.sampled.ids, answer.logprobs, strict=True)
        )
    ]


def _read_chat(form: Json) -> EngineRequest:
    messages = form.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list")
    limit = "max_completion_tokens" if "max_completion_tokens" in form else "max_tokens"
    top = int(form.get("top_logprobs") or 0) if form.get("logprobs") else None
    return EngineRequest(
        params=_params(form, limit, default=None),
        model=form.get("model"),
        top=top,
        ids=bool(form.get("return_token_ids")),
        messages=tuple(messages),
        tools=tuple(form.get("tools") or ()),
    )


def _write_chat(answer: EngineAnswer) -> Json:
    reason = answer.sampled.finish
    if answer.message.get("tool_calls") and reason == "stop":
        reason = "tool_calls"
    choice: Json = {"index": 0, "message": answer.message, "finish_reason": reason}
    choice["logprobs"] = None if answer.request.top is None else {"content": _content(answer)}
    form: Json = {
        "id": f"chatcmpl-{answer.request_id}",
        "object": "chat.completion",
        "created": 0,
        "model": answer.model,
        "choices": [choice],
        "usage": answer.usage,
    }
    if answer.request.ids and answer.spelling == "sglang":
        choice["prompt_token_ids"] = list(answer.prompt)
        choice["response_token_ids"] = list(answer.sampled.ids)
    elif answer.request.ids:
        form["prompt_token_ids"] = list(answer.prompt)
        choice["token_ids"] = list(answer.sampled.ids)
    return form


def _read_sglang(form: Json) -> EngineRequest:
    sampling = form.get("sampling_params") or {}
    wanted = bool(form.get("return_logprob"))
    return EngineRequest(
        params=_params(sampling, "max_new_tokens", default=128),
        prompt=_ids(form.get("input_ids"), "input_ids"),
        top=int(form.get("top_logprobs_num") or 0) if wanted else None,
        skip_special=sampling.get("skip_special_tokens", True),
    )


def _write_sglang(answer: EngineAnswer) -> Json:
    sampled = answer.sampled
    ended: Json = {"type": sampled.finish}
    if sampled.finish == "length":
        ended["length"] = len(sampled.ids)
    elif sampled.stop_id is not None:
        ended["matched"] = sampled.stop_id
    meta: Json = {
        "id": answer.request_id,
        "finish_reason": ended,
        "prompt_tokens": len(answer.prompt),
        "weight_version": answer.version or "default",
        "completion_tokens": len(sampled.ids),
        "cached_tokens": answer.cached,
    }
    if answer.request.top is not None:
        pairs = zip(sampled.ids, answer.logprobs, strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in pairs]
        if answer.request.top:
            meta["output_top_logprobs"] = [
                [[p, t, None] for t, p in answer.likely(place)] for place in range(len(sampled.ids))
            ]
    return {"text": answer.text, "output_ids": list(sampled.ids), "meta_info": meta}


def _read_llamacpp(form: Json) -> EngineRequest:
    limit = form.get("n_predict")
    params = _params(form, "n_predict", default=None)
    wanted = int(form.get("n_probs") or 0)
    return EngineRequest(
        params=replace(params, max_tokens=None if limit in (None, -1) else limit),
        prompt=_ids(form.get("prompt"), "prompt"),
        top=wanted or None,
        ids=bool(form.get("return_tokens")),
        after_sampling=bool(form.get("post_sampling_probs")),
        skip_special=False,
    )


def _write_llamacpp(answer: EngineAnswer) -> Json:
    sampled = answer.sampled
    kinds = {"stop": "eos", "length": "limit"}
    form: Json = {
        "index": 0,
        "content": answer.text,
        "tokens": list(sampled.ids) if answer.request.ids else [],
        "stop": True,
        "model": answer.model,
        "tokens_predicted": len(sampled.ids),
        "tokens_evaluated": len(answer.prompt),
        "stop_type": kinds.get(sampled.finish, "none"),
        "truncated": False,
        "timings": {"cache_n": answer.cached, "prompt_n": len(answer.prompt) - answer.cached},
    }
    if answer.request.top is not None:
        form["completion_probabilities"] = [
            _probability(answer, place) for place in range(len(sampled.ids))
        ]
    return form


def _probability(answer: EngineAnswer, place: int) -> Json:
    token, logprob = answer.sampled.ids[place], answer.logprobs[place]
    head = {
        "id": token,
        "token": answer.label(token),
        "bytes": list(answer.vocabulary.bytes_of(token)),
    }
    likely = answer.likely(place)
    if not answer.request.after_sampling:
        listed = [{"id": t, "token": answer.label(t), "logprob": p} for t, p in likely]
        return {**head, "logprob": logprob, "top_logprobs": listed}
    probable = [{"id": t, "token": answer.label(t), "prob": math.exp(p)} for t, p in likely]
    return {**head, "prob": math.exp(logprob), "top_probs": probable}


CHAT = "chat"

WIRES: dict[str, Wire] = {
    "/v1/completions": Wire("vllm", _read_completions, _write_completions),
    "/v1/chat/completions": Wire(CHAT, _read_chat, _write_chat),
    "/inference/v1/generate": Wire("vllm_generate", _read_generate, _write_generate),
    "/generate": Wire("sglang", _read_sglang, _write_sglang),
    "/completion": Wire("llamacpp", _read_llamacpp, _write_llamacpp),
}
"""Route -> its wire."""


def read_request(wire: Wire, body: bytes) -> EngineRequest:
    """Parse a request. Raises: InvalidRequest."""
    try:
        form = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(form, dict):
        raise InvalidRequest("the body is not a JSON object")
    return wire.read(form)
