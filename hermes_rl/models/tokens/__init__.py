"""Exact tokens: conversations to ids and back, and prompts that continue what was sampled.

`load_renderer` reads a model's tokenizer and chat template; `Renderer` writes prompts, bridges
calls and says what its template breaks; `parsers` reads tool calls out of what was sampled.
"""

from hermes_rl.models.tokens.bridge import Bridged as Bridged
from hermes_rl.models.tokens.bridge import History as History
from hermes_rl.models.tokens.probes import Finding as Finding
from hermes_rl.models.tokens.renderer import Renderer as Renderer
from hermes_rl.models.tokens.renderer import load_renderer as load_renderer
from hermes_rl.models.tokens.template import TemplateRefused as TemplateRefused
