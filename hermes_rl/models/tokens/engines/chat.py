"""Chat endpoints that give ids beside their answers (vLLM's and SGLang's spellings).

Every call is exact by itself: the ids of its prompt, those sampled, and their logprobs. Whether one
call goes on where the last one ended is the server's rendering; the graph of a rollout finds out.
"""

from __future__ import annotations

from dataclasses import replace

from hermes_rl.models.base import Completion, LogprobsKind, ModelClient, ModelRequest
from hermes_rl.models.calls.retry import Renewable
from hermes_rl.models.tokens.logprobs import kind_in


class ChatIdsClient:
    """A chat client that asks for ids and logprobs with every call.

    Args:
        inner: closed with this one.
        kind: what the logprobs are of, as a probe found; an answer that says so itself is believed.
        filtered: they are taken behind top-p, top-k and min-p.
        whole: never stream: SGLang gives no ids in streams.
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
        """See `ModelClient.complete`."""
        stream = request.stream and not self._whole
        answer = await self._inner.complete(
            replace(request, token_ids=True, logprobs=True, stream=stream)
        )
        tokens = answer.tokens
        if tokens is None or tokens.logprobs is None or tokens.logprobs_kind != "unknown":
            return answer
        sent = {**request.sampling.as_dict(), **request.extra}
        kind = kind_in(self._kind, self._filtered, sent)
        return replace(answer, tokens=replace(tokens, logprobs_kind=kind))

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return self._inner.bound(request)

    async def renew(self) -> None:
        """Use new connections from now on."""
        if isinstance(self._inner, Renewable):
            await self._inner.renew()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._inner.aclose()
