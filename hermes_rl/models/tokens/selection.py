"""How a run gets exact token ids from its endpoint: found once, at its start.

`auto` tries what needs a tokenizer first (vLLM, SGLang, llama.cpp, with the prompt as ids), then a
chat endpoint that gives ids. An endpoint that does neither gives rows without segments, and that is
said: ids are never made up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hermes_rl.errors import (
    AuthError,
    BadRequest,
    BillingError,
    ConnectionLost,
    ModelError,
    ModelTimeout,
    Overloaded,
    RateLimited,
    ServerError,
    UserError,
)
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Conversation, LogprobsKind, ModelClient, ModelRequest, Sampling
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.providers.raw import ask_raw
from hermes_rl.models.tokens.client import WIRES, at_root, token_client
from hermes_rl.models.tokens.engines.base import PENALTIES, Json, sampling_of, whole_ids
from hermes_rl.models.tokens.engines.chat import ChatIdsClient
from hermes_rl.models.tokens.logprobs import CUT, TOP, filters_shown, kind_of
from hermes_rl.models.tokens.plan import NO_IDS, Asked, Spelling, TokenPlan, Wanted, Way
from hermes_rl.models.tokens.renderer import Renderer
from hermes_rl.models.wire.base import ReplyHead
from hermes_rl.models.wire.chat import NAME as CHAT_MODE
from hermes_rl.models.wire.usage import read_chat_usage
from hermes_rl.text import decode_json
from hermes_rl.usage import Usage

TRIED: dict[Wanted, tuple[Way, ...]] = {
    "auto": ("vllm", "vllm_generate", "sglang", "llamacpp"),
    "vllm": ("vllm", "vllm_generate"),
    "sglang": ("sglang",),
    "llamacpp": ("llamacpp",),
}
"""The token wires that are tried, in order."""

_WORD = "Answer with one random letter of the alphabet."
_WORDS = "Naïve cafés count 12345 \t{}\n\n  日本語 🙂 isn't 'it'?"
"""Hard for tokenizers to agree on by chance."""
_SECONDS = 60.0


_WAITS = (0.2, 1.0)
"""Seconds before another try."""
_LONGEST = 5.0
_PASSING = (RateLimited, Overloaded, ServerError, ModelTimeout, ConnectionLost)
"""Faults that another try may not meet. A route that answers 500 every time is not there."""


class Meaning(NamedTuple):
    """What logprobs are of."""

    kind: LogprobsKind
    filtered: bool = False
    """They are taken behind top-p, top-k and min-p."""


class Look(NamedTuple):
    """What one call showed."""

    likely: Mapping[Any, float] = {}
    """Token -> logprob of the first position."""
    usage: Usage | None = None


class _OtherTokenizer(ValueError):
    """The engine makes other ids of a text."""


@dataclass
class Search:
    """One search at one endpoint.

    Args:
        model: as the endpoint calls it.
        renderer: of the model's tokenizer; None where none was named.
        tools: whether tools are offered, whose calls a parser here must then read.
        extra: further fields of the bodies of chat requests.
    """

    endpoint: Endpoint
    model: str
    renderer: Renderer | None = None
    tools: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    _calls: list[Asked] = field(default_factory=list)

    async def plan(self, wanted: Wanted) -> TokenPlan:
        """The way to ids.

        Raises: UserError when a way that was asked for by name is not there, or needs a tokenizer,
            or where tools are offered whose calls nobody would read.
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
                await self._compare(renderer)
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
        """Why answers to prompts of ids would lose their tool calls; None where they do not."""
        if self.renderer is None or not self.tools or self.renderer.parser_fits:
            return None
        return self.renderer.unread_calls

    async def _try_wire(self, way: Way, renderer: Renderer) -> Meaning | None:
        """The kind of its logprobs; None where the route is not there."""
        wire = WIRES[way](renderer.end_ids, self.endpoint.secrets)
        where = at_root(self.endpoint) if wire.at_root else self.endpoint
        prompt = renderer.render([UserMessage(content=_WORD)])

        async def ask(temperature: float, most: int, top_k: int | None = None) -> Look:
            request = _one_token(self.model, temperature, prompt, top_k)
            form = wire.body(request, prompt)
            wire.ask_likely(form, most)
            data = await ask_raw(where, wire.path, form)
            decoder = wire.decoder(request, ReplyHead({}))
            decoder.feed(data)
            usage = decoder.finish().usage  # raises where the answer contradicts itself
            try:
                return Look(wire.likely(decode_json(data)), usage)
            except (KeyError, IndexError, TypeError, AttributeError):
                return Look({}, usage)

        return await self._kind(way, ask)

    async def _compare(self, renderer: Renderer) -> None:
        """Ask the engine to tokenise a text too, where it has a route for that.

        Raises: UserError when it does so in another way: the tokenizer is of another model.
        """
        text = renderer.text([UserMessage(content=_WORDS)])
        body = {
            "model": self.model,
            "prompt": text,
            "add_special_tokens": False,  # vLLM, SGLang
            "content": text,
            "add_special": False,
            "parse_special": True,  # llama.cpp
        }

        async def ask() -> Look:
            form = decode_json(await ask_raw(at_root(self.endpoint), "/tokenize", body))
            told = whole_ids(form.get("tokens") if isinstance(form, dict) else None)
            if told is not None and list(told) != renderer.tokenizer.encode(text):
                raise _OtherTokenizer
            return Look()

        _, error = await self._listed("tokenize", ask)
        if isinstance(error, _OtherTokenizer):
            raise UserError(
                f"endpoint.tokenizer is not the tokenizer of {self.model!r} at "
                f"{self.endpoint.host}: the same text becomes other ids there"
            )

    async def _by_chat(self, *, needed: bool) -> TokenPlan:
        why, spelling = "the endpoint is no chat endpoint", None
        meaning: Meaning | None = None
        if self.endpoint.api_mode == CHAT_MODE:
            found: list[Spelling | None] = []
            meaning = await self._kind("chat", partial(self._ask_chat, found))
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
        self, found: list[Spelling | None], temperature: float, most: int, top_k: int | None = None
    ) -> Look:
        body: Json = {
            "model": self.model,
            "messages": [{"role": "user", "content": _WORD}],
            **sampling_of(Sampling(temperature=temperature, top_k=top_k)),
            **PENALTIES,
            **self.extra,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": most,
            "return_token_ids": True,
        }
        form = decode_json(await ask_raw(self.endpoint, "/chat/completions", body))
        found.append(spelling_of(form))
        usage = read_chat_usage(form.get("usage")) if isinstance(form, dict) else None
        try:
            likely = form["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return Look({one["token"]: float(one["logprob"]) for one in likely}, usage)
        except (KeyError, IndexError, TypeError, ValueError):
            return Look({}, usage)

    async def _kind(self, what: str, ask: Callable[..., Awaitable[Look]]) -> Meaning | None:
        """Ask at two temperatures, and with a filter; None when the first call was refused.

        Args:
            ask: takes the temperature, the number of likely tokens, and maybe top-k.
        """
        for most in TOP:
            at_one, error = await self._listed(what, partial(ask, 1.0, most))
            if not isinstance(error, BadRequest):
                break
        if at_one is None:
            return None
        at_half, _ = await self._listed(f"{what}, T 0.5", partial(ask, 0.5, most))
        kind = kind_of(at_one.likely, at_half.likely if at_half is not None else {})
        if kind != "sampling":
            return Meaning(kind)
        cut, _ = await self._listed(f"{what}, top_k {CUT}", partial(ask, 1.0, most, CUT))
        return Meaning(kind, cut is not None and filters_shown(at_one.likely, cut.likely))

    async def _listed(
        self, what: str, ask: Callable[[], Awaitable[Look]]
    ) -> tuple[Look | None, Exception | None]:
        """Make a call, and again where it met a fault that passes.

        Raises: AuthError, BillingError: the run itself stops for them, resumable. UserError for a
        fault that does not pass: a run would have no ids for want of one answer.
        """
        for wait in (*_WAITS, None):
            look, error = await self._once(what, ask)
            if isinstance(error, AuthError | BillingError):
                raise error
            if not isinstance(error, _PASSING) or (wait is None and isinstance(error, ServerError)):
                return look, error
            if wait is None:
                raise UserError(
                    f"{self.endpoint.host} does not say how it gives token ids: {error}. Try again "
                    "later, or set endpoint.tokens=off"
                )
            await asyncio.sleep(min(_LONGEST, error.retry_after_s or wait))
        raise AssertionError("the last wait is None")

    async def _once(
        self, what: str, ask: Callable[[], Awaitable[Look]]
    ) -> tuple[Look | None, Exception | None]:
        began = time.monotonic()
        look, error = None, None
        try:
            async with asyncio.timeout(_SECONDS):
                look = await ask()
        except (ModelError, UserError, ValueError, TimeoutError) as failed:
            error = failed
        usage = look.usage if look is not None else None
        self._calls.append(
            Asked(
                what=what,
                seconds=round(time.monotonic() - began, 3),
                input_tokens=usage.input_tokens if usage else None,
                output_tokens=usage.output_tokens if usage else None,
                error=None if error is None else f"{type(error).__name__}: {error}"[:300],
            )
        )
        return look, error


def spelling_of(form: Any) -> Spelling | None:
    """Whose names the ids of a chat answer have; None where there are none."""
    try:
        choice = form["choices"][0]
        if choice.get("response_token_ids") and choice.get("prompt_token_ids"):
            return "sglang"
        return "vllm" if choice.get("token_ids") and form.get("prompt_token_ids") else None
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def client_for(plan: TokenPlan, endpoint: Endpoint, renderer: Renderer | None) -> ModelClient:
    """The client that a plan means. Raises: UserError."""
    if plan.way == "off":
        return connect(endpoint)
    if plan.way == "chat":
        whole = plan.spelling == "sglang"
        return ChatIdsClient(
            connect(endpoint), kind=plan.logprobs, filtered=plan.filtered, whole=whole
        )
    if renderer is None:
        raise UserError(f"endpoint.tokens={plan.way} needs endpoint.tokenizer")
    return token_client(endpoint, renderer, plan.way, kind=plan.logprobs, filtered=plan.filtered)


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
