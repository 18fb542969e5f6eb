"""The part of the Chat Completions request that the local server reads, and how it refuses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class BadChatRequest(Exception):
    """The request cannot be served; becomes an error of the OpenAI form.

    Args:
        message: one line for the caller.
        code: the machine-readable code, if there is a customary one.
        status: HTTP status.
    """

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text can be read here."""

    type: str
    text: str = ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Name and arguments (JSON text) of a call."""

    name: str
    arguments: str = "{}"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier step."""

    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the history."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None

    def text(self) -> str:
        """The content as one string.

        Raises:
            BadChatRequest: a part is not text.
        """
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    raise BadChatRequest(f"content of type {part.type!r}: only text can be read")
            return "".join(part.text for part in self.content)
        return self.content or ""


class OfferedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as offered in the request."""

    type: Literal["function"]
    function: OfferedFunction


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides the deltas."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`; fields that are not listed are ignored."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    model: str = ""
    tools: list[OfferedTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=5)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


_DECODER = msgspec.json.Decoder(ChatRequest)


def read_request(body: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        BadChatRequest: it is no JSON, or not of this form; the message names the place.
    """
    try:
        request = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise BadChatRequest(f"bad request: {error}") from error
    except msgspec.DecodeError as error:
        raise BadChatRequest(f"the body is not JSON: {error}") from error
    if request.n not in (None, 1):
        raise BadChatRequest("n: this server gives one choice per request")
    return request


def error_body(message: str, *, status: int, code: str | None = None) -> dict[str, Any]:
    """An error in the OpenAI form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
