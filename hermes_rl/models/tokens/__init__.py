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
    from hermes_rl.models.tokens.bridge import Bridged, History, abridged
    from hermes_rl.models.tokens.capture import (
        CAPTURED,
        Stretch,
        TokenGraph,
        TokensFault,
        record_of,
    )
    from hermes_rl.models.tokens.client import (
        ChatIdsClient,
        TokenClient,
        at_root,
        client_for,
        token_client,
    )
    from hermes_rl.models.tokens.engines import (
        CHAT_MODE,
        PENALTIES,
        ROUTES,
        TokenWire,
        first_logprobs,
        ids_spelling,
        sampling_of,
        whole_ids,
    )
    from hermes_rl.models.tokens.logprobs import CUT, LOWEST, TOP, filters_shown, kind_of, shaped_by
    from hermes_rl.models.tokens.parsers import PARSERS, Parsed, ToolCallParser, parser_named, typed
    from hermes_rl.models.tokens.plan import (
        NO_IDS,
        Asked,
        Spelling,
        TokenPlan,
        Wanted,
        Way,
        spelled_out,
    )
    from hermes_rl.models.tokens.renderer import Finding, Renderer, load_renderer, renderer_of
    from hermes_rl.models.tokens.template import (
        PROBE_TOOL,
        Template,
        TemplateRefused,
        detect_form,
        message_form,
    )
    from hermes_rl.models.tokens.tokenizer import Tokenizer, TokenizerFiles, clean
else:
    __getattr__, __dir__ = attach(__name__)
