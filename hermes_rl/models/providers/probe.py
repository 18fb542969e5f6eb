"""Ask an endpoint what it is: which models it lists, what a model can do, how it gives token ids.

- `list_models` costs no token. Every run asks it before it starts.
- `find_capabilities` makes at most seven small calls. It looks for tools, streaming, usage in
  streams and cached tokens in every wire format, and for logprobs and token ids in Chat
  Completions only, the one format that has them.
- `TokenSearch` finds out how a run gets exact token ids. `auto` tries what needs a tokenizer first
  (vLLM, SGLang, llama.cpp, with the prompt as ids), then a chat endpoint that returns ids. Rows of
  an endpoint that offers neither have no segments: ids are never made up.

What logprobs stand for is found from several calls: see `models.tokens.logprobs`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hermes_rl.errors import (
    AuthError,
    BadRequest,
    BillingError,
    ConnectionLost,
    ModelError,
    ModelTimeout,
    Outage,
    Overloaded,
    RateLimited,
    ServerError,
    UserError,
)
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import (
    Adaptation,
    Completion,
    Conversation,
    LogprobsKind,
    ModelRequest,
    Sampling,
)
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.errors import classify_response
from hermes_rl.models.providers.prices import PriceTable
from hermes_rl.models.tokens import (
    CHAT_MODE,
    CUT,
    NO_IDS,
    PENALTIES,
    TOP,
    Asked,
    Spelling,
    TokenPlan,
    Wanted,
    Way,
    filters_shown,
    first_logprobs,
    ids_spelling,
    kind_of,
    sampling_of,
    whole_ids,
)
from hermes_rl.models.transports import connection_fault, proxy_refused, untrusted
from hermes_rl.models.wire import ReplyHead, read_chat_usage
from hermes_rl.text import decode_json, encode_json, scrub
from hermes_rl.usage import Usage

if TYPE_CHECKING:
    from aiohttp import ClientResponse

    from hermes_rl.models.tokens import Renderer

MAX_TOKENS = 64
"""Output limit of each call; a model that reasons first may still answer."""
TRIED: dict[Wanted, tuple[Way, ...]] = {
    "auto": ("vllm", "vllm_generate", "sglang", "llamacpp"),
    "vllm": ("vllm", "vllm_generate"),
    "sglang": ("sglang",),
    "llamacpp": ("llamacpp",),
}
"""The token wires that are tried, in order."""

_T = TypeVar("_T")
_LIST_S = 5.0
_CALL_S = 60.0
_MAX_BYTES = 4 << 20
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
_WAITS = (0.2, 1.0)
"""Seconds before another try."""
_LONGEST = 5.0
_TRANSIENT = (RateLimited, Overloaded, ServerError, ModelTimeout, ConnectionLost)
"""Faults after which a call is tried again. A route that answers 500 every time does not exist."""


@dataclass(frozen=True)
class ProbeCall:
    """One call of a probe, as the manifest lists it."""

    what: str
    usage: dict[str, int | float | None] | None
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


async def list_models(endpoint: Endpoint, *, seconds: float = _LIST_S) -> tuple[str, ...] | None:
    """Return the ids of the models that an endpoint lists (GET `/models`); None if it has no list.

    An endpoint that answers anything but a refused key counts as reachable: not all have a list.

    Raises:
        UserError: the address cannot work.
        Outage: nobody answers there within `seconds`.
        AuthError: the key is refused, or the certificate is not trusted.
    """
    endpoint.check()
    try:
        async with asyncio.timeout(seconds):
            answer = await _exchange(endpoint, _models_address(endpoint), _key_headers(endpoint))
    except AuthError:
        raise
    except TimeoutError:
        raise _unreachable(f"{endpoint.host}: no answer within {seconds:g} s") from None
    except ModelError as error:
        raise _unreachable(str(error)) from None
    if answer.status in (401, 403):
        refusal = answer.error(endpoint)
        if isinstance(refusal, AuthError):
            raise refusal  # other uses of 403 (rates, credit) are left to the run itself
    return _model_ids(answer.body) if answer.status == 200 else None


def _unreachable(reason: str) -> Outage:
    return Outage(f"{reason}. Start the server, or set another base_url")


def _models_address(endpoint: Endpoint) -> str:
    """Return the address of the list of models. In Anthropic's format `/v1` belongs to the routes,
    and an address may end with the route of its wire format."""
    base = endpoint.base_url.rstrip("/")
    for route in ("/chat/completions", "/responses", "/messages"):
        base = base.removesuffix(route)
    versioned = endpoint.api_mode != "anthropic_messages" or base.endswith("/v1")
    return base + ("/models" if versioned else "/v1/models")


def _key_headers(endpoint: Endpoint) -> dict[str, str]:
    if not endpoint.api_key:
        return {}
    bearer = {"authorization": f"Bearer {endpoint.api_key}"}
    if endpoint.api_mode != "anthropic_messages":
        return bearer
    own = {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}
    return own if endpoint.host == "api.anthropic.com" else {**own, **bearer}


def _model_ids(body: bytes) -> tuple[str, ...] | None:
    try:
        form = decode_json(body)
    except ValueError:
        return None
    data = form.get("data") if isinstance(form, dict) else None
    if not isinstance(data, list):
        return None
    return tuple(str(one["id"]) for one in data if isinstance(one, dict) and "id" in one)


@dataclass(frozen=True)
class _Answer:
    """One HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def error(self, endpoint: Endpoint) -> ModelError:
        """Classify a response that is not a success."""
        low = {name.lower(): value for name, value in self.headers.items()}
        return classify_response(self.status, low, self.body, secrets=endpoint.secrets)


async def _post(endpoint: Endpoint, path: str, form: dict[str, Any]) -> bytes:
    """POST a JSON body and return the body of the answer. Raises: ModelError."""
    headers = {"content-type": "application/json"}
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {endpoint.api_key}"
    answer = await _exchange(endpoint, endpoint.url(path), headers, encode_json(form))
    if answer.status != 200:
        raise answer.error(endpoint)
    return answer.body


async def _exchange(
    endpoint: Endpoint, url: str, headers: Mapping[str, str], data: bytes | None = None
) -> _Answer:
    """Make one plain request: a GET, or a POST of `data`. Raises: ModelError."""
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(headers={"User-Agent": "hermes-rl"}) as session,
            session.request(
                "GET" if data is None else "POST",
                url,
                data=data,
                headers={**headers, **endpoint.headers},
                ssl=endpoint.tls() or True,
                proxy=endpoint.proxy,
                allow_redirects=False,
            ) as response,
        ):
            return _Answer(response.status, dict(response.headers), await _first_bytes(response))
    except aiohttp.ClientConnectorCertificateError as error:
        raise untrusted(endpoint.host, str(error.certificate_error)) from None
    except aiohttp.ClientHttpProxyError as error:
        raise proxy_refused(endpoint.host, error.status) from None
    except aiohttp.ClientConnectorError as error:
        raise ConnectionLost(f"{endpoint.host}: {connection_fault(error)}") from None
    except (aiohttp.ClientError, OSError) as error:
        reason = scrub(str(error) or type(error).__name__, endpoint.secrets)
        raise ConnectionLost(f"{endpoint.host}: {reason}") from None


async def _first_bytes(response: ClientResponse) -> bytes:
    """Return the body, cut after `_MAX_BYTES`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= _MAX_BYTES:
            break
    return bytes(body[:_MAX_BYTES])


async def find_capabilities(
    endpoint: Endpoint,
    model: str,
    prices: PriceTable | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Capabilities:
    """Find out what a model at an endpoint can do.

    Args:
        extra: further fields of each request's body.

    Raises: UserError when nobody answers there; AuthError for a key that is refused.
    """
    listed = await list_models(endpoint)
    calls = _CapabilityCalls(endpoint, model, prices or PriceTable(), extra)
    found = Capabilities(model, listed=None if listed is None else model in listed)
    plain = await calls.complete("answer")
    if plain is None:
        return replace(found, calls=tuple(calls.made))
    streamed = await calls.complete("stream", stream=True)
    called = await calls.complete("tools", tools=(_TOOL,), text="Call read_clock now.")
    chat = endpoint.api_mode == CHAT_MODE
    return replace(
        found,
        answers=True,
        usage=plain.usage is not None,
        cached_tokens=plain.usage is not None and plain.usage.cache_read_tokens is not None,
        streaming=streamed is not None,
        usage_in_streams=None if streamed is None else streamed.usage is not None,
        tools=called is not None and bool(called.message.tool_calls),
        logprobs=await calls.logprobs_kind() if chat else None,
        token_ids=await calls.ids_spelling() if chat else None,
        calls=tuple(calls.made),
    )


class _CapabilityCalls:
    """The calls that find out what a model can do."""

    def __init__(
        self, endpoint: Endpoint, model: str, prices: PriceTable, extra: Mapping[str, Any]
    ) -> None:
        self.made: list[ProbeCall] = []
        self._endpoint, self._model, self._prices = endpoint, model, prices
        self._extra = dict(extra)
        self._adaptations: frozenset[Adaptation] = frozenset()

    async def complete(
        self,
        what: str,
        *,
        stream: bool = False,
        tools: tuple[dict[str, Any], ...] = (),
        text: str = _QUESTION,
    ) -> Completion | None:
        """Make a call through the client that a run would use; None if it failed."""
        request = ModelRequest(
            model=self._model,
            conversation=Conversation([UserMessage(content=text)]),
            call_id=f"probe-{len(self.made)}",
            tools=tools,
            sampling=Sampling(max_tokens=MAX_TOKENS),
            stream=stream,
            extra=self._extra,
        )

        async def send() -> Completion:
            client = connect(self._endpoint)
            try:
                return await client.complete(replace(request, adaptations=self._adaptations))
            finally:
                await client.aclose()

        return await self._recorded(what, send, lambda answer: answer.usage)

    async def logprobs_kind(self) -> LogprobsKind | None:
        """Return what logprobs stand for; None if there are none."""
        for top in TOP:
            fields = {"logprobs": True, "top_logprobs": top, "max_tokens": 1}
            at_one = first_logprobs(await self._raw("logprobs", temperature=1.0, **fields))
            if at_one:
                break
        else:
            return None
        at_half = first_logprobs(await self._raw("logprobs, T 0.5", temperature=0.5, **fields))
        return kind_of(at_one, at_half)

    async def ids_spelling(self) -> str | None:
        """Return whose field names the token ids have; None if there are none."""
        return ids_spelling(await self._raw("token ids", max_tokens=1, return_token_ids=True))

    async def _raw(self, what: str, **fields: Any) -> dict[str, Any] | None:
        """Make a Chat Completions call and return its whole answer; None if it failed."""
        messages = [{"role": "user", "content": _QUESTION}]
        body = {"model": self._model, **self._extra, "messages": messages, **fields}
        if self._adaptations:
            body["max_completion_tokens"] = body.pop("max_tokens")

        async def send() -> dict[str, Any]:
            form = decode_json(await _post(self._endpoint, "/chat/completions", body))
            return form if isinstance(form, dict) else {}

        return await self._recorded(what, send, lambda form: read_chat_usage(form.get("usage")))

    async def _recorded(
        self, what: str, send: Callable[[], Awaitable[_T]], usage_of: Callable[[_T], Usage | None]
    ) -> _T | None:
        answer, error, seconds = await _timed(send)
        usage = None
        if answer is not None:
            try:
                usage = usage_of(answer)
            except (ModelError, ValueError) as failed:
                error = failed
        cost = None if usage is None else self._prices.price(self._model, usage)
        counts = None if usage is None else {k: getattr(usage, k) for k in usage.__struct_fields__}
        self.made.append(ProbeCall(what, counts, cost, seconds, _one_line(error)))
        renamed = isinstance(error, ModelError) and error.facts.completion_cap
        if renamed and not self._adaptations:
            self._adaptations = frozenset({"completion_cap"})
            return await self._recorded(what, send, usage_of)
        return answer


async def _timed(send: Callable[[], Awaitable[_T]]) -> tuple[_T | None, Exception | None, float]:
    """Make a call. Returns its answer or its error, and how many seconds it took."""
    began = time.monotonic()
    answer, error = None, None
    try:
        async with asyncio.timeout(_CALL_S):
            answer = await send()
    except (ModelError, UserError, ValueError, TimeoutError) as failed:
        error = failed
    return answer, error, round(time.monotonic() - began, 3)


def _one_line(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"[:300]


class _LogprobsMeaning(NamedTuple):
    """What the logprobs of a way to get ids stand for."""

    kind: LogprobsKind
    filtered: bool = False
    """They are taken after top-p, top-k and min-p."""


class _Finding(NamedTuple):
    """What one call of a token search returned."""

    logprobs: Mapping[Any, float] = {}
    """Token -> logprob of the first position."""
    usage: Usage | None = None


class _OtherTokenizer(ValueError):
    """The engine encodes a text as other ids."""


@dataclass
class TokenSearch:
    """Finds out how an endpoint gives token ids.

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
    _calls: list[Asked] = field(default_factory=list)

    async def plan(self, wanted: Wanted) -> TokenPlan:
        """Return the way to get ids.

        Raises: UserError when a way that was asked for by name does not exist, or needs a
            tokenizer, or where tools are offered whose calls no parser reads.
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
        if renderer is None and wanted == "auto":
            return None
        if renderer is None:
            raise UserError(
                f"endpoint.tokens={wanted} needs endpoint.tokenizer: a folder with tokenizer.json, "
                "or the model's name on the hub"
            )
        if self._unread is not None:
            if wanted == "auto":
                return None
            raise UserError(f"endpoint.tokens={wanted}: {self._unread}")
        for way in TRIED[wanted]:
            found = await self._try_wire(way, renderer)
            if found is not None:
                await self._compare_tokenizers(renderer)
                return TokenPlan(
                    way=way,
                    logprobs=found.kind,
                    filtered=found.filtered,
                    template=tuple(renderer.preserves_prefix().lines()),
                    calls=tuple(self._calls),
                )
        if wanted == "auto":
            return None
        errors = "; ".join(f"{call.what}: {call.error}" for call in self._calls if call.error)
        raise UserError(
            f"endpoint.tokens={wanted}: {self.endpoint.host} takes no prompt of ids ({errors}). "
            "Use another one, or auto"
        )

    @property
    def _unread(self) -> str | None:
        """Why answers to prompts of ids would lose their tool calls; None if they would not."""
        if self.renderer is None or not self.tools or self.renderer.parser_fits:
            return None
        return self.renderer.unread_calls

    async def _try_wire(self, way: Way, renderer: Renderer) -> _LogprobsMeaning | None:
        """Return what its logprobs stand for; None if the route does not exist."""
        from hermes_rl.models.tokens import TokenWire, at_root

        wire = TokenWire(way, renderer.end_ids, self.endpoint.secrets)
        where = at_root(self.endpoint) if wire.at_root else self.endpoint
        prompt = renderer.render([UserMessage(content=_QUESTION)])

        async def ask(temperature: float, top: int, top_k: int | None = None) -> _Finding:
            request = _one_token(self.model, temperature, prompt, top_k)
            form = wire.body(request, prompt)
            wire.ask_likely(form, top)
            data = await _post(where, wire.path, form)
            decoder = wire.decoder(request, ReplyHead({}))
            decoder.feed(data)
            usage = decoder.finish().usage  # raises if the answer contradicts itself
            return _Finding(wire.likely(decode_json(data)), usage)

        return await self._meaning(way, ask)

    async def _compare_tokenizers(self, renderer: Renderer) -> None:
        """Let the engine tokenize a text too, if it has a route for that.

        Raises: UserError when its ids differ: the tokenizer is another model's.
        """
        from hermes_rl.models.tokens import at_root

        text = renderer.text([UserMessage(content=_TOKENIZER_TEST)])
        body = {
            "model": self.model,
            "prompt": text,
            "add_special_tokens": False,  # vLLM, SGLang
            "content": text,
            "add_special": False,
            "parse_special": True,  # llama.cpp
        }

        async def ask() -> _Finding:
            form = decode_json(await _post(at_root(self.endpoint), "/tokenize", body))
            ids = whole_ids(form.get("tokens") if isinstance(form, dict) else None)
            if ids is not None and list(ids) != renderer.tokenizer.encode(text):
                raise _OtherTokenizer
            return _Finding()

        _, error = await self._with_retries("tokenize", ask)
        if isinstance(error, _OtherTokenizer):
            raise UserError(
                f"endpoint.tokenizer is not the tokenizer of {self.model!r} at "
                f"{self.endpoint.host}: the same text becomes other ids there"
            )

    async def _by_chat(self, *, needed: bool) -> TokenPlan:
        why, spelling = "the endpoint is not a chat endpoint", None
        meaning: _LogprobsMeaning | None = None
        if self.endpoint.api_mode == CHAT_MODE:
            found: list[Spelling | None] = []
            meaning = await self._meaning("chat", partial(self._ask_chat, found))
            spelling = found[0] if found else None
            why = f"{self.endpoint.host} gives none with its answers"
        if spelling is None and needed:
            raise UserError(
                f"endpoint.tokens=chat: {why}. Start the engine with a route for ids, name a "
                "tokenizer with endpoint.tokenizer, or set endpoint.tokens=off"
            )
        calls = tuple(self._calls)
        if spelling is None or meaning is None:
            if self._unread is not None:
                why = f"{why}; as to prompts of ids, {self._unread}"
            return TokenPlan(why=why, calls=calls)
        return TokenPlan(
            way="chat",
            logprobs=meaning.kind,
            filtered=meaning.filtered,
            spelling=spelling,
            calls=calls,
        )

    async def _ask_chat(
        self, found: list[Spelling | None], temperature: float, top: int, top_k: int | None = None
    ) -> _Finding:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": _QUESTION}],
            **sampling_of(Sampling(temperature=temperature, top_k=top_k)),
            **PENALTIES,
            **self.extra,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": top,
            "return_token_ids": True,
        }
        form = decode_json(await _post(self.endpoint, "/chat/completions", body))
        found.append(ids_spelling(form))
        usage = read_chat_usage(form.get("usage")) if isinstance(form, dict) else None
        return _Finding(first_logprobs(form), usage)

    async def _meaning(
        self, what: str, ask: Callable[..., Awaitable[_Finding]]
    ) -> _LogprobsMeaning | None:
        """Ask at two temperatures, and with a filter; None if the first call was refused.

        Args:
            ask: takes the temperature, the number of likely tokens, and optionally top-k.
        """
        for top in TOP:
            at_one, error = await self._with_retries(what, partial(ask, 1.0, top))
            if not isinstance(error, BadRequest):
                break
        if at_one is None:
            return None
        at_half, _ = await self._with_retries(f"{what}, T 0.5", partial(ask, 0.5, top))
        kind = kind_of(at_one.logprobs, at_half.logprobs if at_half is not None else {})
        if kind != "sampling":
            return _LogprobsMeaning(kind)
        cut, _ = await self._with_retries(f"{what}, top_k {CUT}", partial(ask, 1.0, top, CUT))
        filtered = cut is not None and filters_shown(at_one.logprobs, cut.logprobs)
        return _LogprobsMeaning(kind, filtered)

    async def _with_retries(
        self, what: str, ask: Callable[[], Awaitable[_Finding]]
    ) -> tuple[_Finding | None, Exception | None]:
        """Make a call, and repeat it after a transient fault.

        Raises:
            AuthError, BillingError: the run itself stops for them and can be resumed.
            UserError: a transient fault did not end; one missing answer would leave a run without
                ids.
        """
        for wait in (*_WAITS, None):
            finding, error, seconds = await _timed(ask)
            usage = finding.usage if finding is not None else None
            self._calls.append(
                Asked(
                    what=what,
                    seconds=seconds,
                    input_tokens=usage.input_tokens if usage else None,
                    output_tokens=usage.output_tokens if usage else None,
                    error=_one_line(error),
                )
            )
            if isinstance(error, AuthError | BillingError):
                raise error
            transient = isinstance(error, _TRANSIENT)
            if not transient or (wait is None and isinstance(error, ServerError)):
                return finding, error
            if wait is None:
                raise UserError(
                    f"{self.endpoint.host} does not say how it gives token ids: {error}. Try again "
                    "later, or set endpoint.tokens=off"
                )
            assert isinstance(error, ModelError)
            await asyncio.sleep(min(_LONGEST, error.retry_after_s or wait))
        raise AssertionError("the last wait is None")


def _one_token(
    model: str, temperature: float, prompt: list[int], top_k: int | None
) -> ModelRequest:
    return ModelRequest(
        model=model,
        conversation=Conversation(),
        call_id=f"probe-{temperature:g}",
        sampling=Sampling(temperature=temperature, top_k=top_k, max_tokens=1),
        logprobs=True,
        prompt_ids=tuple(prompt),
    )
