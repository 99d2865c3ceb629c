"""Chat templates of the families, in words of our own: the turns, tokens and refusals of the published ones.

Each uses what its original uses of Jinja: filters, namespaces, slices, loop controls, macros, ``raise_exception``,
``tools``, ``strftime_now``, variables that a caller may set.
"""

from __future__ import annotations

__all__ = ["TEMPLATES"]

CHATML = """{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}{% set rules = messages[0]['content'] %}
{% else %}
{% set turns = messages %}{% set rules = false %}
{% endif %}
{% for m in turns %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set content = '<<SYS>>\\n' + rules + '\\n<</SYS>>\\n\\n' + m['content'] if loop.first and rules else m['content'] %}
{% if m['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif m['role'] == 'assistant' %}
{{- ' ' + content.strip() + ' ' + eos_token }}
{% endif %}
{% endfor %}"""

# With a date unless the caller gives one, and tools in the first message of the user, as JSON over several lines.
LLAMA3 = """{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined and dated else '26 Jul 2024' %}
{%- endif %}
{%- if tools is not defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set rules = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set rules = '' %}
{%- endif %}
{%- macro head(role) -%}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- endmacro %}
{{- head('system') }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' + rules + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception('No message of the user for the tools') }}{% endif %}
    {{- head('user') + 'Functions:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- head(m['role']) + m['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('One tool call at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- head('ipython') }}
        {%- if m.content is mapping or m.content is iterable and m.content is not string %}
            {{- m.content | tojson }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{% endif %}"""

MISTRAL1 = """{{ bos_token }}{% for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ m['content'] + eos_token + ' ' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}{% endfor %}"""

# The system message goes to the last user; calls and results have ids of nine characters.
MISTRAL3 = """{%- if messages[0].role == 'system' %}
    {%- set rules, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(n=0) %}
{%- for m in turns %}
    {%- set calls = m.tool_calls is defined and m.tool_calls is not none %}
    {%- if not (m.role == 'tool' or m.role == 'tool_results' or calls) %}
        {%- if (m.role == 'user') != (ns.n % 2 == 0) %}
            {{- raise_exception('After the optional system message, conversation roles must alternate') }}
        {%- endif %}
        {%- set ns.n = ns.n + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}
                    {{- ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' + (', ' if not loop.last else ']') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (rules + '\\n\\n' if loop.last and rules is defined else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role in ['tool_results', 'tool'] %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, beside an initial system message!') }}
    {%- endif %}
{%- endfor %}"""

_TOOLS = """{{- 'You may call functions.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nAnswer {\\"name\\": ..., \\"arguments\\": ...} in <tool_call></tool_call>.<|im_end|>\\n' }}"""
_RESULTS = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}"""
_CALLS = """{%- for call in m.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}"""

QWEN2 = (
    """{%- set rules = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' + rules }}
{%- if tools %}{{- '\\n\\n' }}"""
    + _TOOLS
    + """{% else %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- set said = m.role == 'assistant' and not m.tool_calls %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) or said %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>' + m.role }}{% if m.content %}{{- '\\n' + m.content }}{% endif %}
        """
    + _CALLS
    + """{{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        """
    + _RESULTS
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)

# Thoughts are kept after the last question alone; a caller may ask for none.
QWEN3 = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    """
    + _TOOLS
    + """
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set told = m.content is string and m.content.startswith('<tool_response>') %}
    {%- if ns.searching and m.role == 'user' and not told %}
        {%- set ns.searching = false %}{% set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        """
    + _CALLS
    + """{{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        """
    + _RESULTS
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)

GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# The system message goes in front of the first of the user; contents may be lists of parts.
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first, turns = messages[0]['content'] + '\n\n', messages[1:] -%}
{%- else -%}
    {%- set first, turns = '', messages -%}
{%- endif -%}
{%- for m in turns -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for part in m['content'] -%}{{ part['text'] | trim if part['type'] == 'text' }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

PHI3 = """{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') and m['content'] %}
{{- '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}
{{- '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}
{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

OLMO2 = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + '\n' }}
{%- elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '\n' }}
{%- elif m['role'] == 'assistant' %}
{{- '<|assistant|>\n' + m['content'] + eos_token + ('\n' if not loop.last else '') }}
{%- endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

TEMPLATES: dict[str, str] = {
    "smollm2": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL1,
    "mistral v3": MISTRAL3,
    "mixtral": MISTRAL1,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "phi4": PHI4,
    "olmo2": OLMO2,
}
