"""The events of a Responses stream, made from the response that it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.models.wire.lenient import encode_json
from hermes_rl.models.wire.responses.items import CALL, MESSAGE, REASONING
from hermes_rl.models.wire.sse import event

_Told = tuple[str, dict[str, Any]]
"""An event's name and fields."""


def events_of(response: dict[str, Any], piece_chars: int) -> list[bytes]:
    """The stream of a response: named events with running numbers.

    Args:
        piece_chars: length of the pieces that text and arguments come in.
    """
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun |= {"incomplete_details": None, "error": None}
    told: list[_Told] = [("response.created", {"response": begun})]
    told.append(("response.in_progress", {"response": begun}))
    for index, item in enumerate(response["output"]):
        told += _item_events(index, item, piece_chars)
    told.append((f"response.{response['status']}", {"response": response}))
    return [
        event(encode_json({"type": name, "sequence_number": number, **fields}), name)
        for number, (name, fields) in enumerate(told)
    ]


def _item_events(index: int, item: dict[str, Any], size: int) -> Iterator[_Told]:
    place = {"output_index": index}
    yield "response.output_item.added", {**place, "item": _begun(item)}
    inner = {**place, "item_id": item.get("id")}
    if item["type"] == CALL:
        for text in _pieces(item["arguments"], size):
            yield "response.function_call_arguments.delta", {**inner, "delta": text}
        whole = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**inner, **whole}
    elif item["type"] == MESSAGE:
        for number, part in enumerate(item["content"]):
            yield from _part_events({**inner, "content_index": number}, part, size)
    else:
        yield from _reasoning_events(inner, item, size)
    yield "response.output_item.done", {**place, "item": item}


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is when it is added: without what is still to come. Of encrypted content the
    first half is there already, as providers may do: it is worth nothing."""
    begun = dict(item)
    if item["type"] == CALL:
        return {**begun, "arguments": "", "status": "in_progress"}
    if item["type"] == MESSAGE:
        return {**begun, "content": [], "status": "in_progress"}
    begun["summary"] = []
    if isinstance(begun.get("content"), list):
        begun["content"] = []
    encrypted = begun.get("encrypted_content")
    if isinstance(encrypted, str):
        begun["encrypted_content"] = encrypted[: len(encrypted) // 2]
    return begun


def _part_events(place: dict[str, Any], part: dict[str, Any], size: int) -> Iterator[_Told]:
    name = "refusal" if part["type"] == "refusal" else "text"
    kind = "response.refusal" if name == "refusal" else "response.output_text"
    more: dict[str, Any] = {} if name == "refusal" else {"logprobs": []}
    yield "response.content_part.added", {**place, "part": {**part, name: ""}}
    for text in _pieces(part[name], size):
        yield f"{kind}.delta", {**place, "delta": text, **more}
    yield f"{kind}.done", {**place, name: part[name], **more}
    yield "response.content_part.done", {**place, "part": part}


def _reasoning_events(place: dict[str, Any], item: dict[str, Any], size: int) -> Iterator[_Told]:
    for number, part in enumerate(_texts(item, "summary")):
        at = {**place, "summary_index": number}
        name = "response.reasoning_summary"
        yield f"{name}_part.added", {**at, "part": {**part, "text": ""}}
        for text in _pieces(part["text"], size):
            yield f"{name}_text.delta", {**at, "delta": text}
        yield f"{name}_text.done", {**at, "text": part["text"]}
        yield f"{name}_part.done", {**at, "part": part}
    for number, part in enumerate(_texts(item, "content")):
        at = {**place, "content_index": number}
        for text in _pieces(part["text"], size):
            yield f"response.{REASONING}_text.delta", {**at, "delta": text}
        yield f"response.{REASONING}_text.done", {**at, "text": part["text"]}


def _texts(item: dict[str, Any], name: str) -> list[dict[str, Any]]:
    listed = item.get(name)
    parts = listed if isinstance(listed, list) else []
    return [p for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]


def _pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]
