"""Fakes over real sockets, shipped beside the real thing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.testing import fake_apptainer
    from hermes_rl.testing.cheats import BUNDLES, CHEATS, answer_cheats, bundle, traced
    from hermes_rl.testing.conditions import Conditions, Limits, Price, RateLimits
    from hermes_rl.testing.dialects import WIRES, any_key, wire_of
    from hermes_rl.testing.dialects.anthropic import AnthropicServer
    from hermes_rl.testing.dialects.base import ServedRequest, encode_event
    from hermes_rl.testing.dialects.responses import ResponsesServer
    from hermes_rl.testing.exact_engine import ExactConfig, ExactEngine, chat_of
    from hermes_rl.testing.exact_engine_model import (
        AnswerTokenizer,
        InvalidScript,
        Params,
        Policy,
        PromptView,
        ScriptedAnswer,
        Speaker,
        Vocabulary,
        log_softmax,
        parse_scripted,
        pick,
        scripted,
    )
    from hermes_rl.testing.fake_modal import FakeModal
    from hermes_rl.testing.fake_search import FakeSearch
    from hermes_rl.testing.fake_server import FakeConfig, FakeServer
    from hermes_rl.testing.faults import (
        KINDS,
        MIXED,
        OUTPUT_CAP,
        PROMPT,
        WINDOW,
        FaultPlan,
        plan_from_json,
    )
    from hermes_rl.testing.http_server import Connection, Incoming, Server
    from hermes_rl.testing.mcp_server import mcp_server_source
    from hermes_rl.testing.server_logs import Entry, Truth, read_log, read_truth
    from hermes_rl.testing.tiny_tokenizer import (
        CONTROL,
        MARKUP,
        TEMPLATES,
        tiny_renderer,
        tokenizer_json,
        write_tiny_tokenizer,
    )
else:
    __getattr__, __dir__ = attach(__name__)
