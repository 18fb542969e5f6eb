"""Token-in, token-out: a client that keeps the ids of each conversation.

    client = token_client(Endpoint("http://127.0.0.1:8000/v1"), load_renderer(folder), "vllm")

The prompt is sent as ids: the first one rendered, later ones bridged from what was sampled. The
answer is parsed from its ids by a parser of this package, so one text gives one message on every
engine. Nothing that was sampled is rendered or tokenized again as long as its conversation
continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes_rl.errors import ProtocolError, UserError
from hermes_rl.messages import AssistantMessage, Message
from hermes_rl.models.base import (
    Completion,
    LogprobsKind,
    ModelClient,
    ModelRequest,
    Sampling,
    TokenCapture,
)
from hermes_rl.models.calls.retry import Renewable
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.prepare import outgoing
from hermes_rl.models.tokens.bridge import Prompt, TokenState
from hermes_rl.models.tokens.engines import WIRES, ChatIdsClient
from hermes_rl.models.tokens.logprobs import kind_in
from hermes_rl.models.tokens.parsers import ToolCallParser, parser_named
from hermes_rl.models.tokens.plan import TokenPlan, spelled_out
from hermes_rl.models.tokens.renderer import Renderer


def token_client(
    endpoint: Endpoint,
    renderer: Renderer,
    engine: str,
    *,
    parser: ToolCallParser | None = None,
    kind: LogprobsKind = "unknown",
    filtered: bool = False,
) -> TokenClient:
    """Return a token-in client for an endpoint.

    Args:
        engine: a key of `WIRES`.
        parser: of tool calls; None takes the one that fits the template.
        kind: what the engine's logprobs mean, as a probe found.
        filtered: they are taken after top-p, top-k and min-p, as a probe found.

    Raises: UserError for an unknown engine, or an address that cannot work.
    """
    if engine not in WIRES:
        raise UserError(f"no token wire {engine!r}: use one of {', '.join(WIRES)}")
    wire = WIRES[engine](renderer.end_ids, endpoint.secrets)
    where = at_root(endpoint) if wire.at_root else endpoint
    return TokenClient(connect(where, wire), renderer, parser, kind=kind, filtered=filtered)


def client_for(plan: TokenPlan, endpoint: Endpoint, renderer: Renderer | None) -> ModelClient:
    """Return the client for a plan. Raises: UserError."""
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


def at_root(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint without `/v1`, for routes outside it."""
    base = endpoint.base_url.rstrip("/")
    return replace(endpoint, base_url=base.removesuffix("/v1"))


_RESERVED = ("stop", "n", "stream", "echo", "prompt", "input_ids", "token_ids", "return_token_ids")
"""Body fields that only this client may set."""


@dataclass(frozen=True)
class _Pending:
    """One request in flight."""

    state: TokenState
    messages: Sequence[Message]
    prompt: Prompt


class TokenClient:
    """See `ModelClient`. One per process, endpoint and account; shared by all rollouts.

    Args:
        inner: sends `request.prompt_ids` and returns ids; closed with this one.
        parser: of tool calls; None takes the one that fits the template.
        kind: what the logprobs mean.
        filtered: they are taken after top-p, top-k and min-p.
    """

    def __init__(
        self,
        inner: ModelClient,
        renderer: Renderer,
        parser: ToolCallParser | None = None,
        *,
        kind: LogprobsKind = "unknown",
        filtered: bool = False,
    ) -> None:
        self.api_mode, self.endpoint = inner.api_mode, inner.endpoint
        self._inner, self._renderer = inner, renderer
        self._kind, self._filtered = kind, filtered
        self._control = frozenset(t.id for t in renderer.tokenizer.added if t.special)
        self._parser = parser or parser_named(renderer.parser_name)
        self._unread = None if parser or renderer.parser_fits else renderer.unread_calls

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`. Raises also UserError for images, and if tools are offered
        whose calls no parser reads."""
        pending = self._prepare(request)
        sampling = spelled_out(request.sampling)
        answer = await self._inner.complete(
            replace(
                request,
                prompt_ids=pending.prompt.ids,
                sampling=sampling,
                logprobs=True,
                stream=False,
                on_delta=None,
            )
        )
        sampled = answer.tokens.completion_ids if answer.tokens is not None else None
        if answer.tokens is None or sampled is None:
            raise ProtocolError("the engine returned no token ids", served=True)
        ended = answer.finish_reason == "stop"
        message = self._message(self._without_end(sampled) if ended else sampled, request)
        pending.state.answered(pending.prompt, pending.messages, request.tools, message, sampled)
        if request.on_delta is not None and message.content:
            request.on_delta(message.content)
        called = bool(message.tool_calls) and ended
        return replace(
            answer,
            message=message,
            finish_reason="tool_calls" if called else answer.finish_reason,
            tokens=self._capture(answer.tokens, pending.prompt, sampling, request.extra),
        )

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`: here the exact number. Raises: as `complete`, before it
        sends."""
        return len(self._prepare(request).prompt.ids)

    async def renew(self) -> None:
        """Use new connections from now on."""
        if isinstance(self._inner, Renewable):
            await self._inner.renew()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._inner.aclose()

    def _prepare(self, request: ModelRequest) -> _Pending:
        """Return the prompt of a request: of the stored messages, unchanged by any policy."""
        _refuse(request)
        if request.tools and self._unread is not None:
            raise UserError(self._unread)
        kept = request.conversation.attachments
        state = kept.get(self._key)
        if state is None:
            state = kept[self._key] = TokenState()
        # A copy: messages added while the call is in flight are not part of its prompt.
        messages = tuple(outgoing(replace(request, exact=True, adaptations=frozenset())).messages)
        return _Pending(state, messages, state.prompt(self._renderer, messages, request.tools))

    @property
    def _key(self) -> tuple[str, str, str]:
        """Clients of one model share the state: several accounts, a renewed connection."""
        return ("tokens", self._renderer.tokenizer_hash, self._renderer.template_hash)

    def _without_end(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids of an answer's text, without the control token at which the engine
        stopped, whether or not the template ends turns with it."""
        return sampled[:-1] if sampled and sampled[-1] in self._control else sampled

    def _message(self, sampled: tuple[int, ...], request: ModelRequest) -> AssistantMessage:
        text = self._renderer.answer_text(sampled)
        parsed = self._parser.parse(
            text,
            request.tools,
            opened=self._renderer.opens_reasoning,
            salt=str(len(request.conversation)),
        )
        return parsed.message(text)

    def _capture(
        self, tokens: TokenCapture, prompt: Prompt, sampling: Sampling, extra: Mapping[str, Any]
    ) -> TokenCapture:
        kind = kind_in(self._kind, self._filtered, {**sampling.as_dict(), **extra})
        return replace(
            tokens,
            prompt_ids=prompt.ids,
            logprobs_kind=kind if tokens.logprobs is not None else "unknown",
            source=prompt.source,
            fork_reason=prompt.fork_reason,
            tokenizer_hash=self._renderer.tokenizer_hash,
            template_hash=self._renderer.template_hash,
            sampling=sampling,
        )


def _refuse(request: ModelRequest) -> None:
    """Raises: UserError for requests that prompts of ids do not support."""
    if request.sampling.stop or request.extra.get("stop"):
        raise UserError(
            "exact tokens stop at token ids: a stop text would cut within a token. Leave stop out"
        )
    if reserved := [name for name in _RESERVED if name in request.extra]:
        raise UserError(f"exact tokens: {reserved[0]!r} is set by the client. Leave it out")
