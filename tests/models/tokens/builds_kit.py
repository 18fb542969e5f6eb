"""Four further builds of templates, each with its own trap after a tool call.

runs_on: results are in the turn of the model, and the token that opens them ends the call (GLM).
closed: the same, and a control token that ends no turn closes the call (Gemma 4).
bare: an end without a line break, and no opening of a turn after results (DeepSeek).
channels: calls end with one token, answers with another, the last answer with a third (gpt-oss).
"""

from render_kit import FAMILIES

from hermes_rl.models.tokens import Renderer, Template, Tokenizer
from hermes_rl.testing import tiny_renderer, tokenizer_json

_BEHIND_RESULTS = "loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool'"
_OPEN = "{% if add_generation_prompt and messages[-1].role != 'tool' %}OPENING{% endif %}"
SOURCES = {
    "runs_on": (
        "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{% if not (" + _BEHIND_RESULTS + ") %}"
        "<|im_start|>model\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if not m.tool_calls %}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _OPEN.replace("OPENING", "<|im_start|>model\n")
    ),
    "bare": (
        "<s>{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{% if not (" + _BEHIND_RESULTS + ") %}"
        "[/INST]{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
        "{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}" + _OPEN.replace("OPENING", "[/INST]")
    ),
    "channels": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
        "<|im_start|>assistant to={{ c.function.name }}<|end_header_id|>"
        "{{ c.function.arguments | tojson }}<|eom_id|>{% else %}<|im_start|>assistant"
        "<|end_header_id|>{{ m.content }}{{ '<|endoftext|>' if loop.last and not "
        "add_generation_prompt else '<|im_end|>' }}{% endfor %}{% else %}<|im_start|>{{ m.role }}"
        "<|end_header_id|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    ),
}
SOURCES["closed"] = SOURCES["runs_on"].replace(
    "arguments | tojson }}", "arguments | tojson }}[/AVAILABLE_TOOLS]"
)
ENDS = {
    "closed": ("<|im_end|>", "[TOOL_RESULTS]"),
    "runs_on": ("<|im_end|>", "[TOOL_RESULTS]"),
    "bare": ("</s>",),
    "channels": ("<|endoftext|>", "<|eom_id|>"),
}
END_OF_A_CALL = {
    **dict.fromkeys(FAMILIES, "<|im_end|>"),
    "llama3": "<|eom_id|>",
    "mistral": "</s>",
    "runs_on": "[TOOL_RESULTS]",
    "closed": "[TOOL_RESULTS]",
    "bare": "</s>",
    "channels": "<|eom_id|>",
}


def build_renderer(build: str) -> Renderer:
    tokenizer = Tokenizer(tokenizer_json())
    ends = [tokenizer.id_of(text) for text in ENDS[build]]
    known = [one for one in ends if one is not None]
    return Renderer(tokenizer, Template(SOURCES[build]), end_ids=known)


RENDERERS = {
    **{family: tiny_renderer(family) for family in FAMILIES},
    **{build: build_renderer(build) for build in SOURCES},
}
