"""Probe endpoints: the models that they list, a model's capabilities, and how to get token ids.

- `list_models` costs no token. Every run calls it before it starts.
- `Probe.capabilities` makes at most seven small calls. It checks tools, streaming, usage in
  streams and cached tokens in every wire format, and for logprobs and token ids in Chat
  Completions only, the one format that has them.
- `Probe.plan` finds out how a run gets exact token ids. `auto` first tries the routes that need a
  tokenizer (vLLM, SGLang, llama.cpp, with the prompt as ids), then a chat endpoint that returns
  ids. Without either, rows have no segments: ids are never made up.

Several calls show what kind logprobs are of: see `models.tokens.logprobs`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hermes_rl.errors import (
    AuthError,
    BadRequest,
    BillingError,
    ConnectionLost,
    ModelAborted,
    ModelError,
    ModelTimeout,
    Overloaded,
    RateLimited,
    ServerError,
    UserError,
)
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Conversation, LogprobsKind, ModelRequest, Sampling
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.errors import classify_response
from hermes_rl.models.providers.listing import list_models
from hermes_rl.models.providers.prices import PriceTable
from hermes_rl.models.tokens import (
    CHAT_MODE,
    CUT,
    NO_IDS,
    PENALTIES,
    TOP,
    PlanCall,
    Spelling,
    TokenPlan,
    Wanted,
    Way,
    classify_logprobs,
    detect_ids_format,
    logprobs_follow_filters,
    pick,
    read_first_logprobs,
    read_token_ids,
    sampling_of,
)
from hermes_rl.models.wire import VERSION_HEADERS, ReplyHead, bearer_headers, read_chat_usage
from hermes_rl.text import decode_json, encode_json
from hermes_rl.usage import Usage

if TYPE_CHECKING:
    from hermes_rl.models.tokens import Renderer
    from hermes_rl.models.transports import PlainAnswer

MAX_TOKENS = 64
"""Output limit of each call; a model that reasons first may still answer."""
TRIED: dict[Wanted, tuple[Way, ...]] = {
    "auto": ("vllm", "vllm_generate", "sglang", "llamacpp"),
    "vllm": ("vllm", "vllm_generate"),
    "sglang": ("sglang",),
    "llamacpp": ("llamacpp",),
}
"""The token wires that are tried, in order."""

CALL_S = 60.0
"""How long one call may take, in seconds."""
_QUESTION = "Answer with one random letter of the alphabet."
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_clock",
        "description": "The time now.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_TOKENIZER_TEST = "Naïve cafés count 12345 \t{}\n\n  日本語 🙂 isn't 'it'?"
"""A text that two different tokenizers are unlikely to encode alike."""
_WAITS = (0.2, 1.0, 3.0)
"""Seconds before another try."""
_LONGEST = 5.0
_TOKENS_IF_ABORTED = 16
"""Tokens of a call after one that was aborted before its only token: the first one is enough."""
_TRANSIENT = (RateLimited, Overloaded, ServerError, ModelTimeout, ConnectionLost, ModelAborted)
"""Faults after which a call is tried again. A route that answers 500 every time does not exist."""


@dataclass(frozen=True)
class ProbeCall:
    """One call of a probe, as the manifest lists it."""

    what: str
    usage: dict[str, Any] | None
    cost_usd: float | None
    latency_s: float
    error: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a model at an endpoint can do; None is not known."""

    model: str
    listed: bool | None = None
    """The endpoint lists its models, and this is one of them."""
    answers: bool = False
    tools: bool | None = None
    streaming: bool | None = None
    usage: bool | None = None
    usage_in_streams: bool | None = None
    cached_tokens: bool | None = None
    """Usage says how many prompt tokens came from a cache."""
    logprobs: LogprobsKind | None = None
    """None: it returns none."""
    token_ids: str | None = None
    """`vllm` or `sglang`: the engine whose field names they have. None: it returns none."""
    calls: tuple[ProbeCall, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for the manifest."""
        return asdict(self)


@dataclass(frozen=True)
class EndpointReport:
    """What is known of an endpoint before a run starts."""

    models: tuple[str, ...] | None
    """Ids of the models that it lists; None if it has no list."""
    capabilities: Capabilities | None = None
    """None if the run did not ask for them (`run.probe`)."""
    tokens: TokenPlan | None = None
    """How the run gets token ids; None if it wants none."""


_VERSION = "policy_version|weight_version|choices.0.weight_version|meta_info.weight_version"
"""Places of the version of the weights in the answers of engines."""
_SPANS = "choices.0.weight_versions|weight_versions|meta_info.weight_versions"
"""Places of the versions of the tokens."""


async def _post(endpoint: Endpoint, path: str, form: dict[str, Any]) -> PlainAnswer:
    """POST a JSON body and return the answer. Raises: ModelError."""
    from hermes_rl.models.transports import exchange

    headers, url = bearer_headers(endpoint.api_key), endpoint.url(path)
    answer = await exchange(endpoint, url, headers, encode_json(form))
    if answer.status == 200:
        return answer
    raise classify_response(
        answer.status, answer.headers, answer.body, secrets=endpoint.secrets, url=url
    )


class _Answer(NamedTuple):
    """The result of one call."""

    usage: Usage | None = None
    logprobs: Mapping[Any, float] = {}
    """Token -> logprob of the first position."""
    spelling: Spelling | None = None
    """Whose field names the token ids have; None if there are none."""
    called: bool = False
    """It holds a tool call."""
    ids: tuple[int, ...] | None = None
    """Of a text that the engine tokenized."""


_Ask = Callable[..., Awaitable[_Answer]]


class _Logprobs(NamedTuple):
    """The kind of logprobs that one type of request returns."""

    first: _Answer
    kind: LogprobsKind
    filtered: bool = False
    """They are taken after top-p, top-k and min-p."""


@dataclass
class Probe:
    """Finds out what a model at an endpoint can do, and how it gives token ids.

    Args:
        model: its name at the endpoint.
        renderer: of the model's tokenizer; None if none was named.
        tools: whether tools are offered, whose calls one of our parsers must then read.
        extra: further fields of the bodies of chat requests.
    """

    endpoint: Endpoint
    model: str
    renderer: Renderer | None = None
    tools: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    prices: PriceTable = field(default_factory=PriceTable)
    _calls: list[ProbeCall] = field(default_factory=list)
    _capped: bool = False
    """The server calls the output limit `max_completion_tokens`."""
    _tokens: int = 1
    """Tokens of a call with ids."""
    _version: str | None = None
    """Of the weights, as the last answer named it."""
    _spans: bool = False
    """Whether the last answer names the versions of its tokens."""

    async def capabilities(self) -> Capabilities:
        """Find out what the model can do.

        Raises: Outage if the endpoint does not answer; AuthError for a key that is refused.
        """
        listed = await list_models(self.endpoint)
        found = Capabilities(self.model, listed=None if listed is None else self.model in listed)
        plain, _ = await self._call("answer", self._complete)
        if plain is None:
            return replace(found, calls=tuple(self._calls))
        streamed, _ = await self._call("stream", partial(self._complete, stream=True))
        wanted = partial(self._complete, tools=(_TOOL,), text="Call read_clock now.")
        called, _ = await self._call("tools", wanted)
        likely, ids = None, None
        if self.endpoint.api_mode == CHAT_MODE:
            likely = await self._logprobs("logprobs", self._likely)
            ids, _ = await self._call("token ids", partial(self._chat, return_token_ids=True))
        return replace(
            found,
            answers=True,
            usage=plain.usage is not None,
            cached_tokens=plain.usage is not None and plain.usage.cache_read_tokens is not None,
            streaming=streamed is not None,
            usage_in_streams=None if streamed is None else streamed.usage is not None,
            tools=called is not None and called.called,
            logprobs=likely.kind if likely is not None and likely.first.logprobs else None,
            token_ids=ids.spelling if ids is not None else None,
            calls=tuple(self._calls),
        )

    async def plan(self, wanted: Wanted) -> TokenPlan:
        """Return the way to get ids.

        Raises: UserError if a way that was requested by name does not exist, needs a tokenizer, or
            cannot read the calls of the offered tools.
        """
        if wanted == "off":
            return NO_IDS
        if wanted in TRIED:
            found = await self._by_ids(wanted)
            if found is not None:
                return found
        return await self._by_chat(needed=wanted == "chat")

    async def _by_ids(self, wanted: Wanted) -> TokenPlan | None:
        renderer = self.renderer
        if wanted == "auto" and (renderer is None or self._unread is not None):
            return None
        if renderer is None:
            raise UserError(
                f"endpoint.tokens={wanted} needs endpoint.tokenizer: a folder with tokenizer.json, "
                "or the model's name on the hub"
            )
        if self._unread is not None:
            raise UserError(f"endpoint.tokens={wanted}: {self._unread}")
        for way in TRIED[wanted]:
            ask = self._wire_question(way, renderer)
            found = await self._logprobs(way, ask, decisive=True)
            if found is not None:
                if way == "vllm" and (better := await self._by_versions(renderer)):
                    way, found = "vllm_generate", better
                await self._compare_tokenizers(renderer)
                return TokenPlan(
                    way=way,
                    logprobs=found.kind,
                    filtered=found.filtered,
                    version=self._version,
                    template=tuple(renderer.preserves_prefix().lines()),
                    calls=self._plan_calls(),
                )
        if wanted == "auto":
            return None
        errors = "; ".join(f"{call.what}: {call.error}" for call in self._calls if call.error)
        raise UserError(
            f"endpoint.tokens={wanted}: {self.endpoint.host} takes no prompt of ids ({errors}). "
            "Use another one, or auto"
        )

    async def _by_versions(self, renderer: Renderer) -> _Logprobs | None:
        """What vLLM's route for ids returns, if it names the versions of tokens and completions do
        not, as in vLLM 0.32 with `--enable-scale-out`."""
        if self._spans:
            return None
        ask = self._wire_question("vllm_generate", renderer)
        await self._call("vllm_generate", partial(ask, 1.0, 1))
        if not self._spans:
            return None
        return await self._logprobs("vllm_generate", ask, decisive=True)

    @property
    def _unread(self) -> str | None:
        """Why answers to prompts of ids would lose their tool calls; None if they would not."""
        if self.renderer is None or not self.tools or self.renderer.parser_fits:
            return None
        return self.renderer.unread_calls

    def _wire_question(self, way: Way, renderer: Renderer) -> _Ask:
        """The question for likely tokens on one token wire."""
        from hermes_rl.models.tokens import TokenWire, without_version_path

        wire = TokenWire(way, renderer.end_ids, self.endpoint.secrets)
        where = without_version_path(self.endpoint) if wire.at_root else self.endpoint
        prompt = renderer.render([UserMessage(content=_QUESTION)])

        async def ask(temperature: float, top: int, top_k: int | None = None) -> _Answer:
            request = ModelRequest(
                model=self.model,
                conversation=Conversation(),
                call_id=f"probe-{temperature:g}",
                sampling=Sampling(temperature=temperature, top_k=top_k, max_tokens=self._tokens),
                logprobs=True,
                prompt_ids=tuple(prompt),
            )
            form = wire.body(request, prompt)
            wire.ask_likely(form, top)
            data = self._body(await _post(where, wire.path, form))
            decoder = wire.decoder(request, ReplyHead({}))
            decoder.feed(data)
            answer = decoder.finish()  # raises if the answer contradicts itself
            likely = wire.likely(decode_json(data))
            if answer.finish_reason == "abort" and not likely:
                self._tokens = _TOKENS_IF_ABORTED
                raise ModelAborted("the engine gave the request up")
            return _Answer(answer.usage, likely)

        return ask

    def _body(self, answer: PlainAnswer) -> bytes:
        """Return the body of an answer, and note the version of the weights that it names."""
        named = [answer.headers.get(name) for name in VERSION_HEADERS]
        form = decode_json(answer.body)
        version = pick(form, _VERSION) or next(filter(None, named), None)
        self._version = self._version if version is None else str(version)
        self._spans = bool(pick(form, _SPANS))
        return answer.body

    async def _compare_tokenizers(self, renderer: Renderer) -> None:
        """Let the engine tokenize a text too, if it has a route for that.

        Raises: UserError when its ids differ: the tokenizer is another model's.
        """
        text = renderer.text([UserMessage(content=_TOKENIZER_TEST)])
        body = {
            "model": self.model,
            "prompt": text,
            "add_special_tokens": False,  # vLLM, SGLang
            "content": text,
            "add_special": False,
            "parse_special": True,  # llama.cpp
        }

        from hermes_rl.models.tokens import without_version_path  # with it comes the renderer

        async def ask() -> _Answer:
            form = decode_json(
                (await _post(without_version_path(self.endpoint), "/tokenize", body)).body
            )
            return _Answer(
                ids=read_token_ids(form.get("tokens") if isinstance(form, dict) else None)
            )

        answer, _ = await self._patiently("tokenize", ask)
        ids = answer.ids if answer is not None else None
        if ids is not None and list(ids) != renderer.tokenizer.encode(text):
            raise UserError(
                f"endpoint.tokenizer is not the tokenizer of {self.model!r} at "
                f"{self.endpoint.host}: the same text becomes other ids there"
            )

    async def _by_chat(self, *, needed: bool) -> TokenPlan:
        why, found = "the endpoint is not a chat endpoint", None
        if self.endpoint.api_mode == CHAT_MODE:
            found = await self._logprobs("chat", self._likely_with_ids, decisive=True)
            why = f"{self.endpoint.host} gives none with its answers"
            if found is None and (error := self._calls[-1].error):
                why = f"{self.endpoint.host} gives none: {error}"
        if found is not None and found.first.spelling is not None:
            return TokenPlan(
                way="chat",
                logprobs=found.kind,
                filtered=found.filtered,
                version=self._version,
                spelling=found.first.spelling,
                calls=self._plan_calls(),
            )
        if needed:
            raise UserError(
                f"endpoint.tokens=chat: {why}. Start the engine with a route for ids, name a "
                "tokenizer with endpoint.tokenizer, or set endpoint.tokens=off"
            )
        if self._unread is not None:
            why = f"{why}; as to prompts of ids, {self._unread}"
        return TokenPlan(why=why, calls=self._plan_calls())

    async def _logprobs(self, what: str, ask: _Ask, *, decisive: bool = False) -> _Logprobs | None:
        """Ask at two temperatures; None if the first call was refused.

        Args:
            ask: takes the temperature, the number of likely tokens, and optionally top-k.
            decisive: a run depends on the answers: ask with a filter too, and wait for the end of
                transient faults.
        """
        call = self._patiently if decisive else self._call
        for top in TOP:
            at_one, error = await call(what, partial(ask, 1.0, top))
            if not isinstance(error, BadRequest):
                break
        if at_one is None:
            return None
        at_half, _ = await call(f"{what}, T 0.5", partial(ask, 0.5, top))
        kind = classify_logprobs(at_one.logprobs, at_half.logprobs if at_half is not None else {})
        if kind != "sampling" or not decisive:
            return _Logprobs(at_one, kind)
        cut, _ = await call(f"{what}, top_k {CUT}", partial(ask, 1.0, top, CUT))
        filtered = cut is not None and logprobs_follow_filters(at_one.logprobs, cut.logprobs)
        return _Logprobs(at_one, kind, filtered)

    async def _complete(
        self,
        *,
        stream: bool = False,
        tools: tuple[dict[str, Any], ...] = (),
        text: str = _QUESTION,
    ) -> _Answer:
        """Make a call through the client that a run would use."""
        request = ModelRequest(
            model=self.model,
            conversation=Conversation([UserMessage(content=text)]),
            call_id=f"probe-{len(self._calls)}",
            tools=tools,
            sampling=Sampling(max_tokens=MAX_TOKENS),
            stream=stream,
            extra=dict(self.extra),
            adaptations=frozenset({"completion_cap"} if self._capped else ()),
        )
        client = connect(self.endpoint)
        try:
            answer = await client.complete(request)
        finally:
            await client.aclose()
        return _Answer(answer.usage, called=bool(answer.message.tool_calls))

    async def _chat(self, **fields: Any) -> _Answer:
        """Make a Chat Completions call for one token."""
        limit = "max_completion_tokens" if self._capped else "max_tokens"
        messages = [{"role": "user", "content": _QUESTION}]
        body = {**self.extra, "model": self.model, "messages": messages, limit: 1, **fields}
        form = decode_json(self._body(await _post(self.endpoint, "/chat/completions", body)))
        usage = read_chat_usage(form.get("usage")) if isinstance(form, dict) else None
        return _Answer(usage, read_first_logprobs(form), detect_ids_format(form))

    async def _likely(self, temperature: float, top: int) -> _Answer:
        return await self._chat(temperature=temperature, logprobs=True, top_logprobs=top)

    async def _likely_with_ids(
        self, temperature: float, top: int, top_k: int | None = None
    ) -> _Answer:
        sent = {**sampling_of(Sampling(temperature=temperature, top_k=top_k)), **PENALTIES}
        fields = {"logprobs": True, "top_logprobs": top, "return_token_ids": True}
        return await self._chat(**sent, **fields)

    async def _call(self, what: str, ask: _Ask) -> tuple[_Answer | None, Exception | None]:
        """Make a call and record it. It is made once more where the output limit has another
        name."""
        began = time.monotonic()
        answer, error = None, None
        try:
            async with asyncio.timeout(CALL_S):
                answer = await ask()
        except (ModelError, UserError, ValueError) as failed:
            error = failed
        except TimeoutError:  # a paused engine: it takes requests, and waits
            error = ModelTimeout(f"no answer within {CALL_S:g} s. Is the engine paused?")
        usage = answer.usage if answer is not None else None
        self._calls.append(
            ProbeCall(
                what=what,
                usage=None if usage is None else msgspec.structs.asdict(usage),
                cost_usd=None if usage is None else self.prices.price(self.model, usage),
                latency_s=round(time.monotonic() - began, 3),
                error=None if error is None else f"{type(error).__name__}: {error}"[:300],
            )
        )
        if isinstance(error, ModelError) and error.facts.completion_cap and not self._capped:
            self._capped = True
            return await self._call(what, ask)
        return answer, error

    async def _patiently(self, what: str, ask: _Ask) -> tuple[_Answer | None, Exception | None]:
        """Make a call, and repeat it after a transient fault.

        Raises:
            AuthError, BillingError: the run itself stops for them and can be resumed.
            UserError: a transient fault did not end; one missing answer would leave a run without
                ids.
        """
        for wait in (*_WAITS, None):
            answer, error = await self._call(what, ask)
            if isinstance(error, AuthError | BillingError):
                raise error
            transient = isinstance(error, _TRANSIENT)
            if not transient or (wait is None and isinstance(error, ServerError)):
                return answer, error
            if wait is None:
                raise UserError(
                    f"{self.endpoint.host} does not say how it gives token ids: {error}. Try again "
                    "later, or set endpoint.tokens=off"
                )
            assert isinstance(error, ModelError)
            await asyncio.sleep(min(_LONGEST, error.retry_after_s or wait))
        raise AssertionError("the last wait is None")

    def _plan_calls(self) -> tuple[PlanCall, ...]:
        """The calls, as a plan lists them."""
        return tuple(
            PlanCall(
                what=call.what,
                seconds=call.latency_s,
                input_tokens=call.usage["input_tokens"] if call.usage else None,
                output_tokens=call.usage["output_tokens"] if call.usage else None,
                error=call.error,
            )
            for call in self._calls
        )
