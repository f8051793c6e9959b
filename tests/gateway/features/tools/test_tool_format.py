"""Formats of tool calls: detection, grammar and parser agree."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.gateway import settings
from quire.gateway.features.tools import formats, tool_grammars
from quire.gateway.features.tools.formats import FALLBACK, FORMATS, REASONING_FORMATS, detect, detect_reasoning
from quire.gateway.features.tools.tool_format import ToolFormat
from quire.gateway.features.tools.tool_grammar import (
    Beginning,
    answer_grammar,
    lark_arguments,
    lark_text,
    pattern,
    quoted,
    several,
)
from quire.gateway.features.tools.tool_grammars import ToolGrammars
from quire.gateway.features.tools.tool_messages import as_plain_messages
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.output.tools import Besides, Tool, ToolChoice, ToolMode
from quire.gateway.stream.output_spec import OutputSpec
from quire.shared.text.grammar import special_tokens
from quire.shared.text.grammar_error import GrammarError
from tests.support.chat_templates import TEMPLATES
from tests.support.gateway.output_answers import (
    CLOCK,
    END,
    TOOLS,
    Answers,
    assert_parts_are_sound,
    byte_tokenizer,
    call,
    content,
    every_split,
    parse,
)
from tests.support.gateway.output_cases import CASES, IN_PARIS, Case

# --- Every format: its parser reads calls, its grammar allows them, and both refuse other texts -----------------------


# The characters with which a call begins where an answer may also be text.
BEGINS = {
    "hermes": len("<tool_call>"),
    "qwen3_coder": len("<tool_call>"),
    "llama3_json": len('{"name": '),
    "pythonic": len("[get_weather("),
    "mistral": len("[TOOL_CALLS]"),
    "mistral_args": len("[TOOL_CALLS]"),
    "deepseek": len("<｜tool▁calls▁begin｜>"),
    "deepseek_v31": len("<｜tool▁calls▁begin｜>"),
    "kimi_k2": len("<|tool_calls_section_begin|>"),
    "glm": len("<tool_call>"),
    "minimax_m2": len("<minimax:tool_call>"),
    "gemma4": len("<|tool_call>"),
    "cohere": len("<|START_ACTION|>"),
    "granite": len("<|tool_call|>"),
    "json": len('{"tool": '),
}
AUTO, REQUIRED, NAMED = ToolChoice(), ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "clock")


def answers(case: Case, choice: ToolChoice, with_tokens: bool) -> Answers:
    tokenizer = byte_tokenizer(case.special, case.added if with_tokens else ())
    return Answers(tokenizer, FORMATS[case.name].grammar(TOOLS, choice, special_tokens(tokenizer)))


def test_every_format_has_a_case() -> None:
    assert [case.name for case in CASES] == list(FORMATS)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_calls_are_read_in_any_pieces(case: Case, is_forced: bool) -> None:
    form = FORMATS[case.name]
    reasoning = [AnswerPart(PartKind.REASONING, "Look.")] if case.name == "harmony" else []
    one = [*reasoning, *call("get_weather", IN_PARIS)]
    assert parse(form.parser(TOOLS, is_forced), case.one) == one
    every_split(lambda: form.parser(TOOLS, is_forced), case.one)
    if case.two:
        assert parse(form.parser(TOOLS, is_forced), case.two) == [*one, *call("clock", "{}", 1)]
        every_split(lambda: form.parser(TOOLS, is_forced), case.two)
    if case.leads:
        assert parse(form.parser(TOOLS, is_forced), f"I look.\n\n{case.two}\n") == [
            content("I look."),
            *one,
            *call("clock", "{}", 1),
        ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_written_call_is_read(case: Case) -> None:
    form = FORMATS[case.name]
    assert parse(form.parser(TOOLS), form.written("get_weather", json.loads(IN_PARIS))) == call("get_weather", IN_PARIS)
    assert parse(form.parser(TOOLS), form.written("clock", {})) == call("clock", "{}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_prompt_describes_each_tool_and_the_form_of_a_call(case: Case) -> None:
    form = FORMATS[case.name]
    prompt = form.prompt(TOOLS)
    described = [json.loads(line) for line in prompt.splitlines()[1 : len(TOOLS) + 1]]
    assert [one["name"] for one in described] == [tool.name for tool in TOOLS]
    assert [one["parameters"] for one in described] == [tool.parameters for tool in TOOLS]
    assert form.manner() in prompt
    assert form.is_described or form.written("NAME", {"ARGUMENT": "VALUE"}) in prompt


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_unknown_tool_is_content(case: Case, is_forced: bool) -> None:
    form = FORMATS[case.name]
    text = case.one.replace("get_weather", "get_wealth")
    parts = parse(form.parser(TOOLS, is_forced), text)
    assert {part.kind for part in parts} <= {PartKind.CONTENT, PartKind.REASONING}
    assert text.endswith(parts[-1].text)
    every_split(lambda: form.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_is_cut_off_without_a_grammar_is_content(case: Case) -> None:
    for length in range(len(case.one)):
        parts = parse(FORMATS[case.name].parser(TOOLS), case.one[:length])
        if PartKind.CALL in [part.kind for part in parts]:  # only the end after its arguments is missing
            assert parts[-2:] == call("get_weather", IN_PARIS)


@pytest.mark.parametrize("besides", list(Besides))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_is_cut_off_under_a_grammar_is_no_content(case: Case, besides: Besides) -> None:
    """An answer that consists of calls has no content, wherever it ends, in one piece or in many."""
    form = FORMATS[case.name]
    for whole in filter(None, (case.one, case.two)):
        # With `auto`, an answer becomes a call where the grammar allows nothing else any more.
        begins = 0 if besides == Besides.NOTHING or case.name == "harmony" else BEGINS[case.name]
        arguments = parse(form.parser(TOOLS, True, besides), whole)
        for length in range(begins, len(whole)):
            text = whole[:length]
            parts = parse(form.parser(TOOLS, True, besides), text)
            assert parse(form.parser(TOOLS, True, besides), *text) == parts, text
            if besides == Besides.JSON and form.json_keys and parts == [content(text)]:
                continue  # the text may be an object that is no call
            assert PartKind.CONTENT not in [part.kind for part in parts], text
            for one, other in zip(parts, arguments, strict=False):
                assert other.text.startswith(one.text) or one.kind == PartKind.REASONING, text


def test_text_that_may_be_a_call_is_content_where_text_is_allowed() -> None:
    for name, text in (("hermes", "<tool_cal"), ("json", '{"too'), ("llama3_json", '{"na'), ("pythonic", "[get_we")):
        assert parse(FORMATS[name].parser(TOOLS, True, Besides.TEXT), text) == [content(text)]
    for name, text in (("hermes", '{"a": "<tool_call>'), ("llama3_json", '{"name": "get_w'), ("json", '{"tool": "c')):
        assert parse(FORMATS[name].parser(TOOLS, True, Besides.JSON), text) == [content(text)]


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestGrammar:
    def test_auto(self, case: Case, with_tokens: bool) -> None:
        allowed = answers(case, AUTO, with_tokens)
        texts = [case.one, *([case.two] if case.two else [])]
        texts += [f"I look.\n{text}" for text in texts if case.leads]
        if case.name != "harmony":
            texts += ["", "Hello.\n", "{", '{"a": 1}', "[1]", "a < b", "<tool", '{"name', "[get"]
        for text in texts:
            assert allowed.may_end(text), (text, allowed.accepted(text))
            assert FORMATS[case.name].parser(TOOLS)  # a parser exists for what the grammar allows
        for text in texts[:2]:
            bad = text.replace("get_weather", "get_wealth") if text else ""
            if case.name != "pythonic":  # where a call begins with the name of a tool, and any other text is free
                assert "get_wealth" not in allowed.accepted(bad)
            bad = text.replace("days", "date")
            assert len(allowed.accepted(bad)) < len(bad) or bad == text
            assert allowed.accepted(text + "x") == text

    def test_one_call_only(self, case: Case, with_tokens: bool) -> None:
        if case.two:
            for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
                allowed = answers(case, ToolChoice(mode, parallel=False), with_tokens)
                assert allowed.may_end(case.one)
                assert not allowed.may_end(case.two)

    def test_required(self, case: Case, with_tokens: bool) -> None:
        allowed = answers(case, REQUIRED, with_tokens)
        assert allowed.may_end(case.one), allowed.accepted(case.one)
        assert not case.two or allowed.may_end(case.two)
        assert allowed.accepted("Hello") == ""
        assert not allowed.may_end("")

    def test_named(self, case: Case, with_tokens: bool) -> None:
        allowed = answers(case, NAMED, with_tokens)
        assert "get_" not in allowed.accepted(case.one)
        clock = FORMATS[case.name].written("clock", {}).removesuffix("<|call|>")
        assert allowed.may_end(clock), allowed.accepted(clock)


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.REQUIRED])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_answer_that_the_grammar_allows_is_read(case: Case, mode: ToolMode) -> None:
    allowed = answers(case, ToolChoice(mode), with_tokens=True)
    form = FORMATS[case.name]
    count = calls = 0
    for seed in range(30):
        choose = random.Random(seed)
        text = allowed.walk(choose, begin=allowed.accepted(case.one[: choose.randrange(len(case.one))]))
        if text is None:
            continue
        count += 1
        parts = parse(form.parser(TOOLS, is_forced=True), text)
        assert_parts_are_sound(parts)
        calls += sum(part.kind == PartKind.CALL for part in parts)
        assert mode == ToolMode.AUTO or any(part.kind == PartKind.CALL for part in parts), text
        assert parse(form.parser(TOOLS, is_forced=True), *text) == parts, text
        # A parser without the guarantee of a grammar finds the same parts.
        assert parse(form.parser(TOOLS), text) == parts, text
    assert count > 10
    assert calls > 5


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_schema_that_can_be_followed_is_followed_without_strict(form: ToolFormat) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    }
    lax, strict = (
        form.grammar([Tool("run", parameters=schema, strict=flag)], ToolChoice(), {}) for flag in (False, True)
    )
    assert lax == strict


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_any_json_schema_has_a_grammar(form: ToolFormat) -> None:
    """A later check decides whether llguidance can follow it. The text of a grammar raises nothing but GrammarError."""
    values = [None, 1, "x", [], [1], {}, {"a": 1}, {"$ref": 1}, {"$ref": "#/x/y"}, [{"$ref": "#"}], ["a", 1, {}]]
    keywords = ["type", "properties", "required", "enum", "const", "anyOf", "items", "$defs", "$ref"]
    for keyword in keywords:
        for value in values:
            for schema in (
                {keyword: value},
                {"type": "object", "properties": {"a": {keyword: value}}, "required": value},
                {
                    "type": "object",
                    "properties": {"a": {"anyOf": [{keyword: value}, {"type": "array", keyword: value}]}},
                },
            ):
                for strict in (False, True):
                    with contextlib.suppress(GrammarError):
                        form.grammar([Tool("run", parameters=schema, strict=strict)], ToolChoice(), {})


# --- Detection from chat templates: those of the tests, and templates in the style of each family ---------------------


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
    "kimi_k2": (
        "{%- for call in m.tool_calls -%}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>{%- endfor -%}<|tool_calls_section_begin|>"
    ),
    "glm": (
        "{% if tools %}<tools>{{ tools | tojson }}</tools>\nWrite a call in this form:\n<tool_call>{name}\n"
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>{% endif %}"
    ),
    "minimax_m2": (
        "{%- set begin = '<minimax:tool_call>' -%}{{ begin }}\n<invoke name=\"tool\">\n"
        "<parameter name=\"key\">value</parameter>\n</invoke>\n"
    ),
    "gemma4": "{{- '<|tool_call>call:' + function.name + '{' -}}{{- '}<tool_call|>' -}}",
    "cohere": (
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"{{ call.function.name }}\", "
        "\"parameters\": {{ call.function.arguments | tojson }}}\n]<|END_ACTION|>"
    ),
    "granite": (
        "{{ '<|start_of_role|>system<|end_of_role|>Answer with <|tool_call|> and then a JSON list of calls.' }}"
        "{{ tools | tojson }}"
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
        "{{- '<seed:tool_call>\\n<function=f>\\n<parameter=a>x</parameter></function></seed:tool_call>' }}",
        "{{ '<tool_calls>[' }}{{ '{\"name\": \"' + call.name + '\", \"arguments\": ' }}",
        "{{ tools | tojson }}",
        "",
    ],
)
def test_other_formats_are_not_mistaken(source: str) -> None:
    assert detect(source) is None


def test_granite_4_writes_the_form_of_hermes() -> None:
    assert detect("{{ '<|start_of_role|>system<|end_of_role|>' }}" + STYLES["hermes"]) is FORMATS["hermes"]


def test_the_tokenizer_tells_the_form_of_kimi_where_the_template_does_not() -> None:
    template = "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    assert detect(template) is None
    assert detect(template, FORMATS["kimi_k2"].markers) is FORMATS["kimi_k2"]


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


# --- The settings offer exactly the formats that exist, without importing them ----------------------------------------


def test_the_names_are_those_of_the_formats() -> None:
    assert list(settings.TOOL_CALL_FORMATS) == list(formats.FORMATS)
    assert list(settings.REASONING_FORMATS) == list(formats.REASONING_FORMATS)


def test_settings_import_no_grammars() -> None:
    code = "import sys, quire.gateway.settings; print('llguidance' in sys.modules, 'jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# ---  -----------------------------------------------------------------------------------------------------------------


TOKENIZER = byte_tokenizer(special=("[CALL]",), added=("<call>", "plain"))


def answers_after(
    mode: ToolMode, *beginnings: Beginning, forced: str = '"x"', tokenizer: Tokenizer = TOKENIZER
) -> Answers:
    choice = ToolChoice(mode)
    return Answers(tokenizer, answer_grammar(choice, special_tokens(tokenizer), None, forced, beginnings, []))


def test_added_tokens_in_angle_brackets_are_special() -> None:
    """llguidance decides so. The text of such a token in a grammar does not match the token."""
    special = special_tokens(TOKENIZER)
    assert special.keys() == {END, "[CALL]", "<call>"}
    for name, token_id in special.items():
        assert TOKENIZER.token_to_id(name) == token_id
        if name != END:
            assert Answers(TOKENIZER, f"start: {lark_text(name, special)}").may_end(name)
            assert not Answers(TOKENIZER, f"start: {quoted(name)}").may_end(name)
    assert Answers(TOKENIZER, 'start: "plain"').may_end("plain")


def test_a_text_with_special_tokens() -> None:
    special = {"<a>": 7, "<ab>": 8}
    assert lark_text('x<ab>"<a>\n', special) == '"x" <[8]> "\\"" <[7]> "\\n"'
    assert lark_text("x<ab>", {}) == '"x<ab>"'


@pytest.mark.parametrize("text", ["a.b*c", "[x](y)", "a/b\\c", "{}|^$+?", "a b-c_d", "é<|x|>#&~"])
def test_a_pattern_matches_its_text_only(text: str) -> None:
    allowed = Answers(byte_tokenizer(), f"start: A\nA: /{pattern(text)}/")
    assert allowed.may_end(text)
    assert not allowed.may_end(text[:-1])
    assert re.fullmatch(pattern(text), text)


def test_several() -> None:
    rules = ["NEWLINES: /\\n{0,2}/", 'item: "a"']
    many = Answers(byte_tokenizer(), "\n".join([f"start: {several('item', quoted('-'), True)}", *rules]))
    assert [many.may_end(text) for text in ("a", "a\n", "a-a", "a\n\n-a\n-a\n", "", "aa", "a-")] == [True] * 4 + [
        False
    ] * 3
    one = Answers(byte_tokenizer(), "\n".join([f"start: {several('item', quoted('-'), False)}", *rules]))
    assert [one.may_end(text) for text in ("a", "a\n", "a-a")] == [True, True, False]


@pytest.mark.parametrize("trigger", ["[CALL]", "<call>", "plain", "<text>"])
def test_a_trigger_in_free_text(trigger: str) -> None:
    """A token and the same text spelled out both begin a call."""
    for tokenizer in (TOKENIZER, byte_tokenizer()):
        allowed = answers_after(ToolMode.AUTO, Beginning(text=trigger, rest='"x"'), tokenizer=tokenizer)
        for text in ("", "free", f"{trigger}x", f"free {trigger}x", trigger[:-1], f"{trigger[:-1]} free"):
            assert allowed.may_end(text), text
        for text in (trigger, f"{trigger}y", f"{trigger}xx", f"{trigger}x{trigger}x"):
            assert not allowed.may_end(text), text


def test_a_pattern_at_the_beginning() -> None:
    allowed = answers_after(
        ToolMode.AUTO, Beginning(pattern=r"\s*\{", rest='"x"'), Beginning(text="<text>", rest='"y"')
    )
    for text in ("", "free {", " {x", "\n\n{x", "free <text>y", "<text>y"):
        assert allowed.may_end(text), text
    for text in ("{", "{y", " {xx", "<text>x", "{<text>y"):
        assert not allowed.may_end(text), text


def test_forced_calls() -> None:
    allowed = answers_after(ToolMode.REQUIRED, Beginning(text="<text>", rest='"y"'))
    assert [allowed.may_end(text) for text in ("x", "free", "", "<text>y")] == [True, False, False, False]


@pytest.mark.parametrize("parameters", [{}, {"type": "string"}, {"type": ["object", "null"]}, {"type": "object"}])
def test_arguments_are_an_object(parameters: dict[str, object]) -> None:
    allowed = Answers(byte_tokenizer(), f"start: {lark_arguments(Tool('run', parameters=parameters))}")
    assert allowed.may_end('{"a": [1, {}]}')
    assert [allowed.accepted(text) for text in ("null", '"x"', "1")] == ["", "", ""]


def test_white_space_in_arguments_is_that_of_json_dumps() -> None:
    allowed = Answers(byte_tokenizer(), f"start: {lark_arguments(Tool('run'))}")
    assert not allowed.may_end('{"a":1}')
    assert not allowed.may_end('{ "a": 1 }')


# ---  -----------------------------------------------------------------------------------------------------------------


SPEC = OutputSpec(tool_format="hermes")
CHOICES = [ToolChoice(), ToolChoice(ToolMode.REQUIRED), ToolChoice(parallel=False)]


def tool(name: str) -> Tool:
    return Tool(name, parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


def test_equal_tools_get_one_grammar_and_others_get_others() -> None:
    grammars = ToolGrammars({})
    made = [grammars.text(SPEC, [tool(name)], choice) for name in ("add", "sub") for choice in CHOICES]
    made.append(grammars.text(OutputSpec(tool_format="llama3_json"), [tool("add")], ToolChoice()))
    made.append(grammars.text(OutputSpec(tool_format="hermes", reasoning_format="think"), [tool("add")], ToolChoice()))
    assert len(set(made)) == len(made) == 8
    assert grammars.text(SPEC, [tool("add")], ToolChoice()) is made[0]


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_grammars, "KEPT", 2)
    grammars = ToolGrammars({})
    first = grammars.text(SPEC, [tool("a")], ToolChoice())
    for name in "bc":
        grammars.text(SPEC, [tool(name)], ToolChoice())
    again = grammars.text(SPEC, [tool("a")], ToolChoice())
    assert again == first
    assert again is not first
    monkeypatch.setattr(tool_grammars, "KEPT_CHARACTERS", 0)
    grammars.text(SPEC, [tool("d")], ToolChoice())
    assert not grammars._known
    assert grammars._characters == 0


@pytest.mark.parametrize("name", sorted(name for name, form in FORMATS.items() if not form.has_reasoning))
@pytest.mark.parametrize("reasoning", ["", "think"])
def test_an_answer_calls_tools_or_follows_the_schema_of_the_content(name: str, reasoning: str) -> None:
    tokenizer = byte_tokenizer(tuple(sorted(FORMATS[name].markers)))
    special = special_tokens(tokenizer)
    spec = OutputSpec(tool_format=name, tools=(tool("add"),), reasoning_format=reasoning)
    content = '{"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}'
    lark = json.loads(ToolGrammars(special).text(spec, spec.tools, ToolChoice(), content))["lark"]
    answers = Answers(tokenizer, lark)
    assert answers.may_end('{"b": 1}')
    assert not answers.may_end('{"b": 2}')
    assert not answers.may_end("Some text.")
    required = json.loads(ToolGrammars(special).text(spec, spec.tools, ToolChoice(ToolMode.REQUIRED), content))["lark"]
    assert not Answers(tokenizer, required).may_end('{"b": 1}')


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_calls_without_marks_are_told_apart_from_the_content(name: str) -> None:
    tokenizer = byte_tokenizer(tuple(sorted(FORMATS[name].markers)))
    spec = OutputSpec(tool_format=name, tools=(tool("add"),), is_forced=True)
    grammars = ToolGrammars(special_tokens(tokenizer))
    content = '{"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}'
    lark = json.loads(grammars.text(spec, spec.tools, ToolChoice(), content))["lark"]
    name_key, arguments_key = FORMATS[name].json_keys or ("", "")
    text = f'{{"{name_key}": "add", "{arguments_key}": {{"a": 1}}}}'
    assert Answers(tokenizer, lark).may_end(text)
    assert [part.kind for part in parse(spec.parser(), text)] == [PartKind.CALL, PartKind.ARGUMENTS]
    assert [part.kind for part in parse(spec.parser(), '{"b": 1}')] == [PartKind.CONTENT]
    with pytest.raises(GrammarError, match="no references"):
        grammars.text(spec, spec.tools, ToolChoice(), '{"$ref": "#/$defs/a", "$defs": {"a": {}}}')


# ---  -----------------------------------------------------------------------------------------------------------------


def test_the_tools_that_an_answer_may_call() -> None:
    assert ToolChoice(ToolMode.NONE).callable_tools(TOOLS) == []
    assert ToolChoice().callable_tools(TOOLS) == ToolChoice(ToolMode.REQUIRED).callable_tools(TOOLS) == TOOLS
    assert ToolChoice(ToolMode.NAMED, "clock").callable_tools(TOOLS) == [CLOCK]


# --- tool messages ----------------------------------------------------------------------------------------------------
# Conversations with tools for a chat template that does not know them.


def call_of(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_and_results_become_plain_messages() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 3, and the time?"},
        {"role": "assistant", "content": None, "tool_calls": [call_of(1, "add", a=2, b=3), call_of(2, "time")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "5, at noon."},
    ]
    assert as_plain_messages(messages, FALLBACK.written, "You have tools.") == [
        {"role": "system", "content": "You have tools."},
        {"role": "user", "content": "2 + 3, and the time?"},
        {
            "role": "assistant",
            "content": '{"tool": "add", "arguments": {"a": 2, "b": 3}}\n{"tool": "time", "arguments": {}}',
        },
        {"role": "user", "content": "Result of add:\n5\n\nResult of time:\nnoon"},
        {"role": "assistant", "content": "5, at noon."},
    ]


def test_the_result_of_an_unknown_call_is_that_of_a_tool() -> None:
    messages = [{"role": "tool", "tool_call_id": "x", "content": "5"}]
    assert as_plain_messages(messages, FALLBACK.written, "") == [{"role": "user", "content": "Result of the tool:\n5"}]
