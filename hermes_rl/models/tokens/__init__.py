"""Exact tokens: conversations to ids and back, and prompts that continue what was sampled.

`load_renderer` reads a model's tokenizer and chat template; `Renderer` writes prompts, bridges
calls and says what its template breaks; `parsers` reads tool calls out of what was sampled.

The names are loaded when they are used: every run imports some module of this package, and few
render anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.tokens.bridge import Bridged, History, abridge_messages
    from hermes_rl.models.tokens.capture import (
        CAPTURED,
        TokenGraph,
        TokenRun,
        TokensFault,
        record_tokens,
    )
    from hermes_rl.models.tokens.client import (
        ChatIdsClient,
        TokenClient,
        client_for,
        token_client,
        without_version_path,
    )
    from hermes_rl.models.tokens.engines import (
        CHAT_MODE,
        PENALTIES,
        ROUTES,
        TokenWire,
        detect_ids_format,
        pick,
        read_first_logprobs,
        read_token_ids,
        sampling_of,
    )
    from hermes_rl.models.tokens.logprobs import (
        CUT,
        LOWEST,
        TOP,
        classify_logprobs,
        logprobs_follow_filters,
        shaped_by,
    )
    from hermes_rl.models.tokens.parsers import PARSERS, Parsed, ToolCallParser, find_parser, typed
    from hermes_rl.models.tokens.plan import (
        NO_IDS,
        PROBLEMS,
        PlanCall,
        Spelling,
        TokenPlan,
        Wanted,
        Way,
        with_explicit_filters,
    )
    from hermes_rl.models.tokens.renderer import Finding, Renderer, build_renderer, load_renderer
    from hermes_rl.models.tokens.template import (
        PROBE_TOOL,
        Template,
        TemplateRefused,
        detect_form,
        message_form,
    )
    from hermes_rl.models.tokens.tokenizer import (
        Tokenizer,
        TokenizerFiles,
        clean,
        load_tokenizer,
    )
else:
    __getattr__, __dir__ = attach(__name__)
