"""Grammars: forms, EBNF, structural tags, errors, and the trial in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.text.ebnf import MAX_DEPTH, rules, to_lark
from quire.shared.text.grammar import GrammarVocabulary, check, framed, lark_json, matcher, special_tokens, write
from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.grammar_trial import TRIAL_CPU_S, order
from quire.shared.text.panics import faults_as, is_panic
from quire.shared.text.structural_tag import MAX_TAGS
from quire.shared.text.structural_tag import to_lark as tag_to_lark
from tests.support.tokenizers import PANICS, panicking

# --- grammar ----------------------------------------------------------------------------------------------------------
# Each kind of grammar accepts the answers that it describes, and no others.


VOCABULARY = GrammarVocabulary({"<|call|>": 300, "<|end|>": 302}, (302,), 5000)
BYTES = VOCABULARY.tokenizer(has_all_ids=False)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def accepts(grammar: str, answer: str) -> bool:
    made = matcher(grammar, BYTES, VOCABULARY.special_tokens)
    return bool(made.consume_tokens(list(answer.encode())) and made.is_accepting())


GRAMMARS: list[tuple[str, Any, list[str], list[str]]] = [
    ("json_schema", SCHEMA, ['{"a": 1}'], ["{}", '{"a":1}', '{"a": 1} ']),
    ("regex", "[0-9]{2}/(a|b)", ["12/a"], ["1/a", "12/c", "12/ab"]),
    ("choice", ["yes", 'n"o\n', "ä"], ["yes", 'n"o\n', "ä"], ["", "yesyes", "n"]),
    ("ebnf", 'root ::= "(" root? ")"', ["()", "(())"], ["", "(()"]),
    ("structural_tag", {"format": {"type": "const_string", "value": "a"}}, ["a"], ["b"]),
    ("lark", f'start: "<" {lark_json(SCHEMA)} ">"', ['<{"a": 1}>'], ['<{"a":1}>', '{"a": 1}']),
]


@pytest.mark.parametrize(("kind", "value", "good", "bad"), GRAMMARS, ids=[one[0] for one in GRAMMARS])
def test_an_answer_follows_its_grammar(kind: str, value: Any, good: list[str], bad: list[str]) -> None:
    text = write(kind, value)
    assert json.loads(text) == {kind: value}
    check(text, VOCABULARY)
    for answer in good:
        assert accepts(text, answer)
    for answer in bad:
        assert not accepts(text, answer)


@pytest.mark.parametrize(("kind", "value", "good", "bad"), GRAMMARS, ids=[one[0] for one in GRAMMARS])
def test_a_frame_holds_a_grammar_of_any_kind(kind: str, value: Any, good: list[str], bad: list[str]) -> None:
    text = framed('start: ("[" /[^\\]]*/ "]")? @content', write(kind, value))
    check(text, VOCABULARY)
    for before in ("", "[why {]"):
        for answer in good:
            assert accepts(text, before + answer)
        for answer in bad:
            assert not accepts(text, before + answer)
    assert not accepts(text, "[why")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "a JSON object with one key"),
        ("{}", "a JSON object with one key"),
        ('{"regex":"a","lark":"b"}', "a JSON object with one key"),
        ('{"other":"a"}', "one of json_schema, regex"),
        ('{"regex":5}', "regex must be a string"),
        ('{"lark":null}', "lark must be a string"),
        ('{"choice":[]}', "an array of strings"),
        ('{"choice":["a",1]}', "an array of strings"),
        ('{"choice":"a"}', "an array of strings"),
        ('{"json_schema":[]}', "a JSON object"),
        ('{"regex":"("}', "unclosed group"),
        ('{"regex":"(?=a)"}', "look-around"),
        ('{"lark":"start: x"}', "unknown name"),
        ('{"lark":"start: <|other|>"}', "unknown special token"),
        # The library also reads grammars in JSON, with options that clients must not set: this is Lark.
        ('{"lark":"{\\"grammars\\":[{\\"json_schema\\":{}}]}"}', "expecting rule"),
        ('{"framed":{"lark":"start: @content"}}', "wrong type"),
        ('{"framed":{"lark":"start: @content","content":{}}}', "a JSON object with one key"),
        ('{"framed":{"lark":"start: @content","content":{"framed":{}}}}', "one of json_schema, regex"),
        ('{"framed":{"lark":5,"content":{"regex":"a"}}}', "lark must be a string"),
        ('{"framed":{"lark":"start: @other","content":{"regex":"a"}}}', "unknown"),
        ('{"framed":{"lark":"start: @content","content":{"regex":"("}}}', "unclosed group"),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_with_the_cause(text: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        check(text, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_a_schema_inside_of_lark_is_rewritten_too() -> None:
    grammar = write("lark", f'start: "x" {lark_json({"type": "string", "format": "date"})}')
    assert accepts(grammar, 'x"2024-02-29"')
    assert not accepts(grammar, 'x"2023-02-29"')
    with pytest.raises(GrammarError, match="x-guidance"):
        lark_json({"x-guidance": {"lenient": True}})


def test_special_tokens_are_not_their_text() -> None:
    grammar = write("lark", 'start: <|call|> "a"')
    assert not accepts(grammar, "<|call|>a")
    made = matcher(grammar, BYTES, VOCABULARY.special_tokens)
    [call] = [place for place in range(BYTES.vocab_size) if BYTES.decode_str([place]) == "<|call|>"]
    assert made.consume_tokens([call, ord("a")])


def test_numbers_of_tokens_are_those_of_the_model() -> None:
    tokens = VOCABULARY.tokenizer(has_all_ids=True)
    assert tokens.vocab_size == 5000
    made = matcher(write("lark", 'start: <[300]> "a"'), tokens, ())
    assert np.flatnonzero(np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")) == [300]
    check(write("lark", "start: <[4999]>"), VOCABULARY)
    with pytest.raises(GrammarError, match="too large"):
        check(write("lark", "start: <[5000]>"), VOCABULARY)


def test_the_vocabulary_of_a_model_has_the_special_tokens_that_llguidance_knows() -> None:
    demo = Tokenizer.from_file(str(PROJECT_ROOT / DEFAULT_MODEL / "tokenizer.json"))
    demo.add_tokens(["<tool_call>", "plain"])
    size = demo.get_vocab_size()
    vocabulary = GrammarVocabulary.of(demo, [2, size + 5], size)
    assert vocabulary.eos_token_ids == (2,)
    assert vocabulary.special_tokens == special_tokens(demo)
    real = LLTokenizer(demo.to_str(), n_vocab=size, eos_token=[2])
    assert all(real.is_special_token(token_id) for token_id in special_tokens(demo).values())
    assert not real.is_special_token(demo.token_to_id("plain"))
    assert "<tool_call>" in special_tokens(demo)
    assert "plain" not in special_tokens(demo)
    for name in special_tokens(demo):
        grammar = write("lark", f'start: "x" {name} "y"')
        check(grammar, vocabulary)
        assert not matcher(grammar, real, ()).is_error()


# --- ebnf -------------------------------------------------------------------------------------------------------------
# Grammars in EBNF accept the answers that they describe.


EBNF_BYTES = LLTokenizer("byte")
ARITHMETIC = r"""
# terms in lines
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*   # with operators
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]{1,3} ws | "0x" [0-9a-fA-F]{2} | "\x41\u00e4"
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def ebnf_accepts(grammar: str, answer: str) -> bool:
    made = matcher(write("ebnf", grammar), EBNF_BYTES, ())
    data = list(answer.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (ARITHMETIC, ["a+b=3\n", "(a+(b*c)) = 0xff\nx=y\n\n", "q=Aä\n"], ["a=", "a+=b\n", "a=1234\n", "a=3"]),
        (JSON, ["{}", '{"a": [1, -2.5e3, "x\\n\\u00e4"],\n  "b": {"c": null}}'], ["", "[", '{"a"}', '{"a": 01}']),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a" |', ["", "a"], ["aa"]),
        ('root ::= [a-z]+ "x"', ["abx", "xx"], ["x", "ab"]),
        ('root ::= "(" root ")" | [a-z]+ "x"', ["abx", "((xx))"], ["(abx", "()"]),
        ('root ::= "[" (root ("," root)*)? "]" | "-"', ["[]", "[-,[-]]"], ["[,]"]),
        ("root ::= [\\u00e4-\\U0001F600\\-\\]^]{2}", ["äé", "-]", "^-"], ["a-", "ä"]),
        ('root ::= [^\\n"/]+', ["a b", "ä"], ["a\n", "/", '"']),
        ('root ::= . . "/"', ["\nä/"], ["a/"]),
        ('root ::= "a"{2}{,3} "b"?', ["", "aab", "aaaaaa"], ["a", "aaaaaaaa"]),
        ('root ::= a-b\na-b ::= (\n  [-a] # one\n  |\n  "c"\n)', ["-", "a", "c"], ["b"]),
        ('root ::= root "a" | "b"', ["b", "baaa"], ["a"]),
        ('root ::= "x"{2,}', ["xx", "xxxx"], ["x"]),
    ],
)
def test_an_answer_follows_the_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    for answer in good:
        assert ebnf_accepts(grammar, answer), answer
    for answer in bad:
        assert not ebnf_accepts(grammar, answer), answer


def test_a_grammar_without_recursion_is_one_terminal_per_rule() -> None:
    """A mask then needs no parser, and terminals that overlap lose no answers."""
    start, lines = rules('root ::= a b\na ::= "x" | "xy"\nb ::= "yz"', "p")
    assert start == "P_0"
    assert len(lines) == 3
    assert ebnf_accepts('root ::= a b\na ::= "x" | "xy"\nb ::= "yz"', "xyz")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("", "no rule root"),
        ('x ::= "a"', "no rule root"),
        ("root ::= a", "no rule a"),
        ('root ::= "a', "a string must be closed"),
        ('root ::= "a\n"', "a string must be closed"),
        ("root ::= [a", "a class must be closed"),
        ("root ::= []", "a class must not be empty"),
        ("root ::= [z-a]", "in the wrong order"),
        ('root ::= "a"{3,2}', "a repetition must be"),
        ('root ::= "a"{,}', "a repetition must be"),
        ('root ::= "a"{x}', "a string, class, name or parenthesis must be here"),
        ("root ::= {3}", "a string, class, name or parenthesis must be here"),
        ('root ::= ("a"', "a parenthesis must be closed"),
        ('root ::= "a" ) "b"', "a rule `name ::= ...` must begin here"),
        ('root = "a"', "a rule `name ::= ...` must begin here"),
        ("root ::= " + "(" * (MAX_DEPTH + 1) + ")" * (MAX_DEPTH + 1), "nested parentheses"),
        ('root ::= "a" (= "b")', "a lookahead is not supported"),
        ('root ::= TagDispatch(("a","b"))', r"TagDispatch\(...\) is not supported"),
        ('root ::= "\\q"', "an unknown escape"),
        ('root ::= "\\ud800"', "a Unicode character"),
        ('root ::= "\\U00110000"', "a Unicode character"),
        ('root ::= "a"\nroot ::= "b"', "two rules root"),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_with_the_place(grammar: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        to_lark(grammar)
    assert "\n" not in str(caught.value)


def test_an_error_names_the_line() -> None:
    with pytest.raises(GrammarError, match=r"^line 3 "):
        to_lark('root ::= a\n# one\na ::= "x" ~')


# --- structural tag ---------------------------------------------------------------------------------------------------
# Structural tags accept free text, and within their tags only what these allow.


TAG_VOCABULARY = GrammarVocabulary({"<|call|>": 300, "<|end|>": 302, "[SPECIAL]": 303}, (302,), 5000)
TAG_BYTES = TAG_VOCABULARY.tokenizer(has_all_ids=False)
# The place of the special token `<|call|>`, written as € in answers.
[CALL] = [place for place in range(TAG_BYTES.vocab_size) if TAG_BYTES.decode_str([place]) == "<|call|>"]
TAG_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG_JSON = {"type": "json_schema", "json_schema": TAG_SCHEMA}
ANY: dict[str, Any] = {"type": "any_text"}
OLD: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=foo>", "schema": TAG_SCHEMA, "end": "</function>"},
        {"begin": "<function=bar>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def of(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def elements(kind: str, *parts: Any) -> dict[str, Any]:
    return of({"type": kind, "elements": list(parts)})


def triggered(**changes: Any) -> dict[str, Any]:
    return of(
        {
            "type": "triggered_tags",
            "triggers": ["<|call|>"],
            "tags": [tag("<|call|>f", TAG_JSON, "!")],
            **changes,
        }
    )


def tag_accepts(value: dict[str, Any], answer: str) -> bool:
    made = matcher(write("structural_tag", value), TAG_BYTES, TAG_VOCABULARY.special_tokens)
    tokens = [token for letter in answer for token in ([CALL] if letter == "€" else letter.encode())]
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


CALLED = '€f{"a": 1}!'
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "structures": (
        OLD,
        ["", "hi", 'x<function=foo>{"a": 1}</function>y<function=bar>7</function>', "<function"],
        ["<function=baz>", "<function=foo>{}</function>", "<function=foo>"],
    ),
    "a text": (of(text("yes")), ["yes"], ["", "yes!"]),
    "any text": (of(ANY), ["", "x\ny"], []),
    "a schema": (of(TAG_JSON), ['{"a": 1}'], ["{}"]),
    "a pattern": (of({"type": "regex", "pattern": "[0-9]+/x"}), ["12/x"], ["x"]),
    "a grammar": (of({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}), ["((x))"], ["(x"]),
    "thinking": (
        elements("sequence", tag("<think>", ANY, "</think>"), text("\n"), tag("<|call|>", TAG_JSON, "")),
        ['<think>hm</think>\n€{"a": 1}', '<think></think>\n<|call|>{"a": 1}'],
        ['<think>hm</think>\n{"a": 1}', "<think>"],
    ),
    "a text that ends any text": (
        elements("sequence", ANY, text("E"), text("N"), {"type": "regex", "pattern": "[0-9]"}),
        ["abEN1", "EN1"],
        ["abE1", "ab"],
    ),
    "a choice": (elements("or", text("x"), TAG_JSON), ["x", '{"a": 1}'], ["y", ""]),
    "tags": (triggered(), ["", "ab", CALLED, f"ab{CALLED}c{CALLED}", 'x<|call|>f{"a": 1}!'], ["€", "<|call|>x"]),
    "one tag at least": (triggered(at_least_one=True), [CALLED, f"{CALLED}x{CALLED}"], ["", "ab"]),
    "one tag at most": (triggered(stop_after_first=True), ["", "ab", f"ab{CALLED}"], [f"{CALLED}x"]),
    "one tag": (triggered(at_least_one=True, stop_after_first=True), [CALLED], ["", f"{CALLED}x", f"x{CALLED}"]),
    "separated tags": (
        of({"type": "tags_with_separator", "separator": ", ", "tags": [tag("<a>", TAG_JSON, "</a>")]}),
        ["", '<a>{"a": 1}</a>', '<a>{"a": 1}</a>, <a>{"a": 2}</a>'],
        ['<a>{"a": 1}</a><a>{"a": 2}</a>', "x"],
    ),
    "tags in a tag": (
        of(tag("[", {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>", TAG_JSON, ">")]}, "]")),
        ["[]", '[x<a>{"a": 1}>y]'],
        ["[<b", "[", "]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_follows_the_tags(name: str) -> None:
    value, good, bad = CASES[name]
    for answer in good:
        assert tag_accepts(value, answer), answer
    for answer in bad:
        assert not tag_accepts(value, answer), answer


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "must be an object"),
        ({"type": "structural_tag"}, "structures must be an array that is not empty"),
        ({"type": "other", "format": ANY}, "the type of a structural tag"),
        (OLD | {"x": 1}, "x is not supported in structural_tag"),
        (OLD | {"triggers": ["x"]}, "must start with exactly one trigger"),
        (OLD | {"triggers": ["<", "<f"]}, "must start with exactly one trigger"),
        (OLD | {"triggers": [""]}, "triggers must not be empty"),
        (OLD | {"structures": [5]}, "structures must be an object"),
        (OLD | {"structures": [{"begin": "<function=x", "end": ">"}]}, "JSON object"),
        (of({"type": "qwen_xml_parameter", "json_schema": {}}), "'qwen_xml_parameter' of a structural tag is not"),
        (of({}), "the format 'None'"),
        (elements("sequence", ANY, TAG_JSON), "any text must have an end"),
        (elements("sequence"), "elements must be an array that is not empty"),
        (of(ANY | {"excludes": []}), "excludes is not supported in any_text"),
        (of(TAG_JSON | {"style": "qwen_xml"}), "the style of a json_schema must be json"),
        (of(tag("a", TAG_JSON, ["b"])), "end must be a string"),
        (of(tag("a", TAG_JSON, "b") | {"type": "tag", "x": 1}), "x is not supported in tag"),
        (triggered(at_least_one=1), "at_least_one must be true or false"),
        (triggered(tags=[tag("<|call|>f", TAG_JSON, "!")] * (MAX_TAGS + 1)), "tags"),
        (of({"type": "grammar", "grammar": "x"}), "line 1 of the grammar"),
    ],
)
def test_a_value_that_is_no_structural_tag_is_refused(value: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        tag_to_lark(value, TAG_VOCABULARY.special_tokens)


def test_nesting_is_bounded() -> None:
    form: dict[str, Any] = text("x")
    for _ in range(40):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(GrammarError, match="nested formats"):
        tag_to_lark(of(form), ())


# --- panics -----------------------------------------------------------------------------------------------------------


def test_a_panic_of_a_library_becomes_an_error() -> None:
    with pytest.raises(BaseException, match="retry-limit") as panic:
        panicking().encode(PANICS)
    assert is_panic(panic.value)
    assert not isinstance(panic.value, Exception)
    with pytest.raises(ValueError, match="retry-limit"), faults_as(ValueError):
        panicking().encode(PANICS)


def test_an_interrupt_is_no_fault_of_a_library() -> None:
    assert not is_panic(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), faults_as(ValueError):
        raise KeyboardInterrupt


# --- grammar trial ----------------------------------------------------------------------------------------------------


GRAMMAR_TRIAL_VOCABULARY = GrammarVocabulary({"<|call|>": 3}, (2,), 1000)


def try_out(kind: str, value: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "quire.shared.text.grammar_trial"]
    data = order(write(kind, value), GRAMMAR_TRIAL_VOCABULARY)
    return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)


def test_a_grammar_that_answers_can_follow_has_no_fault() -> None:
    for kind, value in (
        ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        ("lark", 'start: <|call|> "x" <[3]>'),
    ):
        trial = try_out(kind, value)
        assert (trial.returncode, trial.stdout) == (0, b"")


def test_a_grammar_that_is_too_expensive_after_some_tokens_has_a_fault() -> None:
    trial = try_out("regex", "((([a-z]{1,50}){1,50}){1,50}){1,50}")
    assert trial.returncode == 0
    assert "too many" in trial.stdout.decode()


def test_a_fault_is_one_line_on_standard_output() -> None:
    for kind, value, why in (
        ("json_schema", {"not": {"pattern": "a+"}}, b"not cannot be followed"),
        ("lark", 'start: <|other|> "x"', b"unknown special token"),
        ("lark", "start: <[1000]>", b"too large"),
    ):
        trial = try_out(kind, value)
        assert trial.returncode == 0
        assert why in trial.stdout
        assert b"\n" not in trial.stdout


@pytest.mark.slow
def test_a_schema_that_asks_for_too_much_ends_the_process() -> None:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    assert try_out("json_schema", {"$ref": "#/$defs/d0", "$defs": links | {"d20000": {}}}).returncode != 0


HOSTILE: dict[str, tuple[str, Any]] = {
    "a pattern that counts": ("regex", "(a|b)*a(a|b){2000}"),
    "nested repetition": ("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000})"),
    "a pattern of classes": ("regex", r"(\\w{1,500}\\W{1,500}){500}"),
    "parentheses": ("regex", "(" * 30_000 + ")" * 30_000),
    "a repetition of millions": ("ebnf", 'root ::= ("a"{9999999}){9999999}'),
    "a chain of rules": (
        "ebnf",
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | root\n" for i in range(9000)) + 'r9000 ::= "x"',
    ),
    "rules that double": (
        "ebnf",
        "root ::= r0 root\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= " "',
    ),
    "parentheses of Lark": ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "a repetition of Lark": ("lark", 'start: (("a"{1000000}){1000000}){1000000}'),
    "many choices of one beginning": ("choice", [f"{'x' * 200}{i}" for i in range(300)]),
    "a schema in a tag": (
        "structural_tag",
        {"format": {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 1_000_003}}},
    ),
}


# llguidance unfolds a pattern only as far as an answer gets, with limits for each token.
HARMLESS = {
    "a pattern that counts",
    "nested repetition",
    "a pattern of classes",
    "many choices of one beginning",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_within_the_limits(name: str) -> None:
    """The trial refuses it, dies, or finds that it is harmless; all within seconds."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    trial = try_out(*HOSTILE[name])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < TRIAL_CPU_S + 1
    assert (trial.returncode == 0 and not trial.stdout) == (name in HARMLESS)
