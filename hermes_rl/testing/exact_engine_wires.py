"""The wires of the token-exact fake engine: what engines in use take and give, ids and all.

Sources: vLLM's and SGLang's request and response classes and llama.cpp's server manual, read in
November 2026. Each wire is a pair of functions: a body to `Ask`, and `Told` to an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from hermes_rl.testing.exact_engine_sampler import (
    Lexicon,
    LogprobsOf,
    Params,
    Sampled,
    reported,
)

Json = dict[str, Any]


class BadAsk(ValueError):
    """A request that no engine of this kind would take; answered with 400 and this text."""


@dataclass(frozen=True)
class Ask:
    """A request in one form."""

    params: Params
    prompt: tuple[int, ...] | None = None
    """None where a chat template has still to make it."""
    text: str | None = None
    """A prompt that is text."""
    model: str | None = None
    top: int | None = None
    """As many likely tokens are told at each position; None tells no logprobs at all."""
    ids: bool = True
    """The answer holds ids."""
    ids_as_text: bool = False
    """Tokens beside logprobs are written as `token_id:N`."""
    skip_special: bool = True
    after_sampling: bool = False
    """Probabilities of the distribution that was sampled from (llama.cpp)."""
    messages: tuple[Json, ...] = ()
    tools: tuple[Json, ...] = ()


@dataclass(frozen=True)
class Told:
    """An answer before it is written."""

    ask: Ask
    prompt: tuple[int, ...]
    sampled: Sampled
    lexicon: Lexicon
    kind: LogprobsOf
    request_id: str
    cached: int
    version: str | None
    spelling: str = "vllm"
    """Whose names a chat answer uses for ids."""
    message: Json = field(default_factory=dict)
    """Of a chat answer."""

    @property
    def text(self) -> str:
        """The text of the answer, without its stop token."""
        ids = self.sampled.ids
        shown = ids[:-1] if self.sampled.stop_id is not None else ids
        return self.lexicon.text(shown, skip_special=self.ask.skip_special)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.ask.model or "toy"

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One per sampled token, of the kind that this engine reports."""
        kinds = {"raw": self.sampled.raw, "scaled": self.sampled.scaled}
        return kinds.get(self._told, self.sampled.processed)

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
        """The likeliest tokens of a position."""
        most = self.ask.top or 0
        if not most:
            return []
        return reported(self.sampled.top[place], self._told, self.ask.params, most)

    @property
    def _told(self) -> LogprobsOf:
        return "processed" if self.ask.after_sampling else self.kind

    def shown(self, token: int) -> str:
        """A token beside its logprob."""
        if self.ask.ids_as_text:
            return f"token_id:{token}"
        return self.lexicon.text([token])


class Wire(NamedTuple):
    """One wire."""

    name: str
    read: Callable[[Json], Ask]
    write: Callable[[Told], Json]


def _params(form: Mapping[str, Any], limit: str, *, default: int | None) -> Params:
    if form.get("stop"):
        raise BadAsk("stop strings: this engine stops at token ids alone")
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
        raise BadAsk(f"{name} must be a list of token ids")
    return tuple(value)


def _read_completions(form: Json) -> Ask:
    prompt = form.get("prompt")
    ask = Ask(
        params=_params(form, "max_tokens", default=16),
        model=form.get("model"),
        top=form.get("logprobs"),
        ids=bool(form.get("return_token_ids")),
        ids_as_text=bool(form.get("return_tokens_as_token_ids")),
        skip_special=form.get("skip_special_tokens", True),
    )
    if isinstance(prompt, str):
        return replace(ask, text=prompt)
    return replace(ask, prompt=_ids(prompt, "prompt"))


def _write_completions(told: Told) -> Json:
    sampled = told.sampled
    choice: Json = {
        "index": 0,
        "text": told.text,
        "logprobs": None,
        "finish_reason": sampled.finish,
        "stop_reason": sampled.stop_id if sampled.stop_id in told.ask.params.stop_ids else None,
        "prompt_logprobs": None,
    }
    if told.ask.top is not None:
        choice["logprobs"] = {
            "text_offset": [0] * len(sampled.ids),
            "token_logprobs": list(told.logprobs),
            "tokens": [told.shown(token) for token in sampled.ids],
            "top_logprobs": [
                {told.shown(t): p for t, p in told.likely(place)}
                for place in range(len(sampled.ids))
            ],
        }
    if told.ask.ids:
        choice |= {"prompt_token_ids": list(told.prompt), "token_ids": list(sampled.ids)}
    return {
        "id": f"cmpl-{told.request_id}",
        "object": "text_completion",
        "created": 0,
        "model": told.model,
        "choices": [choice],
        "usage": told.usage,
    }


def _read_generate(form: Json) -> Ask:
    sampling = form.get("sampling_params")
    if not isinstance(sampling, dict):
        raise BadAsk("sampling_params must be an object")
    return Ask(
        params=_params(sampling, "max_tokens", default=16),
        prompt=_ids(form.get("token_ids"), "token_ids"),
        model=form.get("model"),
        top=sampling.get("logprobs"),
        ids_as_text=True,
    )


def _write_generate(told: Told) -> Json:
    logprobs = {"content": _content(told)} if told.ask.top is not None else None
    choice = {
        "index": 0,
        "logprobs": logprobs,
        "finish_reason": told.sampled.finish,
        "token_ids": list(told.sampled.ids),
    }
    return {
        "request_id": told.request_id,
        "id": f"generate-tokens-{told.request_id}",
        "model": told.model,
        "choices": [choice],
        "usage": told.usage,
        "prompt_logprobs": None,
    }


def _content(told: Told) -> list[Json]:
    """Logprobs in the form of Chat Completions."""
    return [
        {
            "token": told.shown(token),
            "logprob": logprob,
            "bytes": list(told.lexicon.bytes_of(token)),
            "top_logprobs": [
                {"token": told.shown(t), "logprob": p, "bytes": list(told.lexicon.bytes_of(t))}
                for t, p in told.likely(place)
            ],
        }
        for place, (token, logprob) in enumerate(zip(told.sampled.ids, told.logprobs, strict=True))
    ]


def _read_chat(form: Json) -> Ask:
    messages = form.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadAsk("messages must be a list")
    limit = "max_completion_tokens" if "max_completion_tokens" in form else "max_tokens"
    top = int(form.get("top_logprobs") or 0) if form.get("logprobs") else None
    return Ask(
        params=_params(form, limit, default=None),
        model=form.get("model"),
        top=top,
        ids=bool(form.get("return_token_ids")),
        messages=tuple(messages),
        tools=tuple(form.get("tools") or ()),
    )


def _write_chat(told: Told) -> Json:
    reason = told.sampled.finish
    if told.message.get("tool_calls") and reason == "stop":
        reason = "tool_calls"
    choice: Json = {"index": 0, "message": told.message, "finish_reason": reason}
    choice["logprobs"] = None if told.ask.top is None else {"content": _content(told)}
    form: Json = {
        "id": f"chatcmpl-{told.request_id}",
        "object": "chat.completion",
        "created": 0,
        "model": told.model,
        "choices": [choice],
        "usage": told.usage,
    }
    if told.ask.ids and told.spelling == "sglang":
        choice["prompt_token_ids"] = list(told.prompt)
        choice["response_token_ids"] = list(told.sampled.ids)
    elif told.ask.ids:
        form["prompt_token_ids"] = list(told.prompt)
        choice["token_ids"] = list(told.sampled.ids)
    return form


def _read_sglang(form: Json) -> Ask:
    sampling = form.get("sampling_params") or {}
    wanted = bool(form.get("return_logprob"))
    return Ask(
        params=_params(sampling, "max_new_tokens", default=128),
        prompt=_ids(form.get("input_ids"), "input_ids"),
        top=int(form.get("top_logprobs_num") or 0) if wanted else None,
        skip_special=sampling.get("skip_special_tokens", True),
    )


def _write_sglang(told: Told) -> Json:
    sampled = told.sampled
    ended: Json = {"type": sampled.finish}
    if sampled.finish == "length":
        ended["length"] = len(sampled.ids)
    elif sampled.stop_id is not None:
        ended["matched"] = sampled.stop_id
    meta: Json = {
        "id": told.request_id,
        "finish_reason": ended,
        "prompt_tokens": len(told.prompt),
        "weight_version": told.version or "default",
        "completion_tokens": len(sampled.ids),
        "cached_tokens": told.cached,
    }
    if told.ask.top is not None:
        pairs = zip(sampled.ids, told.logprobs, strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in pairs]
        if told.ask.top:
            meta["output_top_logprobs"] = [
                [[p, t, None] for t, p in told.likely(place)] for place in range(len(sampled.ids))
            ]
    return {"text": told.text, "output_ids": list(sampled.ids), "meta_info": meta}


def _read_llamacpp(form: Json) -> Ask:
    limit = form.get("n_predict")
    params = _params(form, "n_predict", default=None)
    wanted = int(form.get("n_probs") or 0)
    return Ask(
        params=replace(params, max_tokens=None if limit in (None, -1) else limit),
        prompt=_ids(form.get("prompt"), "prompt"),
        top=wanted or None,
        ids=bool(form.get("return_tokens")),
        after_sampling=bool(form.get("post_sampling_probs")),
        skip_special=False,
    )


def _write_llamacpp(told: Told) -> Json:
    sampled = told.sampled
    kinds = {"stop": "eos", "length": "limit"}
    form: Json = {
        "index": 0,
        "content": told.text,
        "tokens": list(sampled.ids) if told.ask.ids else [],
        "stop": True,
        "model": told.model,
        "tokens_predicted": len(sampled.ids),
        "tokens_evaluated": len(told.prompt),
        "stop_type": kinds.get(sampled.finish, "none"),
        "truncated": False,
        "timings": {"cache_n": told.cached, "prompt_n": len(told.prompt) - told.cached},
    }
    if told.ask.top is not None:
        form["completion_probabilities"] = [
            _probability(told, place) for place in range(len(sampled.ids))
        ]
    return form


def _probability(told: Told, place: int) -> Json:
    import math

    token, logprob = told.sampled.ids[place], told.logprobs[place]
    head = {"id": token, "token": told.shown(token), "bytes": list(told.lexicon.bytes_of(token))}
    likely = told.likely(place)
    if not told.ask.after_sampling:
        listed = [{"id": t, "token": told.shown(t), "logprob": p} for t, p in likely]
        return {**head, "logprob": logprob, "top_logprobs": listed}
    probable = [{"id": t, "token": told.shown(t), "prob": math.exp(p)} for t, p in likely]
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


def read_ask(wire: Wire, body: bytes) -> Ask:
    """A request. Raises: BadAsk."""
    try:
        form = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadAsk(f"the body is no JSON: {error}") from None
    if not isinstance(form, dict):
        raise BadAsk("the body is no JSON object")
    return wire.read(form)
