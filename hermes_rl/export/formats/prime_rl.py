"""prime-rl: verifiers episodes (`traces.jsonl`), one rollout per line.

A trace is a graph of messages; a node has the tokens that its message adds, and the path from a
root to a leaf is one training sequence. Each segment becomes a path of its own. Which of the tokens
between two sampled runs belongs to which message is not known: they are in the first possible node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hermes_rl.export.samples import Message, text_of_content
from hermes_rl.export.source import Format, Row, Source
from hermes_rl.export.tokens import TokenItem


def _rows(source: Source) -> Iterator[Row]:
    """One episode per rollout."""
    return (_episode(items, source) for items in source.token_rollouts())


def _episode(items: list[TokenItem], source: Source) -> Row:
    """Make the episode of one rollout: a trace per agent."""
    row = items[0].row
    task = {
        "type": row["env_name"] or "hermes_rl",
        "data": {"idx": row["row_index"], "id": row["task_id"]},
        "key": row["task_hash"],
        "hash": row["task_hash"],
    }
    by_agent: dict[str, list[TokenItem]] = defaultdict(list)
    for item in items:
        by_agent[item.segment["agent_name"]].append(item)
    traces = [_trace(_Transcript(row, agent, source), task, of) for agent, of in by_agent.items()]
    return {
        "id": row["trajectory_id"],
        "env": {"id": row["env_name"] or "hermes_rl"},
        "task": task,
        "group": {"id": row["group_id"]},
        "ok": True,
        "traces": traces,
    }


def _trace(transcript: _Transcript, task: Row, items: list[TokenItem]) -> Row:
    row, agent = transcript.row, transcript.agent
    nodes: list[Row] = []
    for item in items:
        parent = None
        for node in _path(item, transcript):
            node["timestamp"] = row["started_at"].timestamp()
            if parent is None:
                node["tools"] = [_tool(tool["function"]) for tool in row["tools"]]
            else:
                node["parent"] = parent
            parent = len(nodes)
            nodes.append(node)
    return {
        "id": row["trajectory_id"] if agent == "main" else f"{row['trajectory_id']}-{agent}",
        "task": task,
        "agent": {"name": agent, "config": {"model": row["model"]}},
        "nodes": nodes,
        "rewards": {"reward": {"score": items[0].reward, "weight": 1.0}},
        "info": {
            "end_reason": row["end_reason"],
            "metadata": row["metadata"] or {},
            "policy_versions": [
                (item.segment["policy_version_min"], item.segment["policy_version_max"])
                for item in items
            ],
        },
        "is_completed": True,
        "ok": True,
        "stop_condition": row["end_reason"],
    }


@dataclass
class _Transcript:
    """The messages of a rollout, to join with its tokens."""

    row: Mapping[str, Any]
    agent: str
    source: Source

    def answer(self, turn: int) -> Row:
        """Return the policy's message of a turn."""
        if self.agent == "main":
            for message, info in self._messages():
                if info["turn"] == turn and info["role"] == "assistant" and not info["synthetic"]:
                    return _convert(message, info)
        self.source.losses.lose("texts")
        return {"role": "assistant", "content": ""}

    def before(self, turn: int, since: int) -> list[Row]:
        """Return the messages between the answer of turn `since` and that of `turn`."""
        messages = [
            _convert(message, info)
            for message, info in self._messages()
            if since <= info["turn"] <= turn and self._is_context(info, turn)
        ]
        return messages if self.agent == "main" and messages else [{"role": "user", "content": ""}]

    def _is_context(self, info: Mapping[str, Any], turn: int) -> bool:
        """Whether a message was in the prompt of a turn's last call (the turn's own results were
        not)."""
        if info["role"] == "tool":
            return int(info["turn"]) < turn
        return bool(info["role"] != "assistant" or info["synthetic"] or info["turn"] == 0)

    def _messages(self) -> Iterator[tuple[Message, Mapping[str, Any]]]:
        return zip(self.row["messages"], self.row["message_info"], strict=True)


def _path(item: TokenItem, transcript: _Transcript) -> Iterator[Row]:
    """Yield the nodes of one segment, the root first."""
    ids, logprobs, since = item.ids, item.logprobs(0.0), 0
    for sampled, start, end, turn in _runs(item.segment):
        if sampled:
            message, since = transcript.answer(turn), turn
            training = _training(item, logprobs, start, end)
            yield {"message": message, "token_ids": ids[start:end], **training}
            continue
        following = item.segment["turn_ids"][end] if end < len(ids) else since
        for place, message in enumerate(transcript.before(following, since)):
            added = ids[start:end] if place == 0 else []
            yield {"message": message, "token_ids": added, "mask": [False] * len(added)}


def _training(item: TokenItem, logprobs: list[float] | None, start: int, end: int) -> Row:
    """Return what a trainer learns from the sampled tokens from `start` to `end`."""
    mask = item.segment["loss_mask"][start:end]
    training: Row = {"mask": mask, "sampled": any(mask)}
    if logprobs is not None:
        pairs = zip(logprobs[start:end], mask, strict=True)
        training["logprobs"] = [p for p, trained in pairs if trained]
    if item.advantage is not None:
        training["advantages"] = [item.advantage] * sum(mask)
    return training


def _runs(segment: Mapping[str, Any]) -> Iterator[tuple[bool, int, int, int]]:
    """Yield (sampled, start, end, turn) of each run of tokens of one origin."""
    marks = zip(segment["sampled_mask"], segment["turn_ids"], strict=True)
    start = 0
    for (sampled, turn), run in groupby((s, t if s else 0) for s, t in marks):
        end = start + sum(1 for _ in run)
        yield sampled, start, end, turn
        start = end


def _convert(message: Message, info: Mapping[str, Any]) -> Row:
    role = message["role"]
    content = text_of_content(message["content"])
    if role == "tool":
        named = {"tool_call_id": message["tool_call_id"], "name": message["name"]}
        return {"role": role, "content": content, **named}
    out: Row = {"role": role, "content": content}
    if "reasoning_content" in message:
        out["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": text}
            for call, text in zip(message["tool_calls"], info["raw_arguments"], strict=True)
        ]
    return out


def _tool(function: Mapping[str, Any]) -> Row:
    names = ("name", "description", "parameters")
    return {name: function[name] for name in names if name in function}


EPISODES = Format(
    name="prime-rl",
    about="prime-rl: verifiers episodes with tokens (traces.jsonl)",
    suffix=".jsonl",
    unit="tokens",
    rows=_rows,
    rl=True,
    supports=frozenset({"rewards"}),
    needs=("task_hash", "started_at"),
)
