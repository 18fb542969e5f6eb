"""Token-in, token-out: a client that keeps the ids of each conversation.

    client = token_client(Endpoint("http://127.0.0.1:8000/v1"), load_renderer(folder), "vllm")

The prompt is sent as ids: the first one rendered, later ones bridged from what was sampled. The
answer is parsed from its ids by a parser of this package, so one text gives one message on every
engine. Nothing that was sampled is rendered or tokenized again as long as its conversation
continues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes_rl.errors import ConnectionLost, ModelError, ModelTimeout, ProtocolError, UserError
from hermes_rl.messages import AssistantMessage, Message
from hermes_rl.models.base import (
    OUTPUT_LIMITS,
    Completion,
    ForkReason,
    LogprobsKind,
    ModelClient,
    ModelRequest,
    PartialAnswer,
    Sampling,
    TokenCapture,
    TokenSource,
)
from hermes_rl.models.calls import Checkable, Renewable
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.prepare import prepare_request
from hermes_rl.models.tokens.bridge import History
from hermes_rl.models.tokens.engines import PENALTIES, ROUTES, IdsLeftOut, TokenWire
from hermes_rl.models.tokens.logprobs import classify_call_logprobs
from hermes_rl.models.tokens.parsers import ToolCallParser, find_parser
from hermes_rl.models.tokens.plan import TokenPlan, with_explicit_filters
from hermes_rl.models.tokens.renderer import Renderer
from hermes_rl.models.tokens.template import Tools
from hermes_rl.models.tokens.tokenizer import Tokenizer
from hermes_rl.usage import Usage


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
        engine: a key of `engines.ROUTES`.
        parser: of tool calls; None takes the one that fits the template.
        kind: what the engine's logprobs mean, as a probe found.
        filtered: they are taken after top-p, top-k and min-p, as a probe found.

    Raises: UserError for an unknown engine, or an address that cannot work.
    """
    if engine not in ROUTES:
        raise UserError(f"no token wire {engine!r}: use one of {', '.join(ROUTES)}")
    wire = TokenWire(engine, renderer.end_ids, endpoint.secrets)
    where = without_version_path(endpoint) if wire.at_root else endpoint
    inner, longest = connect(where, wire), ROUTES[engine].longest_stream
    return TokenClient(inner, renderer, parser, kind=kind, filtered=filtered, longest=longest)


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


def without_version_path(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint without `/v1`, for routes outside it."""
    base = endpoint.base_url.rstrip("/")
    return replace(endpoint, base_url=base.removesuffix("/v1"))


KEPT = 4
"""Number of earlier calls whose tokens are kept. A conversation continues its last call; the others
serve answers that were discarded and turns that were undone."""
PARALLEL_ANSWERS = 256
"""Number of answers to one prompt that are kept: the conversation may continue any of them. They
share the ids of their prompt."""


@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt and their source."""

    ids: tuple[int, ...]
    source: TokenSource = "engine"
    """`bridged`: it continues sampled ids. `engine`: it is rendered as a whole."""
    fork_reason: ForkReason | None = None
    """The reason why it does not continue the last call."""


@dataclass(frozen=True)
class _Call:
    """One answered call."""

    history: History
    sampled: tuple[int, ...]
    tools: Tools
    prompt: Prompt


class TokenState:
    """The tokens of one conversation. Not for threads; safe between tasks, as nothing awaits."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._last: tuple[Sequence[Message], Tools, int, Prompt] | None = None
        self._answered = 0
        self.streams = True
        """The next answer may be streamed: the stream of the last one left out no ids."""

    def prompt(self, renderer: Renderer, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """Return the prompt of the conversation as it is now.

        Raises: TemplateRefused; UserError for images.
        """
        last = self._last
        known = last is not None and last[2] == self._answered and last[1] is tools
        if last is not None and known and self._same(last[0], messages):
            return last[3]
        found = self._find(renderer, messages, tools)
        self._last = (list(messages), tools, self._answered, found)
        return found

    def answered(
        self,
        prompt: Prompt,
        messages: Sequence[Message],
        tools: Tools,
        answer: AssistantMessage,
        sampled: tuple[int, ...],
    ) -> None:
        """Record what was sampled for a prompt.

        Args:
            messages: the conversation that the prompt represents, without the answer.
        """
        history = History(messages=tuple(messages), prompt_ids=prompt.ids, answer=answer)
        self._calls.append(_Call(history, sampled, tools, prompt))
        self._answered, self.streams = self._answered + 1, True
        length = len(history.messages)
        beside = [call for call in self._calls if len(call.history.messages) == length]
        if len(self._calls) > KEPT:
            others = [call for call in self._calls if len(call.history.messages) != length]
            self._calls = [*others[-KEPT:], *beside[-PARALLEL_ANSWERS:]]

    def _find(self, renderer: Renderer, messages: Sequence[Message], tools: Tools) -> Prompt:
        for call in reversed(self._calls):
            if self._same(call.history.messages, messages) and _alike(call.tools, tools):
                return replace(call.prompt, fork_reason="retry")  # its answer was discarded
        before = self._before(messages, tools)
        if before is None:
            ids = tuple(renderer.render(messages, tools))
            return Prompt(ids, fork_reason="edited_history" if self._calls else None)
        new = messages[len(before.history.messages) + 1 :]
        found = renderer.bridge(before.history, before.sampled, new, tools)
        if found.ids is None:
            reason: ForkReason = "dropped_reasoning" if found.drops_reasoning else "template"
            return Prompt(tuple(renderer.render(messages, tools)), fork_reason=reason)
        newest = before is self._calls[-1]
        return Prompt(found.ids, "bridged", None if newest else "edited_history")

    def _before(self, messages: Sequence[Message], tools: Tools) -> _Call | None:
        """Return the call that this conversation continues. If two have equal answers (one text,
        sampled twice), it is the one whose answer object was kept, else the newest."""
        fitting = [call for call in reversed(self._calls) if self._continues(call, messages, tools)]
        longest = max((len(call.history.messages) for call in fitting), default=0)
        fitting = [call for call in fitting if len(call.history.messages) == longest]
        kept = (c for c in fitting if messages[longest] is c.history.answer)
        return next(kept, fitting[0] if fitting else None)

    def _continues(self, call: _Call, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether this conversation holds the call's messages and then its answer."""
        before = call.history.messages
        place = len(before)
        if len(messages) <= place or not _alike(call.tools, tools):
            return False
        answer = call.history.answer
        return self._equal(answer, messages[place]) and self._same(before, messages[:place])

    def _same(self, before: Sequence[Message], now: Sequence[Message]) -> bool:
        return len(before) == len(now) and all(map(self._equal, before, now))

    def _equal(self, one: Message, other: Message) -> bool:
        """Return whether a message represents another. Two answers with the same text were sampled
        separately, and neither represents the other; a copy of an answer does."""
        if one is other or one != other:
            return one is other
        return not any(call.history.answer is other for call in self._calls)


def _alike(one: Tools, other: Tools) -> bool:
    return one is other or one == other


_GATEWAY_LOST = (502, 504)
"""What a proxy answers when the engine closed the connection, or was too slow for it."""
_RESERVED = ("stop", "n", "stream", "echo", "prompt", "input_ids", "token_ids", "return_token_ids")
"""Body fields that only this client may set."""


@dataclass(frozen=True)
class _Pending:
    """One request in flight."""

    state: TokenState
    messages: Sequence[Message]
    prompt: Prompt
    before: tuple[int, ...] = ()
    """The tokens of the answer that earlier requests sampled."""

    @property
    def sent(self) -> tuple[int, ...]:
        """The ids that are sent as the prompt."""
        return (*self.prompt.ids, *self.before)


class _ExactClient(ABC):
    """A client on another one, which it closes.

    Args:
        inner: sends the requests.
        kind: what its logprobs mean, as a probe found.
        filtered: they are taken after top-p, top-k and min-p, as a probe found.
        tokenizer: of the model, if it is known.
    """

    def __init__(
        self,
        inner: ModelClient,
        kind: LogprobsKind,
        filtered: bool,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.api_mode, self.endpoint = inner.api_mode, inner.endpoint
        self._inner, self._kind, self._filtered = inner, kind, filtered
        self._tokenizer = tokenizer

    @abstractmethod
    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return self._inner.bound(request)

    async def renew(self) -> None:
        """Use new connections from now on."""
        if isinstance(self._inner, Renewable):
            await self._inner.renew()

    async def responds(self) -> bool:
        """Return whether the server answers other requests, as far as the other client can tell."""
        return isinstance(self._inner, Checkable) and await self._inner.responds()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._inner.aclose()

    def _kind_in(self, sampling: Sampling, extra: Mapping[str, Any]) -> LogprobsKind:
        """Return what the logprobs of a call mean."""
        return classify_call_logprobs(self._kind, self._filtered, {**sampling.as_dict(), **extra})

    def _check_ids(self, tokens: TokenCapture) -> None:
        """Raises: ProtocolError for an id that the model cannot have sampled."""
        ids, known = (*(tokens.prompt_ids or ()), *(tokens.completion_ids or ())), self._tokenizer
        greatest = max(ids, default=0)
        unknown = greatest if greatest >= _STORED_IDS else None
        if unknown is None and known is not None:
            unknown = known.find_unknown_id(ids)
        if unknown is not None:
            raise ProtocolError(
                f"{self.api_mode} at {self.endpoint} returned token id {unknown}, outside of "
                + (
                    f"the {_STORED_IDS} that can be stored"
                    if known is None
                    else f"the vocabulary of {known.rows} tokens. endpoint.tokenizer must be the "
                    "engine's, with config.json if the model has more ids than its tokenizer"
                ),
                served=True,
            )


_STORED_IDS = 1 << 31


class ChatIdsClient(_ExactClient):
    """A chat client that requests ids and logprobs with every call, in vLLM's or SGLang's format.

    Every call is exact by itself: the ids of its prompt, those sampled, and their logprobs. Whether
    a call continues the last one depends on the server's rendering; the graph of a rollout finds
    out. The meaning that an answer states for its logprobs is believed.

    Args:
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
        super().__init__(inner, kind, filtered)
        self._whole = whole

    async def complete(self, request: ModelRequest) -> Completion:
        """Return an answer with its ids."""
        sent = replace(
            request,
            sampling=with_explicit_filters(request.sampling),
            extra={**PENALTIES, **_VERSIONS, **request.extra},
            token_ids=True,
            logprobs=True,
            stream=request.stream and not self._whole,
        )
        answer = await self._inner.complete(sent)
        if answer.tokens is None:
            return answer
        self._check_ids(answer.tokens)
        tokens = replace(answer.tokens, sampling=sent.sampling)
        if _contradict(tokens, answer.usage):  # ids are missing: none of the others can be trained
            tokens = replace(tokens, logprobs=None)
        elif tokens.logprobs is not None and tokens.logprobs_kind == "unknown":
            tokens = replace(tokens, logprobs_kind=self._kind_in(sent.sampling, sent.extra))
        return replace(answer, tokens=tokens)


_VERSIONS = {"return_weight_versions": True}
"""Requests the versions of the weights by token from vLLM; other engines ignore it."""


def _contradict(tokens: TokenCapture, usage: Usage | None) -> bool:
    """Return whether the server counted other numbers of tokens than it returned ids."""
    if usage is None:
        return False
    counted = (
        (usage.input_tokens, tokens.prompt_ids),
        (usage.output_tokens, tokens.completion_ids),
    )
    return any(n is not None and ids is not None and n != len(ids) for n, ids in counted)


class TokenClient(_ExactClient):
    """A client that sends prompts of ids. One per process, endpoint and account; all rollouts share
    it.

    Args:
        inner: sends `request.prompt_ids` and returns ids.
        parser: of tool calls; None takes the one that fits the template.
        longest: most tokens of a stream whose events repeat the answer so far.
    """

    def __init__(
        self,
        inner: ModelClient,
        renderer: Renderer,
        parser: ToolCallParser | None = None,
        *,
        kind: LogprobsKind = "unknown",
        filtered: bool = False,
        longest: int | None = None,
    ) -> None:
        super().__init__(inner, kind, filtered, renderer.tokenizer)
        self._longest, self._repeats = longest, True
        self._renderer, self._streams = renderer, False
        self._control = frozenset(t.id for t in renderer.tokenizer.added if t.special)
        self._parser = parser or find_parser(renderer.parser_name)
        self._unread = None if parser or renderer.parser_fits else renderer.unread_calls

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`. Raises also UserError for images, and if tools are offered
        whose calls no parser reads.

        An answer with the finish reason `abort` has `partial` if it has tokens: the request with
        it continues the answer, and the message is parsed from all tokens at its end.
        """
        pending = self._prepare(request)
        done = len(pending.before)
        sampling = _for_rest(with_explicit_filters(request.sampling), done)
        extra = {k: _left(v, done) if k in OUTPUT_LIMITS else v for k, v in request.extra.items()}
        stream = self._streams and pending.state.streams
        piece = self._piece(request, done) if stream else None
        try:
            answer = await self._inner.complete(
                replace(
                    request,
                    prompt_ids=pending.sent,
                    sampling=replace(sampling, max_tokens=piece) if piece else sampling,
                    extra=extra,
                    logprobs=True,
                    stream=stream,
                    on_delta=None,
                )
            )
        except ModelError as error:  # so that the next one that breaks off can continue
            lost = isinstance(error, ConnectionLost | ModelTimeout) and error.served
            self._streams |= lost or error.status in _GATEWAY_LOST
            pending.state.streams &= not isinstance(error, IdsLeftOut)
            raise
        sampled = answer.tokens.completion_ids if answer.tokens is not None else None
        if answer.tokens is None or sampled is None:
            raise ProtocolError("the engine returned no token ids", served=True)
        self._check_ids(answer.tokens)
        if answer.tokens.repeated is not None:
            self._repeats = answer.tokens.repeated
        answer = replace(
            answer, tokens=self._capture(answer.tokens, pending, sampling, request.extra)
        )
        if answer.finish_reason == "length" and len(sampled) == piece:
            answer = replace(answer, finish_reason="abort")
        whole = (*pending.before, *sampled)
        reason = self._finish_reason(answer, whole, request.sampling)
        if reason == "abort":
            so_far = PartialAnswer(request.call_id, pending.prompt.ids, whole)
            return replace(answer, partial=so_far if sampled else None)
        ended = reason == "stop"
        message = self._message(self._without_end(whole) if ended else whole, request)
        pending.state.answered(pending.prompt, pending.messages, request.tools, message, whole)
        if request.on_delta is not None and message.content:
            request.on_delta(message.content)
        called = bool(message.tool_calls) and ended
        return replace(answer, message=message, finish_reason="tool_calls" if called else reason)

    def _piece(self, request: ModelRequest, done: int) -> int | None:
        """Return the most tokens of a stream, if that is less than what may be left of the answer.
        Pieces grow with the answer: a short one takes few bytes, a long one few requests.

        Args:
            done: number of tokens that the answer has.
        """
        if self._longest is None or not self._repeats or request.extra.keys() & {*OUTPUT_LIMITS}:
            return None
        piece, most = min(self._longest, max(_FIRST_PIECE, done)), request.sampling.max_tokens
        return piece if most is None or most - done > piece else None

    def _finish_reason(
        self, answer: Completion, whole: tuple[int, ...], sampling: Sampling
    ) -> str | None:
        """Return why an answer ended. One that was aborted may have been complete."""
        reason, most = answer.finish_reason, sampling.max_tokens
        if reason != "abort" or not whole:
            return reason
        if whole[-1] in self._renderer.end_ids:
            return "stop"
        return "length" if most is not None and len(whole) >= most else reason

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`: here the exact number. Raises: as `complete`, before it
        sends."""
        return len(self._prepare(request).sent)

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
        messages = tuple(
            prepare_request(replace(request, exact=True, adaptations=frozenset())).messages
        )
        prompt, part = state.prompt(self._renderer, messages, request.tools), request.partial
        if part is None:
            return _Pending(state, messages, prompt)
        return _Pending(state, messages, replace(prompt, ids=part.prompt_ids), part.ids)

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
        self, tokens: TokenCapture, pending: _Pending, sampling: Sampling, extra: Mapping[str, Any]
    ) -> TokenCapture:
        known, prompt = tokens.logprobs is not None, pending.prompt
        return replace(
            tokens,
            prompt_ids=pending.sent,
            logprobs_kind=self._kind_in(sampling, extra) if known else "unknown",
            source="bridged" if pending.before else prompt.source,
            fork_reason=None if pending.before else prompt.fork_reason,
            tokenizer_hash=self._renderer.tokenizer_hash,
            template_hash=self._renderer.template_hash,
            sampling=sampling,
        )


_FIRST_PIECE = 128
"""Tokens of the first stream of an answer, if its events may repeat the answer so far."""
_SEED_STEP = 2654435761
"""Between the seeds of the requests of one answer: their difference to others' seeds is small."""


def _left(limit: Any, done: int) -> Any:
    """Return what an output limit leaves for the rest of an answer."""
    return max(1, limit - done) if type(limit) is int and limit > 0 else limit


def _for_rest(sampling: Sampling, done: int) -> Sampling:
    """Return the sampling for the rest of an answer: fewer tokens, and another seed, since the same
    one would draw the same random numbers again.

    Args:
        done: number of tokens that the answer has.
    """
    most, seed = sampling.max_tokens, sampling.seed
    if not done:
        return sampling
    return replace(
        sampling,
        max_tokens=_left(most, done),
        seed=None if seed is None else (seed + _SEED_STEP * done) % (1 << 31),
    )


def _refuse(request: ModelRequest) -> None:
    """Raises: UserError for requests that prompts of ids do not support."""
    if request.sampling.stop or request.extra.get("stop"):
        raise UserError(
            "exact tokens stop at token ids: a stop text would cut within a token. Leave stop out"
        )
    if reserved := [name for name in _RESERVED if name in request.extra]:
        raise UserError(f"exact tokens: {reserved[0]!r} is set by the client. Leave it out")
