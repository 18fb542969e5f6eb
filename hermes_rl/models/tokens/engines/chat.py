"""Chat endpoints that give ids beside their answers (vLLM's and SGLang's spellings).

Every call is exact by itself: the ids of its prompt, those sampled, and their logprobs. Whether one
call goes on where the last one ended is the server's rendering; the graph of a rollout finds out.
"""

from __future__ import annotations

from dataclasses import replace

from hermes_rl.models.base import (
    Completion,
    LogprobsKind,
    ModelClient,
    ModelRequest,
    TokenCapture,
)
from hermes_rl.models.calls.retry import Renewable
from hermes_rl.models.tokens.engines.base import PENALTIES, spelled_out
from hermes_rl.models.tokens.logprobs import kind_in
from hermes_rl.usage import Usage


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
        sent = replace(
            request,
            sampling=spelled_out(request.sampling),
            extra={**PENALTIES, **request.extra},
            token_ids=True,
            logprobs=True,
            stream=request.stream and not self._whole,
        )
        answer = await self._inner.complete(sent)
        if answer.tokens is None:
            return answer
        return replace(answer, tokens=self._capture(answer.tokens, answer.usage, sent))

    def _capture(self, told: TokenCapture, usage: Usage | None, sent: ModelRequest) -> TokenCapture:
        told = replace(told, sampling=sent.sampling)
        if _contradict(told, usage):  # some ids are missing: nothing may be trained on the others
            return replace(told, logprobs=None)
        if told.logprobs is None or told.logprobs_kind != "unknown":
            return told
        said = {**sent.sampling.as_dict(), **sent.extra}
        return replace(told, logprobs_kind=kind_in(self._kind, self._filtered, said))

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


def _contradict(told: TokenCapture, usage: Usage | None) -> bool:
    """Whether the server counted other numbers of tokens than it gave ids."""
    if usage is None:
        return False
    counted = ((usage.input_tokens, told.prompt_ids), (usage.output_tokens, told.completion_ids))
    return any(n is not None and ids is not None and n != len(ids) for n, ids in counted)
