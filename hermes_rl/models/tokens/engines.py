"""Engines that return token ids: four routes that take a prompt of ids, and chat with ids.

Sources: the request and response classes of vLLM and SGLang and llama.cpp's server manual, read in
November 2026. An answer that contradicts itself is refused with a `ProtocolError`, never repaired:
another prompt than was sent (a second BOS, a cut beginning), ids and logprobs of different lengths
or tokens, no ids at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import (
    Completion,
    LogprobsKind,
    ModelClient,
    ModelRequest,
    Sampling,
    TokenCapture,
)
from hermes_rl.models.calls import Renewable
from hermes_rl.models.tokens.logprobs import LOWEST, kind_in
from hermes_rl.models.tokens.plan import Spelling, spelled_out
from hermes_rl.models.wire import (
    BodyDecoder,
    Decoder,
    Envelope,
    Reading,
    ReplyHead,
    bearer_headers,
    count_of,
    read_chat_usage,
)
from hermes_rl.text import encode_json
from hermes_rl.usage import Usage

Json = dict[str, Any]

_FIRST_INVALID_ID = 1 << 31
"""Ids are stored in 32 bits."""

PENALTIES: Json = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""No penalties, sent explicitly."""


def sampling_of(sampling: Sampling) -> Json:
    """Return temperature and filters as they are sent."""
    sent = spelled_out(sampling)
    return {name: getattr(sent, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def whole_ids(values: Any) -> tuple[int, ...] | None:
    """Return ids that can be stored; None for anything else."""
    if not isinstance(values, list):
        return None
    valid = all(type(v) is int and 0 <= v < _FIRST_INVALID_ID for v in values)
    return tuple(values) if valid else None


@dataclass(frozen=True)
class Answer:
    """The contents of an engine's answer, before they are checked."""

    ids: Any
    logprobs: Any = None
    """One per id; None if there are none."""
    named: Any = None
    """The ids that the logprobs belong to, if the engine names them."""
    prompt_ids: Any = None
    """The prompt as the engine read it, if it returns that."""
    finish: str | None = None
    usage: Usage = field(default_factory=Usage)
    raw: Any = None
    """The engine's usage object."""
    answer_id: Any = None
    model: Any = None
    version: Any = None
    """Of the weights."""


class TokenWire(ABC):
    """The route of one engine, as a dialect: `request.prompt_ids` in, ids and logprobs out.

    Args:
        stop_ids: token ids that end an answer, besides the engine's own.
        secrets: texts that no error may show.
    """

    name: str
    path: str
    at_root = True
    """The route is beside `/v1`, not below it."""

    def __init__(self, stop_ids: frozenset[int] = frozenset(), secrets: Iterable[str] = ()) -> None:
        self._stop = sorted(stop_ids)
        self._secrets = secrets

    @abstractmethod
    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """Return the body of a request."""

    @abstractmethod
    def read(self, form: Json) -> Answer:
        """Read an answer. Raises: KeyError, IndexError, TypeError for another structure."""

    @abstractmethod
    def ask_likely(self, form: Json, most: int) -> None:
        """Change a body so that it also requests the likeliest tokens of each position."""

    @abstractmethod
    def likely(self, form: Json) -> dict[Any, float]:
        """Return token -> logprob at the answer's first position. Raises: as `read`."""

    def encode(self, request: ModelRequest) -> bytes:
        """Return the body of a request. Raises: ValueError without a prompt of ids."""
        if request.prompt_ids is None:
            raise ValueError("a token wire needs request.prompt_ids")
        return encode_json(self.body(request, list(request.prompt_ids)))

    def bound(self, request: ModelRequest) -> int:
        """Return the exact number of prompt tokens."""
        return len(request.prompt_ids or ())

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers of a request."""
        return bearer_headers(api_key)

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """Return the decoder of an answer."""
        prompt = request.prompt_ids or ()

        def read(data: bytes, reading: Reading) -> Completion:
            return self._completion(data, reading, prompt)

        return BodyDecoder(Reading(head, self._secrets), read)

    def _completion(self, data: bytes, reading: Reading, prompt: tuple[int, ...]) -> Completion:
        form = reading.parse(msgspec.json.decode, data)
        if isinstance(form, dict) and form.get("error"):
            raise reading.fault(form["error"])
        try:
            answer = self.read(form)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise reading.unreadable(f"not {self.name}: {type(error).__name__} {error}") from None
        ids = _checked_ids(answer, prompt, reading)
        usage = msgspec.structs.replace(
            answer.usage, input_tokens=len(prompt), output_tokens=len(ids)
        )
        envelope = Envelope(
            id=answer.answer_id,
            model=answer.model,
            usage=msgspec.Raw(msgspec.json.encode(answer.raw)),
            policy_version=answer.version,
        )
        tokens = TokenCapture(prompt, ids, _checked_logprobs(answer, ids, reading))
        return reading.completion(
            envelope, AssistantMessage(), answer.finish, lambda _: usage, tokens
        )


def _checked_ids(answer: Answer, prompt: tuple[int, ...], reading: Reading) -> tuple[int, ...]:
    """Return the sampled ids. Raises: ProtocolError."""
    ids = whole_ids(answer.ids)
    if ids is None:
        raise reading.unreadable("it holds no token ids of the answer")
    if answer.prompt_ids is not None and whole_ids(answer.prompt_ids) != prompt:
        raise reading.unreadable("the engine read another prompt than it was sent")
    read, counted = answer.usage.input_tokens, answer.usage.output_tokens
    if read not in (None, len(prompt)):
        raise reading.unreadable(f"the engine read {read} prompt tokens and was sent {len(prompt)}")
    if counted not in (None, len(ids)):
        raise reading.unreadable(f"the engine counted {counted} sampled tokens, gave {len(ids)}")
    return ids


def _checked_logprobs(
    answer: Answer, ids: tuple[int, ...], reading: Reading
) -> tuple[float, ...] | None:
    """Return one logprob per id; None if any is missing. Raises: ProtocolError."""
    if answer.named is not None and list(answer.named) != list(ids):
        raise reading.unreadable("ids and logprobs are of different tokens")
    values = answer.logprobs
    if not isinstance(values, list):
        return None
    if len(values) != len(ids):
        raise reading.unreadable(f"{len(values)} logprobs for {len(ids)} tokens")
    if not all(type(v) in (int, float) and LOWEST < v <= 1e-3 for v in values):
        return None
    return tuple(min(0.0, float(v)) for v in values)


class VllmCompletions(TokenWire):
    """vLLM's `/v1/completions`. `token_ids` include the end token that the text leaves out."""

    name = "vllm_completions"
    path = "/completions"
    at_root = False

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        form = {
            "model": request.model,
            "prompt": prompt,
            **_vllm_sampling(request, self._stop),
            "spaces_between_special_tokens": False,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "request_id": request.call_id,
        }
        return form | request.extra

    def read(self, form: Json) -> Answer:
        choice = form["choices"][0]
        logprobs = choice.get("logprobs") or {}
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs"),
            named=_named_ids(logprobs.get("tokens")),
            prompt_ids=choice.get("prompt_token_ids"),
            finish=choice.get("finish_reason"),
            usage=_usage_in(form.get("usage")),
            raw=form.get("usage"),
            answer_id=form.get("id"),
            model=form.get("model"),
            version=form.get("policy_version"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        form["logprobs"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        return dict(form["choices"][0]["logprobs"]["top_logprobs"][0])


class VllmGenerate(TokenWire):
    """vLLM's `/inference/v1/generate`, where it is served. Older versions report no usage."""

    name = "vllm_generate"
    path = "/inference/v1/generate"

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        return {
            "request_id": request.call_id,
            "model": request.model,
            "token_ids": prompt,
            "sampling_params": _vllm_sampling(request, self._stop) | request.extra,
        }

    def read(self, form: Json) -> Answer:
        choice = form["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            ids=choice.get("token_ids"),
            logprobs=[one.get("logprob") for one in content] or None,
            named=_named_ids([one.get("token") for one in content] or None),
            finish=choice.get("finish_reason"),
            usage=_usage_in(form.get("usage")),
            raw=form.get("usage"),
            answer_id=form.get("id") or form.get("request_id"),
            model=form.get("model"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        form["sampling_params"]["logprobs"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        # Tokens by their bytes: several may look alike.
        return {
            (one["token"], tuple(one.get("bytes") or ())): one["logprob"]
            for one in form["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }


def _vllm_sampling(request: ModelRequest, stop: list[int]) -> Json:
    params: Json = {
        **sampling_of(request.sampling),
        **PENALTIES,
        "max_tokens": request.sampling.max_tokens,  # None is the rest of the window
        "stop_token_ids": stop,
        "skip_special_tokens": False,
    }
    if request.logprobs:
        params["logprobs"] = 0
    if request.sampling.seed is not None:
        params["seed"] = request.sampling.seed
    return params


def _named_ids(tokens: Any) -> list[int] | None:
    """Return the ids in `token_id:N`; None if a server writes texts instead."""
    if not isinstance(tokens, list):
        return None
    prefix = "token_id:"
    texts = [t.removeprefix(prefix) for t in tokens if isinstance(t, str) and t.startswith(prefix)]
    whole = len(texts) == len(tokens) and all(text.isdecimal() for text in texts)
    return [int(text) for text in texts] if whole else None


def _usage_in(usage: Any) -> Usage:
    """Return the usage that an answer reports; one of the two counts alone is evidence too."""
    form = usage if isinstance(usage, dict) else {}
    return read_chat_usage(form) or _counts(form, "prompt_tokens", "completion_tokens", None)


def _counts(form: Json, prompt: str, completion: str, cached: Any) -> Usage:
    return Usage(
        input_tokens=count_of(form.get(prompt)),
        output_tokens=count_of(form.get(completion)),
        cache_read_tokens=count_of(cached),
    )


class SglangGenerate(TokenWire):
    """SGLang's `/generate`. Logprobs are triples (logprob, id, text), so they name their tokens."""

    name = "sglang_generate"
    path = "/generate"

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        params: Json = {
            **sampling_of(request.sampling),
            **PENALTIES,
            "max_new_tokens": request.sampling.max_tokens,  # None is the rest of the window
            "stop_token_ids": self._stop,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if request.sampling.seed is not None:
            params["sampling_seed"] = request.sampling.seed
        return {
            "rid": request.call_id,
            "input_ids": prompt,
            "sampling_params": params | request.extra,
            "return_logprob": request.logprobs,
            "stream": False,
        }

    def read(self, form: Json) -> Answer:
        meta = form["meta_info"]
        triples = meta.get("output_token_logprobs")
        named = None if triples is None else [triple[1] for triple in triples]
        ended = meta.get("finish_reason")  # {"type": "stop", "matched": 2}
        kind = ended.get("type") if isinstance(ended, dict) else ended
        counts = ("prompt_tokens", "completion_tokens", "cached_tokens")
        return Answer(
            ids=_sglang_ids(form.get("output_ids"), named, ended),
            logprobs=None if triples is None else [triple[0] for triple in triples],
            named=named,
            finish=kind if isinstance(kind, str) else None,
            usage=_counts(meta, *counts[:2], meta.get("cached_tokens")),
            raw={name: meta.get(name) for name in counts},
            answer_id=meta.get("id"),
            version=meta.get("weight_version"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        form["top_logprobs_num"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        return {triple[1]: triple[0] for triple in form["meta_info"]["output_top_logprobs"][0]}


def _sglang_ids(ids: Any, named: list[Any] | None, ended: Any) -> Any:
    """Return the sampled ids. Some versions leave the stop token that was matched out of
    `output_ids` but return its logprob: it was sampled."""
    if named is None:
        return ids
    matched = ended.get("matched") if isinstance(ended, dict) else None
    return named if ids is None or [*ids, matched] == named else ids


class LlamacppCompletion(TokenWire):
    """llama.cpp's `/completion`. It stops at the end tokens that the model's file names, and takes
    no others. Its logprobs are requested as they are after temperature and filters, so that they
    are of the distribution that was sampled from."""

    name = "llamacpp_completion"
    path = "/completion"

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        sampling = request.sampling
        form: Json = {
            "prompt": prompt,
            **_LLAMACPP_NEUTRAL,
            **sampling_of(sampling),
            "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": False,
        }
        form["top_k"] = max(0, form["top_k"])  # 0 means all
        if request.logprobs:
            form |= {"n_probs": 1, "post_sampling_probs": True}
        if sampling.seed is not None:
            form["seed"] = sampling.seed % 2**32  # its seeds have 32 bits
        return form | request.extra

    def read(self, form: Json) -> Answer:
        if form.get("truncated"):
            raise TypeError("truncated: the engine cut the prompt")
        listed = form.get("completion_probabilities") or []
        aligned = [one.get("id") for one in listed] == form["tokens"]
        counts = ("tokens_evaluated", "tokens_predicted")
        return Answer(
            ids=form["tokens"],
            logprobs=[_llamacpp_logprob(one) for one in listed] if aligned else None,
            finish=_LLAMACPP_FINISH.get(str(form.get("stop_type"))),
            usage=_counts(form, *counts, (form.get("timings") or {}).get("cache_n")),
            raw={name: form.get(name) for name in counts},
            answer_id=form.get("id"),
            model=form.get("model"),
        )

    def ask_likely(self, form: Json, most: int) -> None:
        form["n_probs"] = most

    def likely(self, form: Json) -> dict[Any, float]:
        first = form["completion_probabilities"][0]
        listed = first.get("top_probs") or first["top_logprobs"]
        pairs = ((one["id"], _llamacpp_logprob(one)) for one in listed)
        return {token: logprob for token, logprob in pairs if logprob is not None}


_LLAMACPP_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
_LLAMACPP_NEUTRAL: Json = {
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


def _llamacpp_logprob(one: Json) -> Any:
    if "prob" not in one:
        return one.get("logprob")
    prob = one["prob"]
    return math.log(prob) if type(prob) in (int, float) and prob > 0 else None


WIRES: dict[str, type[TokenWire]] = {
    "vllm": VllmCompletions,
    "vllm_generate": VllmGenerate,
    "sglang": SglangGenerate,
    "llamacpp": LlamacppCompletion,
}
"""`endpoint.tokens` -> the wire."""


CHAT_MODE = "chat_completions"
_ABSURD = 1e9
"""No logprob is so far from 0."""


class ChatIdsClient:
    """A chat client that requests ids and logprobs with every call (vLLM's and SGLang's spellings).

    Every call is exact by itself: the ids of its prompt, those sampled, and their logprobs. Whether
    a call continues the last one depends on the server's rendering; the graph of a rollout finds
    out.

    Args:
        inner: closed with this one.
        kind: what the logprobs mean, as a probe found; an answer that names it is believed.
        filtered: they are taken after top-p, top-k and min-p.
        whole: never stream: SGLang returns no ids in streams.
    """

    def __init__(
        self,
        inner: ModelClient,
        *,
        kind: LogprobsKind = "unknown",
        filtered: bool = False,
        whole: bool = False,
    ) -> None:
        self.api_mode, self.endpoint = inner.api_mode, inner.endpoint
        self._inner, self._whole = inner, whole
        self._kind, self._filtered = kind, filtered

    async def complete(self, request: ModelRequest) -> Completion:
        """Return an answer with its ids."""
        sent = replace(
            request,
            sampling=spelled_out(request.sampling),
            extra={**PENALTIES, **request.extra},
            token_ids=True,
            logprobs=True,
            stream=request.stream and not self._whole,
        )
        answer = await self._inner.complete(sent)
        if answer.tokens is None:
            return answer
        tokens = replace(answer.tokens, sampling=sent.sampling)
        if _contradict(tokens, answer.usage):  # ids are missing: none of the others can be trained
            tokens = replace(tokens, logprobs=None)
        elif tokens.logprobs is not None and tokens.logprobs_kind == "unknown":
            fields = {**sent.sampling.as_dict(), **sent.extra}
            tokens = replace(tokens, logprobs_kind=kind_in(self._kind, self._filtered, fields))
        return replace(answer, tokens=tokens)

    def bound(self, request: ModelRequest) -> int:
        """Return an upper bound of the prompt's tokens."""
        return self._inner.bound(request)

    async def renew(self) -> None:
        """Use new connections from now on."""
        if isinstance(self._inner, Renewable):
            await self._inner.renew()

    async def aclose(self) -> None:
        """Close the inner client."""
        await self._inner.aclose()


def _contradict(tokens: TokenCapture, usage: Usage | None) -> bool:
    """Return whether the server counted other numbers of tokens than it returned ids."""
    if usage is None:
        return False
    counted = (
        (usage.input_tokens, tokens.prompt_ids),
        (usage.output_tokens, tokens.completion_ids),
    )
    return any(n is not None and ids is not None and n != len(ids) for n, ids in counted)


def first_logprobs(form: Any) -> dict[str, float]:
    """Return token -> logprob of the first position of a chat answer; empty if there are none."""
    try:
        listed = form["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        pairs = {str(one["token"]): float(one["logprob"]) for one in listed}
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return {}
    return {token: logprob for token, logprob in pairs.items() if abs(logprob) < _ABSURD}


def ids_spelling(form: Any) -> Spelling | None:
    """Return whose field names the token ids of a chat answer have; None if there are none."""
    try:
        choice = form["choices"][0]
        if choice.get("response_token_ids"):
            return "sglang"
        return "vllm" if choice.get("token_ids") and form.get("prompt_token_ids") else None
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
