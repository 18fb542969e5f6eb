"""From what a rollout left to a reward: the task's verifier and its scorers.

The verifier runs in the grading sandbox, a fresh one over the workspace (DESIGN 5.9). Its output is
never read for a reward: the exit code is, or with `score` the one line on descriptor 3. It finds
the final answer and the conversation in read-only files. Scorers judge the answer here (those that
may hang or crash in a child process), code in a grading sandbox.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hermes_rl.config import RunConfig
from hermes_rl.definitions import sampling_of, sent_seed
from hermes_rl.errors import (
    CAUSES,
    HermesError,
    NoVerdict,
    SandboxDied,
    SandboxStartError,
    TaskFault,
    VerifierFault,
    cause_of,
)
from hermes_rl.events import CallStarted, EventLog, Graded, RewardPart
from hermes_rl.judging import Judge, Replies, Verdict
from hermes_rl.models.rate import Budget
from hermes_rl.ports import WorkItem
from hermes_rl.sandboxes import GradingResult, GradingSpec, Sandbox
from hermes_rl.scorers import (
    READERS,
    Score,
    Scorer,
    code_tests,
    function_place,
)
from hermes_rl.tasks import Verify
from hermes_rl.wiring import RunContext, judge_purpose

ANSWER_FILE, MESSAGES_FILE = "answer.txt", "messages.json"
"""What a verifier finds beside its own files; a file of its own with such a name goes first."""


@dataclass(frozen=True)
class Answer:
    """What an agent answered."""

    text: str = ""
    """Its final answer."""
    messages: Callable[[], Sequence[str]] = tuple
    """The conversation: OpenAI messages as JSON. Called when something reads it."""

    def files(self, verifier: Verify) -> dict[str, bytes]:
        """The files for a verifier; the conversation if the verifier names it."""
        made = {ANSWER_FILE: self.text.encode("utf-8", "replace")}
        texts = [verifier.script.encode("utf-8", "replace"), *verifier.files.values()]
        if any(MESSAGES_FILE.encode() in text for text in texts):
            made[MESSAGES_FILE] = f"[{','.join(self.messages())}]".encode("utf-8", "replace")
        return {**made, **verifier.files}


def check_scorers(config: RunConfig, scorers: Sequence[Scorer]) -> None:
    """Check, before a model is paid, that the judges and functions of some scorers are named.

    Raises: TaskFault.
    """
    for scorer in scorers:
        if scorer.type == "judge" and not config.scoring.judges:
            raise TaskFault("a scorer of type 'judge' needs judges: name them with --judge MODEL")
        if scorer.type == "python":
            _place_of(config, scorer)


def _place_of(config: RunConfig, scorer: Scorer) -> str:
    name = scorer.options["function"]
    place = function_place(name, config.scoring.functions)
    if place is None:
        raise TaskFault(
            f"score.function {name!r} is unknown. Name it in scoring.functions, or install the "
            "package that brings it"
        )
    return place


async def grade_task(
    context: RunContext,
    item: WorkItem,
    log: EventLog,
    sandbox: Sandbox | None,
    answer: Answer,
    budget: Budget | None = None,
    replies: Replies | None = None,
) -> Graded:
    """Compute the reward of a task of a dataset: its verifier and its scorers, by weight.

    Args:
        replies: of judges to earlier attempts; takes and saves further ones.
        log: takes the calls of judges.
        sandbox: the rollout's; None if no part of the task needs one.

    Returns: the event; the reward is null for a task without verifier and scorers.

    Raises: VerifierFault and other HermesErrors.
    """
    task = item.task
    assert task is not None
    check_scorers(context.config, task.score)
    graded = Graded(reward=None)
    if task.verify is not None:
        graded = await _verified(sandbox, task.verify, answer)
    if not task.score:
        return graded
    began, parts, metrics = time.monotonic(), list(graded.rewards), dict[str, float]()
    rewards = [] if graded.reward is None else [(graded.reward, 1.0)]
    scoring = _Scoring(context, item, log, sandbox, answer, budget, replies or Replies())
    for number, scorer in enumerate(task.score):
        score = await scoring.score(scorer, number, metrics)
        metrics.update({f"{scorer.name}_{name}": x for name, x in score.metrics.items()})
        rewards.append((score.value, scorer.weight))
        detail = "\n".join(filter(None, [score.reason, *scorer.compared()]))
        part = RewardPart(name=scorer.name, score=score.value, weight=scorer.weight, detail=detail)
        parts.append(part)
    # All at 1 give exactly 1.0, whatever the weights.
    total = math.fsum(weight for _, weight in rewards)
    reward = math.fsum(value * weight for value, weight in rewards) / total
    seconds = graded.seconds + time.monotonic() - began
    return Graded(reward=reward, rewards=tuple(parts), metrics=metrics, seconds=seconds)


async def _verified(sandbox: Sandbox | None, verifier: Verify, answer: Answer) -> Graded:
    if sandbox is None:
        raise TaskFault("the task needs a sandbox to be graded in")
    return await verify(sandbox, verifier, answer)


@dataclass(frozen=True)
class _Scoring:
    """The scorers of one rollout."""

    context: RunContext
    item: WorkItem
    log: EventLog
    sandbox: Sandbox | None
    answer: Answer
    budget: Budget | None
    replies: Replies

    async def score(self, scorer: Scorer, number: int, metrics: dict[str, float]) -> Score:
        kind, options, text = scorer.type, scorer.options, self.answer.text
        if kind in READERS:
            return READERS[kind](options, text)
        if kind == "code":
            return await self._code(options)
        if kind == "judge":
            return await self._judged(scorer, number, metrics)
        row: dict[str, Any] = {}
        if kind == "python":
            options = {**options, "function": _place_of(self.context.config, scorer)}
            task = self.item.task
            row = {
                "messages": [json.loads(message) for message in self.answer.messages()],
                "metadata": task.metadata if task else {},
            }
        return await self.context.scorer_pool.score(kind, options, text, row)

    async def _code(self, options: Mapping[str, Any]) -> Score:
        tests = code_tests(options, self.answer.text)
        if tests is None:
            return Score(0.0, "the answer holds no Python code")
        verifier = Verify(
            script=tests.script, files=tests.files, timeout_s=tests.timeout_s, score=True
        )
        graded = await _verified(self.sandbox, verifier, self.answer)
        command, _, printed = (graded.rewards[0].detail or "").partition("\n")
        ended = [] if command.endswith("-> exit 0") else [command.rpartition("-> ")[2]]
        return Score(graded.reward or 0.0, "\n".join([*ended, *filter(None, [printed])]))

    async def _judged(self, scorer: Scorer, number: int, metrics: dict[str, float]) -> Score:
        """The verdict of most judges; of as many for several, the one that scores lowest."""
        options, judges = scorer.options, self._judges()
        scores = options.get("scores", {"yes": 1.0, "no": 0.0})
        data = {"task": self.item.task.prompt_text if self.item.task else ""}
        if "target" in options:
            data["reference answer"] = options["target"]
        data["answer to judge"] = self.answer.text

        async def decide(judge: Judge, name: str) -> Verdict:
            judge = judge.resuming(self.replies, name)
            try:
                return await judge.verdict(options["rubric"], data, choices=tuple(scores))
            except NoVerdict as error:
                if error.__cause__ is None:  # no call failed: the next attempt needs other replies
                    self.replies.received.pop(name, None)
                raise

        deciding = (decide(judge, f"{number}-{index}") for index, judge in enumerate(judges))
        # One that fails does not cancel the others, whose replies are kept.
        ended = await asyncio.gather(*deciding, return_exceptions=True)
        if failed := [one for one in ended if isinstance(one, BaseException)]:
            raise min(failed, key=_can_continue)
        verdicts = [one for one in ended if isinstance(one, Verdict)]
        counts = Counter(verdict.choice for verdict in verdicts)
        most = max(counts.values())
        metrics[f"{scorer.name}_agreement"] = most / len(verdicts)
        value = min(v.score(scores) for v in verdicts if counts[v.choice] == most)
        return Score(value, "\n".join(map(_verdict_line, verdicts)))

    def _judges(self) -> list[Judge]:
        context, made = self.context, list[Judge]()
        turns = [e.turn for e in self.log.events if isinstance(e, CallStarted)]
        turn = max(turns, default=0)
        for number, place in enumerate(context.config.scoring.judges):
            caller = context.other_caller(judge_purpose(number), self.log, place.name, self.budget)
            sampling = sampling_of(place, sent_seed(context.config, self.item.seed))
            where = f"scoring.judges.{number}"
            made.append(Judge(place.name, "judge", caller, sampling, lambda: turn, where))
        return made


def _can_continue(error: BaseException) -> bool:
    """Whether the run can continue after the failure of a judge."""
    return isinstance(error, HermesError) and not CAUSES[cause_of(error)].breaker


def _verdict_line(verdict: Verdict) -> str:
    return json.dumps(
        {"judge": verdict.model, "verdict": verdict.choice, "reason": verdict.reason[:500]},
        ensure_ascii=False,
    )


BOXES = 3
"""A verifier that cannot judge, or a box that dies, gets this many boxes on the same workspace. The
rollout is never rolled again for it."""

_SIGNALLED = 128
"""Exit codes above it tell of a signal."""
_DETAIL_CHARS = 2_000
_SCRIPT_CHARS = 300


async def verify(sandbox: Sandbox, verifier: Verify | None, answer: Answer | None = None) -> Graded:
    """Judge the workspace that a rollout left.

    Args:
        sandbox: the rollout's sandbox; its processes are ended by the first grading box.
        verifier: the task's verifier; None gives a null reward.
        answer: what the verifier finds in its files; None gives it none.

    Returns: the event, with the reward and how long all boxes took.

    Raises: VerifierFault when no box could judge.
    """
    if verifier is None:
        return Graded(reward=None)
    spec = GradingSpec(
        script=verifier.script,
        files=answer.files(verifier) if answer else verifier.files,
        timeout_s=verifier.timeout_s,
        score=verifier.score,
        image=verifier.image,
        mounts=verifier.mounts,
    )
    seconds = 0.0
    faults: list[str] = []
    for _ in range(BOXES):
        try:
            result = await sandbox.grade(spec)
            seconds += result.seconds
            scores = judge(result, score=verifier.score)
        except (VerifierFault, SandboxDied, SandboxStartError) as fault:
            faults.append(f"{type(fault).__name__}: {fault}")
            continue
        detail = _detail(verifier, result)
        parts = [RewardPart(name=name, score=score) for name, score in scores.items()]
        parts[0] = msgspec.structs.replace(parts[0], detail=detail)
        return Graded(reward=reward_of(scores), rewards=tuple(parts), seconds=seconds)
    raise VerifierFault(f"no verdict in {BOXES} grading boxes; the last: {faults[-1]}")


def judge(result: GradingResult, *, score: bool) -> dict[str, float]:
    """The rewards that a grading box stands for, by name; `verify` where there is only one.

    Exit 0 is 1.0; any other exit or a timeout is 0.0, since the policy can cause those. With
    `score` the report on descriptor 3 decides; a box that failed without one, or was killed, is 0.0
    as well.

    Raises: VerifierFault for `cannot-judge=...`, a report that is not one such line, or success
    without one.
    """
    if result.timed_out:
        return {"verify": 0.0}
    if not score:
        return {"verify": 1.0 if result.exit_code == 0 else 0.0}
    if result.exit_code > _SIGNALLED:
        return {"verify": 0.0}  # killed: what it had written may not be its last word
    if not result.report.strip():
        if result.exit_code != 0:
            return {"verify": 0.0}
        raise VerifierFault("the verifier succeeded without writing reward=... to descriptor 3")
    return _parse_report(result.report)


def reward_of(scores: Mapping[str, float]) -> float:
    """The reward of several: the one named `reward`, else their mean."""
    return scores["reward"] if "reward" in scores else sum(scores.values()) / len(scores)


def _parse_report(report: bytes) -> dict[str, float]:
    lines = report.decode("utf-8", "replace").strip().splitlines()
    key, _, value = lines[0].partition("=")
    if len(lines) != 1:
        raise VerifierFault(f"descriptor 3 took {len(lines)} lines; it takes one")
    if key == "cannot-judge":
        raise VerifierFault(f"the verifier cannot judge: {value[:200]}")
    try:
        numbers = json.loads(value) if key == "rewards" else {"verify": float(value)}
        scores = {name: float(number) for name, number in numbers.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        scores = {}
    if (
        key not in ("reward", "rewards")
        or not scores
        or not all(map(math.isfinite, scores.values()))
    ):
        raise VerifierFault(
            f"descriptor 3 said {lines[0][:80]!r}; it takes reward=<finite number>, or "
            "rewards=<JSON object of such numbers>"
        )
    return scores


def _detail(verifier: Verify, result: GradingResult) -> str:
    """What ran, how it ended, the end of what was printed: for people, never for a reward."""
    script = " ; ".join(line for line in verifier.script.strip().splitlines() if line.strip())
    ending = "timed out" if result.timed_out else f"exit {result.exit_code}"
    printed = result.output.strip()[-_DETAIL_CHARS:]
    first = f"{script[:_SCRIPT_CHARS]}  -> {ending}"
    return f"{first}\n{printed}" if printed else first
