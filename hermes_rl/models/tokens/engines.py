"""Engines that return token ids: routes that take a prompt of ids, described in `engines.toml`.

An answer that contradicts itself is refused with a `ProtocolError`, never repaired: another prompt
than was sent (a second BOS, a cut beginning), ids and logprobs of different lengths or tokens, no
ids at all.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import ModelAborted, ProtocolError
from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import Completion, ModelRequest, Sampling, TokenCapture
from hermes_rl.models.tokens.logprobs import LOWEST
from hermes_rl.models.tokens.plan import Spelling, with_explicit_filters
from hermes_rl.models.wire import (
    DONE,
    AnswerContext,
    BodyDecoder,
    Decoder,
    Envelope,
    EventDecoder,
    ReplyHead,
    bearer_headers,
    count_of,
    read_chat_usage,
    read_versions,
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
    sent = with_explicit_filters(sampling)
    return {name: getattr(sent, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def read_token_ids(values: Any) -> tuple[int, ...] | None:
    """Return ids that can be stored; None for anything else."""
    if not isinstance(values, list):
        return None
    valid = all(type(v) is int and 0 <= v < _FIRST_INVALID_ID for v in values)
    return tuple(values) if valid else None


class TokenRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names that one route uses: a table of `engines.toml`."""

    name: str
    """As rows name the wire."""
    path: str
    at_root: bool = True
    """The route is beside `/v1`, not below it."""
    params: str = ""
    """The object of a body with the sampling parameters and a run's further fields; empty: the body
    itself."""
    send: dict[str, str]
    """Value of a request -> its place in the body."""
    fixed: Json
    """The part of a body that is the same in every request."""
    with_logprobs: Json
    """What requests logprobs."""
    streamed: Json
    """What requests a stream, each event of which has the form of an answer."""
    pieces: tuple[str, ...]
    """The places of a stream's lists, that of the token ids last. An event has their next elements,
    or repeats them from the beginning."""
    longest_stream: int | None = None
    """Most tokens of a stream whose events repeat the answer so far: there is an event for each
    token, so the bytes of a stream grow with the square of its length."""
    likely_count: str
    """The place of the number of likeliest tokens that are requested for each position."""
    unlimited: int | None = None
    """Sent where no maximum of tokens is set: the rest of the window."""
    all_tokens: int = -1
    """The top-k that filters nothing."""
    seeds: int | None = None
    """Number of different seeds; None is unlimited."""
    gaps: bool = False
    """Some tokens may have no logprob; an answer with such a token has none. Streams leave these
    tokens out."""
    read: dict[str, str]
    """Value of an answer -> its place. `required`: an object without which nothing can be checked.
    `named`: the ids that the logprobs belong to. `matched`: the end token at which it stopped,
    which some versions leave out of `ids` but not of `named`. `refused`: the status of a refusal,
    which a stream has in place of an answer."""
    counts: dict[str, str]
    """Field of `Usage` -> its place, where `usage` is absent or incomplete."""
    finish: dict[str, str] | None = None
    """The engine's finish reasons -> ours; None where they are the same."""


ROUTES = msgspec.convert(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")),
    dict[str, TokenRoute],
)
"""`endpoint.tokens` -> the route."""


class TokenWire:
    """The route of one engine, as a dialect: `request.prompt_ids` in, ids and logprobs out.

    Args:
        route: a key of `ROUTES`.
        stop_ids: token ids that end an answer, besides the engine's own.
        secrets: texts that no error may show.
    """

    def __init__(
        self, route: str, stop_ids: frozenset[int] = frozenset(), secrets: Iterable[str] = ()
    ) -> None:
        self._route = ROUTES[route]
        self.name, self.path = self._route.name, self._route.path
        self.at_root = self._route.at_root
        self._stop = sorted(stop_ids)
        self._secrets = secrets

    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """Return the body of a request."""
        route, sampling = self._route, request.sampling
        form: Json = {}
        _merge(form, route.fixed)
        if request.logprobs:
            _merge(form, route.with_logprobs)
        if request.stream:
            _merge(form, route.streamed)
        params = form[route.params] if route.params else form
        params |= sampling_of(sampling)
        if params["top_k"] < 0:
            params["top_k"] = route.all_tokens
        most, seed = sampling.max_tokens, sampling.seed
        values = {
            "model": request.model,
            "call_id": request.call_id,
            "prompt": prompt,
            "max_tokens": route.unlimited if most is None else most,
            "stop": self._stop,
        }
        if seed is not None:
            values["seed"] = seed if route.seeds is None else seed % route.seeds
        for name, place in route.send.items():
            if name in values:
                _put(form, place, values[name])
        params |= request.extra
        return form

    def ask_likely(self, form: Json, most: int) -> None:
        """Change a body so that it also requests the likeliest tokens of each position."""
        _put(form, self._route.likely_count, most)

    def likely(self, form: Any) -> dict[Any, float]:
        """Return token -> logprob at the answer's first position."""
        listed = self._pick(form, "likely")
        if isinstance(listed, dict):
            return {token: p for token, p in listed.items() if _is_number(p)}
        # Two tokens may look alike: all that is listed beside the probability tells them apart.
        entries = listed if isinstance(listed, list) else []
        pairs = ((repr(_without_number(one)), _logprob(one)) for one in entries)
        return {token: p for token, p in pairs if _is_number(p)}

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

        def read(data: bytes, context: AnswerContext) -> Completion:
            return self._completion(context.parse(msgspec.json.decode, data), context, request)

        context = AnswerContext(head, self._secrets)
        if "event-stream" in head.headers.get("content-type", ""):
            read_whole = partial(self._completion, context=context, request=request)
            return _TokenStream(context, self._route, read_whole)
        return BodyDecoder(context, read)

    def _pick(self, form: Any, name: str) -> Any:
        return pick(form, self._route.read.get(name, ""))

    def _completion(self, form: Any, context: AnswerContext, request: ModelRequest) -> Completion:
        prompt = request.prompt_ids or ()
        if isinstance(form, dict) and form.get("error"):
            raise context.error_in_answer(form["error"])
        usage, raw = self._usage(form)
        named = _named_ids(self._pick(form, "named"))
        ids = self._checked_ids(form, named, usage, prompt, context)
        logprobs = self._checked_logprobs(form, named, ids, context)
        usage = msgspec.structs.replace(usage, input_tokens=len(prompt), output_tokens=len(ids))
        spans = read_versions(self._pick(form, "versions"), len(ids))
        envelope = Envelope(
            id=self._pick(form, "id"),
            model=self._pick(form, "model"),
            usage=msgspec.Raw(msgspec.json.encode(raw)),
            policy_version=self._pick(form, "version"),
        )
        finish = self._pick(form, "finish")
        if self._route.finish is not None:
            finish = self._route.finish.get(str(finish))
        return context.completion(
            envelope,
            AssistantMessage(),
            finish,
            lambda _: usage,
            TokenCapture(prompt, ids, logprobs, versions=spans),
        )

    def _usage(self, form: Any) -> tuple[Usage, Any]:
        """Return the usage that an answer reports, and the engine's own object. One of the counts
        alone is evidence too."""
        counts = self._route.counts
        counted = Usage(**{name: count_of(pick(form, place)) for name, place in counts.items()})
        if "usage" in self._route.read:
            raw = self._pick(form, "usage")
            return read_chat_usage(raw) or counted, raw
        return counted, {place.rpartition(".")[2]: pick(form, place) for place in counts.values()}

    def _checked_ids(
        self, form: Any, named: Any, usage: Usage, prompt: tuple[int, ...], context: AnswerContext
    ) -> tuple[int, ...]:
        """Return the sampled ids. Raises: ProtocolError."""
        if "required" in self._route.read and not isinstance(self._pick(form, "required"), dict):
            raise context.unreadable_error(f"not an answer of {self.name}")
        if self._pick(form, "truncated"):
            raise context.unreadable_error("the engine cut the prompt")
        listed = self._pick(form, "ids")
        if "matched" in self._route.read and named is not None:
            left_out = [self._pick(form, "matched")]
            shorter = isinstance(listed, list) and listed + left_out == named
            listed = named if listed is None or shorter else listed
        ids = read_token_ids(listed)
        if ids is None:
            raise context.unreadable_error("it holds no token ids of the answer")
        returned = self._pick(form, "prompt_ids")
        if returned is not None and read_token_ids(returned) != prompt:
            raise context.unreadable_error("the engine read another prompt than it was sent")
        read, counted = usage.input_tokens, usage.output_tokens
        if read not in (None, len(prompt)):
            raise context.unreadable_error(
                f"the engine read {read} prompt tokens and was sent {len(prompt)}"
            )
        if counted not in (None, len(ids)):
            raise context.unreadable_error(
                f"the engine counted {counted} sampled tokens, gave {len(ids)}"
            )
        return ids

    def _checked_logprobs(
        self, form: Any, named: Any, ids: tuple[int, ...], context: AnswerContext
    ) -> tuple[float, ...] | None:
        """Return one logprob per id; None if any is missing. Raises: ProtocolError."""
        listed = self._pick(form, "logprobs")
        if named is not None and named != list(ids):
            if self._route.gaps:
                return None
            raise context.unreadable_error("ids and logprobs are of different tokens")
        if not ids:
            return ()  # none is missing
        if not isinstance(listed, list) or not listed:
            return None
        if len(listed) != len(ids):
            raise context.unreadable_error(f"{len(listed)} logprobs for {len(ids)} tokens")
        values = [_logprob(one) for one in listed]
        if not all(_is_number(v) and LOWEST < v <= 1e-3 for v in values):
            return None
        return tuple(min(0.0, float(v)) for v in values)


class IdsLeftOut(ModelAborted):
    """The stream of an answer left out some of its ids."""


class _TokenStream(EventDecoder):
    """A streamed answer. One that breaks off has the tokens so far, and the finish reason `abort`.

    Args:
        read: reads an answer that came whole.
    """

    def __init__(
        self, context: AnswerContext, route: TokenRoute, read: Callable[[Json], Completion]
    ) -> None:
        super().__init__(context)
        self._route, self._read, self._form = route, read, Json()
        self._lists: dict[str, list[Any]] = {place: [] for place in route.pieces}
        """The pieces so far, by place. They are not in the form before the end."""
        self._repeats: bool | None = None
        self._last: Json = {}
        """The last event."""

    in_call = False

    def finish(self) -> Completion:
        """See `Decoder.finish`. A proxy may end a stream that it did not receive to its end."""
        if not self.done:
            with suppress(ProtocolError):  # within an event
                for data in self._events.close():
                    self._take(data)
        return self._answer()

    def cut_off(self) -> Completion | None:
        """See `EventDecoder.cut_off`. Without its end mark alone, the answer is complete."""
        if not any(self._lists.values()):
            return None
        if pick(self._form, self._route.read["finish"]) is not None:
            return self._whole()
        _put(self._form, self._route.read["finish"].rpartition("|")[2], "abort")
        # The engine may have sampled more than arrived: what it billed is unknown.
        return replace(self._whole(), usage=None, usage_raw=None)

    def _take(self, data: bytes) -> None:
        if data.strip() == DONE:
            self.done = True
            return
        event, read = self._context.parse(msgspec.json.decode, data), self._route.read
        if not isinstance(event, dict):
            raise self._context.unreadable_error(f"not an event of {self._route.name}")
        error = event.get("error")
        if pick(event, read.get("refused", "")) is not None:
            error = pick(event, "meta_info.finish_reason")
        if error:
            raise self._context.error_in_answer(error)
        _overlay(self._form, event)
        self._last = event
        total = count_of(pick(event, self._route.counts["output_tokens"]))
        for place, earlier in self._lists.items():
            new = pick(event, place)
            if type(new) is list and new:
                joined = self._joined(earlier, new, total) if earlier else new
                if earlier:
                    self._repeats = self._repeats or joined is new
                self._lists[place] = joined

    def _joined(self, earlier: list[Any], new: list[Any], total: int | None) -> list[Any]:
        """Return a list with the elements of an event. SGLang's events repeat all lists, none
        (`--incremental-streaming-output`), or the logprobs alone (earlier versions); the number of
        tokens so far tells, and for ids those beside the logprobs.

        Args:
            total: tokens so far; None if only the last event counts them.
        """
        if len(new) == total:
            return new
        if new and len(new) + 1 == total:  # some versions leave the end token out of the ids
            named = _named_ids(pick(self._joined_form(), self._route.read["named"])) or []
            if new == named[:-1] and earlier + new != named:
                return new
        earlier += new
        return earlier

    def _joined_form(self) -> Json:
        """Return the answer so far."""
        for place, joined in self._lists.items():
            if joined:
                _put(self._form, place, joined)
        return self._form

    def _answer(self) -> Completion:
        if pick(self._form, self._route.read["finish"]) is not None:
            return self._whole()
        if (answer := self.cut_off()) is not None:
            return answer
        raise self._context.truncated_error()

    def _whole(self) -> Completion:
        if self._route.gaps:
            total = count_of(pick(self._form, self._route.counts["output_tokens"])) or 0
            left_out = total - len(self._lists[self._route.pieces[-1]])
            if left_out > 0:
                raise IdsLeftOut(f"the stream left out {left_out} of {total} ids", served=True)
        answer = self._read(self._joined_form())
        assert answer.tokens is not None
        tokens = replace(answer.tokens, repeated=self._repeats)
        answer = replace(answer, tokens=tokens)
        if tokens.versions:
            return answer
        # The headers came before the tokens: what they name is not the version of all of them.
        version = pick(self._last, self._route.read.get("version", ""))
        return replace(answer, policy_version=None if version is None else str(version))


def _overlay(form: Json, event: Json) -> None:
    """Replace the values of an answer by those of an event that are not null."""
    for name, value in event.items():
        if type(value) is dict and type(known := form.get(name)) is dict:
            _overlay(known, value)
        elif type(value) is list and name == "choices" and (known := form.get(name)):
            for choice, more in zip(known, value, strict=False):
                if type(choice) is dict and type(more) is dict:
                    _overlay(choice, more)
        elif value is not None:
            form[name] = value


def pick(form: Any, places: str) -> Any:
    """Return the value at the first of these places that has one; None if there is none.

    Args:
        places: separated by `|`; the names of a place are separated by `.`.
    """
    for path in _paths(places):
        if (value := _pick_path(form, path)) is not None:
            return value
    return None


_Path = tuple[str | int, ...]


@cache
def _paths(places: str) -> tuple[_Path, ...]:
    """Return the names of each place, with indices as numbers. A stream needs them per token."""
    split = (place.split(".") for place in places.split("|"))
    return tuple(tuple(int(n) if n.isdecimal() else n for n in names) for names in split)


def _pick_path(form: Any, path: _Path) -> Any:
    for number, name in enumerate(path, 1):
        if type(form) is dict:
            form = form.get(name)
        elif type(form) is not list:
            return None
        elif name == "*":
            return [_pick_path(one, path[number:]) for one in form]
        else:
            form = form[name] if type(name) is int and name < len(form) else None
    return form


def _put(form: Any, place: str, value: Any) -> None:
    *parents, name = _paths(place)[0]
    for parent in parents:
        form = form[int(parent)] if type(form) is list else form.setdefault(parent, {})
    form[name] = value


def _merge(form: Json, more: Mapping[str, Any]) -> None:
    """Add fields to a body, and to the objects in it."""
    for name, value in more.items():
        if isinstance(value, dict):
            _merge(form.setdefault(name, {}), value)
        else:
            form[name] = value


def _named_ids(tokens: Any) -> list[Any] | None:
    """Return ids, which some servers write as `token_id:N`; None if they are texts."""
    if not isinstance(tokens, list) or not tokens:
        return None
    if any(type(token) is int for token in tokens):
        return tokens
    prefix = "token_id:"
    texts = [t.removeprefix(prefix) for t in tokens if isinstance(t, str) and t.startswith(prefix)]
    whole = len(texts) == len(tokens) and all(text.isdecimal() for text in texts)
    return [int(text) for text in texts] if whole else None


def _logprob(one: Any) -> Any:
    """Return the logprob of a token as engines list it: a number, a triple that begins with it, or
    an object with it or with the probability."""
    if isinstance(one, list):
        return one[0] if one else None
    if not isinstance(one, dict):
        return one
    prob = one.get("prob")
    if prob is None:
        return one.get("logprob")
    return math.log(prob) if _is_number(prob) and prob > 0 else None


def _without_number(one: Any) -> Any:
    if isinstance(one, dict):
        return {name: value for name, value in one.items() if name not in ("prob", "logprob")}
    return one[1:] if isinstance(one, list) else one


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


CHAT_MODE = "chat_completions"
_ABSURD = 1e9
"""No logprob is so far from 0."""


def read_first_logprobs(form: Any) -> dict[str, float]:
    """Return token -> logprob of the first position of a chat answer; empty if there are none."""
    listed = pick(form, "choices.0.logprobs.content.0.top_logprobs")
    entries = listed if isinstance(listed, list) else []
    pairs = ((str(pick(one, "token")), pick(one, "logprob")) for one in entries)
    return {token: p for token, p in pairs if _is_number(p) and abs(p) < _ABSURD}


def detect_ids_format(form: Any) -> Spelling | None:
    """Return whose field names the token ids of a chat answer have; None if there are none."""
    if pick(form, "choices.0.response_token_ids"):
        return "sglang"
    return "vllm" if pick(form, "choices.0.token_ids") and pick(form, "prompt_token_ids") else None
