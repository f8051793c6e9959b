"""Parsers of tool calls, one format after the other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.features.tools.argument_types import properties_of, resolved, types_of
from quire.gateway.features.tools.formats import FALLBACK, FORMATS
from quire.gateway.features.tools.literal_arguments import LiteralArguments
from quire.gateway.features.tools.pythonic import PYTHON
from quire.gateway.features.tools.reasoning import Reasoning, ReasoningFormat
from quire.gateway.features.tools.sections import DEEPSEEK
from quire.gateway.features.tools.tool_grammars import ToolGrammars
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.gateway.stream.output_spec import OutputSpec
from quire.shared.text.grammar import framed, grammar, special_tokens, write
from quire.shared.text.grammar_error import GrammarError
from tests.support.gateway.output_answers import (
    TOOLS,
    Answers,
    byte_tokenizer,
    call,
    content,
    every_split,
    parse,
)

# ---  -----------------------------------------------------------------------------------------------------------------


CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR = DEEPSEEK
V3 = f"{CALL_BEGIN}function{SEPARATOR}clock\n```json\n{{}}\n```{CALL_END}"
V31 = f"{CALL_BEGIN}clock{SEPARATOR}{{}}{CALL_END}"


@pytest.mark.parametrize("name", ["deepseek", "deepseek_v31"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{CALLS_BEGIN}{V3}\n{V31}{CALLS_END}", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"{CALLS_BEGIN}{V31}", call("clock", "{}")),
        (f"Look. {CALLS_BEGIN}{V3[:-3]}", [content("Look."), *call("clock", "{}")]),
        (f"{CALLS_BEGIN}{V31}x", [*call("clock", "{}"), content("x")]),
        (f"{CALLS_BEGIN}{CALLS_END}", [content(f"{CALLS_BEGIN}{CALLS_END}")]),
        (f"{CALLS_BEGIN}{V3.replace('json', 'xml')}", [content(f"{CALLS_BEGIN}{V3.replace('json', 'xml')}")]),
    ],
)
def test_both_forms_are_read(name: str, text: str, parts: list[AnswerPart]) -> None:
    assert parse(FORMATS[name].parser(TOOLS), text) == parts
    every_split(lambda: FORMATS[name].parser(TOOLS), text)


KIMI_CLOCK = "<|tool_call_begin|>functions.clock:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{KIMI_BEGIN}{KIMI_CLOCK}\n{KIMI_CLOCK}{KIMI_END}", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"Look. {KIMI_BEGIN}{KIMI_CLOCK.replace('functions.', '')}", [content("Look."), *call("clock", "{}")]),
        (f"{KIMI_BEGIN}{KIMI_CLOCK.replace(':7', '')}", [content(f"{KIMI_BEGIN}{KIMI_CLOCK.replace(':7', '')}")]),
    ],
)
def test_kimi_numbers_its_calls(text: str, parts: list[AnswerPart]) -> None:
    assert parse(FORMATS["kimi_k2"].parser(TOOLS), text) == parts
    every_split(lambda: FORMATS["kimi_k2"].parser(TOOLS), text)


# ---  -----------------------------------------------------------------------------------------------------------------


COHERE_CLOCK = '{"tool_call_id": "0", "tool_name": "clock", "parameters": {}}'
GRANITE_CLOCK = '{"name": "clock", "arguments": {}}'


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("cohere", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", [content("Hi.")]),
        ("cohere", "Hi.", [content("Hi.")]),
        ("cohere", f"<|START_ACTION|>[{COHERE_CLOCK}]<|END_ACTION|>", call("clock", "{}")),
        (
            "cohere",
            f"<|START_ACTION|>[\n{COHERE_CLOCK},\n{COHERE_CLOCK}\n]",
            [*call("clock", "{}"), *call("clock", "{}", 1)],
        ),
        ("cohere", '<|START_ACTION|>[{"tool_name": "clock"}]', [content('<|START_ACTION|>[{"tool_name": "clock"}]')]),
        ("granite", f"<tool_call>[{GRANITE_CLOCK}]", call("clock", "{}")),
        ("granite", f"I look. <|tool_call|> [{GRANITE_CLOCK}", [content("I look."), *call("clock", "{}")]),
        ("granite", "<|tool_call|>[]", [content("<|tool_call|>[]")]),
    ],
)
def test_lists_of_calls(name: str, text: str, parts: list[AnswerPart]) -> None:
    assert parse(FORMATS[name].parser(TOOLS), text) == parts
    every_split(lambda: FORMATS[name].parser(TOOLS), text)


def test_a_grammar_allows_the_marks_around_content_of_cohere() -> None:
    form = FORMATS["cohere"]
    tokenizer = byte_tokenizer(tuple(sorted(form.markers)))
    special = special_tokens(tokenizer)
    reasoning = ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>")
    tool = Tool("run", parameters={"type": "object", "properties": {}, "additionalProperties": False})
    thought = "<|START_THINKING|>Why.<|END_THINKING|>"
    spec = OutputSpec(tool_format="cohere", tools=(tool,), reasoning_format="cohere")
    grammars = ToolGrammars(special)
    with_schema = json.loads(grammars.text(spec, [tool], ToolChoice(), '{"const": 5}'))["lark"]
    framed_number = grammar(grammars.framed(spec, "", write("regex", "5")), special)
    auto = Answers(tokenizer, form.grammar([tool], ToolChoice(), special, Reasoning(reasoning)))
    for allowed in (auto, Answers(tokenizer, with_schema), Answers(tokenizer, framed_number)):
        for before in ("", thought):
            assert allowed.may_end(f"{before}<|START_RESPONSE|>5<|END_RESPONSE|>")
            assert allowed.may_end(f"{before}5")
    assert auto.may_end(f"{thought}<|START_RESPONSE|>Hello.\n<|END_RESPONSE|>")
    for allowed in (Answers(tokenizer, with_schema), Answers(tokenizer, framed_number)):
        assert not allowed.may_end("<|START_RESPONSE|>Hello.<|END_RESPONSE|>")
    assert parse(spec.parser(), f"{thought}<|START_RESPONSE|>5<|END_RESPONSE|>")[-1] == content("5")


# ---  -----------------------------------------------------------------------------------------------------------------


GEMMA = FORMATS["gemma4"]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            '<|tool_call>call:any-thing.v2{a:<|"|>b, }"\n<|"|>,c:[1,{d:None}],e:{},f:-1.5e2,g:true,h:[]}<tool_call|>',
            call("any-thing.v2", r'{"a": "b, }\"\n", "c": [1, {"d": null}], "e": {}, "f": -1.5e2, "g": true, "h": []}'),
        ),
        ("I look. <|tool_call>call:clock{}", [content("I look."), *call("clock", "{}")]),
        ("<|tool_call>call:cluck{}<tool_call|>", [content("<|tool_call>call:cluck{}<tool_call|>")]),
        ("<|tool_call>clock{}", [content("<|tool_call>clock{}")]),
    ],
)
def test_values_of_gemma(text: str, parts: list[AnswerPart], is_forced: bool) -> None:
    assert parse(GEMMA.parser(TOOLS, is_forced), text) == parts
    every_split(lambda: GEMMA.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("arguments", ["1", "a", "a:", "a:x", 'a:<|"|>', "a:1 b:2", "a:]", "a:NaN", "a:" + "[" * 5000])
def test_a_broken_call_of_gemma_is_content(arguments: str) -> None:
    text = f"<|tool_call>call:any-thing.v2{{{arguments}}}<tool_call|>"
    assert parse(GEMMA.parser(TOOLS), text) == [content(text)]


def test_gemma_writes_arguments_in_the_order_of_its_template() -> None:
    tokenizer = byte_tokenizer(special=tuple(sorted(GEMMA.markers)))
    names = {
        "b": {"enum": ["x", "y"]},
        "A": {"type": ["number", "null"]},
        "c": {"type": "array", "items": {"type": "string"}},
    }
    schema = {"type": "object", "properties": names, "required": ["b"], "additionalProperties": False}
    tools = [Tool("run", parameters=schema, strict=True)]
    allowed = Answers(tokenizer, GEMMA.grammar(tools, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer)))
    for arguments in ('b:<|"|>x<|"|>', 'A:1.5,b:<|"|>y<|"|>,c:[<|"|>a<|"|>,<|"|><|"|>]', 'A:null,b:<|"|>x<|"|>,c:[]'):
        assert allowed.may_end(f"<|tool_call>call:run{{{arguments}}}<tool_call|>"), arguments
    for arguments in ("", 'b:<|"|>z<|"|>', 'b:<|"|>x<|"|>,A:1', "b:x", 'b:<|"|>x<|"|>,c:[1]', 'b:<|"|>x<|"|>,'):
        assert not allowed.may_end(f"<|tool_call>call:run{{{arguments}}}<tool_call|>"), arguments


# ---  -----------------------------------------------------------------------------------------------------------------


HARMONY = FORMATS["harmony"]
WHY = "<|channel|>analysis<|message|>Why.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CLOCK = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
# The chat template writes the recipient first; models do both.
SWAPPED = " to=functions.clock<|channel|>commentary json<|message|>{}"
FINAL = "<|channel|>final<|message|>Hi."


def reasoning(text: str) -> AnswerPart:
    return AnswerPart(PartKind.REASONING, text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{WHY}{FINAL}", [reasoning("Why."), content("Hi.")]),
        (f"{WHY}{FINAL}<|return|>", [reasoning("Why."), content("Hi.")]),
        (f"{WHY}{WHY}{PREAMBLE}{CLOCK}<|call|>", [reasoning("Why.\nWhy."), content("I look."), *call("clock", "{}")]),
        (f"{WHY}{SWAPPED}", [reasoning("Why."), *call("clock", "{}")]),
        (f"{PREAMBLE}{FINAL}", [content("I look.\nHi.")]),
        ("<|channel|>analysis<|message|>cut off <|en", [reasoning("cut off <|en")]),
        (f"{WHY}<|channel|>fin", [reasoning("Why.")]),
        ("Hi, < and <| too.", [content("Hi, < and <| too.")]),
        (f"{WHY}<|channel|>final<|message|>", [reasoning("Why.")]),
        (f"{WHY}{CLOCK.replace('clock', 'cluck')}", [reasoning("Why."), content(CLOCK.replace("clock", "cluck"))]),
        (f"{WHY}{CLOCK[:-1]}x", [reasoning("Why."), content(f"{CLOCK[:-1]}x")]),
        ("", []),
    ],
)
def test_parts(text: str, parts: list[AnswerPart]) -> None:
    if "cluck" in text or text.endswith("x"):  # the beginning of the assistant's message belongs to it
        parts = [*parts[:-1], content("<|start|>assistant" + parts[-1].text)]
    assert parse(HARMONY.parser(TOOLS), text) == parts
    every_split(lambda: HARMONY.parser(TOOLS), text)


def test_what_the_grammar_allows() -> None:
    tokenizer = byte_tokenizer(special=tuple(sorted(HARMONY.markers)))

    def answers(mode: ToolMode) -> Answers:
        return Answers(tokenizer, HARMONY.grammar(TOOLS, ToolChoice(mode), special_tokens(tokenizer)))

    auto, required = answers(ToolMode.AUTO), answers(ToolMode.REQUIRED)
    for text in (f"{WHY}{PREAMBLE}{CLOCK}", CLOCK, f"{WHY}{SWAPPED}", CLOCK.replace(" <|constrain|>", "<|constrain|>")):
        assert auto.may_end(text)
        assert required.may_end(text)
    for text in (f"{WHY}{FINAL}", FINAL):
        assert auto.may_end(text)
        assert not required.may_end(text)
    for text in ("Hi.", CLOCK.replace("clock", "cluck"), f"{CLOCK}<|end|>", f"{FINAL}<|end|>{WHY}"):
        assert not auto.may_end(text)


def test_content_that_follows_a_grammar_is_in_the_final_channel() -> None:
    tokenizer = byte_tokenizer(special=tuple(sorted(HARMONY.markers)))
    frame = HARMONY.content_frame(special_tokens(tokenizer))
    allowed = Answers(tokenizer, grammar(framed(frame, write("regex", "[0-9]+")), special_tokens(tokenizer)))
    final = "<|channel|>final<|message|>"
    for text in (f"{final}42", f"{WHY}{final}7", f"{WHY}{WHY}{final}7"):
        assert allowed.may_end(text), text
    for text in ("42", f"{final}x", final, WHY, f"{PREAMBLE}{final}7", f"{CLOCK}", f"{final}7<|end|>{WHY}"):
        assert not allowed.may_end(text), text


# ---  -----------------------------------------------------------------------------------------------------------------


HERMES = FORMATS["hermes"]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
HERMES_CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
IN_PARIS = '{"city": "Paris", "days": 3}'


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.\n", [content("Hello.\n")]),
        (PARIS, call("get_weather", IN_PARIS)),
        (f"\n{PARIS}\n{HERMES_CLOCK}\n", [*call("get_weather", IN_PARIS), *call("clock", "{}", 1)]),
        (f"I look.\n\n{PARIS}", [content("I look."), *call("get_weather", IN_PARIS)]),
        (f"{PARIS}\nDone.", [*call("get_weather", IN_PARIS), content("Done.")]),
        ('<tool_call>{"arguments":{},"name":"clock"}</tool_call>', call("clock", "{}")),
        ('<tool_call>{"name": "any-thing.v2", "arguments": {"a": [{"b": "}\\"\\\\"}]}}', None),
        ('a <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', None),
        ("The tag <tool_call> begins a call, < and <tool_ do not.", None),
        ('<tool_call>{"name": "clock"}</tool_call> x', None),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', None),
        (f"bad: <tool_call>{{}}\n{HERMES_CLOCK}", [content("bad: <tool_call>{}"), *call("clock", "{}")]),
    ],
)
def test_parts_hermes(text: str, parts: list[AnswerPart] | None, is_forced: bool) -> None:
    """None: the text comes back as it is."""
    if parts is None and text.endswith("}}"):
        parts = call("any-thing.v2", '{"a": [{"b": "}\\"\\\\"}]}')
    assert parse(HERMES.parser(TOOLS, is_forced), text) == ([content(text)] if parts is None else parts)
    every_split(lambda: HERMES.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("text", ["<tool_call><tool_call>", '<tool_call>{"name": "clock", "argu'])
def test_the_beginning_of_a_call_is_content_without_a_grammar(text: str) -> None:
    assert parse(HERMES.parser(TOOLS), text) == [content(text)]


# ---  -----------------------------------------------------------------------------------------------------------------


JSON_FORMAT_CLOCK = '{"tool": "clock", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{JSON_FORMAT_CLOCK} {JSON_FORMAT_CLOCK}", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"{JSON_FORMAT_CLOCK}\n{{}}", [*call("clock", "{}"), content("\n{}")]),
        (f"{JSON_FORMAT_CLOCK}\nDone.", [*call("clock", "{}"), content("Done.")]),
        (f"Call: {JSON_FORMAT_CLOCK}", [content(f"Call: {JSON_FORMAT_CLOCK}")]),
        ('{"a": 1}', [content('{"a": 1}')]),
        ('{"tool": "clock", "arguments": {"a": NaN}}', [content('{"tool": "clock", "arguments": {"a": NaN}}')]),
        ("", []),
    ],
)
def test_parts_json_format(text: str, parts: list[AnswerPart]) -> None:
    assert parse(FALLBACK.parser(TOOLS), text) == parts
    every_split(lambda: FALLBACK.parser(TOOLS), text)


# ---  -----------------------------------------------------------------------------------------------------------------


LLAMA = FORMATS["llama3_json"]
LLAMA_CLOCK = '{"name": "clock", "parameters": {}}'
CODE = '<|python_tag|>brave_search.call(query="x")'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<|python_tag|>{LLAMA_CLOCK}", call("clock", "{}")),
        (f"I look. <|python_tag|>{LLAMA_CLOCK}", [content("I look."), *call("clock", "{}")]),
        (f"\n\n<|python_tag|>{LLAMA_CLOCK}", call("clock", "{}")),
        ('{"type": "function", "name": "clock", "parameters": {}}', call("clock", "{}")),
        ('{"name": "clock", "arguments": {}}', call("clock", "{}")),
        (f"{LLAMA_CLOCK};{LLAMA_CLOCK} ", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        (f"{LLAMA_CLOCK}; x", [*call("clock", "{}"), content("; x")]),
        (CODE, [content(CODE)]),
        ('{"name": "Bob", "age": 3}', [content('{"name": "Bob", "age": 3}')]),
        (f"See {LLAMA_CLOCK}", [content(f"See {LLAMA_CLOCK}")]),
    ],
)
def test_parts_llama_json(text: str, parts: list[AnswerPart]) -> None:
    assert parse(LLAMA.parser(TOOLS), text) == parts
    every_split(lambda: LLAMA.parser(TOOLS), text)


def test_what_the_grammar_forces() -> None:
    tokenizer = byte_tokenizer(special=("<|python_tag|>",))
    allowed = Answers(tokenizer, LLAMA.grammar(TOOLS, ToolChoice(), special_tokens(tokenizer)))
    for text in (
        f"<|python_tag|>{LLAMA_CLOCK}",
        f"I look. <|python_tag|>{LLAMA_CLOCK}",
        f"\n{LLAMA_CLOCK}",
        '{"names": 1}',
        "{}",
    ):
        assert allowed.may_end(text), text
    for text in (CODE, '{"name": "Bob"', f"{LLAMA_CLOCK} x", '{"type": "function", "name": "Bob"'):
        assert not allowed.may_end(text), text
    assert allowed.may_end('{"type": "function", "name": "clock", "parameters": {}}')


# ---  -----------------------------------------------------------------------------------------------------------------


MISTRAL_CLOCK = '{"name": "clock", "arguments": {}}'
WITH_ID = '{"name": "clock", "arguments": {}, "id": "abcDEF123"}'


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"[TOOL_CALLS] [{WITH_ID}]", call("clock", "{}")),
        (f"[TOOL_CALLS][{MISTRAL_CLOCK}", call("clock", "{}")),
        (f"[TOOL_CALLS][{MISTRAL_CLOCK}, x]", [*call("clock", "{}"), content(", x]")]),
        ("[TOOL_CALLS]clock[CALL_ID]abcDEF123[ARGS]{}", call("clock", "{}")),
        ("[TOOL_CALLS]clock{}", call("clock", "{}")),
        ("[TOOL_CALLS]clock [ARGS] {}", call("clock", "{}")),
        ("[TOOL_CALLS]clock[ARGS]", [content("[TOOL_CALLS]clock[ARGS]")]),
        ("[TOOL_CALLS]cluck[ARGS]{}", [content("[TOOL_CALLS]cluck[ARGS]{}")]),
        ("[TOOL_CALLS][]", [content("[TOOL_CALLS][]")]),
    ],
)
def test_both_forms_are_read_mistral(name: str, text: str, parts: list[AnswerPart]) -> None:
    assert parse(FORMATS[name].parser(TOOLS), text) == parts
    every_split(lambda: FORMATS[name].parser(TOOLS), text)


def test_the_grammar_of_the_list_allows_ids() -> None:
    tokenizer = byte_tokenizer(special=("[TOOL_CALLS]",))
    grammar = FORMATS["mistral"].grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
    allowed = Answers(tokenizer, grammar)
    for text in (f"[TOOL_CALLS] [{WITH_ID}, {MISTRAL_CLOCK}]", f"[TOOL_CALLS][{MISTRAL_CLOCK}]"):
        assert allowed.may_end(text)
    assert not allowed.may_end(f"[TOOL_CALLS][{MISTRAL_CLOCK}")


def test_the_grammar_of_names_allows_ids_if_the_tokenizer_has_them() -> None:
    for special, may in ((("[TOOL_CALLS]", "[ARGS]"), False), (("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), True)):
        tokenizer = byte_tokenizer(special=special)
        grammar = FORMATS["mistral_args"].grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
        allowed = Answers(tokenizer, grammar)
        assert allowed.may_end("[TOOL_CALLS]clock[ARGS]{}")
        assert allowed.may_end("[TOOL_CALLS]clock[CALL_ID]abcDEF123[ARGS]{}") == may


# ---  -----------------------------------------------------------------------------------------------------------------


PYTHONIC = FORMATS["pythonic"]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[clock()]", call("clock", "{}")),
        ("[ clock( ) , clock() ]\n", [*call("clock", "{}"), *call("clock", "{}", 1)]),
        ("[any-thing.v2(a='b, )]', c=[1, (2,)], d={'e': None})]",
         call("any-thing.v2", '{"a": "b, )]", "c": [1, [2]], "d": {"e": null}}')),
        ("[any-thing.v2(a = True, b=false, c=-1.5,)]", call("any-thing.v2", '{"a": true, "b": false, "c": -1.5}')),
        ("<|python_start|>[clock()]<|python_end|>", call("clock", "{}")),
        ("I look. <|python_start|>[clock()]", [content("I look."), *call("clock", "{}")]),
        ("[clock()] is it.", [*call("clock", "{}"), content("is it.")]),
        ("[1, 2]", [content("[1, 2]")]),
        ("[cluck()]", [content("[cluck()]")]),
        ("[clock", [content("[clock")]),
        ("I call [clock()]", [content("I call [clock()]")]),
    ],
)  # fmt: skip
def test_parts_pythonic(text: str, parts: list[AnswerPart], is_forced: bool) -> None:
    assert parse(PYTHONIC.parser(TOOLS, is_forced), text) == parts
    every_split(lambda: PYTHONIC.parser(TOOLS, is_forced), text)


@pytest.mark.parametrize("arguments", ["1", "**x", "a=b", "a=f()", "a=1 b=2", "a='", "a=]", "a=1", "1a=2", "a=1e999"])
def test_a_broken_call_is_content(arguments: str) -> None:
    text = f"[any-thing.v2({arguments}" + ("" if arguments == "a=1" else ")]")
    assert parse(PYTHONIC.parser(TOOLS), text) == [content(text)]
    every_split(lambda: PYTHONIC.parser(TOOLS), text)


def test_lists_that_are_not_calls_are_free() -> None:
    tokenizer = byte_tokenizer()
    allowed = Answers(tokenizer, PYTHONIC.grammar(TOOLS, ToolChoice(), special_tokens(tokenizer)))
    for text in ("[1, 2]", "[clocks()]", "[clock", '\n[get_weather(city="x"), clock()]'):
        assert allowed.may_end(text), text
    for text in ("[clock(1)]", "[get_weather()]", "[clock()] x", "[clock(), x]"):
        assert not allowed.may_end(text), text


# ---  -----------------------------------------------------------------------------------------------------------------


CODER = FORMATS["qwen3_coder"]
TOOL = Tool(
    "run",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "list": {"type": "array"},
            "untyped": {},
        },
    },
)


def written(*arguments: tuple[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=run>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (written(), call("run", "{}")),
        (written(("text", 'a "b"\n\n<c>\\n\t😀\n')), call("run", r'{"text": "a \"b\"\n\n<c>\\n\t😀\n"}')),
        (written(("text", "3"), ("count", "3")), call("run", '{"text": "3", "count": 3}')),
        (written(("maybe", "null")), call("run", '{"maybe": null}')),
        (written(("maybe", "nullable")), call("run", '{"maybe": "nullable"}')),
        (written(("list", '[1, {"a": "b"}]')), call("run", '{"list": [1, {"a": "b"}]}')),
        (written(("list", "None"), ("count", " 7 ")), call("run", '{"list": null, "count": 7}')),
        (written(("count", "many")), call("run", '{"count": "many"}')),
        (written(("untyped", "3"), ("unknown", "x")), call("run", '{"untyped": "3", "unknown": "x"}')),
        (written(("text", "")), call("run", '{"text": ""}')),
        ("<tool_call><function=run><parameter=text>x</parameter></function></tool_call>", call("run", '{"text": "x"}')),
        ("Hi.\n<function=run>\n</function>", [content("Hi."), *call("run", "{}")]),
        (written()[:-3], call("run", "{}")),
        ("<tool_call>\n<function=ran>\n</function>", [content("<tool_call>\n<function=ran>\n</function>")]),
        ("a <tool_call> b <func", [content("a <tool_call> b <func")]),
    ],
)
def test_parts_qwen_coder(text: str, parts: list[AnswerPart], is_forced: bool) -> None:
    assert parse(CODER.parser([TOOL], is_forced), text) == parts
    every_split(lambda: CODER.parser([TOOL], is_forced), text)


@pytest.mark.parametrize("rest", ["<parameter=text>\nabc", "<parameter=text>\nabc\n</parameter>\nx</function>"])
def test_a_broken_call_is_content_qwen_coder(rest: str) -> None:
    text = f"<tool_call>\n<function=run>\n{rest}"
    assert parse(CODER.parser([TOOL]), text) == [content(text)]
    every_split(lambda: CODER.parser([TOOL]), text)


ENTRIES = (("text", ' a "b"\n'), ("count", "3"), ("list", '["x"]'), ("maybe", "null"))
READ = r'{"text": " a \"b\"\n", "count": 3, "list": ["x"], "maybe": null}'


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("glm", "<tool_call>run{entries}</tool_call>", call("run", READ)),  # GLM 4.7
        ("glm", "Hi.\n<tool_call>run\n{entries}\n</tool_call>\n", [content("Hi."), *call("run", READ)]),
        ("glm", "<tool_call>run</tool_call>", call("run", "{}")),
        ("glm", "<tool_call>ran\n{entries}\n</tool_call>", None),
        ("glm", "<tool_call>run\n{entries}\n", None),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="run">\n{entries}\n</invoke>\n<invoke name="run">\n</invoke>\n',
            [*call("run", READ), *call("run", "{}", 1)],
        ),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="ran">\n{entries}\n</invoke>\n</minimax:tool_call>', None),
    ],
)
def test_parts_in_tags(name: str, text: str, parts: list[AnswerPart] | None, is_forced: bool) -> None:
    """None: the text comes back as it is."""
    form = {
        "glm": "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
        "minimax_m2": '<parameter name="{}">{}</parameter>\n',
    }[name]
    text = text.replace("{entries}", "".join(form.format(*entry) for entry in ENTRIES))
    if parts is None:
        if is_forced and not text.endswith("call>"):
            return  # the beginning of a call is no content under a grammar
        parts = [content(text)]
    assert parse(FORMATS[name].parser([TOOL], is_forced), text) == parts
    every_split(lambda: FORMATS[name].parser([TOOL], is_forced), text)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_strict_tools_in_tags(has_tokens: bool) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"enum": ["x", "y"]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    form = FORMATS["glm"]
    tokenizer = byte_tokenizer(added=tuple(sorted(form.markers)) if has_tokens else ())
    tools = [Tool("run", parameters=schema, strict=True)]
    allowed = Answers(tokenizer, form.grammar(tools, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer)))
    for line in ("", "\n"):
        for values, good in (({"a": "<x>\n"}, True), ({"a": "", "b": "5", "c": "y"}, True), ({"b": "5"}, False),
                             ({"a": "", "b": "x"}, False), ({"a": "", "c": "z"}, False)):  # fmt: skip
            texts = (f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>" for key, value in values.items())
            text = line.join(["<tool_call>run", *texts, "</tool_call>"])
            assert allowed.may_end(text) == good, text


def test_a_string_is_passed_on_as_it_grows() -> None:
    parser = CODER.parser([TOOL], is_forced=True)
    parser.push("<tool_call>\n<function=run>\n<parameter=text>\n")
    assert "".join(part.text for part in parser.push("abc")) == "abc"
    assert "".join(part.text for part in parser.push("\n")) == ""
    assert "".join(part.text for part in parser.push('"')) == '\\n\\"'


# ---  -----------------------------------------------------------------------------------------------------------------


DEFINITIONS = {"$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}


def may_end(properties: dict[str, Any], *arguments: tuple[str, str], strict: bool = True, **others: Any) -> bool:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **DEFINITIONS, **others}
    tokenizer = byte_tokenizer()
    tools = [Tool("run", parameters=schema, strict=strict)]
    grammar = FORMATS["qwen3_coder"].grammar(tools, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return Answers(tokenizer, grammar).may_end(f"<tool_call>\n<function=run>\n{values}</function>\n</tool_call>")


def test_required_and_optional_arguments() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "string"}}
    for arguments, allowed in [
        ([("a", "x")], True),
        ([("a", "x"), ("b", "1")], True),
        ([("a", "x"), ("c", "y")], True),
        ([("a", "x"), ("b", "1"), ("c", "y")], True),
        ([("b", "1")], False),
        ([], False),
        ([("a", "x"), ("a", "x")], False),
        ([("a", "x"), ("d", "x")], False),
    ]:
        assert may_end(properties, *arguments, required=["a"]) == allowed, arguments


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a\nb", '"', "</param>", "3"], []),
        ({"type": "integer"}, ["1", "-20"], ["x", "1.5", "", '"1"']),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"enum": ["red", "light blue"]}, ["red", "light blue"], ["blue", '"red"']),
        ({"enum": [1, 2]}, ["1"], ["3"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['["x"]', "1"]),
        ({"$ref": "#/$defs/Point"}, ['{"x": 1}'], ['{"x": "y"}', "{}"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ["x"]),
    ],
)
def test_values_follow_their_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert may_end({"a": schema}, ("a", text)), text
    for text in bad:
        assert not may_end({"a": schema}, ("a", text)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a>": {"type": "string"}}},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}]},
    ],
)
def test_a_strict_tool_that_xml_cannot_follow_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        CODER.grammar([Tool("run", parameters=schema, strict=True)], ToolChoice(), {})
    assert CODER.grammar([Tool("run", parameters=schema)], ToolChoice(), {})


def test_a_tool_without_named_arguments_takes_any() -> None:
    tokenizer = byte_tokenizer()
    grammar = FORMATS["qwen3_coder"].grammar([Tool("run")], ToolChoice(), special_tokens(tokenizer))
    text = "<tool_call>\n<function=run>\n<parameter=any>\nx\n</parameter>\n</function>\n</tool_call>"
    assert Answers(tokenizer, grammar).may_end(text)
    assert not may_end({}, ("any", "x"))
    assert may_end({})


# ---  -----------------------------------------------------------------------------------------------------------------


ROOT: dict[str, Any] = {
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "$defs": {"City": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}, "Deep": {"anyOf": []}},
}
ROOT["$defs"]["Deep"]["anyOf"].append({"$ref": "#/$defs/Deep"})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/City"}, {"type": "null"}]}, {"string", "null"}),
        ({"enum": ["a", 1, True, None, 1.5, [], {}]},
         {"string", "integer", "boolean", "null", "number", "array", "object"}),
        ({"const": "x"}, {"string"}),
        ({"$ref": "#/$defs/City"}, {"string"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/$defs/Deep"}, set()),
        ({"$ref": "#/properties/nothing/x"}, set()),
        ({"$ref": "https://example.org/x"}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)  # fmt: skip
def test_types(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_properties_and_references() -> None:
    assert list(properties_of(ROOT)) == ["city"]
    assert properties_of({"properties": 1}) == {}
    assert resolved(ROOT["properties"]["city"], ROOT) == {"type": "string"}


def test_alternatives_that_refer_to_each_other_end() -> None:
    """Without a bound, the work would grow with 20 to the power of the depth."""
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 20 + [{"type": "integer"}]}}}
    assert types_of({"$ref": "#/$defs/A"}, root) == {"integer"}
    arguments = LiteralArguments(PYTHON)
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, **root}
    arguments.of(Tool("run", parameters=schema))
    assert len(arguments.rules) < 100
