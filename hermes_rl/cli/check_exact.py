"""`hermes-rl check RUN --tokens` and `--masks`: a second look at a run's token-exact segments.

`--tokens`: whether the ids in table `segments` are those that were sampled, and where and why a
history forked. Every rule is checked again on the stored rows; the ids are counted against what the
servers reported; and with the model's tokenizer the histories are rendered again and compared.

`--masks`: whether exactly what the model wrote is masked in. Where ids were recorded, the masks are
those of table `segments`. For each chat template that is given, they are those that a trainer of
text has to find: what the template writes between the opening of an assistant's turn and its end.
"""

from __future__ import annotations

import itertools
import json
import operator
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from hermes_rl.errors import ExitCode, UserError
from hermes_rl.export import samples_of
from hermes_rl.messages import AssistantMessage, Message, ToolMessage, conversation_from_openai
from hermes_rl.models.tokens import Renderer, TemplateRefused, load_renderer, shaped_by
from hermes_rl.segments import (
    DRIFT,
    MAIN,
    AnswerSpan,
    answer_spans,
    rollout_faults,
    row_faults,
    usage_faults,
)
from hermes_rl.store import MANY_FORKS, RunDir

SHOWN = 50
"""Rows and faults that are printed one by one; `--json` has them all."""


def check_exact(
    path: Path, tokenizers: Sequence[str], *, tokens: bool, masks: bool, as_json: bool
) -> int:
    """Look at a run's exact tokens and at what would be trained.

    Args:
        tokenizers: folders or hub names: of the run's model, or of its models. Masks are looked
            at under each.

    Raises: UserError for a tokenizer that cannot be read, and for a run without what is asked for.
    """
    renderers = {name: load_renderer(name) for name in tokenizers}
    known = Renderers(tuple(renderers.values()))
    look = Look(known, keep=None if as_json else SHOWN)
    recorded_masks, template_masks = (
        Masks("recorded ids"),
        [
            Masks(name, renderer, "endgeneration" in "".join(renderer.template.sources.values()))
            for name, renderer in renderers.items()
        ],
    )
    for rollout in rollouts(RunDir(path), texts=bool(renderers)):
        if tokens:
            look.add(rollout)
        if masks:
            recorded(rollout, recorded_masks, known)
            for one in template_masks:
                rendered(rollout, one)
    checked = [recorded_masks, *template_masks] if masks else []
    if tokens and not look.counts["captured"] + look.counts["segments"]:
        raise UserError(
            f"{path}: no token ids were recorded. Ask for them: --preset rl, or a way to them with "
            "--set endpoint.tokens=WAY"
        )
    if masks and not any(one.spans for one in checked):
        raise UserError(
            f"{path}: no token ids were recorded. Name a model's template: --tokenizer FOLDER"
        )
    faults = [*look.all_faults(), *(fault for one in checked for fault in one.verdict())]
    if as_json:
        found: dict[str, Any] = {"faults": faults}
        found |= {"tokens": look.as_dict()} if tokens else {}
        found |= {"masks": [one.as_dict() for one in checked]} if masks else {}
        print(json.dumps(found))
    else:
        _print(path, look if tokens else None, checked, faults)
    return ExitCode.BAD_INPUT if faults else ExitCode.DONE


def _print(path: Path, look: Look | None, masks: list[Masks], faults: list[str]) -> None:
    if look is not None:
        shown = [*look.forks, *look.others][:SHOWN]
        for row in shown:
            print(line_of(row))
        if look.counts["segments"] > len(shown):
            print(f"... and {look.counts['segments'] - len(shown):,} more (--json has them all)")
    for fault in faults[:SHOWN]:
        print(f"error: {fault}", file=sys.stderr)
    if len(faults) > SHOWN:
        print(f"... and {len(faults) - SHOWN} more faults", file=sys.stderr)
    if look is not None:
        print(f"{path}: {summary_of(look)}")
        if (look.fork_rate or 0.0) > MANY_FORKS:
            print(f"warning: more than {MANY_FORKS:.0%} of histories forked", file=sys.stderr)
    for one in masks:
        if one.spans:
            print(one.line())


Row = dict[str, Any]

_ROWS = ("trajectories", "failures")
_FEW = (
    "task_id",
    "repeat",
    "trajectory_id",
    "status",
    "reward",
    "metrics",
    "calls",
    "sampling",
    "prompt_sha256",
)
_TEXTS = ("messages", "message_info", "tools", "contexts")
_AT_ONCE = 16


@dataclass(frozen=True)
class Rollout:
    """A row and its segments."""

    row: Row
    """Of `trajectories` or `failures`; with its texts undecoded."""
    segments: list[Row]

    @property
    def name(self) -> str:
        """For people: task and repeat."""
        return f"{self.row['task_id']} #{self.row['repeat']}"

    @cached_property
    def unsound(self) -> list[str]:
        """What is wrong with single segments; others may then not be looked at further."""
        return [f"branch {s['branch_index']}: {f}" for s in self.segments for f in row_faults(s)]

    @property
    def metrics(self) -> dict[str, float]:
        """Column `metrics`, by name."""
        return {pair["name"]: pair["value"] for pair in self.row["metrics"]}

    def messages(self) -> list[Message]:
        """The conversation, with the arguments of calls as the model wrote them."""
        forms = [msgspec.json.decode(text) for text in self.row["messages"]]
        pairs = zip(conversation_from_openai(forms), self.row["message_info"], strict=True)
        return [_with_raw_arguments(message, info["raw_arguments"]) for message, info in pairs]

    def tools(self) -> list[Row]:
        """The schemas that the model saw."""
        found: list[Row] = msgspec.json.decode(self.row["tools"])
        return found


@dataclass(frozen=True)
class Renderers:
    """The models that were named to look at a run with; a run may have rows of several."""

    named: Sequence[Renderer] = ()

    def of(self, segment: Row) -> Renderer | None:
        """The one whose tokenizer a row was made with, its template too where there are several.
        None where it is not among them. Of a row that does not know (ids by chat), the first."""
        made_with = segment["tokenizer_hash"]
        fitting = [one for one in self.named if made_with in (None, one.tokenizer_hash)]
        same = (one for one in fitting if one.template_hash == segment["template_hash"])
        return next(same, fitting[0] if fitting else None)


def rollouts(run_dir: RunDir, *, texts: bool = False) -> Iterator[Rollout]:
    """All published rollouts, those without segments too.

    Args:
        texts: read the messages as well.
    """
    columns = [*_FEW, *(_TEXTS if texts else ())]
    for stem in sorted({part.name for table in _ROWS for part in run_dir.parts(table)}):
        rows = {
            row["trajectory_id"]: row
            for table in _ROWS
            for row in _rows(run_dir, table, stem, columns)
        }
        segments = _rows(run_dir, "segments", stem, None)  # those of a rollout are side by side
        for owner, group in itertools.groupby(segments, operator.itemgetter("trajectory_id")):
            lost = {"task_id": owner, "repeat": 0, "status": "absent", "calls": [], "metrics": []}
            yield Rollout(rows.pop(owner, lost), list(group))
        yield from (Rollout(row, []) for row in rows.values())


def _rows(run_dir: RunDir, table: str, stem: str, columns: Sequence[str] | None) -> Iterator[Row]:
    place = run_dir.path / table / stem
    if not place.exists():
        return
    with pq.ParquetFile(place) as file:
        for batch in file.iter_batches(_AT_ONCE, columns=columns):
            yield from batch.to_pylist()


def _with_raw_arguments(message: Message, raw: list[str] | None) -> Message:
    if not isinstance(message, AssistantMessage) or not raw:
        return message
    calls = tuple(
        msgspec.structs.replace(call, arguments=text)
        for call, text in zip(message.tool_calls, raw, strict=True)
    )
    return msgspec.structs.replace(message, tool_calls=calls)


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
    yield from usage_faults(segments, rollout.row["calls"])
    held = len({call for segment in segments for call in segment["call_ids"]})
    if held != metrics.get("captured_calls", 0):
        yield f"ids of {metrics.get('captured_calls', 0):g} calls were recorded, {held} are there"
    shaped = shaped_by(msgspec.json.decode(rollout.row["sampling"]).get("extra_body", {}))
    for segment in segments:
        branch = f"branch {segment['branch_index']}"
        if segment["trainable"] and rollout.row["status"] != "ok":
            yield f"{branch} is trainable, but the attempt failed"
        if segment["trainable"] and segment["logprobs_kind"] == "raw" and shaped:
            yield f"{branch} is trainable, but shaped by {shaped[0]}"
        if segment["reward"] != rollout.row["reward"]:
            yield f"{branch} has reward {segment['reward']}"
    if renderers.named:
        yield from _tokenizer_faults(segments, renderers)


def _tokenizer_faults(segments: Sequence[Row], renderers: Renderers) -> Iterator[str]:
    for segment in segments:
        branch = f"branch {segment['branch_index']}"
        renderer, ids = renderers.of(segment), segment["input_ids"]
        if renderer is None:
            yield f"{branch} was made with another tokenizer than those that are named"
            return
        doubled = len(ids) > 1 and ids[0] == ids[1] and renderer.tokenizer.text_of(ids[0])
        if doubled:
            yield f"{branch} begins twice with {doubled!r}"


def ends_of(segment: Row, renderer: Renderer) -> Iterator[str]:
    """`ended` or `unended` for each answer that stopped by itself. One without an end token may
    have met a stop string; when all are without, the end tokens were lost."""
    for reason, run in zip(segment["finish_reasons"], answer_spans(segment), strict=True):
        if run.trained and reason in _ENDED:
            last = segment["input_ids"][run.end - 1]
            yield "ended" if last in renderer.end_ids else "unended"


def explanation(rollout: Rollout, segment: Row, renderer: Renderer | None) -> Row:
    """One row, explained."""
    runs = [run for run in answer_spans(segment) if run.trained]
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
        told["renders"] = _render_again(rollout, segment, renderer)
    return told


def _fork(rollout: Rollout, segment: Row, runs: list[AnswerSpan], renderer: Renderer | None) -> Row:
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


def _render_again(rollout: Rollout, segment: Row, renderer: Renderer) -> str:
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
        text += f"; {n['suspected_unparsed']:,} answers look like tool calls that were not parsed"
    if n["unended"]:
        text += f"; {n['unended']:,} of {n['ended'] + n['unended']:,} stopped without an end token"
    return f"{text}; {len(look.all_faults()) or 'no'} faults"


_LEAST_CHARS = 12
"""A shorter tool output may stand in what the model says by chance."""

_OTHER = "made with another tokenizer than those that are named: add it with --tokenizer"


@dataclass
class Masks:
    """The masks of one template over a run, or those of its recorded ids."""

    name: str
    renderer: Renderer | None = None
    """The template's; None for recorded ids."""
    marks_turns: bool | None = None
    """The template has `{% generation %}` blocks, by which some trainers find the mask."""
    spans: int = 0
    """Assistant messages (or recorded answers) that are to be trained."""
    found: int = 0
    """Those of them that are masked in."""
    tokens: int = 0
    """Tokens of assistant messages."""
    masked: int = 0
    """Those of them that are masked in."""
    texts: int = 0
    """Spans whose decoded text was compared with the message."""
    faults: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    """Messages that could not be looked at, by the reason."""

    @property
    def share(self) -> float | None:
        """Of the tokens of assistant messages that are masked in."""
        return self.masked / self.tokens if self.tokens else None

    def verdict(self) -> list[str]:
        """What is wrong: messages that cannot be looked at, one line per reason; texts that differ;
        or nothing to train on."""
        told = [f"{n:,} of {self.spans:,} messages: {why}" for why, n in self.unread.most_common()]
        if self.spans and not (self.masked or told):
            told.append("no assistant token is masked in: training learns nothing")
        return [f"{self.name}: {fault}" for fault in (*told, *self.faults)]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "template": self.name,
            "share": self.share,
            "tokens": self.tokens,
            "masked": self.masked,
            "messages": self.spans,
            "found": self.found,
            "compared": self.texts,
            "generation_blocks": self.marks_turns,
            "faults": self.verdict(),
        }

    def line(self) -> str:
        """For people."""
        share = "no assistant tokens" if self.share is None else f"{self.share:.1%} masked in"
        text = f"{self.name}: {share}, {self.masked:,} of {self.tokens:,} assistant tokens, "
        text += f"{self.found:,} of {self.spans:,} messages, {self.texts:,} compared by text"
        if self.marks_turns is False:
            text += "; no {% generation %} block: a trainer that needs one masks all out"
        return f"{text}; {len(self.verdict()) or 'no'} faults"


def recorded(rollout: Rollout, masks: Masks, renderers: Renderers) -> None:
    """Add the masks of a rollout's recorded ids; what is not trainable is left out. The main
    agent's answers are compared with its messages if there are renderers."""
    if rollout.unsound:
        masks.faults += [f"{rollout.name}: {fault}" for fault in rollout.unsound]
        return
    answers = _answer_of_turn(rollout) if renderers.named else {}
    outputs = _outputs(rollout.messages()) if renderers.named else []
    for segment in rollout.segments:
        renderer = renderers.of(segment)
        for run in answer_spans(segment) if segment["trainable"] else ():
            if not run.trained:
                continue
            masks.spans += 1
            masks.found += 1
            masks.tokens += run.end - run.start
            masks.masked += run.end - run.start
            if not renderers.named or segment["agent_name"] != MAIN:
                continue
            turn = segment["turn_ids"][run.start]
            if renderer is None:
                masks.unread[_OTHER] += 1
            elif turn in answers:
                masks.texts += 1
                text = renderer.decode(segment["input_ids"][run.start : run.end])
                for fault in _span_faults(text, answers[turn], outputs):
                    masks.faults.append(f"{rollout.name} turn {turn}: {fault}")


def _answer_of_turn(rollout: Rollout) -> dict[int, AssistantMessage]:
    """Return turn -> the message of the policy."""
    infos = rollout.row["message_info"]
    return {
        info["turn"]: message
        for message, info in zip(rollout.messages(), infos, strict=True)
        if isinstance(message, AssistantMessage) and info["turn"] and not info["synthetic"]
    }


def rendered(rollout: Rollout, masks: Masks) -> None:
    """Add the masks that a template gives to a rollout's messages."""
    if rollout.row["status"] != "ok" or masks.renderer is None:
        return
    row = rollout.row
    decoded = {**row, "messages": [msgspec.json.decode(text) for text in row["messages"]]}
    tools = rollout.tools()
    for sample in samples_of(decoded):
        messages = conversation_from_openai(sample.messages)
        outputs = _outputs(messages)
        for place, (message, trained) in enumerate(zip(messages, sample.trained, strict=True)):
            if not trained or not isinstance(message, AssistantMessage):
                continue
            masks.spans += 1
            span = _span(messages, place, tools, masks)
            if span is not None:
                masks.found += 1
                masks.texts += 1
                for fault in _span_faults(span, message, outputs):
                    masks.faults.append(f"{rollout.name} message {place}: {fault}")


def _span(
    messages: Sequence[Message], place: int, tools: Sequence[Row], masks: Masks
) -> str | None:
    """The text between the opening of the assistant's turn at `place` and what follows it."""
    renderer = masks.renderer
    assert renderer is not None
    try:
        before = renderer.render(messages[:place], tools)
        whole = renderer.render(messages[: place + 1], tools, generation_prompt=False)
        closed = renderer.render(messages[:place], tools, generation_prompt=False)
    except TemplateRefused as error:
        masks.unread[str(error)] += 1
        return None
    masks.tokens += max(0, len(whole) - len(closed))
    if whole[: len(before)] != before:
        return None
    masks.tokens -= len(before) - len(closed)  # the opening of the turn is nobody's saying
    ends = (n for n in range(len(before), len(whole)) if whole[n] in renderer.end_ids)
    end = next(ends, len(whole) - 1) + 1
    masks.tokens -= len(whole) - end
    masks.masked += end - len(before)
    return renderer.decode(whole[len(before) : end])


def _outputs(messages: Sequence[Message]) -> list[str]:
    texts = (m.content.strip() for m in messages if isinstance(m, ToolMessage))
    return [text for text in texts if len(text) >= _LEAST_CHARS]


def _span_faults(text: str, message: AssistantMessage, outputs: Sequence[str]) -> Iterator[str]:
    """Whether a masked span is what the message says, and holds no tool's output."""
    texts = [message.raw_content or message.content, *(c.name for c in message.tool_calls)]
    absent = [piece for piece in texts if piece.strip() and piece.strip() not in text]
    if absent:
        yield f"masked in is {text[:80]!r}, without {absent[0][:80]!r}"
    arguments = [c.arguments for c in message.tool_calls]
    said = "\n".join([*texts, message.reasoning_content or "", *arguments])
    if any(output in text and output not in said for output in outputs):
        yield "a tool's output is masked in"
