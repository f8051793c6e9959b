"""`structured_outputs` and its older names: the worker gets a grammar, or the call is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.gateway.api.structured_outputs import READERS
from quire.shared.text.grammar import ANY_OBJECT, write
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["ä", 1]}}, "required": ["a"]}
EBNF, LARK = 'root ::= "(" root? ")"', 'start: "a" | "b"'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture
async def server(start_gateway: Start) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway()
    yield gateway
    assert await gateway.accepted() == 0


def body_of(path: str) -> dict[str, Any]:
    return chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}


FORMS: list[tuple[str, Any, str]] = [
    ("json", SCHEMA, write("json_schema", SCHEMA)),
    ("regex", "[0-9]+", write("regex", "[0-9]+")),
    ("choice", ["yes", "no"], write("choice", ["yes", "no"])),
    ("grammar", EBNF, write("ebnf", EBNF)),
    ("grammar", LARK, write("lark", LARK)),
    ("json_object", True, ANY_OBJECT),
    ("json_object", False, ""),
    ("structural_tag", TAG, write("structural_tag", TAG)),
]


def test_every_form_is_tested() -> None:
    assert {form for form, _, _ in FORMS} == set(READERS)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_worker_gets_the_grammar(gateway: RunningGateway, path: str) -> None:
    asked: list[tuple[dict[str, Any], str]] = []
    for form, value, text in FORMS:
        asked.append(({"structured_outputs": {form: value, "whitespace_pattern": None}}, text))
        if form in ("json", "regex", "choice", "grammar"):
            asked.append(({f"guided_{form}": value, "guided_decoding_backend": "auto"}, text))
    asked.append(({"response_format": TAG}, write("structural_tag", TAG)))
    for extra, text in asked:
        async with gateway.worker(emit(tokens("{}"))) as worker:
            reply = await gateway.post(path, body_of(path) | extra)
        assert reply.status == 200, reply.error
        [request] = worker.claimed
        assert request.sampling.grammar == text


S, F = "structured_outputs", "response_format"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no object": ({S: "json"}, S, "an object"),
    "no form": ({S: {}}, S, "exactly one of json, regex, choice, grammar, json_object, structural_tag"),
    "two forms": ({S: {"regex": "a", "choice": ["a"]}}, S, "exactly one of"),
    "white space": ({S: {"regex": "a", "whitespace_pattern": " "}}, f"{S}.whitespace_pattern", "is not supported"),
    "an option": ({S: {"regex": "a", "disable_fallback": True}}, f"{S}.disable_fallback", "is not supported"),
    "a schema that is none": ({S: {"json": []}}, f"{S}.json", "an object"),
    "a wrong schema": ({S: {"json": {"type": "text"}}}, f"{S}.json", "Invalid type"),
    "a wrong pattern": ({S: {"regex": "("}}, f"{S}.regex", "unclosed group"),
    "a lookahead": ({S: {"regex": "(?=a)b"}}, f"{S}.regex", "look-around"),
    "no choice": ({S: {"choice": []}}, f"{S}.choice", "an array of strings"),
    "wrong EBNF": ({S: {"grammar": "root ::= x"}}, f"{S}.grammar", "has no rule x"),
    "wrong Lark": ({S: {"grammar": "start: x"}}, f"{S}.grammar", "unknown name"),
    "an unknown token": ({S: {"grammar": "start: <|nothing|>"}}, f"{S}.grammar", "unknown special token"),
    "a token that is too large": ({S: {"grammar": "start: <[99999999]>"}}, f"{S}.grammar", "too large"),
    "a wrong tag": ({S: {"structural_tag": {"format": {"type": "x"}}}}, f"{S}.structural_tag", "the format 'x'"),
    "a wrong tag as a format": ({F: {"type": "structural_tag"}}, F, "structures must be an array"),
    "an unknown key of a tag": ({F: TAG | {"x": 1}}, f"{F}.x", "is not supported"),
    "an old name": ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    "a backend": ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "not supported"),
    "an old option": ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    "both names": ({S: {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "not supported with structured_outputs"),
    "two old names": ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "not supported with guided_json"),
    "a format too": ({S: {"regex": "a"}, F: {"type": "json_object"}}, S, "not supported with response_format"),
    "beams": ({S: {"regex": "a"}, "use_beam_search": True}, "use_beam_search", "does not follow a grammar"),
    "no end token": ({S: {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "an answer ends where its grammar does"),
    "a bomb": ({S: {"json": {"type": "integer", "multipleOf": 1_000_003}}}, f"{S}.json", "too large, or takes too"),
    "a tower": ({S: {"regex": "(" * 30_000 + ")" * 30_000}}, f"{S}.regex", "cannot be followed"),
    "a repetition": ({S: {"grammar": 'root ::= ("a"{9999999}){9999999}'}}, f"{S}.grammar", "cannot be followed"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_name(server: RunningGateway, path: str, name: str) -> None:
    extra, param, says = REFUSED[name]
    reply = await server.post(path, body_of(path) | extra)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert says in reply.error["message"]
