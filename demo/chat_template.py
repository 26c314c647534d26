"""The demo tokenizer's chat template: turns between `<|im_start|>` and `<|im_end|>`, and tools as Qwen and Hermes do.

With `tools` the system message lists them; an assistant message may have `tool_calls`, and a message of the role `tool`
is a tool's answer, which goes into a user turn.
"""

from demo.problems.tools import AFTER_TOOLS, BEFORE_TOOLS


def _quoted(text: str) -> str:
    """A Jinja string."""
    return "'" + text.replace("\n", "\\n") + "'"


_SYSTEM_WITH_TOOLS = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}"
    f"{{{{- {_quoted(BEFORE_TOOLS)} -}}}}"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}"
    f"{{{{- {_quoted(AFTER_TOOLS)} + '<|im_end|>\\n' -}}}}"
    "{%- endif -%}"
)
_CALLS = (
    "{%- for call in message['tool_calls'] -%}"
    "{%- set function = call['function'] if call['function'] else call -%}"
    "{%- if not loop.first or message['content'] -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' -}}"
    "{{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -}}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
)
_MESSAGES = (
    "{%- for message in messages -%}"
    "{%- if tools and loop.first and message['role'] == 'system' -%}"
    "{%- elif message['role'] == 'tool' -%}"
    "{%- if loop.first or loop.previtem['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}"
    "{%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- elif message['tool_calls'] -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}" + _CALLS + "{{- '<|im_end|>\\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
CHAT_TEMPLATE = (
    _SYSTEM_WITH_TOOLS + _MESSAGES + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
