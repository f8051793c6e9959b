from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from quire.shared.text.grammar import GrammarVocabulary, write
from quire.shared.text.grammar_trial import TRIAL_CPU_S, order

VOCABULARY = GrammarVocabulary({"<|call|>": 3}, (2,), 1000)


def try_out(kind: str, value: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "quire.shared.text.grammar_trial"]
    data = order(write(kind, value), VOCABULARY)
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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_within_the_limits(name: str) -> None:
    """The trial refuses it, dies, or finds that it is harmless; all within seconds."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    trial = try_out(*HOSTILE[name])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < TRIAL_CPU_S + 1
    assert (trial.returncode == 0 and not trial.stdout) == (name in HARMLESS)
