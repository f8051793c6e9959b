"""Parts of an answer: text, reasoning and calls, however the text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.gateway.features.tools.formats import FORMATS, REASONING_FORMATS
from quire.gateway.features.tools.growing_text import (
    GrowingText,
    MalformedCall,
    begun,
    parse_json,
    plain_text,
    without_spaces,
)
from quire.gateway.features.tools.literal_arguments import LiteralArguments
from quire.gateway.features.tools.pythonic import PYTHON, read_literal
from quire.gateway.features.tools.reasoning import Reasoning, ReasoningFormat, ReasoningParser
from quire.gateway.output.parts import (
    AnswerPart,
    OutputParser,
    PartKind,
    PlainText,
    call_id,
    complete_calls,
    is_complete,
    merged,
)
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.gateway.stream.output_spec import MAX_SPEC_LENGTH, OutputSpec, read_spec
from quire.shared.config.validators import InvalidValue
from quire.shared.text.grammar import special_tokens
from quire.shared.text.grammar_error import GrammarError
from tests.support.gateway.output_answers import (
    TOOLS,
    Answers,
    assert_parts_are_sound,
    byte_tokenizer,
    call,
    content,
    every_split,
    parse,
)
from tests.support.gateway.output_cases import CASES, Case

# ---  -----------------------------------------------------------------------------------------------------------------


CONTENT, REASONING, CALL, ARGUMENTS = PartKind


def test_the_id_of_a_tool_call_tells_request_choice_and_position_apart() -> None:
    ids = {call_id(request, choice, at) for request in ("a", "b") for choice in (0, 1) for at in (1, 2, 11)}
    assert len(ids) == 12
    assert call_id("a", 0, 1) == "call_" + "64992eb62b2101de4c4b69b7"


def test_pieces_of_one_part_are_joined() -> None:
    parts = [
        AnswerPart(REASONING, "think"),
        AnswerPart(REASONING, "ing"),
        AnswerPart(CONTENT, "te"),
        AnswerPart(CONTENT, "xt"),
        AnswerPart(CALL, "add", 0, "call_1"),
        AnswerPart(ARGUMENTS, "{", 0),
        AnswerPart(ARGUMENTS, "}", 0),
        AnswerPart(CALL, "add", 1, "call_2"),
        AnswerPart(CALL, "add", 2, "call_3"),
        AnswerPart(ARGUMENTS, "{}", 2),
    ]
    assert merged(parts) == [
        AnswerPart(REASONING, "thinking"),
        AnswerPart(CONTENT, "text"),
        AnswerPart(CALL, "add", 0, "call_1"),
        AnswerPart(ARGUMENTS, "{}", 0),
        AnswerPart(CALL, "add", 1, "call_2"),
        AnswerPart(CALL, "add", 2, "call_3"),
        AnswerPart(ARGUMENTS, "{}", 2),
    ]
    assert merged([]) == []


@pytest.mark.parametrize("arguments", ["{}", ' {"a": [1, {"b": "}"}]}\n'])
def test_complete_arguments(arguments: str) -> None:
    assert is_complete(arguments)


@pytest.mark.parametrize("arguments", ["", "{", '{"a": "}', '{"a": 1', "[]", "{} {}", "[" * 100_000])
def test_arguments_that_are_no_object_are_not_complete(arguments: str) -> None:
    assert not is_complete(arguments)


@pytest.mark.parametrize("cut", [[], [AnswerPart(ARGUMENTS, '{"a": ', 1)]])
def test_a_call_without_complete_arguments_is_left_out(cut: list[AnswerPart]) -> None:
    whole = [AnswerPart(CONTENT, "text"), AnswerPart(CALL, "add", 0, "call_1"), AnswerPart(ARGUMENTS, "{}", 0)]
    assert complete_calls([*whole, AnswerPart(CALL, "add", 1, "call_2"), *cut]) == whole


# --- Texts that are almost calls, in any pieces: nothing is lost, and nothing is half a call --------------------------


_NOISE = ["", " ", "\n", "<", "{", "[", "}", '"', "\\", "\\u00", "é", "x", "null", "get_weather", "; ", "=", ")"]


def pieces_of(case: Case) -> list[str]:
    """The marks and words of the calls of a format."""
    return [*re.findall(r"\w+|<[^>]*>|\s+|[^\w\s]", case.two or case.one), case.one, case.two, *_NOISE]


def texts(case: Case) -> st.SearchStrategy[list[str]]:
    """Texts in pieces: parts of calls, cut anywhere, in any order."""
    part = st.sampled_from(pieces_of(case))
    cut = st.integers(0, len(case.one))
    calls = st.builds(lambda start, end: case.one[min(start, end) : max(start, end)], cut, cut)
    begins = st.builds(lambda end, rest: case.one[:end] + rest, cut, part)
    return st.lists(st.one_of(part, calls, begins), max_size=8)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_do_not_depend_on_the_pieces(case: Case, is_forced: bool) -> None:
    form = FORMATS[case.name]

    @settings(max_examples=40, deadline=None)
    @given(texts(case))
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        parts = parse(form.parser(TOOLS, is_forced), text)
        assert parse(form.parser(TOOLS, is_forced), *pieces) == parts
        assert parse(form.parser(TOOLS, is_forced), *text) == parts
        if is_forced:  # the beginning of a call is no content
            return
        assert_parts_are_sound(parts)
        if case.name != "harmony" and all(part.kind == PartKind.CONTENT for part in parts):
            assert parts == ([content(text)] if text else [])

    check()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_that_was_cut_off_after_its_name_leaves_no_content(case: Case) -> None:
    """Under a grammar a call begins with its name; the unfinished value at the end of its arguments is dropped."""
    seen = False
    for end in range(len(case.one)):
        parts = parse(FORMATS[case.name].parser(TOOLS, True), case.one[:end])
        kinds = [part.kind for part in parts]
        if PartKind.CALL in kinds:
            seen = True
            assert PartKind.CONTENT not in kinds[kinds.index(PartKind.CALL) :], case.one[:end]
        else:
            assert "".join(part.text for part in parts if part.kind == PartKind.CONTENT) in case.one
    assert seen


# ---  -----------------------------------------------------------------------------------------------------------------


THINK = REASONING_FORMATS["think"]
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def reasoning(text: str) -> AnswerPart:
    return AnswerPart(PartKind.REASONING, text)


def parser(starts_inside: bool, answer: OutputParser | None = None, form: ReasoningFormat = THINK) -> ReasoningParser:
    return ReasoningParser(Reasoning(form, starts_inside), answer or PlainText())


@pytest.mark.parametrize(
    ("starts_inside", "text", "parts"),
    [
        (False, "<think>\nwhy\n\nso\n</think>\n\nHi.\n", [reasoning("why\n\nso"), content("Hi.\n")]),
        (False, "\n<think>a < b </th </think>c", [reasoning("a < b </th"), content("c")]),
        (False, "<think>\n\n</think>\n\nHi.", [content("Hi.")]),
        (False, "Hi. <think>no</think>", [content("Hi. <think>no</think>")]),
        (False, "  Hi.", [content("  Hi.")]),
        (False, "<thi", [content("<thi")]),
        (False, "<think>cut off </thin", [reasoning("cut off </thin")]),
        (False, "", []),
        (True, "why</think>Hi.", [reasoning("why"), content("Hi.")]),
        (True, "\nwhy\n", [reasoning("why\n")]),
        (True, "<think>\nwhy</think>Hi.</think>", [reasoning("why"), content("Hi.</think>")]),
        (True, "</think>", []),
        (True, "<b>why</think>Hi.", [reasoning("<b>why"), content("Hi.")]),
    ],
)
def test_parts(starts_inside: bool, text: str, parts: list[AnswerPart]) -> None:
    assert parse(parser(starts_inside), text) == parts
    every_split(lambda: parser(starts_inside), text)


@pytest.mark.parametrize("form", REASONING_FORMATS.values(), ids=lambda form: form.name)
def test_the_markers_of_each_family(form: ReasoningFormat) -> None:
    text = f"{form.start}\nwhy\n{form.end}\nHi."
    assert parse(parser(False, form=form), *text) == [reasoning("why"), content("Hi.")]
    assert form.begins_in(f"<|im_start|>assistant\n{form.start}\n")
    closed = f"<|im_start|>assistant\n{form.start}\n\n{form.end}\n\n"
    assert not form.begins_in(closed)
    assert form.is_over_in(closed)
    assert not form.is_over_in(f"<|im_start|>user\n{form.end}<|im_end|>\n<|im_start|>assistant\n")


def test_a_call_is_read_after_the_reasoning_only() -> None:
    def make() -> ReasoningParser:
        return parser(True, FORMATS["hermes"].parser(TOOLS))

    text = f"I could write {CLOCK}\n</think>\n\n{CLOCK}"
    assert parse(make(), text) == [reasoning(f"I could write {CLOCK}"), *call("clock", "{}")]
    every_split(make, text)


@pytest.mark.parametrize("starts_inside", [False, True])
@pytest.mark.parametrize("added", [(), ("<think>", "</think>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
class TestGrammar:
    def answers(self, mode: ToolMode, starts_inside: bool, added: tuple[str, ...], name: str = "hermes") -> Answers:
        tokenizer = byte_tokenizer(added=added)
        grammar = FORMATS[name].grammar(
            TOOLS, ToolChoice(mode), special_tokens(tokenizer), Reasoning(THINK, starts_inside)
        )
        return Answers(tokenizer, grammar)

    def test_auto(self, starts_inside: bool, added: tuple[str, ...]) -> None:
        allowed = self.answers(ToolMode.AUTO, starts_inside, added)
        begin = "" if starts_inside else "<think>"
        for text in ("Hi.", CLOCK, f"Hi. {CLOCK}"):
            assert allowed.may_end(f"{begin}\nwhy\n</think>\n\n{text}")
            assert starts_inside or allowed.may_end(text)
        assert allowed.may_end(f"{begin}cut off")
        assert not allowed.may_end(f"{begin}why</think>{CLOCK}.")
        if "<tool_call>" not in added:
            assert allowed.may_end(f"{begin}why <tool_call> </think>Hi.")

    def test_required(self, starts_inside: bool, added: tuple[str, ...]) -> None:
        allowed = self.answers(ToolMode.REQUIRED, starts_inside, added)
        begin = "" if starts_inside else "<think>"
        for gap in ("", "\n", "\n\n"):
            assert allowed.may_end(f"{begin}why</think>{gap}{CLOCK}")
        assert not allowed.may_end(f"{begin}why</think>Hi.")
        assert not allowed.may_end(f"{begin}cut off")
        assert starts_inside or allowed.may_end(CLOCK)

    def test_a_call_at_the_beginning_of_the_answer(self, starts_inside: bool, added: tuple[str, ...]) -> None:
        begin = "" if starts_inside else "<think>"
        clock = '{"tool": "clock", "arguments": {}}'
        for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
            allowed = self.answers(mode, starts_inside, added, name="json")
            assert allowed.may_end(f"{begin}why</think>\n\n{clock}")
            assert not allowed.may_end(f"{begin}why</think>\n\n{clock.replace('clock', 'cluck')}")
            assert allowed.may_end(f"{begin}why</think>\n\nHi.") == (mode == ToolMode.AUTO)


# ---  -----------------------------------------------------------------------------------------------------------------


Reading = Callable[[GrowingText], Generator[None, None, Any]]


def read(reading: Reading, *pieces: str) -> tuple[Any, str]:
    """The value that is read from a text in pieces, and the text after it."""
    source = GrowingText()
    generator = reading(source)
    waiting = list(pieces)
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value, source.unread + "".join(waiting)
        if waiting:
            source.unread += waiting.pop(0)
        else:
            assert not source.is_complete, "a generator yields after the end of the text"
            source.is_complete = True


@pytest.mark.parametrize(
    ("reading", "text", "value", "rest"),
    [
        (lambda source: source.spaces(), " \n\tx", None, "x"),
        (lambda source: source.spaces(), "", None, ""),
        (lambda source: source.literal("<a>"), "<a>b", None, "b"),
        (lambda source: source.one_of("<a>", "<ab>", "<"), "<ab>", "<ab>", ""),
        (lambda source: source.one_of("<a>", "<"), "<b", "<", "b"),
        (lambda source: source.one_of("<a>", "<"), "<", "<", ""),
        (lambda source: source.closing("<a>", "<b>"), "<b>c", "<b>", "c"),
        (lambda source: source.closing("<a>", "<b>"), "<", "", ""),
        (lambda source: source.closing("<a>", "<b>"), "", "", ""),
        (lambda source: source.peek(), "ab", "a", "ab"),
        (lambda source: source.peek(), "", "", ""),
        (lambda source: source.word("[{"), "name[x", "name", "[x"),
        (lambda source: source.until("</a>"), "b<c</a>d", "b<c", "d"),
        (lambda source: source.json_string(), r'"a\"\u00e9\\" ', 'a"é\\', " "),
        (lambda source: source.json_object(lambda text: None), '{"a": [{"}": "\\"{"}, -1.5e3, null]} }', None, " }"),
        (lambda source: source.json_object(lambda text: None), "{}{", "{}", "{"),
    ],
)
def test_reading(reading: Reading, text: str, value: Any, rest: str) -> None:
    expected = (text[: len(text) - len(rest)] if value is None and text.startswith("{") else value, rest)
    assert read(reading, text) == expected
    assert read(reading, *text) == expected


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (lambda source: source.literal("<a>"), "<b>"),
        (lambda source: source.literal("<a>"), "<a"),
        (lambda source: source.closing("<a>", "<b>"), "<c"),
        (lambda source: source.word("["), "x" * 257 + "["),
        (lambda source: source.word("["), "x"),
        (lambda source: source.until(">"), "x" * 257 + ">"),
        (lambda source: source.until(">"), "x"),
        (lambda source: source.json_string(), "x"),
        (lambda source: source.json_string(), '"a\nb"'),
        (lambda source: source.json_string(), '"\\x"'),
        (lambda source: source.json_string(), '"' + "x" * 257 + '"'),
        (lambda source: source.json_string(), '"a\\'),
        (lambda source: source.json_object(lambda text: None), "[]"),
        (lambda source: source.json_object(lambda text: None), "{x}"),
        (lambda source: source.json_object(lambda text: None), '{"a\n"}'),
        (lambda source: source.json_object(lambda text: None), '{"a": "'),
        (lambda source: source.json_object(lambda text: None), "{]x"),
        (lambda source: source.stream_until((">",), lambda text: None), "x"),
    ],
)
def test_malformed(reading: Reading, text: str) -> None:
    if text == "{]x":  # brackets of the wrong kind: `parse_json` finds them
        value, _ = read(reading, text)
        with pytest.raises(MalformedCall):
            parse_json(value)
        return
    for pieces in ([text], text):
        with pytest.raises(MalformedCall):
            read(reading, *pieces)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.booleans(),
)
def test_any_json_object_is_read_whole(value: Any, is_ascii: bool) -> None:
    text = json.dumps({"value": value}, ensure_ascii=is_ascii)
    pieces: list[str] = []
    assert read(lambda source: source.json_object(pieces.append), *text, "}") == (text, "}")
    assert "".join(pieces) == text


def test_text_streams_up_to_an_end() -> None:
    seen: list[str] = []
    for pieces in (["a <b \n</a>c"], "a <b \n</a>c"):
        assert read(lambda source: source.stream_until(("</a>", "</b>"), seen.append), *pieces) == ("</a>", "c")
    assert "".join(seen) == "a <b" * 2
    assert len(without_spaces("a" + " " * 1000)) == 1 + 1000 - 256


def test_the_beginning_of_a_marker() -> None:
    assert [begun(text, "<<a>") for text in ("", "x", "<", "x<<", "<<<", "<<a", "<x")] == [0, 0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "{", "[" * 100_000, "1" * 5000, ""])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(MalformedCall):
        parse_json(text)


@given(st.text(st.sampled_from("<t>[ \n\u2003ax"), max_size=6))
def test_no_marker_begins_in_plain_text_and_no_space_ends_it(text: str) -> None:
    markers = ("<t>", "[x")
    if plain_text(markers)(text):
        assert all(begun(text, marker) == 0 and marker not in text for marker in markers)
        assert text
        assert without_spaces(text) == text


def test_ordinary_words_are_plain_text() -> None:
    assert plain_text(("<t>", "[x"))(" a word, 1 > 0")
    assert plain_text(("<t>",))("two\nlines")
    assert plain_text(("]",))("[")
    assert not plain_text(("<t>",))("1 < 2")
    assert plain_text(())("any\n<text>")
    assert not plain_text(())("any ")


# ---  -----------------------------------------------------------------------------------------------------------------


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab'\"\\\n"), inner, max_size=4),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_literal_becomes_the_json_of_its_value(value: Any) -> None:
    for end in (", ", ")"):
        text, rest = read(read_literal, *repr(value), end)
        assert (json.loads(text), rest) == (value, end)


@pytest.mark.parametrize("text", ["b'x'", "{1, 2}", "1j", "x", "f()", "", "'a\nb'", "(((", "]", "1e999", "[" * 10_000])
def test_what_has_no_json(text: str) -> None:
    for pieces in ([text + ")"], text + ")"):
        with pytest.raises(MalformedCall):
            read(read_literal, *pieces)


def may_end(properties: dict[str, Any], arguments: str, strict: bool = True, **others: Any) -> bool:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **others}
    tokenizer = byte_tokenizer()
    tools = [Tool("run", parameters=schema, strict=strict)]
    grammar = FORMATS["pythonic"].grammar(tools, ToolChoice(ToolMode.REQUIRED), special_tokens(tokenizer))
    return Answers(tokenizer, grammar).may_end(f"[run({arguments})]")


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
def test_required_and_optional_arguments(required: list[str]) -> None:
    properties = {key: {"type": "integer"} for key in "abc"}
    for number in range(8):
        keys = [key for index, key in enumerate("abc") if number >> index & 1]
        text = ", ".join(f"{key}=1" for key in keys)
        assert may_end(properties, text, required=required) == (set(required) <= set(keys)), text
    assert not may_end(properties, "c=1, b=1, a=1")
    assert not may_end(properties, "a=1, b=1, c=1, d=1")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['"a, \\n"', "'b'"], ["x", "1"]),
        ({"type": "integer"}, ["1", "-20"], ["1.5", '"x"']),
        ({"type": "number"}, ["1.5", "2", "1e3"], ["True"]),
        ({"type": "boolean"}, ["True", "False"], ["true", "1"]),
        ({"type": ["integer", "null"]}, ["1", "None"], ['"x"']),
        ({"enum": ["red", 1, None]}, ['"red"', "1", "None"], ["2", "'red'"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['["x"]']),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}, ["1", '["x"]'], ["[1]"]),
    ],
)
def test_values_follow_their_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert may_end({"a": schema}, f"a={text}"), text
    for text in bad:
        assert not may_end({"a": schema}, f"a={text}"), text


def test_a_tool_that_is_not_strict_may_have_any_value_where_literals_cannot_follow() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert may_end({"a": schema, "b": {}}, "a={'x': [1, None]}, b=True", strict=False)
    for bad in ({"a": schema}, {"a": {"type": "string", "minLength": 1}}, {"a-b": {"type": "string"}}):
        with pytest.raises(GrammarError):
            LiteralArguments(PYTHON).of(Tool("run", parameters={"type": "object", "properties": bad}, strict=True))
    with pytest.raises(GrammarError):
        LiteralArguments(PYTHON).of(Tool("run", strict=True))


# ---  -----------------------------------------------------------------------------------------------------------------


TOOL = Tool("add", "Adds numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)
SPEC = OutputSpec(
    tool_format="hermes", tools=(TOOL,), is_forced=True, reasoning_format="think", starts_in_reasoning=True
)


@pytest.mark.parametrize("spec", [SPEC, OutputSpec(), OutputSpec(reasoning_format="think")], ids=str)
def test_a_gateway_reads_what_another_one_wrote(spec: OutputSpec) -> None:
    assert read_spec("spec", spec.encode()) == spec


def test_the_parser_reads_reasoning_then_calls() -> None:
    parser = SPEC.parser()
    text = 'I add.</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    parts = [*parser.push(text), *parser.finish()]
    assert [(part.kind, part.text) for part in parts if part.kind != PartKind.ARGUMENTS] == [
        (PartKind.REASONING, "I add."),
        (PartKind.CALL, "add"),
    ]
    assert "".join(part.text for part in parts if part.kind == PartKind.ARGUMENTS) == '{"a": 1}'


def test_without_formats_all_text_is_content() -> None:
    assert OutputSpec().parser().push("<tool_call>") == [AnswerPart(PartKind.CONTENT, "<tool_call>")]


@pytest.mark.parametrize(
    "value",
    [
        5,
        "",
        "[]",
        "{}",
        '{"tools": 1}',
        json.dumps({**json.loads(OutputSpec().encode()), "surprise": 1}),
        json.dumps({**json.loads(OutputSpec().encode()), "tool_format": "no such format"}),
        json.dumps({**json.loads(OutputSpec().encode()), "reasoning_format": "no such format"}),
        "x" * (MAX_SPEC_LENGTH + 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_specification_that_is_corrupt_is_refused(value: object) -> None:
    with pytest.raises(InvalidValue, match="spec must be the JSON"):
        read_spec("spec", value)
