"""Token-in, token-out: a client that keeps the ids of each conversation.

    client = token_client(Endpoint("http://127.0.0.1:8000/v1"), load_renderer(folder), "vllm")

The prompt is sent as ids: the first rendered, later ones bridged from what was sampled. The answer
is read from its ids by a parser of ours, so one text gives one message on every engine. Nothing
that was sampled is ever rendered or tokenised again as long as its conversation goes on.
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
from hermes_rl.models.tokens.engines.base import TokenWire, spelled_out
from hermes_rl.models.tokens.engines.llamacpp import LlamacppCompletion
from hermes_rl.models.tokens.engines.sglang import SglangGenerate
from hermes_rl.models.tokens.engines.vllm import VllmCompletions, VllmGenerate
from hermes_rl.models.tokens.logprobs import kind_in
from hermes_rl.models.tokens.parsers import ToolCallParser, parser_named
from hermes_rl.models.tokens.renderer import Renderer
from hermes_rl.models.tokens.state import Prompt, TokenState

WIRES: dict[str, type[TokenWire]] = {
    "vllm": VllmCompletions,
    "vllm_generate": VllmGenerate,
    "sglang": SglangGenerate,
    "llamacpp": LlamacppCompletion,
}
"""`endpoint.tokens` -> the wire."""


def token_client(
    endpoint: Endpoint,
    renderer: Renderer,
    engine: str,
    *,
    parser: ToolCallParser | None = None,
    kind: LogprobsKind = "unknown",
    filtered: bool = False,
) -> TokenClient:
    """A token-in client for an endpoint.

    Args:
        engine: a key of `WIRES`.
        parser: of tool calls; None takes the one that fits the template.
        kind: what the engine's logprobs are of, as a probe found.
        filtered: they are taken behind top-p, top-k and min-p, as a probe found.

    Raises: UserError for an unknown engine, or an address that cannot work.
    """
    if engine not in WIRES:
        raise UserError(f"no token wire {engine!r}: use one of {', '.join(WIRES)}")
    wire = WIRES[engine](renderer.end_ids, endpoint.secrets)
    where = at_root(endpoint) if wire.at_root else endpoint
    return TokenClient(connect(where, wire), renderer, parser, kind=kind, filtered=filtered)


def at_root(endpoint: Endpoint) -> Endpoint:
    """The endpoint without `/v1`, for routes that stand beside it."""
    base = endpoint.base_url.rstrip("/")
    return replace(endpoint, base_url=base.removesuffix("/v1"))


_OWN = ("stop", "n", "stream", "echo", "prompt", "input_ids", "token_ids", "return_token_ids")
"""Fields of a body that are this client's own."""


@dataclass(frozen=True)
class _Asked:
    """One request on its way."""

    state: TokenState
    messages: Sequence[Message]
    prompt: Prompt


class TokenClient:
    """See `ModelClient`. One per process, endpoint and account; shared by all rollouts.

    Args:
        inner: sends `request.prompt_ids` and gives back ids; closed with this one.
        parser: of tool calls; None takes the one that fits the template.
        kind: what the logprobs are of.
        filtered: they are taken behind top-p, top-k and min-p.
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
        """See `ModelClient.complete`. Raises also UserError for images, and where tools are offered
        whose calls no parser here would read."""
        asked = self._ask(request)
        sampling = spelled_out(request.sampling)
        answer = await self._inner.complete(
            replace(
                request,
                prompt_ids=asked.prompt.ids,
                sampling=sampling,
                logprobs=True,
                stream=False,
                on_delta=None,
            )
        )
        sampled = answer.tokens.completion_ids if answer.tokens is not None else None
        if answer.tokens is None or sampled is None:
            raise ProtocolError("the engine gave no token ids", served=True)
        ended = answer.finish_reason == "stop"
        message = self._message(self._said(sampled) if ended else sampled, request)
        asked.state.answered(asked.prompt, asked.messages, request.tools, message, sampled)
        if request.on_delta is not None and message.content:
            request.on_delta(message.content)
        called = bool(message.tool_calls) and ended
        return replace(
            answer,
            message=message,
            finish_reason="tool_calls" if called else answer.finish_reason,
            tokens=self._capture(answer.tokens, asked.prompt, sampling, request.extra),
        )

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`: the very number. Raises: as `complete`, before it sends."""
        return len(self._ask(request).prompt.ids)

    async def renew(self) -> None:
        """Use new connections from now on."""
        if isinstance(self._inner, Renewable):
            await self._inner.renew()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._inner.aclose()

    def _ask(self, request: ModelRequest) -> _Asked:
        """The prompt of a request: of the stored messages as they are, whatever the policy."""
        _refuse(request)
        if request.tools and self._unread is not None:
            raise UserError(self._unread)
        kept = request.conversation.attachments
        state = kept.get(self._key)
        if state is None:
            state = kept[self._key] = TokenState()
        # A copy: what joins the conversation while the call is under way is no part of its prompt.
        messages = tuple(outgoing(replace(request, exact=True, adaptations=frozenset())).messages)
        return _Asked(state, messages, state.prompt(self._renderer, messages, request.tools))

    @property
    def _key(self) -> tuple[str, str, str]:
        """Clients of one model share the state: several accounts, a renewed connection."""
        return ("tokens", self._renderer.tokenizer_hash, self._renderer.template_hash)

    def _said(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """The ids of an answer's text: without the control token that the engine stopped at, be it
        one that this template knows as an end or not."""
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
        self, told: TokenCapture, prompt: Prompt, sampling: Sampling, extra: Mapping[str, Any]
    ) -> TokenCapture:
        kind = kind_in(self._kind, self._filtered, {**sampling.as_dict(), **extra})
        return replace(
            told,
            prompt_ids=prompt.ids,
            logprobs_kind=kind if told.logprobs is not None else "unknown",
            source=prompt.source,
            fork_reason=prompt.fork_reason,
            tokenizer_hash=self._renderer.tokenizer_hash,
            template_hash=self._renderer.template_hash,
            sampling=sampling,
        )


def _refuse(request: ModelRequest) -> None:
    """Raises: UserError for what cannot be asked for with prompts of ids."""
    if request.sampling.stop or request.extra.get("stop"):
        raise UserError(
            "exact tokens stop at token ids: a stop text would cut within a token. Leave stop out"
        )
    if own := [name for name in _OWN if name in request.extra]:
        raise UserError(f"exact tokens: {own[0]!r} cannot be a field of your own. Leave it out")
