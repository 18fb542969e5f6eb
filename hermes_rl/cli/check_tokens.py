"""`check RUN --tokens`: are the ids in table `segments` those that were sampled, and if a history
forked, where and why.

Every rule is looked at again, now on the stored rows; the ids are counted against what the servers
billed; and with the model's tokenizer the histories are rendered again and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hermes_rl.cli.exact_rows import Renderers, Rollout, Row
from hermes_rl.models.tokens.capture import shaped_by
from hermes_rl.models.tokens.renderer import Renderer
from hermes_rl.models.tokens.template import TemplateRefused
from hermes_rl.segments.branches import DRIFT
from hermes_rl.segments.rules import Run, book_faults, rollout_faults, runs_of

SHOWN_IDS = 3
"""Ids that are shown on each side of a fork."""
_ENDED = ("stop", "tool_calls")


@dataclass
class Look:
    """What a look at a run's tokens found."""

    renderers: Renderers = field(default_factory=Renderers)
    faults: list[str] = field(default_factory=list)
    keep: int | None = None
    """So many explanations of forks are kept, and so many others; None keeps all."""
    forks: list[Row] = field(default_factory=list)
    """Explanations of segments that forked."""
    others: list[Row] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """rollouts, calls, captured (calls with ids), segments, trainable, trained (tokens), followed,
    forked, suspected_unparsed (answers), and with a tokenizer: identical, drifting (rows, rendered
    again), ended, unended (answers that stopped, with an end token and without)."""

    def add(self, rollout: Rollout) -> None:
        """Look at one rollout."""
        self.counts["rollouts"] += 1
        agents = [c for c in rollout.row["calls"] if c["purpose"] in ("agent", "summary")]
        self.counts["calls"] += sum(call["outcome"] == "ok" for call in agents)
        metrics = rollout.metrics
        for name in ("captured", "followed", "forked", "suspected_unparsed"):
            self.counts[name] += int(metrics.get(f"{name}_calls", 0))
        self.faults += [f"{rollout.name}: {fault}" for fault in faults_of(rollout, self.renderers)]
        for segment in rollout.segments:
            self._count(segment)
        if not rollout.unsound:
            self._explain(rollout)

    def _explain(self, rollout: Rollout) -> None:
        for segment in rollout.segments:
            renderer = self.renderers.of(segment)
            if renderer is not None:
                self.counts.update(ends_of(segment, renderer))
            told = explanation(rollout, segment, renderer)
            self.counts["identical"] += told.get("renders") == "identical"
            self.counts["drifting"] += told.get("renders", "identical") != "identical"
            rows = self.forks if told["verdict"] == "forked" else self.others
            if self.keep is None or len(rows) < self.keep:
                rows.append(told)

    def _count(self, segment: Row) -> None:
        self.counts["segments"] += 1
        if segment["fork_reason"] is not None:
            self.reasons[segment["fork_reason"]] += 1
        if segment["trainable"]:
            self.counts["trainable"] += 1
            self.counts["trained"] += sum(segment["loss_mask"])
        else:
            self.excluded[segment["exclude_reason"] or "no reason"] += 1

    def all_faults(self) -> list[str]:
        """The faults of rollouts, and what is wrong with all of them together."""
        if self.counts["unended"] and not self.counts["ended"]:
            return [*self.faults, "no answer ends with an end token of this tokenizer"]
        return self.faults

    @property
    def fork_rate(self) -> float | None:
        """Of the calls that an exact history would have made extensions."""
        followed = self.counts["followed"]
        return self.counts["forked"] / followed if followed else None

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            **self.counts,
            "fork_rate": self.fork_rate,
            "fork_reasons": dict(self.reasons),
            "excluded": dict(self.excluded),
            "faults": self.all_faults(),
            "rows": [*self.forks, *self.others],
        }


def faults_of(rollout: Rollout, renderers: Renderers) -> Iterator[str]:
    """What is wrong with the segments of one rollout."""
    segments, metrics = rollout.segments, rollout.metrics
    if metrics.get("segments_rejected"):
        yield "its tokens broke a rule when it was written: it has no segments"
        return
    if rollout.row["status"] == "absent":
        yield "its segments have no rollout"
        return
    if rollout.unsound:
        yield from rollout.unsound  # the other rules presume sound rows
        return
    yield from rollout_faults(segments)
    yield from book_faults(segments, rollout.row["calls"])
    held = len({call for segment in segments for call in segment["call_ids"]})
    if held != metrics.get("captured_calls", 0):
        yield f"ids of {metrics.get('captured_calls', 0):g} calls were recorded, {held} are there"
    yield from _owner_faults(rollout)
    if renderers.named:
        yield from _text_faults(rollout, renderers)


def _owner_faults(rollout: Rollout) -> Iterator[str]:
    shaped = shaped_by(msgspec.json.decode(rollout.row["sampling"]).get("extra_body", {}))
    for segment in rollout.segments:
        if segment["trainable"] and rollout.row["status"] != "ok":
            yield f"branch {segment['branch_index']} is trainable, but the attempt failed"
        if segment["trainable"] and segment["logprobs_kind"] == "raw" and shaped:
            yield f"branch {segment['branch_index']} is trainable, but shaped by {shaped[0]}"
        if segment["reward"] != rollout.row["reward"]:
            yield f"branch {segment['branch_index']} has reward {segment['reward']}"


def _text_faults(rollout: Rollout, renderers: Renderers) -> Iterator[str]:
    """What only the model's tokenizer can tell."""
    for segment in rollout.segments:
        renderer = renderers.of(segment)
        if renderer is None:
            yield (
                f"branch {segment['branch_index']} was made with another tokenizer than those that "
                "are named"
            )
            return
        ids = segment["input_ids"]
        doubled = len(ids) > 1 and ids[0] == ids[1] and renderer.tokenizer.text_of(ids[0])
        if doubled:
            yield f"branch {segment['branch_index']} begins twice with {doubled!r}"


def ends_of(segment: Row, renderer: Renderer) -> Iterator[str]:
    """`ended` or `unended` for each answer that stopped by itself. One without an end token may
    have met a stop string; when all are without, the end tokens were lost."""
    for reason, run in zip(segment["finish_reasons"], runs_of(segment), strict=True):
        if run.trained and reason in _ENDED:
            last = segment["input_ids"][run.end - 1]
            yield "ended" if last in renderer.end_ids else "unended"


def explanation(rollout: Rollout, segment: Row, renderer: Renderer | None) -> Row:
    """One row, explained."""
    runs = [run for run in runs_of(segment) if run.trained]
    told: Row = {
        "task_id": rollout.row["task_id"],
        "repeat": rollout.row["repeat"],
        "trajectory_id": segment["trajectory_id"],
        "agent": segment["agent_name"],
        "branch": segment["branch_index"],
        "kind": segment["branch_kind"],
        "turns": [segment["turn_ids"][run.start] for run in runs],
        "ids": len(segment["input_ids"]),
        "trained": sum(run.end - run.start for run in runs),
        "source": segment["token_source"],
        "excluded": segment["exclude_reason"],
        "verdict": "identical" if segment["token_source"] == "engine" else segment["token_source"],
    }
    if segment["fork_reason"] is not None:
        told |= {"verdict": "forked", "fork": _fork(rollout, segment, runs, renderer)}
    if renderer is not None and _renderable(rollout, segment):
        told["renders"] = _rendered(rollout, segment, renderer)
    return told


def _fork(rollout: Rollout, segment: Row, runs: list[Run], renderer: Renderer | None) -> Row:
    parents = (s for s in rollout.segments if s["branch_index"] == segment["parent_branch"])
    before: list[int] = next(parents, {"input_ids": []})["input_ids"]
    now: list[int] = segment["input_ids"]
    at = _shared(before, now)
    found: Row = {
        "reason": segment["fork_reason"],
        "from": segment["parent_branch"],
        "turn": segment["turn_ids"][runs[0].start] if runs else None,
        "at": at,
        "was": before[at : at + SHOWN_IDS],
        "now": now[at : at + SHOWN_IDS],
    }
    if renderer is not None:
        found |= {f"{n}_text": renderer.decode(found[n]) for n in ("was", "now")}
    return found


def _shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _renderable(rollout: Rollout, segment: Row) -> bool:
    """Whether the row's messages are what the segment's tokens say: the main agent's conversation,
    before anything was put in the place of its history or beside it."""
    row = rollout.row
    plain = len(row["contexts"]) == 1 and row["prompt_sha256"] is None
    return plain and segment["branch_kind"] == "main"


def _rendered(rollout: Rollout, segment: Row, renderer: Renderer) -> str:
    """`identical` when rendering the stored messages again gives the very ids; else where not."""
    infos, turn = rollout.row["message_info"], max(segment["turn_ids"])
    said = [n for n, i in enumerate(infos) if i["role"] == "assistant" and i["turn"] == turn]
    if not said:
        return "no answer of its last turn is among the messages"
    messages = rollout.messages()[: said[-1] + 1]
    try:
        again = renderer.render(messages, rollout.tools(), generation_prompt=False)
    except TemplateRefused as error:
        return f"the template refuses it: {error}"
    ids = segment["input_ids"]
    at = _shared(ids, again)
    if at == len(ids):
        return "identical"
    was, now = ids[at : at + SHOWN_IDS], again[at : at + SHOWN_IDS]
    place = f"differs at token {at} (turn {segment['turn_ids'][at]})"
    return f"{place}: {was} {renderer.decode(was)!r} became {now} {renderer.decode(now)!r}"


def line_of(told: Row) -> str:
    """An explanation for people."""
    turns = told["turns"]
    span = f"turn {turns[0]}" if len(turns) == 1 else f"turns {turns[0]}-{turns[-1]}"
    head = f"{told['task_id']} #{told['repeat']} branch {told['branch']} ({told['kind']})"
    text = f"{head}: {span if turns else 'nothing trained'}, {told['trained']:,} of "
    text += f"{told['ids']:,} ids trained, {told['verdict']}"
    fork = told.get("fork")
    if fork is not None:
        text += f" here because {fork['reason']}: turn {fork['turn']}, token {fork['at']}"
        text += _change(fork) if fork["reason"] in DRIFT else ""
    if told["excluded"] is not None:
        text += f"; not trainable: {told['excluded']}"
    if told.get("renders", "identical") != "identical":
        text += f"; rendered again it {told['renders']}"
    return text


def _change(fork: Row) -> str:
    was, now = str(fork["was"]), str(fork["now"])
    if "was_text" in fork:
        was, now = f"{was} {fork['was_text']!r}", f"{now} {fork['now_text']!r}"
    return f", {was} of branch {fork['from']} became {now}"


def summary_of(look: Look) -> str:
    """The totals, in one line."""
    n = look.counts
    text = (
        f"{n['rollouts']:,} rollouts, {n['captured']:,} of {n['calls']:,} calls with ids, "
        f"{n['segments']:,} segments, {n['trainable']:,} trainable ({n['trained']:,} tokens)"
    )
    if look.fork_rate is not None:
        text += f", {n['forked']:,} of {n['followed']:,} histories forked ({look.fork_rate:.1%})"
    for name, found in (("branches", look.reasons), ("not trainable", look.excluded)):
        if found:
            text += f"; {name}: {', '.join(f'{k} {v}' for k, v in found.most_common())}"
    if n["identical"] or n["drifting"]:
        text += f"; rendered again {n['identical']:,} are identical, {n['drifting']:,} are not"
    if n["suspected_unparsed"]:
        text += f"; {n['suspected_unparsed']:,} answers look like tool calls that nobody parsed"
    if n["unended"]:
        text += f"; {n['unended']:,} of {n['ended'] + n['unended']:,} stopped without an end token"
    return f"{text}; {len(look.all_faults()) or 'no'} faults"
