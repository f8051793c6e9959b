"""Chats, and chat templates in the styles of the model families: what each of them does differently is in here once."""
# ruff: noqa: E501 - templates have their own line ends

from typing import Any

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hello, wörld 😀 <b>&amp;</b>"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "several": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "first\n\nline"},
        {"role": "assistant", "content": "</s> answer "},
        {"role": "user", "content": "  second  "},
    ],
    "user first": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ],
}
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
        "{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}\n"
        "{%- if strftime_now is defined %}\n{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' }}\n{%- endif %}\n"
        "{{- system_message }}\n{{- '<|eot_id|>' }}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
    ),
    "mistral": (
        "{%- set ns = namespace(system='') -%}{{ bos_token }}"
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\n\n' -%}{%- continue -%}{%- endif -%}"
        "{%- if message.role == 'user' -%}{{ '[INST] ' + ns.system + message.content + '[/INST]' }}{%- set ns.system = '' -%}"
        "{%- elif message.role == 'assistant' -%}{{ ' ' + message.content + eos_token }}"
        "{%- else -%}{{ raise_exception('Only user and assistant roles are supported!') }}{%- endif -%}"
        "{%- endfor -%}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "qwen": (
        "{%- if tools %}\n    {{- tools | tojson }}\n{%- else %}\n    {%- if messages[0].role == 'system' %}\n"
        "        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}\n    {%- else %}\n"
        "        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}\n    {%- endif %}\n{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}\n"
        "        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}\n    {%- endif %}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}\n"
    ),
    "phi": (
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
        "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "vicuna": (
        "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{{ ' ' }}"
        "{% elif message.role == 'user' %}USER: {{ message.content }}{{ ' ' }}"
        "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "json": "{% for message in messages %}{{ message | tojson(indent=2) }}\n{{ message.content|tojson }}{% endfor %}",
    "blocks": (
        "  {% for message in messages %}\n"
        "    {% if message.role == 'assistant' %}\n"
        "      {% generation %}\n[{{ message.content }}]\n      {% endgeneration %}\n"
        "    {% else %}\n({{ message.content }})\n    {% endif %}\n"
        "    {% if loop.index > 4 %}{% break %}{% endif %}\n"
        "  {% endfor %}\n"
        "end{{ '!' if add_generation_prompt }}\n"
    ),
    "parts": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "macro": (
        "{% macro turn(role, content) %}<|{{ role }}|>{{ content | trim }}{% endmacro %}"
        "{% set names = {'user': 'U', 'assistant': 'A', 'system': 'S'} %}"
        "{% for message in messages %}{{ turn(names[message.role], message['content']) }}"
        "{{ message.get('name', '') }}{% endfor %}{{ dict(a=1).items() | list | length }}"
        "{{ messages | map(attribute='role') | join(',') }}{{ pad_token is defined }}{{ '' if not documents else 'd' }}"
    ),
}
# Templates that refuse an order of roles, with the messages of published templates: Qwen3.5, Gemma 3, Mistral v3.
STRICT_TEMPLATES = {
    "system at the head": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
        "{% endif %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "alternating": (
        "{% if messages[0].role == 'system' %}{% set head = messages[0].content ~ '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{{ '<|im_start|>' ~ m.role ~ '\n' ~ (head if loop.first else '') ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "alternating between tools": (
        "{% set ns = namespace(index=0) %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
        "{% set rest = messages %}{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{{ messages[0].content if messages[0].role == 'system' }}{% for m in rest %}"
        "{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('After the optional system message, conversation roles must alternate user and assistant "
        "roles except for tool calls and results.') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}"
        "{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


# --- tool templates ---------------------------------------------------------------------------------------------------
# Chat templates that take tool calls in one form only: one for each rule of `quire.shared.text.tool_turns`.


def tool_template(
    content: str = "m.content or ''",
    call: str = "call.function.arguments | tojson",
    result: str = "'' ~ m.content",
    before: str = "",
) -> str:
    """A template in which three expressions write the content, a call and a result; `before` checks a message."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}" + before + "<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}{{ " + result + " }}{% else %}{{ " + content + " }}{% endif %}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ " + call + " }}</tool_call>"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# By rule.
TOOL_TEMPLATES = {
    "any form": tool_template(),
    "no null": tool_template(content="'' + m.content"),
    "null is written as None": tool_template(content="m.content"),
    "nine characters": tool_template(
        before="{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs have 9 characters') }}{% endif %}{% endfor %}"
        "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    ),
    "name of the tool": tool_template(result="m.name + ': ' + m.content"),
    "arguments as text": tool_template(call="'' + call.function.arguments"),
    "arguments as they are": tool_template(call="call.function.arguments"),
    "thinking": tool_template(content="(m.thinking or '') ~ (m.content or '')"),
    "tool plan": tool_template(content="(m.tool_plan if m.tool_calls else '') ~ (m.content or '')"),
    "ids in place of names": tool_template(result="'## Return of ' ~ m.tool_call_id ~ '\n' ~ m.content").replace(
        "{{ call.function.name }}", "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    ),
    # Results as messages are shown, too, but as turns of a speaker whom the model does not know.
    "responses after what asks": tool_template().replace(
        "{% endfor %}<|im_end|>",
        "{% endfor %}{% for response in m.tool_responses or [] %}<|tool_response>response:{{ response.name }}"
        "{value:{{ response.response }}}<tool_response|>{% endfor %}<|im_end|>",
    ),
    "one call": tool_template(
        before="{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    ),
    "only the first call": tool_template().replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
    "no null, nine characters, arguments as text": tool_template(
        content="'' + m.content",
        call="(call.id if call.id | length == 9 else raise_exception('9')) + call.function.arguments",
    ),
}
