"""Drift-prone episodes over real sockets: segments equal the engine's log.

The agent's part (answers thrown away, edits, sub-agents, compaction, calls side by side) is that of
`tests/segments`; here the engine is a server, and the clients are those of a run.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines_kit import engine_at

sys.path.insert(0, str(Path(__file__).parents[2] / "segments"))
from episodes import Episode

from hermes_rl.models import Completion, Endpoint, ModelClient, ModelRequest, connect
from hermes_rl.models.tokens import ChatIdsClient, Renderer, load_renderer, token_client
from hermes_rl.testing import ExactEngine, FaultPlan, PromptView, ScriptedAnswer, Truth

pytestmark = pytest.mark.slow

EPISODES = 300
AT_ONCE = 32
WAYS = ("vllm", "vllm_generate", "sglang", "llamacpp", "vllm", "chat")
TEXTS = ("look", " now", "naïve", " 日本", "🙂", "\n\n", " </think>", "<|im_end|>", "<tool_call>")
FAULTS = FaultPlan(seed=5, rates={"server_error": 0.02, "reset": 0.02, "cut": 0.02})


def drifting(signals: PromptView) -> ScriptedAnswer:
    """What a model might say to this prompt, as awkwardly as it can."""
    random = Random(f"{signals.times} {hash(signals.prompt)}")

    def text() -> str:
        return "".join(random.choices(TEXTS, k=random.randint(1, 6)))

    called = random.random() < 0.6
    return ScriptedAnswer(
        reasoning=text() if random.random() < 0.4 else None,
        text=text(),
        calls=(("terminal", f'{{"command": "{random.randint(0, 99)} é"}}'),) * called,
        plain=random.choice(("", "", "<|im_end|>", "</tool_call>")),
        split=random.choice(("random", "random", "canonical")),
        lookalike=random.random() < 0.05,
        end=random.choice((True, True, True, True, False, "<|endoftext|>")),
        cut=random.choice((None, None, None, 3, 12)),
    )


@dataclass(frozen=True)
class Entry:
    """As the checks of episodes read an engine's log."""

    call_id: str
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    delivered: bool
    policy: bool = True


class OnEngine:
    """One episode's client: its own names for calls, on a client that all share."""

    api_mode, endpoint = "exact", "exact:1"

    def __init__(self, shared: "Shared", seed: int) -> None:
        self.way = WAYS[seed % len(WAYS)]
        self._shared, self._seed, self._judged = shared, seed, set[str]()
        self._client = shared.clients[self.way]

    async def complete(self, request: ModelRequest) -> Completion:
        if request.model == "judge":
            self._judged.add(request.call_id)
        return await self._client.complete(
            replace(request, call_id=f"{self._seed}/{request.call_id}", exact=True)
        )

    def bound(self, request: ModelRequest) -> int:
        return self._client.bound(request)

    async def aclose(self) -> None:
        pass

    @property
    def log(self) -> Sequence[Entry]:
        return [
            Entry(
                call_id=name,
                prompt=truth.prompt_ids,
                sampled=truth.sampled_ids,
                logprobs=self._reported(truth),
                delivered=truth.outcome == "served",
                policy=name not in self._judged,
            )
            for name, truth in self._shared.of(self._seed)
        ]

    def _reported(self, truth: Truth) -> tuple[float, ...]:
        if self.way == "llamacpp":  # which tells probabilities
            return tuple(math.log(math.exp(p)) for p in truth.scaled_logprobs)
        return truth.raw_logprobs


class Shared:
    """One engine and its clients, for all episodes."""

    def __init__(self, engine: ExactEngine, renderer: Renderer) -> None:
        at = Endpoint(engine.base_url)
        self._engine = engine
        self._sorted: dict[int, list[tuple[str, Truth]]] | None = None
        self.clients: dict[str, ModelClient] = {
            way: token_client(at, renderer, way, kind="raw") for way in WAYS if way != "chat"
        }
        self.clients["chat"] = ChatIdsClient(connect(at), kind="raw")

    def of(self, seed: int) -> list[tuple[str, Truth]]:
        """Call and truth of one episode, after all have ended."""
        if self._sorted is None:
            self._sorted = {}
            for truth in self._engine.truth:
                number, _, name = str(truth.call_id).partition("/")
                if truth.sampled_ids:
                    self._sorted.setdefault(int(number), []).append((name, truth))
        return self._sorted.get(seed, [])

    async def aclose(self) -> None:
        for client in self.clients.values():
            await client.aclose()


async def play(shared: Shared, count: int) -> list[Episode]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> Episode:
        def engine(random: Random, habits: Any) -> OnEngine:
            return OnEngine(shared, seed)

        async with places:
            return await Episode(seed, engine).run()

    return await asyncio.gather(*map(one, range(count)))


async def test_episodes_over_sockets_record_what_was_sampled(tmp_path):
    async with engine_at(tmp_path / "t", speaker=drifting, faults=FAULTS) as engine:
        shared = Shared(engine, load_renderer(engine.config.tokenizer))
        episodes = await play(shared, EPISODES)
        await shared.aclose()
    for number, episode in enumerate(episodes):
        assert not episode.compare_with_log(), (number, episode.engine.way)
        assert not episode.check_rules(), (number, episode.engine.way)
    segments = [segment for episode in episodes for segment in episode.segments]
    kinds = Counter(segment.branch_kind for segment in segments)
    assert all(kinds[kind] > 15 for kind in ("main", "compaction", "subagent", "retry"))
    assert sum(entry.outcome == "cut" for entry in engine.truth) > 15
    assert sum("length" in segment.finish_reasons for segment in segments) > 100
    by_way = Counter(e.engine.way for e in episodes if e.row.metrics.get("forked_calls"))
    followed = sum(e.row.metrics.get("followed_calls", 0) for e in episodes)
    assert followed > 300
    assert by_way["chat"] > 15
