"""Chat templates in the style of the common families, each with what is hard about it.

chatml: tools in the system message, results as `<tool_response>` in a user turn (Qwen 2.5).
qwen3: the same with reasoning, which earlier turns lose once a user speaks.
coder: calls as parameters in tags (Qwen3-Coder).
llama3: headers, one call per turn, a turn of calls ends with its own token, a date.
mistral: `[INST]`, tools before the last question, ids of nine letters, no opening of a turn.
text_arguments: wants the arguments of calls as text.
"""

from __future__ import annotations

_TOOLS_HEAD = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>' + FORM + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_JSON_FORM = '\'\\nCall one as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\''
_XML_FORM = (
    "'\\nCall one as <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n"
    "</function>\\n</tool_call>'"
)
_RESULT = """{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
"""
_OPENING = """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_SPOKEN = """{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
"""
_JSON_CALL = (
    '\'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \''
    " + (call.function.arguments | tojson) + '}\\n</tool_call>'"
)
_TEXT_CALL = (
    '\'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \''
    " + call.function.arguments + '}\\n</tool_call>'"
)


def _calls(call: str) -> str:
    return (
        "{%- for call in message.tool_calls or [] %}\n"
        "{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}\n"
        "{{- " + call + " }}\n{%- endfor %}\n"
    )


def _chatml(form: str, call: str) -> str:
    return (
        _TOOLS_HEAD.replace("FORM", form)
        + "{%- for message in messages %}\n"
        + _SPOKEN
        + "{%- elif message.role == 'assistant' %}\n"
        + "{{- '<|im_start|>assistant\\n' + (message.content or '') }}\n"
        + _calls(call)
        + "{{- '<|im_end|>\\n' }}\n"
        + _RESULT
        + "{%- endif %}\n{%- endfor %}\n"
        + _OPENING
    )


_XML_CALL = """'<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>'"""

_QWEN3 = (
    _TOOLS_HEAD.replace("FORM", _JSON_FORM)
    + """{%- set last = namespace(query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
"""
    + _SPOKEN
    + """{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.query and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
"""
    + _calls(_JSON_CALL)
    + "{{- '<|im_end|>\\n' }}\n"
    + _RESULT
    + "{%- endif %}\n{%- endfor %}\n"
    + """{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
)

_LLAMA3 = """{{- bos_token }}
{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}
{%- else %}{%- set today = '26 Jul 2024' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + today + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content | trim }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for tool in tools or [] %}{{- '\\n\\n' + (tool | tojson(indent=4)) }}{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model calls one tool at a time!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{{- '<|eom_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL = """{{- bos_token }}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.index0 == last.query and tools %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception('Tool call IDs must be 9 letters or digits!') }}
{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.role == 'system' %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": _chatml(_JSON_FORM, _JSON_CALL),
    "text_arguments": _chatml(_JSON_FORM, _TEXT_CALL),
    "coder": _chatml(_XML_FORM, _XML_CALL),
    "qwen3": _QWEN3,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
"""Family -> source."""

END = {
    "chatml": "<|im_end|>",
    "text_arguments": "<|im_end|>",
    "coder": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
}
"""Family -> the end token that its files name."""
