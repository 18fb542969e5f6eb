"""Wire formats. A dialect translates between the internal form and one wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.wire.anthropic import (
        ANTHROPIC_MESSAGES,
        AnthropicMessages,
        Block,
        assistant_blocks,
        input_of,
    )
    from hermes_rl.models.wire.anthropic_answers import THINKING, Call, Content, anthropic_message
    from hermes_rl.models.wire.base import (
        NEUTRAL_FILTERS,
        RESERVED_FIELDS,
        UNSUPPORTED_SAMPLING,
        Dialect,
        Quirks,
        bearer_headers,
        refuse_reserved_fields,
        supported_sampling,
    )
    from hermes_rl.models.wire.chat import CHAT_COMPLETIONS, ChatCompletions
    from hermes_rl.models.wire.decoding import (
        DONE,
        VERSION_HEADERS,
        AnswerContext,
        AnswerInterrupted,
        BodyDecoder,
        Decoder,
        Envelope,
        EventDecoder,
        EventReader,
        ReplyHead,
        StreamedText,
        count_of,
        read_chat_usage,
        read_tool_call,
        read_versions,
        split_content_parts,
        split_reasoning,
    )
    from hermes_rl.models.wire.responses import (
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
else:
    __getattr__, __dir__ = attach(__name__)
