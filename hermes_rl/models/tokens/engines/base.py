"""What the token wires share: a `Dialect` whose requests carry ids, and what an answer must hold.

An answer that contradicts itself is refused as a `ProtocolError`, never mended: another prompt than
was sent (a second BOS, a cut head), ids and logprobs of different lengths or tokens, no ids at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage
from hermes_rl.models.base import Completion, ModelRequest, Sampling, TokenCapture
from hermes_rl.models.wire.base import Decoder, ReplyHead, bearer_headers
from hermes_rl.models.wire.decoding import BodyDecoder, Reading
from hermes_rl.text import encode_json
from hermes_rl.usage import Usage

Json = dict[str, Any]

LOWEST = -9999.0
"""vLLM writes this in the place of minus infinity: it is no logprob."""

NO_TOKEN = 1 << 31
"""Ids are stored in 32 bits."""


@dataclass(frozen=True)
class Answer:
    """What an engine says, before it is believed."""

    ids: Any
    logprobs: Any = None
    """One per id; None where an engine gave none."""
    named: Any = None
    """The ids that the logprobs are of, where the engine names them."""
    prompt_ids: Any = None
    """The prompt as the engine read it, where it says so."""
    finish: str | None = None
    usage: Usage = field(default_factory=Usage)
    """As far as the engine tells it."""
    raw: Any = None
    """The engine's own words on usage."""
    answer_id: Any = None
    model: Any = None
    version: Any = None
    """Of the weights."""


class TokenWire(ABC):
    """One engine's route, as a dialect: `request.prompt_ids` in, ids and logprobs out.

    Args:
        stop_ids: token ids that end an answer, beside the engine's own.
        secrets: texts that no error may show.
    """

    name: str
    path: str
    at_root: bool = True
    """The route stands beside `/v1`, not below it."""

    def __init__(self, stop_ids: frozenset[int] = frozenset(), secrets: Iterable[str] = ()):
        self._stop = sorted(stop_ids)
        self._secrets = secrets

    @abstractmethod
    def body(self, request: ModelRequest, prompt: list[int]) -> Json:
        """What is sent."""

    @abstractmethod
    def read(self, form: Json) -> Answer:
        """What came back. Raises: KeyError, IndexError, TypeError for another shape."""

    @abstractmethod
    def ask_likely(self, form: Json, most: int) -> None:
        """Change a body so that it also asks for the likeliest tokens of each position."""

    @abstractmethod
    def likely(self, form: Json) -> dict[Any, float]:
        """Token -> logprob of the answer's first position. Raises: as `read`."""

    def encode(self, request: ModelRequest) -> bytes:
        """See `Dialect.encode`. Raises: ValueError without a prompt of ids."""
        if request.prompt_ids is None:
            raise ValueError("a token wire needs request.prompt_ids")
        return encode_json(self.body(request, list(request.prompt_ids)))

    def bound(self, request: ModelRequest) -> int:
        """See `Dialect.bound`: the very number."""
        return len(request.prompt_ids or ())

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        return bearer_headers(api_key)

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """See `Dialect.decoder`."""
        prompt = request.prompt_ids or ()

        def read(data: bytes, reading: Reading) -> Completion:
            return self._completion(data, reading, prompt)

        return BodyDecoder(Reading(head, self._secrets), read)

    def _completion(self, data: bytes, reading: Reading, prompt: tuple[int, ...]) -> Completion:
        form = reading.parse(msgspec.json.decode, data)
        if isinstance(form, dict) and form.get("error"):
            raise reading.fault(form["error"])
        try:
            answer = self.read(form)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise reading.unreadable(f"not {self.name}: {type(error).__name__} {error}") from None
        ids = _checked(answer, prompt, reading)
        # What the engine told of these two is the same: else it were refused.
        usage = msgspec.structs.replace(
            answer.usage, input_tokens=len(prompt), output_tokens=len(ids)
        )
        return reading.completion(
            AssistantMessage(),
            finish_reason=answer.finish,
            usage=msgspec.Raw(msgspec.json.encode(answer.raw)),
            read_usage=lambda _: usage,
            answer_id=answer.answer_id,
            model=answer.model,
            tokens=TokenCapture(prompt, ids, _logprobs(answer, ids, reading)),
            policy_version=answer.version,
        )


def _checked(answer: Answer, prompt: tuple[int, ...], reading: Reading) -> tuple[int, ...]:
    """The sampled ids. Raises: ProtocolError."""
    ids = whole_ids(answer.ids)
    if ids is None:
        raise reading.unreadable("it holds no token ids of the answer")
    if answer.prompt_ids is not None and whole_ids(answer.prompt_ids) != prompt:
        raise reading.unreadable("the engine read another prompt than it was sent")
    read, said = answer.usage.input_tokens, answer.usage.output_tokens
    if read not in (None, len(prompt)):
        raise reading.unreadable(f"the engine read {read} prompt tokens and was sent {len(prompt)}")
    if said not in (None, len(ids)):
        raise reading.unreadable(f"the engine counted {said} sampled tokens, gave {len(ids)}")
    return ids


def _logprobs(answer: Answer, ids: tuple[int, ...], reading: Reading) -> tuple[float, ...] | None:
    """Logprobs, one per id; None where a single one is missing. Raises: ProtocolError."""
    if answer.named is not None and list(answer.named) != list(ids):
        raise reading.unreadable("ids and logprobs are of different tokens")
    values = answer.logprobs
    if not isinstance(values, list):
        return None
    if len(values) != len(ids):
        raise reading.unreadable(f"{len(values)} logprobs for {len(ids)} tokens")
    if not all(type(v) in (int, float) and LOWEST < v <= 1e-3 for v in values):
        return None
    return tuple(min(0.0, float(v)) for v in values)


def whole_ids(values: Any) -> tuple[int, ...] | None:
    """Ids as they can be stored; None for anything else."""
    if not isinstance(values, list):
        return None
    return tuple(values) if all(type(v) is int and 0 <= v < NO_TOKEN for v in values) else None


PENALTIES: Json = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""None, said."""


def spelled_out(sampling: Sampling) -> Sampling:
    """Temperature and filters each said, neutral where nothing is: what is left out a server takes
    from the model's files (`generation_config.json`) or its own defaults, and the logprobs would be
    of something else."""
    none = sampling.top_k is None or sampling.top_k <= 0
    return replace(
        sampling,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=-1 if none else sampling.top_k,
        min_p=0.0 if sampling.min_p is None else sampling.min_p,
    )


def sampling_of(sampling: Sampling) -> Json:
    """Temperature and filters as they are sent."""
    said = spelled_out(sampling)
    return {name: getattr(said, name) for name in ("temperature", "top_p", "top_k", "min_p")}
