"""Grammars in EBNF accept the answers that they describe."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer

from quire.shared.text.ebnf import MAX_DEPTH, rules, to_lark
from quire.shared.text.grammar import matcher, write
from quire.shared.text.grammar_error import GrammarError

BYTES = LLTokenizer("byte")
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


def accepts(grammar: str, answer: str) -> bool:
    made = matcher(write("ebnf", grammar), BYTES, ())
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
        assert accepts(grammar, answer), answer
    for answer in bad:
        assert not accepts(grammar, answer), answer


def test_a_grammar_without_recursion_is_one_terminal_per_rule() -> None:
    """A mask then needs no parser, and terminals that overlap lose no answers."""
    start, lines = rules('root ::= a b\na ::= "x" | "xy"\nb ::= "yz"', "p")
    assert start == "P_0"
    assert len(lines) == 3
    assert accepts('root ::= a b\na ::= "x" | "xy"\nb ::= "yz"', "xyz")


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
