"""Exact tokens: conversations to ids and back, and prompts that continue what was sampled.

`load_renderer` reads a model's tokenizer and chat template; `Renderer` writes prompts, bridges
calls and says what its template breaks; `parsers` reads tool calls out of what was sampled.

The names are loaded when they are used: every run imports some module of this package, and few
render anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_rl.models.tokens.bridge import Bridged as Bridged
    from hermes_rl.models.tokens.bridge import History as History
    from hermes_rl.models.tokens.renderer import Renderer as Renderer
    from hermes_rl.models.tokens.renderer import load_renderer as load_renderer
    from hermes_rl.models.tokens.template import TemplateRefused as TemplateRefused
    from hermes_rl.models.tokens.template_checks import Finding as Finding

_HOMES = {
    "Bridged": "bridge",
    "Finding": "template_checks",
    "History": "bridge",
    "Renderer": "renderer",
    "TemplateRefused": "template",
    "load_renderer": "renderer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
