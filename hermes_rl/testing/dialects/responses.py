"""The Responses API, server side: reads requests and writes answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.messages import Message, SystemMessage, ToolMessage, UserMessage
from hermes_rl.models import Completion
from hermes_rl.models.wire import (
    CALL,
    CODEX_RESPONSES,
    LOGPROBS,
    MESSAGE,
    REASONING,
    Piece,
    Responses,
    pieces_of,
    reasoning_text,
    responses_message,
)
from hermes_rl.testing.dialects.base import (
    OpenAIBody,
    ServedRequest,
    ServerDialect,
    encode_event,
    openai_usage,
    pieces,
    usage_form,
)
from hermes_rl.text import encode_json
from hermes_rl.usage import Usage

_STATUS = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "abort"}
"""Our finish reasons of an incomplete response -> why it is incomplete."""


class _Body(OpenAIBody, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Body).decode


class ResponsesServer(ServerDialect):
    """The server's side of the Responses API; see `ServerDialect`."""

    name = CODEX_RESPONSES
    path = Responses.path

    def decode_request(self, body: bytes) -> ServedRequest:
        """See `ServerDialect.decode_request`."""
        form = _decode(body)
        messages: list[Message] = []
        if form.instructions is not None:
            messages.append(SystemMessage(content=form.instructions))
        if isinstance(form.input, str):
            messages.append(UserMessage(content=form.input))
        else:
            messages += decode_items(form.input)
        return ServedRequest(
            model=form.model,
            messages=tuple(messages),
            tools=tuple(map(_nested, form.tools or ())),
            sampling=form.sampling(form.max_output_tokens, (form.reasoning or {}).get("effort")),
            stream=bool(form.stream),
            logprobs=LOGPROBS in (form.include or ()),
        )

    def encode_answer(self, answer: Completion, *, answer_id: str) -> bytes:
        """See `ServerDialect.encode_answer`."""
        return encode_json(response_form(answer, answer_id))

    def encode_stream(
        self, answer: Completion, *, answer_id: str, include_usage: bool = True
    ) -> list[bytes]:
        """See `ServerDialect.encode_stream`: the response begins, each item comes in pieces and
        is then sent whole, the response ends. The usage is always sent."""
        return events_of(response_form(answer, answer_id), self._piece_chars)


def response_form(answer: Completion, answer_id: str) -> dict[str, Any]:
    """The response object of an answer."""
    why = _STATUS.get(answer.finish_reason or "")
    form: dict[str, Any] = {
        "id": answer_id,
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if why else "completed",
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "instructions": None,
        "metadata": {},
        "model": answer.served_model,
        "output": _output(answer, answer_id, "incomplete" if why else "completed"),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage_form(answer, _write_usage),
    }
    if answer.policy_version is not None:
        form["policy_version"] = answer.policy_version
    return form


def decode_items(items: list[dict[str, Any]]) -> list[Message]:
    """The messages that input items make: reasoning, text and calls in a row are one assistant
    message. Raises: UserError for an item of an unknown kind, and what `check_items` raises."""
    check_items(items)
    out: list[Message] = []
    output: list[dict[str, Any]] = []
    names: dict[str, str] = {}

    def close() -> None:
        if output:
            message, _ = responses_message(output, str(len(out)))
            names.update((call.id, call.name) for call in message.tool_calls)
            out.append(message)
            output.clear()

    for item in items:
        kind = item.get("type", MESSAGE)
        role = item.get("role")
        if kind in (REASONING, CALL):
            output.append(item)
        elif kind == MESSAGE and role == "assistant":
            output.append({**item, "type": MESSAGE})
        elif kind == MESSAGE and role in ("user", "system", "developer"):
            close()
            out.append(_input_message(str(role), item.get("content")))
        elif kind == "function_call_output":
            close()
            call_id = str(item.get("call_id", ""))
            text = _plain(item.get("output"))
            out.append(ToolMessage(tool_call_id=call_id, name=names.get(call_id, ""), content=text))
        else:
            raise UserError(f"input item of type {kind!r}, role {role!r} is not known here")
    close()
    return out


def check_items(items: list[dict[str, Any]]) -> None:
    """Raises: UserError with the API's complaint when a call has no output, an output no call, or a
    reasoning item nothing that followed from it."""
    open_calls: dict[str, None] = {}
    thought: Any = None
    for item in items:
        kind, call_id = item.get("type", MESSAGE), str(item.get("call_id", ""))
        if kind == CALL:
            open_calls[call_id] = None
        elif kind == "function_call_output":
            if call_id not in open_calls:
                raise UserError(
                    f"No tool call found for function call output with call_id {call_id}."
                )
            del open_calls[call_id]
        followed = kind == CALL or (kind == MESSAGE and item.get("role") == "assistant")
        if thought is not None and kind != REASONING and not followed:
            break
        thought = item if kind == REASONING else None
    if thought is not None:
        name = thought.get("id")
        raise UserError(
            f"Item '{name}' of type 'reasoning' was provided without its required following item."
        )
    if open_calls:
        raise UserError(f"No tool output found for function call {next(iter(open_calls))}.")


def _input_message(role: str, content: Any) -> Message:
    if role != "user":
        return SystemMessage(content=_plain(content))
    if isinstance(content, str):
        return UserMessage(content=content)
    parts = [_part(p) for p in content if isinstance(p, dict)] if isinstance(content, list) else []
    if len(parts) == 1 and parts[0].get("type") == "text":
        return UserMessage(content=str(parts[0].get("text", "")))
    return UserMessage(content=parts)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A content part in the form of Chat Completions, which ours is."""
    kind = part.get("type")
    if kind == "input_text":
        return {"type": "text", "text": part.get("text", "")}
    if kind == "input_image":
        image = {"url": part.get("image_url")}
        detail = part.get("detail")
        return {
            "type": "image_url",
            "image_url": image if detail in (None, "auto") else {**image, "detail": detail},
        }
    if kind == "input_file":
        return {"type": "file", "file": {k: v for k, v in part.items() if k != "type"}}
    return part


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict)]
    return "".join(t for t in texts if isinstance(t, str))


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a function schema of Chat Completions, which ours is."""
    if tool.get("type") != "function":
        return tool
    left_out = ("type", *(() if tool.get("strict") else ("strict",)))
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in left_out}}


def _output(answer: Completion, answer_id: str, status: str) -> list[dict[str, Any]]:
    """The output items of an answer."""
    message = answer.message
    pieces = pieces_of(message)
    thoughts = [reasoning_text(p.block) for p in pieces if p.kind == REASONING]
    if message.reasoning_content and not any(thoughts):
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        pieces.insert(0, Piece(REASONING, block={"summary": summary}))
    if not any(p.kind == MESSAGE for p in pieces) and answer.finish_reason == "refusal":
        pieces.append(Piece(MESSAGE))
    refused = answer.finish_reason == "refusal"
    name = answer_id.removeprefix("resp_")
    return [_item(p, f"{name}_{i}", status, refused=refused) for i, p in enumerate(pieces)]


def _item(piece: Piece, item_id: str, status: str, *, refused: bool) -> dict[str, Any]:
    if piece.kind == REASONING:
        return {"type": REASONING, "id": f"rs_{item_id}", "summary": [], **piece.block}
    if piece.call is not None:
        call = piece.call
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"type": CALL, "id": f"fc_{item_id}", **named, "status": status}
    part: dict[str, Any] = {"type": "output_text", "text": piece.text}
    part |= {"annotations": [], "logprobs": []}
    if refused:
        part = {"type": "refusal", "refusal": piece.text}
    item = {"type": MESSAGE, "id": f"msg_{item_id}", "status": status, "role": "assistant"}
    phase = {"phase": piece.phase} if piece.phase else {}
    return {**item, "content": [part], **phase}


def _write_usage(usage: Usage) -> dict[str, Any]:
    return openai_usage(usage, "input_tokens", "output_tokens")


_Event = tuple[str, dict[str, Any]]
"""An event's name and fields."""


def events_of(response: dict[str, Any], piece_chars: int) -> list[bytes]:
    """The stream of a response: named events with running numbers.

    Args:
        piece_chars: length of the pieces that text and arguments come in.
    """
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun |= {"incomplete_details": None, "error": None}
    events: list[_Event] = [("response.created", {"response": begun})]
    events.append(("response.in_progress", {"response": begun}))
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item, piece_chars)
    events.append((f"response.{response['status']}", {"response": response}))
    return [
        encode_event(encode_json({"type": name, "sequence_number": number, **fields}), name)
        for number, (name, fields) in enumerate(events)
    ]


def _item_events(index: int, item: dict[str, Any], size: int) -> Iterator[_Event]:
    place = {"output_index": index}
    yield "response.output_item.added", {**place, "item": _begun(item)}
    inner = {**place, "item_id": item.get("id")}
    if item["type"] == CALL:
        for text in pieces(item["arguments"], size):
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


def _part_events(place: dict[str, Any], part: dict[str, Any], size: int) -> Iterator[_Event]:
    name = "refusal" if part["type"] == "refusal" else "text"
    kind = "response.refusal" if name == "refusal" else "response.output_text"
    more: dict[str, Any] = {} if name == "refusal" else {"logprobs": []}
    yield "response.content_part.added", {**place, "part": {**part, name: ""}}
    for text in pieces(part[name], size):
        yield f"{kind}.delta", {**place, "delta": text, **more}
    yield f"{kind}.done", {**place, name: part[name], **more}
    yield "response.content_part.done", {**place, "part": part}


def _reasoning_events(place: dict[str, Any], item: dict[str, Any], size: int) -> Iterator[_Event]:
    for number, part in enumerate(_texts(item, "summary")):
        at = {**place, "summary_index": number}
        name = "response.reasoning_summary"
        yield f"{name}_part.added", {**at, "part": {**part, "text": ""}}
        for text in pieces(part["text"], size):
            yield f"{name}_text.delta", {**at, "delta": text}
        yield f"{name}_text.done", {**at, "text": part["text"]}
        yield f"{name}_part.done", {**at, "part": part}
    for number, part in enumerate(_texts(item, "content")):
        at = {**place, "content_index": number}
        for text in pieces(part["text"], size):
            yield f"response.{REASONING}_text.delta", {**at, "delta": text}
        yield f"response.{REASONING}_text.done", {**at, "text": part["text"]}


def _texts(item: dict[str, Any], name: str) -> list[dict[str, Any]]:
    listed = item.get(name)
    parts = listed if isinstance(listed, list) else []
    return [p for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
