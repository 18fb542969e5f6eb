"""Segments held against the tokens that were recorded, before they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from hermes_rl.events import TokensAdded, pack_ids, unpack_logprobs
from hermes_rl.models.tokens.graph import TokenGraph, TokensFault
from hermes_rl.record import Segment
from hermes_rl.segments.calls import CallFacts, version_number
from hermes_rl.segments.rules import Run, rollout_faults, row_faults, runs_of
from hermes_rl.segments.trainable import plainly_sampled, sound

Calls = Mapping[str, CallFacts]


def prove(segments: Sequence[Segment], graph: TokenGraph, calls: Calls, *, ok: bool) -> None:
    """Check every rule, and that each call's answer is trained once and as it was sampled.

    The rows were put together piece by piece; here each call's whole path is looked for in the row
    that trains it, so that a slip in one way is seen by the other.

    Args:
        calls: what happened to each call of the graph.
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
        for place, (call_id, run) in enumerate(zip(segment.call_ids, runs_of(row), strict=True)):
            if run.own:
                found.add(call_id)
                yield from _answer_faults(segment, packed, run, call_id, graph)
            if (number := graph.index(call_id)) is not None:
                added = graph.nodes[number].added
                yield from _fact_faults(segment, place, run, calls[call_id], added)
    missing = [n.added.call_id for n in graph.nodes if n.added.call_id not in found]
    yield from (f"call {call_id} is in no branch" for call_id in missing)


def _answer_faults(
    segment: Segment, packed: bytes, run: Run, call_id: str, graph: TokenGraph
) -> Iterator[str]:
    number = graph.index(call_id)
    if number is None:
        yield f"call {call_id}: nothing was recorded of it"
        return
    node = graph.nodes[number]
    if (run.start, run.end) != (node.prompt_end, node.end):
        yield f"call {call_id}: sampled at {node.prompt_end}, trained at {run.start}"
    elif packed[: 4 * run.end] != graph.path(number):
        yield f"call {call_id}: its path is not the row's"


def _fact_faults(
    segment: Segment, place: int, run: Run, call: CallFacts, added: TokensAdded
) -> Iterator[str]:
    """Whether an answer's columns say what happened to its call, trained here or not."""
    if segment.logprobs[run.start : run.end] != _logprobs(added)[: run.end - run.start]:
        yield f"call {call.call_id}: its logprobs are not the row's"
    if set(segment.turn_ids[run.start : run.end]) != {call.turn}:
        yield f"call {call.call_id} is of turn {call.turn}"
    if set(segment.version_ids[run.start : run.end]) != {version_number(call.policy_version)}:
        yield f"call {call.call_id} is of policy version {call.policy_version}"
    if segment.finish_reasons[place] != (call.finish_reason or ""):
        yield f"call {call.call_id} ended with {call.finish_reason}"


def _policy_faults(segment: Segment, graph: TokenGraph, calls: Calls, ok: bool) -> Iterator[str]:
    """What of a trainable row is not the policy's: the rows say less than the calls do (a penalty
    and a grammar stand in no column)."""
    if not ok:
        yield "the attempt failed"
    makers = set()
    for call_id, run in zip(
        segment.call_ids, runs_of(msgspec.structs.asdict(segment)), strict=True
    ):
        call, added = calls[call_id], graph.nodes[graph.index(call_id) or 0].added
        makers.add((call.model, added.tokenizer_hash))
        if run.trained and call.aside is not None:
            yield f"call {call_id} is no part of the conversation ({call.aside})"
        if added.source == "retokenized":
            yield f"the ids of call {call_id} are of a text that was tokenised again"
        if added.logprobs_kind != segment.logprobs_kind:
            yield f"the logprobs of call {call_id} are {added.logprobs_kind}"
        if added.logprobs_kind == "raw" and not plainly_sampled(added):
            shaped = ", ".join(added.shaped_by) or "temperature, top_p, top_k or min_p"
            yield f"the logprobs of call {call_id} are raw, and {shaped} shaped what was sampled"
    if len(makers) > 1:
        yield "its ids are of several models or tokenizers"


def _logprobs(added: TokensAdded) -> list[float | None]:
    if added.logprobs is None:
        return [None] * (len(added.sampled) // 4)
    return sound(unpack_logprobs(added.logprobs))
