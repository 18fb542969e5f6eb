"""The part of the token-exact fake engine that answers: what is said, sampled and cached."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.testing.exact_engine_sampler import Lexicon, Params, Policy, Sampled, sample
from hermes_rl.testing.exact_engine_scripts import Heard, Mouth, Say, Speaker
from hermes_rl.testing.exact_engine_wires import Ask, BadAsk

_BLOCK = 16
"""Tokens of a block of the prefix cache: whole blocks are reused, as in vLLM."""


class Answered(NamedTuple):
    """One answer."""

    sampled: Sampled
    say: Say | None
    """None: the policy's own words."""
    cached: int
    """Tokens of the prompt that an engine with a prefix cache had."""


class Brain:
    """Answers prompts of ids. The same requests in the same order get the same answers.

    Args:
        ends: end tokens; the first is the one that ends a turn.
        header: how an assistant turn begins in a prompt.
        window: tokens of prompt and answer together.
    """

    def __init__(
        self,
        mouth: Mouth,
        speaker: Speaker,
        *,
        seed: int,
        ends: Sequence[int],
        header: str,
        window: int | None,
    ) -> None:
        self._policy = Policy(mouth.lexicon, seed, ends[0])
        self._mouth, self._speaker, self._seed = mouth, speaker, seed
        self._ends, self._header, self._window = frozenset(ends), header, window
        self._asked: Counter[bytes] = Counter()
        self._cached: set[bytes] = set()

    def answer(self, ask: Ask, prompt: tuple[int, ...], n: int, call_id: str | None) -> Answered:
        """An answer to a prompt.

        Args:
            n: 1-based number of the request.

        Raises: BadAsk for a prompt that does not fit; BadScript.
        """
        params = self._limited(ask.params, len(prompt))
        key = struct.pack(f"<{len(prompt)}Iq", *prompt, (params.seed or 0) % (1 << 62))
        times = self._asked[key]
        self._asked[key] += 1
        say = self._speaker(Heard(prompt, self._mouth.lexicon, self._header, times, n, call_id))
        random = Random(f"{self._seed} {key.hex()} {times}")
        wanted = None if say is None else self._mouth.tokens(say, random)
        if say is not None and say.cut is not None:
            most = say.cut if params.max_tokens is None else min(say.cut, params.max_tokens)
            params = replace(params, max_tokens=most)
        top = ask.top or 0
        sampled = sample(self._policy, prompt, params, random, wanted=wanted, top=top)
        if say is not None and say.finish is not None:
            sampled = msgspec.structs.replace(sampled, finish=say.finish)
        return Answered(sampled, say, self._remember(prompt, sampled.ids))

    def _limited(self, params: Params, prompt: int) -> Params:
        most, window = params.max_tokens, self._window
        if window is not None:
            if prompt >= window:
                raise BadAsk(
                    f"This model's maximum context length is {window} tokens. However, your "
                    f"request has {prompt} input tokens."
                )
            most = min(window - prompt, window if most is None else most)
        return replace(params, max_tokens=most, stop_ids=params.stop_ids | self._ends)

    def _remember(self, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> int:
        """Tokens of the prompt that are in the cache; the new ones join it."""
        whole, state, known = (*prompt, *sampled), bytes(16), 0
        for start in range(0, len(whole) - _BLOCK + 1, _BLOCK):
            block = whole[start : start + _BLOCK]
            state = self._policy.start((*struct.unpack("<4I", state), *block))
            if state in self._cached and known == start and start + _BLOCK < len(prompt):
                known += _BLOCK
            self._cached.add(state)
        return known


def read_lexicon(path: Path) -> Lexicon:
    """The vocabulary in a folder or file. Raises: UserError."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: holds no tokenizer.json")
    return Lexicon(Tokenizer.from_file(str(file)))
