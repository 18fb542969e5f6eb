"""Answers from servers of many habits, and what the client of each dialect reads."""

import json

import msgspec
import pytest
from wire_kit import cases, decode, encode, messages_block, messages_stream

from hermes_rl.messages import ToolMessage, UserMessage
from hermes_rl.testing import encode_event


def encoded(form):
    return json.dumps(form).encode()


def events_of(events):
    return b"".join(encode_event(encoded(form), form.get("type")) for form in events)


def answers_of(row, kit):
    """(bytes of an answer, whether they are a stream), in each form that the row gives."""
    if "raw" in row:
        yield row["raw"].encode("latin-1"), False
    if "body" in row:
        yield encoded(row["body"]), False
    if "events" in row:
        yield events_of(row["events"]), True
    if "message" in row:
        fields = {"usage": row["usage"]} if "usage" in row else {}
        yield kit.answer_with(row["message"], **fields), False
        if not fields:
            yield kit.stream_of(row["message"]), True
    if "deltas" in row:
        yield kit.stream_of(*row["deltas"]), True
    stop, usage = row.get("stop", "end_turn"), row.get("usage")
    if "content" in row:
        form = {"content": row["content"], "stop_reason": stop, "usage": usage}
        yield encoded({name: value for name, value in form.items() if value is not None}), False
    if "blocks" in row or "content" in row:
        blocks = [messages_block(index, *one) for index, one in enumerate(row.get("blocks", ()))]
        yield messages_stream(*blocks, stop=stop, usage=usage), True
    if "output" in row:
        form = {"id": "resp_1", "model": "m-1", "status": "completed", **row.get("fields", {})}
        yield encoded({**form, "output": row["output"]}), False
        done = [
            {"type": "response.output_item.done", "output_index": index, "item": item}
            for index, item in enumerate(row["output"])
        ]
        yield events_of([*done, {"type": "response.completed", "response": form}]), True


MESSAGE = {"content": "", "reasoning": None, "raw": None, "calls": [], "details": None}


def known(struct):
    """The fields of a struct that are set, as JSON has them."""
    form = None if struct is None else json.loads(msgspec.json.encode(struct))
    return form and {name: value for name, value in form.items() if value is not None}


def shown(answer, pieces, expected):
    """What an answer holds, by the names in `answers.yaml`; an id that is made up is null."""
    message = answer.message
    options = {call[0] for call in expected["calls"]}
    return {
        "content": message.content,
        "reasoning": message.reasoning_content,
        "raw": message.raw_content,
        "calls": [
            [call.id if call.id in options else None, call.name, call.arguments]
            for call in message.tool_calls
        ],
        "details": message.reasoning_details,
        "finish": answer.finish_reason,
        "usage": known(answer.usage),
        "usage_raw": answer.usage_raw and json.loads(answer.usage_raw),
        "tokens": known(answer.tokens),
        "served_model": answer.served_model,
        "request_id": answer.request_id,
        "pieces": pieces,
    }


@pytest.mark.parametrize("row", cases("answers"))
def test_answers_are_decoded(kit, row):
    expected = {**MESSAGE, **row.get("read", {})}
    for data, stream in answers_of(row, kit):
        for size in (1, None):  # byte by byte, and at once
            pieces, fields = [], {"stream": stream, "size": size}
            mode = row.get("mode", "chat_completions")
            answer = decode(data, mode=mode, on_delta=pieces.append, **fields)
            found = shown(answer, pieces, expected)
            assert {name: found[name] for name in expected} == expected


def test_stream_is_complete_with_its_finish_reason(kit):
    whole = kit.stream_of({"content": "a"}, done=False)
    assert kit.decode(whole, kit.SSE, stream=True).message.content == "a"


def test_thinking_between_texts_keeps_its_position():
    whole = [
        {"type": "text", "text": "First. "},
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "Then."},
        {"type": "tool_use", "id": "toolu_1", "name": "terminal", "input": {"a": 1}},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "tool_use", "id": "toolu_2", "name": "terminal", "input": {}},
    ]
    mode = "anthropic_messages"
    answer = decode(encoded({"content": whole, "stop_reason": "tool_use"}), mode=mode)
    assert answer.message.content == "First. Then."
    results = [
        ToolMessage(tool_call_id=call.id, name=call.name, content="")
        for call in answer.message.tool_calls
    ]
    body = json.loads(encode([UserMessage(content="u"), answer.message, *results], mode=mode))
    assert body["messages"][1]["content"] == whole
