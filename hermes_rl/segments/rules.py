"""The rules of table `segments`, and the check of rows against the recorded tokens.

For stored rows, `row_faults` checks one row, `rollout_faults` the rows of a rollout, and
`usage_faults` rows and the calls of their trajectory. Each yields one line per fault.
`verify_segments` checks rows before they are written.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, get_args

import msgspec

from hermes_rl.events import ForkReason, TokensAdded, pack_ids
from hermes_rl.models.tokens import TokenGraph, TokensFault
from hermes_rl.record import Segment
from hermes_rl.segments.branches import CapturedCall, token_versions, version_number
from hermes_rl.segments.rows import Exclusion, is_plain_sampling, stored_logprobs

Row = Mapping[str, Any]

KINDS = ("main", "compaction", "subagent", "retry", "fork")
_PER_TOKEN = ("loss_mask", "sampled_mask", "logprobs", "turn_ids", "version_ids")
_MAX_ID = 1 << 31


class AnswerSpan(NamedTuple):
    """The answer of one call in a row: sampled tokens at positions [start, end)."""

    start: int
    end: int
    trained: bool
    owned: bool
    """The row trains the answer, or it is aborted and is not trained anywhere."""


def answer_spans(row: Row) -> list[AnswerSpan]:
    """Return the answers in a valid row, one per call, in the order of `call_ids`."""
    marks, loss, starts = bytes(row["sampled_mask"]), row["loss_mask"], row["call_starts"]
    aborted = row["exclude_reason"] == "aborted"
    found: list[AnswerSpan] = []
    for start, after in zip(starts, [*starts[1:], len(marks)], strict=True):
        end = marks.find(0, start, after)
        owned = loss[start] or (aborted and start == starts[-1])
        found.append(AnswerSpan(start, after if end < 0 else end, loss[start], owned))
    return found


def row_faults(row: Row) -> Iterator[str]:
    """Check one row by itself."""
    number = len(row["input_ids"])
    wrong = [name for name in _PER_TOKEN if len(row[name]) != number]
    if wrong or not number:
        yield f"{', '.join(wrong) or 'input_ids'}: not as long as the {number} ids"
        return
    if min(row["input_ids"]) < 0 or max(row["input_ids"]) >= _MAX_ID:
        yield "a token id is negative or has more than 31 bits"
    yield from _mask_faults(row)
    yield from _logprob_faults(row)
    yield from _call_faults(row)
    yield from _label_faults(row)
    if row["trainable"]:
        yield from _trainable_faults(row)


def _mask_faults(row: Row) -> Iterator[str]:
    sampled, loss = row["sampled_mask"], row["loss_mask"]
    if any(map(operator.gt, loss, sampled)):
        yield "a token is trained that was not sampled"
    if row["n_sampled"] != sum(sampled):
        yield f"n_sampled is {row['n_sampled']}, sampled_mask has {sum(sampled)}"
    first = sampled.index(True) if True in sampled else len(sampled)
    if row["prompt_len"] != first:
        yield f"prompt_len is {row['prompt_len']}, the first sampled token is at {first}"
    if set(_others(row["version_ids"], sampled)) - {-1}:
        yield "a token that was not sampled has a policy version"


def _logprob_faults(row: Row) -> Iterator[str]:
    values, sampled = row["logprobs"], row["sampled_mask"]
    if set(_others(values, sampled)) - {None}:
        yield "a token that was not sampled has a logprob"
    known = [value for value in values if value is not None]
    if known and not (all(map(math.isfinite, known)) and max(known) <= 0.0):
        yield "a logprob is above 0 or not finite"
    if row["trainable"] and None in compress(values, sampled):
        yield "a sampled token of a trainable row has no logprob"


def _others(values: Sequence[Any], sampled: Sequence[bool]) -> Iterator[Any]:
    """Yield the values of tokens that were not sampled."""
    return compress(values, map(operator.not_, sampled))


def _call_faults(row: Row) -> Iterator[str]:
    calls, starts, number = row["call_ids"], row["call_starts"], len(row["input_ids"])
    if not len(calls) == len(starts) == len(row["finish_reasons"]) == len(set(calls)):
        yield "call_ids, call_starts and finish_reasons differ in length, or a call is there twice"
        return
    if starts != sorted(set(starts)) or not all(0 <= start < number for start in starts):
        yield f"call_starts {starts}: not increasing positions"
        return
    runs = answer_spans(row)
    if sum(run.end - run.start for run in runs) != sum(row["sampled_mask"]):
        yield "sampled tokens belong to no call"
    if any(len(set(row["loss_mask"][run.start : run.end])) != 1 for run in runs):
        yield "an answer is only partly trained"


def _label_faults(row: Row) -> Iterator[str]:
    if row["branch_kind"] not in KINDS:
        yield f"branch_kind {row['branch_kind']}: unknown"
    if row["fork_reason"] is not None and row["fork_reason"] not in get_args(ForkReason):
        yield f"fork_reason {row['fork_reason']}: unknown"
    if row["exclude_reason"] is not None and row["exclude_reason"] not in get_args(Exclusion):
        yield f"exclude_reason {row['exclude_reason']}: unknown"
    if row["trainable"] != (row["exclude_reason"] is None):
        yield f"trainable is {row['trainable']}, exclude_reason {row['exclude_reason']}"


def _trainable_faults(row: Row) -> Iterator[str]:
    if not any(row["loss_mask"]):
        yield "trainable, but no token is trained"
    if row["token_source"] not in ("engine", "bridged"):
        yield f"trainable, but its ids are {row['token_source']}"
    if row["logprobs_kind"] not in ("sampling", "raw"):
        yield f"trainable, but its logprobs are {row['logprobs_kind']}"
    if row["logprobs_kind"] == "raw" and not _plain(row):
        yield "trainable with raw logprobs, but sampling was not plain (temperature 1, no filter)"


def _plain(row: Row) -> bool:
    """Whether sampling was plain. Penalties and grammars are in no column (`_policy_faults`)."""
    plain = row["temperature"] == 1.0 and row["top_p"] == 1.0 and row["top_k"] in (-1, 0)
    return plain and row["min_p"] == 0


def rollout_faults(rows: Sequence[Row]) -> Iterator[str]:
    """Check the rows of one rollout together; each of them is valid by itself."""
    by_number = {row["branch_index"]: row for row in rows}
    if sorted(by_number) != list(range(len(rows))):
        yield f"branches {[row['branch_index'] for row in rows]} of one rollout"
        return
    if any(row["n_branches"] != len(rows) for row in rows):
        yield f"n_branches is not {len(rows)} in every row"
    owned = Counter(call for row in rows for call, run in _calls(row) if run.owned)
    seen = {call for row in rows for call in row["call_ids"]}
    yield from (f"call {c} is trained {n} times" for c, n in owned.items() if n > 1)
    yield from (f"call {c} is trained in no branch" for c in sorted(seen - set(owned)))
    for row in rows:
        yield from _sharing_faults(row, by_number)


def _calls(row: Row) -> Iterator[tuple[str, AnswerSpan]]:
    return zip(row["call_ids"], answer_spans(row), strict=True)


def _sharing_faults(row: Row, by_number: Mapping[int, Row]) -> Iterator[str]:
    """Check that a branch shares with its parent all sampled tokens that it does not train."""
    number, parent = row["branch_index"], row["parent_branch"]
    shared = max((run.end for run in answer_spans(row) if not run.owned), default=0)
    if parent is None:
        if shared:
            yield f"branch {number} has sampled tokens of another, but no parent"
        return
    if parent not in by_number or parent == number:
        yield f"branch {number}: its parent {parent} is not another branch"
    elif row["input_ids"][:shared] != by_number[parent]["input_ids"][:shared]:
        yield f"branch {number} has sampled tokens that its parent {parent} has not"


def usage_faults(rows: Sequence[Row], calls: Sequence[Row]) -> Iterator[str]:
    """Check the tokens of a rollout against the token counts of its calls.

    Args:
        calls: column `calls` of the trajectory.
    """
    by_id = {call["call_id"]: call for call in calls}
    for row in rows:
        for call_id, run in _calls(row):
            if not run.owned:
                continue
            call = by_id.get(call_id)
            if call is None:
                yield f"call {call_id} has tokens, but is not in column calls"
                continue
            if (call["turn"], call["agent"]) != (row["turn_ids"][run.start], row["agent_name"]):
                yield f"call {call_id} is of turn {call['turn']} of {call['agent']}"
            yield from _count_faults(call, run)


def _count_faults(call: Row, run: AnswerSpan) -> Iterator[str]:
    prompt, output, sampled = call["input_tokens"], call["output_tokens"], run.end - run.start
    if output is not None and output != sampled:
        yield (
            f"turn {call['turn']}: {sampled} sampled ids, but the server counted {output}"
            f" (finish reason {call['finish_reason']})"
        )
    if prompt is not None and prompt != run.start:
        yield f"turn {call['turn']}: a prompt of {run.start} ids, but the server counted {prompt}"


Calls = Mapping[str, CapturedCall]


def verify_segments(
    segments: Sequence[Segment], graph: TokenGraph, calls: Calls, *, ok: bool
) -> None:
    """Check every rule, and that each answer is trained once, with its sampled tokens.

    Rows are built piece by piece; this compares the whole path of each call with the row that
    trains it, independently of how the row was built.

    Args:
        calls: the calls of the graph.
        ok: the rollout has a row in `trajectories`.

    Raises: TokensFault that names the first fault.
    """
    for fault in _faults(segments, graph, calls):
        raise TokensFault(fault)
    for segment in segments:
        if segment.trainable:
            for fault in _policy_faults(segment, graph, calls, ok):
                raise TokensFault(f"branch {segment.branch_index} is trainable, but {fault}")


def _faults(segments: Sequence[Segment], graph: TokenGraph, calls: Calls) -> Iterator[str]:
    rows = [msgspec.structs.asdict(segment) for segment in segments]
    for row in rows:
        yield from (f"branch {row['branch_index']}: {fault}" for fault in row_faults(row))
    yield from rollout_faults(rows)
    found: set[str] = set()
    for segment, row in zip(segments, rows, strict=True):
        packed = pack_ids(segment.input_ids)
        for place, (call_id, run) in enumerate(
            zip(segment.call_ids, answer_spans(row), strict=True)
        ):
            if run.owned:
                found.add(call_id)
                yield from _answer_faults(segment, packed, run, call_id, graph)
            if (number := graph.index(call_id)) is not None:
                added = graph.nodes[number].added
                yield from _fact_faults(segment, place, run, calls[call_id], added)
    missing = [n.added.call_id for n in graph.nodes if n.added.call_id not in found]
    yield from (f"call {call_id} is in no branch" for call_id in missing)


def _answer_faults(
    segment: Segment, packed: bytes, run: AnswerSpan, call_id: str, graph: TokenGraph
) -> Iterator[str]:
    number = graph.index(call_id)
    if number is None:
        yield f"call {call_id}: not in the recorded tokens"
        return
    node = graph.nodes[number]
    if (run.start, run.end) != (node.prompt_end, node.end):
        yield f"call {call_id}: sampled at {node.prompt_end}, trained at {run.start}"
    elif packed[: 4 * run.end] != graph.path(number):
        yield f"call {call_id}: its path differs from the row"


def _fact_faults(
    segment: Segment, place: int, run: AnswerSpan, call: CapturedCall, added: TokensAdded
) -> Iterator[str]:
    """Check the columns of an answer against its call, trained here or not."""
    if segment.logprobs[run.start : run.end] != stored_logprobs(added)[: run.end - run.start]:
        yield f"call {call.call_id}: its logprobs differ from the row"
    if set(segment.turn_ids[run.start : run.end]) != {call.turn}:
        yield f"call {call.call_id} is of turn {call.turn}"
    versions = [version_number(v) for v in token_versions(call, added)]
    if segment.version_ids[run.start : run.end] != versions[: run.end - run.start]:
        yield f"call {call.call_id} is of policy version {call.policy_version}"
    if segment.finish_reasons[place] != (call.finish_reason or ""):
        yield f"call {call.call_id} ended with {call.finish_reason}"


def _policy_faults(segment: Segment, graph: TokenGraph, calls: Calls, ok: bool) -> Iterator[str]:
    """Check that all trained tokens of a trainable row are the policy's.

    The calls have more than the row: no column has penalties and grammars.
    """
    if not ok:
        yield "the attempt failed"
    makers = set()
    for call_id, run in zip(
        segment.call_ids, answer_spans(msgspec.structs.asdict(segment)), strict=True
    ):
        call, added = calls[call_id], graph.nodes[graph.index(call_id) or 0].added
        makers.add((call.model, added.tokenizer_hash))
        if run.trained and call.detached is not None:
            yield f"call {call_id} is not in the conversation ({call.detached})"
        if added.source == "retokenized":
            yield f"the ids of call {call_id} were retokenized from text"
        if added.logprobs_kind != segment.logprobs_kind:
            yield f"the logprobs of call {call_id} are {added.logprobs_kind}"
        if added.logprobs_kind == "raw" and not is_plain_sampling(added):
            shaped = ", ".join(added.shaped_by) or "temperature, top_p, top_k or min_p"
            yield f"the logprobs of call {call_id} are raw, and {shaped} changed the distribution"
    if len(makers) > 1:
        yield "its calls are of several models or tokenizers"
