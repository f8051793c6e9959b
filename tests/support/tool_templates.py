"""Chat templates that take tool calls in one form only: one for each rule of `quire.shared.text.tool_turns`."""

from __future__ import annotations


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
    "one call": tool_template(
        before="{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    ),
    "only the first call": tool_template().replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
    "no null, nine characters, arguments as text": tool_template(
        content="'' + m.content",
        call="(call.id if call.id | length == 9 else raise_exception('9')) + call.function.arguments",
    ),
}
