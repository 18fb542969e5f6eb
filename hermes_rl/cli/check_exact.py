"""`hermes-rl check RUN --tokens` and `--masks`: check the token-exact segments of a run.

`--tokens` checks whether the ids in table `segments` were sampled, and where and why histories
forked. All rules are checked on the stored rows, ids are compared with the reported usage, and with
the tokenizer of the model histories are rendered again and compared.

`--masks` checks whether exactly the output of the model is masked in: by the masks of table
`segments`, and for each chat template by the masks that a trainer of text computes from the start
and the end of assistant turns.
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
"""Maximum number of rows and faults that are printed; `--json` has all."""


def check_exact(
    path: Path, tokenizers: Sequence[str], *, tokens: bool, masks: bool, as_json: bool
) -> int:
    """Check the exact tokens of a run, and the tokens that would be trained.

    Args:
        tokenizers: folders or hub names of the models of the run. Masks are checked for each.

    Raises: UserError for a tokenizer that cannot be read, and for a run without token ids.
    """
    renderers = {name: load_renderer(name) for name in tokenizers}
    known = Renderers(tuple(renderers.values()))
    check = TokenCheck(known, keep=None if as_json else SHOWN)
    recorded_masks, template_masks = (
        MaskCheck("recorded ids"),
        [
            MaskCheck(
                name, renderer, "endgeneration" in "".join(renderer.template.sources.values())
            )
            for name, renderer in renderers.items()
        ],
    )
    for rollout in rollouts(RunDir(path), texts=bool(renderers)):
        if tokens:
            check.add(rollout)
        if masks:
            add_recorded_masks(rollout, recorded_masks, known)
            for one in template_masks:
                add_template_masks(rollout, one)
    checked = [recorded_masks, *template_masks] if masks else []
    if tokens and not check.counts["captured"] + check.counts["segments"]:
        raise UserError(
            f"{path}: no token ids were recorded. Ask for them: --preset rl, or a way to them with "
            "--set endpoint.tokens=WAY"
        )
    if masks and not any(one.spans for one in checked):
        raise UserError(
            f"{path}: no token ids were recorded. Name a model's template: --tokenizer FOLDER"
        )
    faults = [*check.all_faults(), *(fault for one in checked for fault in one.verdict())]
    if as_json:
        found: dict[str, Any] = {"faults": faults}
        found |= {"tokens": check.as_dict()} if tokens else {}
        found |= {"masks": [one.as_dict() for one in checked]} if masks else {}
        print(json.dumps(found))
    else:
        _print(path, check if tokens else None, checked, faults)
    return ExitCode.BAD_INPUT if faults else ExitCode.DONE


def _print(path: Path, check: TokenCheck | None, masks: list[MaskCheck], faults: list[str]) -> None:
    if check is not None:
        shown = [*check.forks, *check.others][:SHOWN]
        for row in shown:
            print(format_entry(row))
        if check.counts["segments"] > len(shown):
            print(f"... and {check.counts['segments'] - len(shown):,} more (--json has them all)")
    for fault in faults[:SHOWN]:
        print(f"error: {fault}", file=sys.stderr)
    if len(faults) > SHOWN:
        print(f"... and {len(faults) - SHOWN} more faults", file=sys.stderr)
    if check is not None:
        print(f"{path}: {format_summary(check)}")
        if (check.fork_rate or 0.0) > MANY_FORKS:
            print(f"warning: more than {MANY_FORKS:.0%} of histories forked", file=sys.stderr)
    for one in masks:
        if one.spans:
            print(one.line())


Row = dict[str, Any]

_ROWS = ("trajectories", "failures")
_COLUMNS = (
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
_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Rollout:
    """A row and its segments."""

    row: Row
    """Of `trajectories` or `failures`, with JSON columns as text."""
    segments: list[Row]

    @property
    def name(self) -> str:
        """Task and repeat, for messages."""
        return f"{self.row['task_id']} #{self.row['repeat']}"

    @cached_property
    def row_errors(self) -> list[str]:
        """Faults of single segments; other checks require that there are none."""
        return [f"branch {s['branch_index']}: {f}" for s in self.segments for f in row_faults(s)]

    @property
    def metrics(self) -> dict[str, float]:
        """Column `metrics`, by name."""
        return {pair["name"]: pair["value"] for pair in self.row["metrics"]}

    def messages(self) -> list[Message]:
        """The conversation with the original arguments of calls."""
        forms = [msgspec.json.decode(text) for text in self.row["messages"]]
        pairs = zip(conversation_from_openai(forms), self.row["message_info"], strict=True)
        return [_with_raw_arguments(message, info["raw_arguments"]) for message, info in pairs]

    def tools(self) -> list[Row]:
        """The schemas that the model saw."""
        found: list[Row] = msgspec.json.decode(self.row["tools"])
        return found


@dataclass(frozen=True)
class Renderers:
    """The tokenizers of the command; a run may have rows of several models."""

    named: Sequence[Renderer] = ()

    def of(self, segment: Row) -> Renderer | None:
        """The renderer with the tokenizer of a row, and its template if possible. None when it is
        missing; the first one for rows without a tokenizer hash (ids by chat)."""
        made_with = segment["tokenizer_hash"]
        fitting = [one for one in self.named if made_with in (None, one.tokenizer_hash)]
        same = (one for one in fitting if one.template_hash == segment["template_hash"])
        return next(same, fitting[0] if fitting else None)


def rollouts(run_dir: RunDir, *, texts: bool = False) -> Iterator[Rollout]:
    """All published rollouts, including those without segments.

    Args:
        texts: also read the messages.
    """
    columns = [*_COLUMNS, *(_TEXTS if texts else ())]
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
    try:
        opened = run_dir.read_part(run_dir.path / table / stem, pq.ParquetFile)
    except FileNotFoundError:
        return
    with opened as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
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
"""Ids shown on each side of a fork."""
_ENDED = ("stop", "tool_calls")


@dataclass
class TokenCheck:
    """What a look at a run's tokens found."""

    renderers: Renderers = field(default_factory=Renderers)
    faults: list[str] = field(default_factory=list)
    keep: int | None = None
    """Maximum number of entries of forks, and of others; None keeps all."""
    forks: list[Row] = field(default_factory=list)
    """Entries of segments that forked."""
    others: list[Row] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """rollouts, calls, captured (calls with ids), segments, trainable, trained (tokens), followed,
    forked, suspected_unparsed (answers), and with a tokenizer: identical, drifting (rows, rendered
    again), ended, unended (answers that stopped, with an end token and without)."""

    def add(self, rollout: Rollout) -> None:
        """Check one rollout."""
        self.counts["rollouts"] += 1
        agents = [c for c in rollout.row["calls"] if c["purpose"] in ("agent", "summary")]
        self.counts["calls"] += sum(call["outcome"] == "ok" for call in agents)
        metrics = rollout.metrics
        for name in ("captured", "followed", "forked", "suspected_unparsed"):
            self.counts[name] += int(metrics.get(f"{name}_calls", 0))
        self.faults += [f"{rollout.name}: {fault}" for fault in faults_of(rollout, self.renderers)]
        for segment in rollout.segments:
            self._count(segment)
        if not rollout.row_errors:
            self._add_entries(rollout)

    def _add_entries(self, rollout: Rollout) -> None:
        for segment in rollout.segments:
            renderer = self.renderers.of(segment)
            if renderer is not None:
                self.counts.update(classify_ends(segment, renderer))
            entry = describe_segment(rollout, segment, renderer)
            self.counts["identical"] += entry.get("renders") == "identical"
            self.counts["drifting"] += entry.get("renders", "identical") != "identical"
            rows = self.forks if entry["verdict"] == "forked" else self.others
            if self.keep is None or len(rows) < self.keep:
                rows.append(entry)

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
        """The faults of single rollouts and of all together."""
        if self.counts["unended"] and not self.counts["ended"]:
            return [*self.faults, "no answer ends with an end token of this tokenizer"]
        return self.faults

    @property
    def fork_rate(self) -> float | None:
        """The share of calls that should have extended the history before them."""
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
    """The faults in the segments of one rollout."""
    segments, metrics = rollout.segments, rollout.metrics
    if metrics.get("segments_rejected"):
        yield "its tokens broke a rule when it was written: it has no segments"
        return
    if rollout.row["status"] == "absent":
        yield "its segments have no rollout"
        return
    if rollout.row_errors:
        yield from rollout.row_errors  # the other rules require valid rows
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


def classify_ends(segment: Row, renderer: Renderer) -> Iterator[str]:
    """`ended` or `unended` for each answer that stopped by itself. A stop string may end one
    without an end token; if all lack it, the end tokens were lost."""
    for reason, run in zip(segment["finish_reasons"], answer_spans(segment), strict=True):
        if run.trained and reason in _ENDED:
            last = segment["input_ids"][run.end - 1]
            yield "ended" if last in renderer.end_ids else "unended"


def describe_segment(rollout: Rollout, segment: Row, renderer: Renderer | None) -> Row:
    """Describe one segment."""
    runs = [run for run in answer_spans(segment) if run.trained]
    entry: Row = {
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
        entry |= {"verdict": "forked", "fork": _fork(rollout, segment, runs, renderer)}
    if renderer is not None and _renderable(rollout, segment):
        entry["renders"] = _render_again(rollout, segment, renderer)
    return entry


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
    """Whether the messages of the row correspond to the tokens of the segment: only for the main
    agent without compressed history and unsaved prompts."""
    row = rollout.row
    plain = len(row["contexts"]) == 1 and row["prompt_sha256"] is None
    return plain and segment["branch_kind"] == "main"


def _render_again(rollout: Rollout, segment: Row, renderer: Renderer) -> str:
    """Render the stored messages again: `identical`, or the first difference."""
    infos, turn = rollout.row["message_info"], max(segment["turn_ids"])
    answers = [n for n, i in enumerate(infos) if i["role"] == "assistant" and i["turn"] == turn]
    if not answers:
        return "no answer of its last turn is among the messages"
    messages = rollout.messages()[: answers[-1] + 1]
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


def format_entry(entry: Row) -> str:
    """The line of an entry."""
    turns = entry["turns"]
    span = f"turn {turns[0]}" if len(turns) == 1 else f"turns {turns[0]}-{turns[-1]}"
    head = f"{entry['task_id']} #{entry['repeat']} branch {entry['branch']} ({entry['kind']})"
    text = f"{head}: {span if turns else 'nothing trained'}, {entry['trained']:,} of "
    text += f"{entry['ids']:,} ids trained, {entry['verdict']}"
    fork = entry.get("fork")
    if fork is not None:
        text += f" here because {fork['reason']}: turn {fork['turn']}, token {fork['at']}"
        text += _change(fork) if fork["reason"] in DRIFT else ""
    if entry["excluded"] is not None:
        text += f"; not trainable: {entry['excluded']}"
    if entry.get("renders", "identical") != "identical":
        text += f"; rendered again it {entry['renders']}"
    return text


def _change(fork: Row) -> str:
    was, now = str(fork["was"]), str(fork["now"])
    if "was_text" in fork:
        was, now = f"{was} {fork['was_text']!r}", f"{now} {fork['now_text']!r}"
    return f", {was} of branch {fork['from']} became {now}"


def format_summary(check: TokenCheck) -> str:
    """The totals, in one line."""
    n = check.counts
    text = (
        f"{n['rollouts']:,} rollouts, {n['captured']:,} of {n['calls']:,} calls with ids, "
        f"{n['segments']:,} segments, {n['trainable']:,} trainable ({n['trained']:,} tokens)"
    )
    if check.fork_rate is not None:
        text += f", {n['forked']:,} of {n['followed']:,} histories forked ({check.fork_rate:.1%})"
    for name, found in (("branches", check.reasons), ("not trainable", check.excluded)):
        if found:
            text += f"; {name}: {', '.join(f'{k} {v}' for k, v in found.most_common())}"
    if n["identical"] or n["drifting"]:
        text += f"; rendered again {n['identical']:,} are identical, {n['drifting']:,} are not"
    if n["suspected_unparsed"]:
        text += f"; {n['suspected_unparsed']:,} answers look like tool calls that were not parsed"
    if n["unended"]:
        text += f"; {n['unended']:,} of {n['ended'] + n['unended']:,} stopped without an end token"
    return f"{text}; {len(check.all_faults()) or 'no'} faults"


_LEAST_CHARS = 12
"""Shorter tool outputs may be part of a message by chance."""

_OTHER = "made with another tokenizer than those that are named: add it with --tokenizer"


@dataclass
class MaskCheck:
    """Results for the masks of one template, or for those of recorded ids."""

    name: str
    renderer: Renderer | None = None
    """The template's; None for recorded ids."""
    marks_turns: bool | None = None
    """Whether the template has `{% generation %}` blocks, which some trainers use."""
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
    """Reason -> messages that could not be checked."""

    @property
    def share(self) -> float | None:
        """The share of assistant tokens that are masked in."""
        return self.masked / self.tokens if self.tokens else None

    def verdict(self) -> list[str]:
        """The faults: messages that could not be checked, one line per reason; texts that differ;
        or no tokens to train."""
        entry = [f"{n:,} of {self.spans:,} messages: {why}" for why, n in self.unread.most_common()]
        if self.spans and not (self.masked or entry):
            entry.append("no assistant token is masked in: training learns nothing")
        return [f"{self.name}: {fault}" for fault in (*entry, *self.faults)]

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


def add_recorded_masks(rollout: Rollout, masks: MaskCheck, renderers: Renderers) -> None:
    """Add the masks of recorded ids, without segments that are not trainable. With renderers the
    answers of the main agent are compared with its messages."""
    if rollout.row_errors:
        masks.faults += [f"{rollout.name}: {fault}" for fault in rollout.row_errors]
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
    """Turn -> the message of the policy."""
    infos = rollout.row["message_info"]
    return {
        info["turn"]: message
        for message, info in zip(rollout.messages(), infos, strict=True)
        if isinstance(message, AssistantMessage) and info["turn"] and not info["synthetic"]
    }


def add_template_masks(rollout: Rollout, masks: MaskCheck) -> None:
    """Add the masks of a template for the messages of a rollout."""
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
    messages: Sequence[Message], place: int, tools: Sequence[Row], masks: MaskCheck
) -> str | None:
    """The text of the assistant turn at `place`, without its opening."""
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
    masks.tokens -= len(before) - len(closed)  # without the opening of the turn
    ends = (n for n in range(len(before), len(whole)) if whole[n] in renderer.end_ids)
    end = next(ends, len(whole) - 1) + 1
    masks.tokens -= len(whole) - end
    masks.masked += end - len(before)
    return renderer.decode(whole[len(before) : end])


def _outputs(messages: Sequence[Message]) -> list[str]:
    texts = (m.content.strip() for m in messages if isinstance(m, ToolMessage))
    return [text for text in texts if len(text) >= _LEAST_CHARS]


def _span_faults(text: str, message: AssistantMessage, outputs: Sequence[str]) -> Iterator[str]:
    """Faults of a masked span: text of the message is missing, or it contains the output of a
    tool."""
    texts = [message.raw_content or message.content, *(c.name for c in message.tool_calls)]
    absent = [piece for piece in texts if piece.strip() and piece.strip() not in text]
    if absent:
        yield f"masked in is {text[:80]!r}, without {absent[0][:80]!r}"
    arguments = [c.arguments for c in message.tool_calls]
    message_text = "\n".join([*texts, message.reasoning_content or "", *arguments])
    if any(output in text and output not in message_text for output in outputs):
        yield "a tool's output is masked in"
