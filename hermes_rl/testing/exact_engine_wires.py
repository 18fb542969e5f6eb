"""The wires of the exact engine: the requests and responses of real engines, with ids.

`exact_engine_wires.json` has one table per route: the names of a request's fields, and its answer
as a template. In a template `$name` is a value of the answer, and a field whose value is absent is
left out; `["$each", list, form]` is a list with a form for each element, and `["$if", name, form]`
is the form if that value is there, else null.

Sources: vLLM's and SGLang's request and response classes and llama.cpp's server manual, read in
November 2026.
"""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from hermes_rl.testing.exact_engine_model import (
    LogprobsOf,
    Params,
    Sampled,
    Vocabulary,
    reported,
)

Json = dict[str, Any]
CHAT = "chat"


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
    model: str = "toy"
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
    stream: bool = False
    interval: int = 1
    """Tokens between two events of a stream (SGLang)."""


StreamForm = Literal["cumulative", "incremental", "mixed"]
"""What SGLang's events repeat: all lists; none (`--incremental-streaming-output`); the logprobs
alone (earlier versions)."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One route: what it calls the fields of a request, and the template of its answer."""

    name: str
    params: str | None = None
    """The object that holds the sampling parameters; None: the body itself."""
    prompt: str | None = None
    """None for a conversation."""
    limits: tuple[str, ...]
    """Names of the maximum of tokens; the first that is sent counts."""
    default_limit: int | None = None
    top: str
    """Number of likeliest tokens."""
    wants: str | None = None
    """What requests logprobs; None: that number alone does."""
    ids: str | None = None
    """What requests ids; None: always returned."""
    as_text: str | bool = False
    """What requests tokens as `token_id:N`; a bool: always, or never."""
    after_sampling: str = ""
    skip_special: bool = True
    """Whether special tokens are left out of the text, unless the request tells."""
    answer: Json

    def read(self, body: Json) -> EngineRequest:
        """Parse a request. Raises: InvalidRequest."""
        text, prompt, messages = None, None, body.get("messages")
        if self.prompt is None and (not isinstance(messages, list) or not messages):
            raise InvalidRequest("messages must be a list")
        if self.prompt is not None:
            prompt = body.get(self.prompt)
            if isinstance(prompt, str):
                text, prompt = prompt, None
            else:
                prompt = _ids(prompt, self.prompt)
        params = body.get(self.params) if self.params else {}
        if not isinstance(params, dict):
            raise InvalidRequest(f"{self.params} must be an object")
        form = {**body, **params}
        top = form.get(self.top)
        if self.wants is not None:
            top = int(top or 0) if form.get(self.wants) else None
        as_text = self.as_text
        return EngineRequest(
            params=self._params(form),
            prompt=prompt,
            text=text,
            model=form.get("model") or "toy",
            top=top,
            ids=self.ids is None or bool(form.get(self.ids)),
            ids_as_text=bool(form.get(as_text)) if isinstance(as_text, str) else as_text,
            skip_special=form.get("skip_special_tokens", self.skip_special),
            after_sampling=bool(form.get(self.after_sampling)),
            messages=tuple(messages or ()),
            tools=tuple(form.get("tools") or ()),
            stream=bool(form.get("stream")) and self.name != CHAT,
            interval=int(form.get("stream_interval") or 1),
        )

    def _params(self, form: Json) -> Params:
        if form.get("stop"):
            raise InvalidRequest("stop strings: this engine stops only at token ids")
        temperature, seed = form.get("temperature"), form.get("seed", form.get("sampling_seed"))
        limit = next((form[name] for name in self.limits if name in form), self.default_limit)
        return Params(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=float(form.get("top_p") or 1.0),
            top_k=int(form.get("top_k") or 0),
            min_p=float(form.get("min_p") or 0.0),
            seed=None if seed is None else int(seed),
            max_tokens=None if limit == -1 else limit,
            stop_ids=frozenset(form.get("stop_token_ids") or ()),
        )

    def events(self, answer: EngineAnswer, form: StreamForm, *, whole: bool) -> Iterator[Json]:
        """Yield the events of a streamed answer.

        Args:
            whole: it was not cut off by a closed connection.
        """
        if self.name == "sglang":
            yield from self._sglang_events(answer, form, whole=whole)
            return
        if self.name == "llamacpp":
            yield from self._llamacpp_events(answer, whole=whole)
            return
        for n in range(len(answer.sampled.ids)):
            yield self._event(answer, n, n + 1)
        if whole:
            yield {"id": answer.request_id, "choices": [], "usage": self.write(answer)["usage"]}

    def _event(self, answer: EngineAnswer, start: int, end: int) -> Json:
        """Return an event with these tokens; one with the last token is that of the end."""
        sampled = answer.sampled
        last = end == len(sampled.ids) and sampled.finish != "abort"
        part = msgspec.structs.replace(
            sampled.part(start, end), finish=sampled.finish if last else None,
            stop_id=sampled.stop_id if last else None,
        )  # fmt: skip
        event = self.write(replace(answer, sampled=part, by_token=answer.by_token and last))
        return {**event, "usage": None} if "usage" in event else event

    def _sglang_events(
        self, answer: EngineAnswer, form: StreamForm, *, whole: bool
    ) -> Iterator[Json]:
        every, count, sent = answer.request.interval, len(answer.sampled.ids), 0
        ids, text, logprobs = list[int](), "", dict[str, list[Any]]()
        for n in range(1, count + 1):
            if n % every != (1 if every > 1 else 0) and not (whole and n == count):
                continue
            spans = [(v, min(end, n)) for v, end in answer.versions]
            starts = (0, *(end for _, end in spans))
            named = tuple(s for s, start in zip(spans, starts, strict=False) if start < s[1])
            version = answer.version and named[-1][0]
            event = self._event(replace(answer, versions=named, version=version), sent, n)
            meta = event["meta_info"] | {"completion_tokens": n}
            if answer.by_token and answer.version is not None:
                meta["weight_versions"] = _version_spans(named)
            if meta["finish_reason"]["type"] is None:
                done = whole and n == count
                meta["finish_reason"] = {"type": answer.sampled.finish} if done else None
            if "length" in (meta["finish_reason"] or ()):
                meta["finish_reason"]["length"] = n
            if form == "cumulative":
                ids, text = ids + event["output_ids"], text + event["text"]
                event |= {"output_ids": ids, "text": text}
            if form != "incremental":
                for name in meta.keys() & {"output_token_logprobs", "output_top_logprobs"}:
                    meta[name] = logprobs[name] = logprobs.get(name, []) + meta[name]
            sent = n
            yield event | {"meta_info": meta}

    def leaves_out(self, answer: EngineAnswer) -> bool:
        """Whether a stream lacks some ids of an answer."""
        if self.name != "llamacpp":
            return False
        return sum(1 for _ in self._llamacpp_events(answer, whole=False)) < len(answer.sampled.ids)

    def _llamacpp_events(self, answer: EngineAnswer, *, whole: bool) -> Iterator[Json]:
        """Yield an event per token. One that ends within a character has none, and so is lost."""
        text, sampled = getincrementaldecoder("utf-8")("replace"), answer.sampled
        for n, token in enumerate(sampled.ids, 1):
            text.decode(answer.vocabulary.bytes_of(token))
            if text.getstate()[0]:
                continue
            event = self.write(replace(answer, sampled=sampled.part(n - 1, n)))
            for name in ("stop_type", "truncated", "timings", "model"):
                del event[name]
            yield event | {"stop": False, "tokens_predicted": n}
        if whole:
            last = self.write(answer) | {"content": "", "tokens": []}
            last.pop("completion_probabilities", None)
            yield last

    def write(self, answer: EngineAnswer) -> Json:
        """Return the body of an answer."""
        filled: Json = _fill(self.answer, dict(answer.values()))
        return filled


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(v) is int for v in value):
        raise InvalidRequest(f"{name} must be a list of token ids")
    return tuple(value)


def _version_spans(versions: Sequence[tuple[str | None, int]]) -> list[Json]:
    starts = (0, *(end for _, end in versions))
    pairs = zip(starts, versions, strict=False)
    return [{"version": version, "start": start, "end": end} for start, (version, end) in pairs]


_FINISH = {"stop": "eos", "length": "limit"}
"""Finish reasons as llama.cpp names them."""


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
    """When the answer ended."""
    by_token: bool = True
    """It also names the versions of the tokens."""
    spelling: str = "vllm"
    """The engine whose field names a chat answer uses for ids."""
    message: Json = field(default_factory=dict)
    """Of a chat answer."""
    versions: tuple[tuple[str | None, int], ...] = ()
    """Versions of its tokens, each with the index after its last token."""

    @property
    def text(self) -> str:
        """The text of the answer, without its stop token."""
        ids = self.sampled.ids
        shown = ids[:-1] if self.sampled.stop_id is not None else ids
        return self.vocabulary.text(shown, skip_special=self.request.skip_special)

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the values that templates use, by name; those that do not apply are left out."""
        request, sampled = self.request, self.sampled
        prompt, output, stop_id = len(self.prompt), len(sampled.ids), sampled.stop_id
        called = bool(self.message.get("tool_calls")) and sampled.finish == "stop"
        yield from {
            "text": self.text,
            "model": request.model,
            "request_id": self.request_id,
            "message": self.message,
            "finish": sampled.finish,
            "chat_finish": "tool_calls" if called else sampled.finish,
            "stop_type": _FINISH.get(sampled.finish, "none"),
            "stop_reason": stop_id if stop_id in request.params.stop_ids else None,
            "version": self.version or "default",
            "n_prompt": prompt,
            "n_sampled": output,
            "cached": self.cached,
            "uncached": prompt - self.cached,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": self.cached},
            },
        }.items()
        if sampled.finish == "length":
            yield "length", output
        elif stop_id is not None:
            yield "matched", stop_id
        if self.version is not None and self.by_token:
            yield "weight_versions", _version_spans(self.versions)
        if request.ids:
            for prefix in ("", f"{self.spelling}_"):
                yield f"{prefix}prompt_ids", list(self.prompt)
                yield f"{prefix}ids", list(sampled.ids)
        if request.top is not None:
            yield "tokens", list(self._tokens())
            yield "no_tokens", []

    def _tokens(self) -> Iterator[Json]:
        """Yield the values of each sampled token."""
        after, sampled = self.request.after_sampling, self.sampled
        kind: LogprobsOf = "processed" if after else self.kind
        reported_of = {"raw": sampled.raw, "scaled": sampled.scaled}.get(kind, sampled.processed)
        most = self.request.top or 0
        for place, (token, logprob) in enumerate(zip(sampled.ids, reported_of, strict=True)):
            top = sampled.top[place] if most else ()
            likely = reported(top, kind, self.request.params, most) if most else []
            listed = [self._token(t, p) for t, p in likely]
            by_text = {one["token"]: p for one, (_, p) in zip(listed, likely, strict=True)}
            name = "top_probs" if after else "top_logprobs"
            yield self._token(token, logprob) | {name: listed, "by_text": by_text}

    def _token(self, token: int, logprob: float) -> Json:
        as_text = self.request.ids_as_text
        form: Json = {
            "id": token,
            "token": f"token_id:{token}" if as_text else self.vocabulary.text([token]),
            "bytes": list(self.vocabulary.bytes_of(token)),
        }
        if self.request.after_sampling:
            return form | {"prob": math.exp(logprob)}
        return form | {"logprob": logprob}


_ABSENT = object()


def _fill(form: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with its values."""
    if isinstance(form, dict):
        filled = {key: _fill(inner, values) for key, inner in form.items()}
        return {key: value for key, value in filled.items() if value is not _ABSENT}
    if isinstance(form, list) and form[:1] == ["$if"]:
        return _fill(form[2], values) if form[1] in values else None
    if isinstance(form, list) and form[:1] == ["$each"]:
        if form[1] not in values:
            return _ABSENT
        return [_fill(form[2], {**values, **one}) for one in values[form[1]]]
    if isinstance(form, list):
        return [_fill(inner, values) for inner in form]
    if not isinstance(form, str) or "$" not in form:
        return form
    before, _, name = form.partition("$")
    value = values.get(name, _ABSENT)
    return f"{before}{value}" if before else value


WIRES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=dict[str, Wire])
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
