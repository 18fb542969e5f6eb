"""Wire formats. A dialect translates between the internal form and one wire, both ways."""

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
        NO_FIELD,
        NO_LIMIT,
        OWN,
        Dialect,
        Quirks,
        bearer_headers,
        refuse_own,
        sendable,
    )
    from hermes_rl.models.wire.chat import CHAT_COMPLETIONS, ChatCompletions
    from hermes_rl.models.wire.decoding import (
        DONE,
        Beginning,
        BodyDecoder,
        BrokenOff,
        Decoder,
        Envelope,
        EventDecoder,
        EventReader,
        Reading,
        ReplyHead,
        count_of,
        flatten,
        read_call,
        read_chat_usage,
        split_think,
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
