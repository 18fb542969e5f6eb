"""A model client for llama.cpp's server: a request becomes one constrained step.

A step takes three requests: the model's own chat template renders the prompt (`/apply-template`),
the prompt becomes ids (`/tokenize`), and the engine continues them (`/completion`). The engine's
`/v1/chat/completions` does not serve here: it returns no ids of tokens that end inside a character,
and takes no grammar beside a prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from hermes_rl.errors import ConnectionLost, UserError
from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import Completion, ModelClient, ModelRequest, TokenCapture
from hermes_rl.models.client import connect
from hermes_rl.models.endpoint import EMBEDDED, Secrets
from hermes_rl.models.errors import classify_response
from hermes_rl.models.local.client import LocalEndpoint, LocalServer
from hermes_rl.models.local.steps import PREFILL, Json, Step, plan_step
from hermes_rl.models.tokens import without_version_path
from hermes_rl.models.transports import HttpTransport
from hermes_rl.models.wire import (
    AnswerContext,
    BodyDecoder,
    Decoder,
    Envelope,
    EventDecoder,
    ReplyHead,
    bearer_headers,
    read_chat_usage,
)
from hermes_rl.text import encode_json


class StepClient:
    """See `ModelClient`. Records and errors name it as a client of Chat Completions."""

    api_mode = "chat_completions"

    def __init__(self, endpoint: LocalEndpoint) -> None:
        root = without_version_path(endpoint)
        self.endpoint = root.host
        self._template_has_tools = endpoint.template_has_tools
        self._where, self._transport = root, HttpTransport(root)
        self._inner = connect(root, _Completion(root.secrets))

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`. The text of a call is not streamed."""
        step = plan_step(request, template_has_tools=self._template_has_tools)
        whole = request.token_ids or request.logprobs  # only a whole answer has all ids
        answer = await self._inner.complete(
            replace(
                request,
                prompt_ids=await self._prompt(step),
                extra={**step.body, "stream": not whole},
                stream=not whole,
                on_delta=None if step.calls else request.on_delta,
                continuable=request.continuable and not step.calls,
            )
        )
        tokens = answer.tokens
        if tokens is not None:
            tokens = replace(tokens, logprobs_kind=step.logprobs_kind)
        salt = str(len(request.conversation))
        message, reason = step.outcome(answer.message.content, answer.finish_reason, salt)
        if step.calls and request.on_delta is not None and message.content:
            request.on_delta(message.content)
        return replace(answer, message=message, finish_reason=reason, tokens=tokens)

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`: the bytes of messages and tools."""
        step = plan_step(request, template_has_tools=self._template_has_tools)
        return len(encode_json([step.messages, step.tools]))

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._inner.aclose()
        await self._transport.aclose()

    async def _prompt(self, step: Step) -> tuple[int, ...]:
        """Return the ids of the prompt that the model's own chat template renders."""
        tools = {"tools": step.tools} if step.tools else {}
        text = (await self._ask("/apply-template", {"messages": step.messages, **tools}))["prompt"]
        text += PREFILL if step.calls else ""
        body = {"content": text, "add_special": True, "parse_special": True}
        return tuple((await self._ask("/tokenize", body))["tokens"])

    async def _ask(self, path: str, body: Json) -> Any:
        where, data = self._where, bytearray()
        headers = bearer_headers(where.api_key)
        async with self._transport.post(where.url(path), encode_json(body), headers) as reply:
            async for piece in reply.chunks():
                data += piece
        if reply.status != 200:
            raise classify_response(reply.status, reply.headers, bytes(data), secrets=where.secrets)
        return msgspec.json.decode(data)


class EmbeddedClient:
    """A client whose address follows the machine's one server: it joins a new one when the old one
    has died.

    Args:
        make: makes the client of an address.
    """

    api_mode = StepClient.api_mode

    def __init__(
        self,
        name: str,
        server: LocalServer,
        make: Callable[[LocalEndpoint], ModelClient] = StepClient,
    ) -> None:
        self.endpoint = f"{EMBEDDED}{name}"
        self._server, self._make = server, make
        self._client: ModelClient | None = None
        self._address = ""
        self._joining = asyncio.Lock()  # invariant: one client, for the current address

    async def open(self) -> ModelClient:
        """Start or join the server, so that a missing engine is reported at once, and return the
        client of its address."""
        where = await self._server.endpoint()
        async with self._joining:
            if self._client is None or where.base_url != self._address:
                await self.aclose()
                self._client, self._address = self._make(where), where.base_url
                self.api_mode = self._client.api_mode
            return self._client

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        try:
            client = await self.open()
        except UserError as error:  # it ran at the start: a failure, not a mistake of the user
            raise ConnectionLost(f"the embedded model is gone: {error}") from error
        return await client.complete(request)

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return self._client.bound(request) if self._client else 0

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        if self._client is not None:
            await self._client.aclose()


class _Completion:
    """The engine's `/completion` as a dialect: `request.extra` is the body, but for the prompt."""

    name, path = StepClient.api_mode, "/completion"

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    def encode(self, request: ModelRequest) -> bytes:
        return encode_json({**request.extra, "prompt": request.prompt_ids})

    def bound(self, request: ModelRequest) -> int:
        return len(request.prompt_ids or ())

    def headers(self, api_key: str | None) -> dict[str, str]:
        return bearer_headers(api_key)

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        context = AnswerContext(head, self._secrets, on_delta=request.on_delta)
        if request.stream:
            return _StreamDecoder(context)

        def read(data: bytes, context: AnswerContext) -> Completion:
            form = context.parse(msgspec.json.decode, data)
            return _completion(context, form, form.get("content") or "", request.prompt_ids)

        return BodyDecoder(context, read)


class _StreamDecoder(EventDecoder):
    """A stream is complete with the chunk that has the counts."""

    in_call = False

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._text: list[str] = []
        self._last: Json = {}

    def _take(self, data: bytes) -> None:
        chunk = self._context.parse(msgspec.json.decode, data)
        if "error" in chunk:
            raise self._context.error_in_answer(chunk["error"])
        self._text.append(chunk.get("content") or "")
        self._context.emit(self._text[-1])
        if chunk.get("stop"):
            self._last, self.done = chunk, True

    def _answer(self) -> Completion:
        if not self.done:
            raise self._context.truncated_error()
        return _completion(self._context, self._last, "".join(self._text))


def _completion(
    context: AnswerContext, form: Json, text: str, prompt: tuple[int, ...] | None = None
) -> Completion:
    """Return an answer as plain text.

    Args:
        form: the engine's answer, or its last chunk.
        prompt: the ids of the prompt; None if the answer does not have all sampled ids.
    """
    prompt_tokens, sampled = form.get("tokens_evaluated", 0), form.get("tokens_predicted", 0)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": (form.get("timings") or {}).get("cache_n", 0)},
    }
    envelope = Envelope(model=form.get("model"), usage=msgspec.Raw(msgspec.json.encode(usage)))
    reason = "length" if form.get("stop_type") == "limit" else "stop"
    tokens = None if prompt is None else _capture(form, prompt)
    message = AssistantMessage(content=text)
    return context.completion(envelope, message, reason, read_chat_usage, tokens)


def _capture(form: Json, prompt: tuple[int, ...]) -> TokenCapture:
    """Return the ids, and the logprobs before temperature and grammar. The engine has no logprob
    of a token that ends inside a character: such an answer has none."""
    ids = form.get("tokens") or []
    listed = form.get("completion_probabilities") or []
    aligned = [one["id"] for one in listed] == ids
    return TokenCapture(
        prompt_ids=prompt,
        completion_ids=tuple(ids),
        logprobs=tuple(one["logprob"] for one in listed) if aligned else None,
    )
