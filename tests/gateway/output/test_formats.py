"""Detection from chat templates: those of the tests, and templates in the style of each family."""

from __future__ import annotations

import pytest

from quire.gateway.output.formats import FALLBACK, FORMATS, REASONING_FORMATS, detect, detect_reasoning
from tests.support.chat_templates import TEMPLATES

# Descriptions of calls in the style of each family's chat template.
STYLES = {
    "hermes": (
        "{%- if tools %}{{- \"<tools>\" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
        "{{- \"</tools>\\n\\n<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n"
        "</tool_call>\" }}{%- endif %}{{- '<tool_call>\\n{\"name\": \"' }}{{- tool_call.name }}"
        "{{- '\", \"arguments\": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    ),
    "qwen3_coder": (
        "{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>"
        "\\n</function>\\n</tool_call>' }}{%- if tools %}{{ tools }}{%- endif %}"
    ),
    "llama3_json": (
        "{%- if tools is not none %}{{- 'Respond in the format {\"name\": function name, \"parameters\": dictionary of "
        "argument name and its value}.' }}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
        "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}"
        "{%- endif %}"
    ),
    "pythonic": (
        "{%- if tools %}{{- \"Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]\\n\" }}"
        "{{- '[' + tool_call.name + '(' -}}{%- endif %}"
    ),
    "mistral": "{{- \"[TOOL_CALLS] [\" }}{%- for tool_call in message.tool_calls %}{{- tool_call.function|tojson }}",
    "mistral_args": "{{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' + tool.function.arguments }}",
    "deepseek": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']"
        " + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}"
    ),
    "deepseek_v31": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + "
        "tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}"
    ),
    "harmony": (
        "{{- \"<|start|>assistant to=\" }}{{- \"functions.\" + tool_call.name + \"<|channel|>commentary \" }}"
        "{{- \"json<|message|>\" }}{{- tool_call.arguments|tojson }}{{- \"<|call|>\" }}"
    ),
}  # fmt: skip


def test_each_format_is_found_by_its_style() -> None:
    assert {name: getattr(detect(source), "name", None) for name, source in STYLES.items()} == {
        name: name for name in FORMATS if name != FALLBACK.name
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_without_a_format(name: str) -> None:
    assert detect(TEMPLATES[name]) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<tool_call>' + tool_call.name + '\\n<arg_key>city</arg_key>' }}",  # GLM
        "{{- '<seed:tool_call>\\n<function=f>\\n<parameter=a>x</parameter></function></seed:tool_call>' }}",
        "{{ '<tool_calls>[' }}{{ '{\"name\": \"' + call.name + '\", \"arguments\": ' }}",
        "{{ tools | tojson }}",
        "",
    ],
)
def test_other_formats_are_not_mistaken(source: str) -> None:
    assert detect(source) is None


def test_the_tokenizer_decides_between_the_forms_of_mistral() -> None:
    assert detect(STYLES["mistral"], {"[TOOL_CALLS]", "[ARGS]"}) is FORMATS["mistral"]
    short = "{{ '[TOOL_CALLS]' ~ calls }}"
    assert detect(short, {"[TOOL_CALLS]", "[ARGS]"}) is FORMATS["mistral_args"]
    assert detect(short, {"[TOOL_CALLS]"}) is FORMATS["mistral"]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_by_template_or_tokens(name: str) -> None:
    form = REASONING_FORMATS[name]
    assert detect_reasoning(f"{{{{ '{form.start}' + message.reasoning_content + '{form.end}' }}}}") is form
    assert detect_reasoning("{{ content.split('" + form.end + "')[-1] }}") is form
    assert detect_reasoning("", {form.start, form.end}) is form
    assert detect_reasoning("", {form.start}) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_without_reasoning(name: str) -> None:
    assert detect_reasoning(TEMPLATES[name]) is None


def test_harmony_has_its_own_reasoning() -> None:
    assert detect_reasoning(STYLES["harmony"], FORMATS["harmony"].markers) is None
