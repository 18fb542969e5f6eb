"""Chat endpoints that give ids beside their answers (vLLM's and SGLang's spellings).

Every call is exact by itself: the ids of its prompt, those sampled, and their logprobs. Whether one
call goes on where the last one ended is the server's rendering; the graph of a rollout finds out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from hermes_rl.models.tokens.plan import Spelling
from hermes_rl.usage import Usage

CHAT_MODE = "chat_completions"
_ABSURD = 1e9
"""No logprob is so far from 0."""


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


def first_logprobs(form: Any) -> dict[str, float]:
    """Return token -> logprob of the first position of a chat answer; empty if there are none."""
    logprobs = _first(_field(form, "choices")).get("logprobs")
    top = _first(_field(logprobs, "content")).get("top_logprobs")
    listed = [one for one in top if isinstance(one, dict)] if isinstance(top, list) else []
    pairs = ((one.get("token"), one.get("logprob")) for one in listed)
    return {
        t: float(p)
        for t, p in pairs
        if isinstance(t, str) and isinstance(p, int | float) and abs(p) < _ABSURD
    }


def ids_spelling(form: Any) -> Spelling | None:
    """Return whose field names the token ids of a chat answer have; None if there are none."""
    choice = _first(_field(form, "choices"))
    if choice.get("response_token_ids"):
        return "sglang"
    return "vllm" if choice.get("token_ids") and _field(form, "prompt_token_ids") else None


def _field(form: Any, name: str) -> Any:
    return form.get(name) if isinstance(form, dict) else None


def _first(listed: Any) -> dict[str, Any]:
    """Return the first of a list if it is an object, else an empty one."""
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, dict) else {}
