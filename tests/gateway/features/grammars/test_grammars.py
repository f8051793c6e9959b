"""Grammars in calls: response formats, structured outputs, and schemas that cannot be followed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from quire.gateway.errors.api_errors import ApiError, InvalidRequest
from quire.gateway.features.grammars import given_grammars
from quire.gateway.features.grammars.given_grammars import FORMS as READERS
from quire.gateway.features.grammars.given_grammars import GRAMMARS, response_format, structured_outputs
from quire.gateway.features.openapi.parameter_schemas import schema_of
from quire.gateway.model.renderer import Renderer
from quire.gateway.output.given_grammar import GivenGrammar
from quire.shared.config.schema_parts import (
    COUNT,
    FLAG,
    TEXT,
    Schema,
    any_of,
    array,
    closed,
    map_of,
    options,
    or_null,
    record,
    with_nulls,
)
from quire.shared.config.validators import Flag, Integer, Text
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.protocol.sampling_params import MAX_GRAMMAR_LENGTH, MAX_SCHEMA_LENGTH
from quire.shared.text.grammar import ANY_OBJECT, write
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens

# --- `structured_outputs` and its older names: the worker gets a grammar, or the call is refused ----------------------


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
    ("json", json.dumps(SCHEMA), write("json_schema", SCHEMA)),
    ("regex", "[0-9]+", write("regex", "[0-9]+")),
    ("choice", ["yes", "no"], write("choice", ["yes", "no"])),
    ("grammar", EBNF, write("ebnf", EBNF)),
    ("grammar", LARK, write("lark", LARK)),
    ("json_object", True, ANY_OBJECT),
    ("json_object", False, ""),
    ("structural_tag", TAG, write("structural_tag", TAG)),
    ("structural_tag", json.dumps(TAG), write("structural_tag", TAG)),
]
# By response format: what the worker gets.
FORMATS: list[tuple[Any, str]] = [
    (None, ""),
    ({"type": "text"}, ""),
    ({"type": "json_object"}, ANY_OBJECT),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, write("json_schema", SCHEMA)),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}, write("json_schema", {})),
    (TAG, write("structural_tag", TAG)),
]


def test_every_form_is_tested() -> None:
    assert {form for form, _, _ in FORMS} == set(READERS)


async def test_the_worker_gets_the_grammar(gateway: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        asked: list[tuple[dict[str, Any], str]] = []
        for form, value, written in FORMS:
            asked.append(({"structured_outputs": {form: value, "whitespace_pattern": None}}, written))
            if form in ("json", "regex", "choice", "grammar"):
                asked.append(({f"guided_{form}": value, "guided_decoding_backend": "auto"}, written))
        asked += [({"response_format": value}, written) for value, written in FORMATS]
        for extra, written in asked:
            async with gateway.worker(emit(tokens("{}"))) as worker:
                reply = await gateway.post(path, body_of(path) | extra)
            assert reply.status == 200, reply.error
            [request] = worker.claimed
            assert request.sampling.grammar == written


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


async def test_what_cannot_be_honoured_is_refused_by_name(server: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        for name in REFUSED:
            extra, param, says = REFUSED[name]
            reply = await server.post(path, body_of(path) | extra)
            assert (reply.status, reply.error["param"]) == (400, param), reply.error
            assert says in reply.error["message"]


# --- `response_format`: the worker gets a grammar with the schema as it was written, or the call is refused -----------


ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"enum": ["ä", 1]}},
    "required": ["b"],
}


def wanted(schema: Any = ANSWER_SCHEMA, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | changes}


REFUSED_FORMATS: dict[str, tuple[Any, str, str]] = {
    "no object": ("json_object", "response_format", "an object"),
    "no type": ({}, "response_format.type", "text, json_object, json_schema or structural_tag"),
    "another type": ({"type": "regex"}, "response_format.type", "text, json_object, json_schema or structural_tag"),
    "more than the type": ({"type": "text", "x": 1}, "response_format.x", "has type only"),
    "a schema of no use": ({"type": "json_object", "json_schema": {}}, "response_format.json_schema", "has type only"),
    "no schema": ({"type": "json_schema"}, "response_format.json_schema", "an object"),
    "no name": (wanted(name=None), "response_format.json_schema.name", "a string"),
    "a name with a space": (wanted(name="a b"), "response_format.json_schema.name", "characters a-z"),
    "a long name": (wanted(name="a" * 65), "response_format.json_schema.name", "1 to 64"),
    "strict of another type": (wanted(strict="yes"), "response_format.json_schema.strict", "true or false"),
    "a description of another type": (wanted(description=1), "response_format.json_schema.description", "a string"),
    "an unknown field": (wanted(shape={}), "response_format.json_schema.shape", "is not supported"),
    "a schema that is none": (wanted([]), "response_format.json_schema.schema", "an object"),
    "a schema that is not there": (wanted(None), "response_format.json_schema.schema", "an object"),
    "a long schema": (
        wanted({"enum": ["x" * MAX_SCHEMA_LENGTH]}),
        "response_format.json_schema.schema",
        f"at most {MAX_SCHEMA_LENGTH}",
    ),
    "an unknown type in it": (wanted({"type": "text"}), "response_format.json_schema.schema", "Invalid type: text"),
    "an unknown keyword": (
        wanted({"dependencies": {"a": ["b"]}}),
        "response_format.json_schema.schema",
        "Unimplemented keys",
    ),
    "a reference to elsewhere": (
        wanted({"$ref": "http://127.0.0.1/x"}),
        "response_format.json_schema.schema",
        "does not fetch",
    ),
    "branches that may both match": (
        wanted({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        "response_format.json_schema.schema",
        "oneOf has branches that may both match; use anyOf",
    ),
    "a pattern that is none": (
        wanted({"type": "string", "pattern": "("}),
        "response_format.json_schema.schema",
        "unclosed group",
    ),
}


async def test_what_cannot_be_honoured_is_refused_by_name_response_format(server: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        for name in REFUSED_FORMATS:
            response_format, param, says = REFUSED_FORMATS[name]
            body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
            reply = await server.post(path, body | {"response_format": response_format})
            assert (reply.status, reply.error["param"]) == (400, param), reply.error
            assert says in reply.error["message"]


async def test_a_schema_that_is_nested_deeply_is_refused(server: RunningGateway) -> None:
    for depth in [200, 900, 5000]:
        schema = '{"items":' * depth + "{}" + "}" * depth
        body = json.dumps(chat_body(response_format=wanted("HERE"))).replace('"HERE"', schema)
        reply = await server.post(CHAT, body.encode())
        assert reply.status == 400, reply.error
        assert reply.error["param"] in ("response_format.json_schema.schema", None)


async def test_what_contradicts_it_is_refused(server: RunningGateway) -> None:
    for name in ["ignore_eos", "min_tokens", "use_beam_search"]:
        contrary: dict[str, Any] = {name: 5 if name == "min_tokens" else True}
        reply = await server.post(CHAT, chat_body(max_tokens=20, response_format={"type": "json_object"}, **contrary))
        assert (reply.status, reply.error["param"]) == (400, name), reply.error
        assert f"{name} is not supported with response_format: " in reply.error["message"]


async def test_a_model_without_an_end_token_is_asked_for_no_json() -> None:
    """Nothing would end the answer."""
    endless: Any = SimpleNamespace(
        template=None,
        eos_token_ids=(),
        name="endless",
        tokenizer=Tokenizer(WordLevel()),
        vocab_size=5,
        layout=None,
    )
    renderer = Renderer(endless, threads=1)
    await renderer.check_grammar("", "")
    with pytest.raises(InvalidRequest, match="endless has none") as caught:
        await renderer.check_grammar(ANY_OBJECT, "response_format")
    assert caught.value.param == "response_format"
    renderer.close()


def test_the_longest_schema_is_one_that_a_worker_decodes() -> None:
    around = len('{"enum":[""]}')
    longest = response_format("response_format", wanted({"enum": ["x" * (MAX_SCHEMA_LENGTH - around)]}))
    assert isinstance(longest, GivenGrammar)
    request = GenerationRequest("r", "m", (3,), SamplingParams(max_tokens=1, grammar=longest.text))
    assert GenerationRequest.decode(request.encode()) == request


def chain(length: int) -> dict[str, Any]:
    """A schema in which each definition refers to the next."""
    links: dict[str, Any] = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {}}}


DEADLY: dict[str, dict[str, Any]] = {
    "a stack without end": chain(1400),
    "more of the stack than a worker's threads may have": chain(500),
    "more memory than a worker keeps for one": {"type": "integer", "multipleOf": 200_003},
    "more memory than there is": {"type": "integer", "multipleOf": 1_000_003},
    "more time than there is": {
        "allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(20)]
    },
}


async def test_a_schema_that_would_end_the_process_is_refused(server: RunningGateway) -> None:
    for name in DEADLY:
        reply = await server.post(CHAT, chat_body(response_format=wanted(DEADLY[name])))
        assert (reply.status, reply.error["param"]) == (400, "response_format.json_schema.schema"), reply.error
        assert "it is too large, or takes too long" in reply.error["message"]


# ---  -----------------------------------------------------------------------------------------------------------------


Reader = Callable[[str, Any], GivenGrammar | tuple[()]]


DEEP = '{"items":' * 100_000 + "{}" + "}" * 100_000


@pytest.mark.parametrize(
    ("reader", "value", "says"),
    [
        (given_grammars.read_schema, "{}", "an object"),
        (given_grammars.read_schema_or_text, "[]", "an object"),
        (given_grammars.read_schema_or_text, "{", "an object, or the JSON text of one"),
        (given_grammars.read_schema_or_text, '{"const": NaN}', "an object, or the JSON text of one"),
        (given_grammars.read_schema_or_text, DEEP, "at most 65536"),
        (given_grammars.read_schema_or_text, DEEP[:18_000] + "{}" + "}" * 2000, "not nested so deeply"),
        (given_grammars.read_json_object, 1, "true or false"),
        (given_grammars.read_regex, "", "a string that is not empty"),
        (given_grammars.read_regex, "x" * (MAX_SCHEMA_LENGTH + 1), "at most 65536"),
        (given_grammars.read_choice, [], "an array of strings that are not empty"),
        (given_grammars.read_choice, ["a", ""], "an array of strings that are not empty"),
        (given_grammars.read_choice, ["x" * 100] * 700, "at most 65536"),
        (given_grammars.read_grammar, 5, "a string that is not empty"),
        (given_grammars.read_grammar, "start: %json {}", "contains %json"),
        (given_grammars.read_grammar, '%llguidance {"no_forcing": true}\nstart: "a"', "contains %llguidance"),
        (given_grammars.read_structural_tag, [], "an object"),
    ],
)
def test_a_value_that_is_no_grammar_is_refused_by_name(reader: Reader, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        reader("its.name", value)
    assert caught.value.param == "its.name"


def test_the_longest_grammar_of_a_client_is_one_that_a_worker_takes() -> None:
    """Each character becomes at most six in JSON."""
    given = given_grammars.read_regex("x", "\x01" * MAX_SCHEMA_LENGTH)
    assert len(given.text) <= MAX_GRAMMAR_LENGTH


# --- Schemas of the parameters that are grammars, against their readers. ------------------------------------------


GRAMMAR_SCHEMAS_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
    "triggers": ["<a"],
}
OF_READERS = {name: schema_of(READERS[name][1]) for name in ("json", "regex", "choice", "grammar")}
STRUCTURED_OUTPUTS = schema_of(GRAMMARS["structured_outputs"].schema)
RESPONSE_FORMAT = schema_of(GRAMMARS["response_format"].schema)
VALUES: list[Any] = [
    {},
    "{}",
    "[a-z]+",
    ["a", "b"],
    [""],
    [],
    "",
    "root ::= %json",
    "start: %json {}",
    5,
    True,
    GRAMMAR_SCHEMAS_TAG,
]


@pytest.mark.parametrize("name", OF_READERS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_field(name: str, value: Any) -> None:
    try:
        READERS[name][0](name, value)
        good = True
    except ApiError:
        good = False
    assert Draft202012Validator(OF_READERS[name]).is_valid(value) == good


@pytest.mark.parametrize("name", READERS)
def test_exactly_one_field_is_given(name: str) -> None:
    check = Draft202012Validator(STRUCTURED_OUTPUTS)
    value: Any = {"choice": ["a"], "json_object": True, "json": {}, "structural_tag": GRAMMAR_SCHEMAS_TAG}.get(
        name, "a"
    )
    for body in ({name: value}, {name: value, "other": None}, {**dict.fromkeys(READERS), name: value}):
        assert check.is_valid(body)
        structured_outputs("structured_outputs", body)
    other = "regex" if name != "regex" else "grammar"
    for body in ({name: None}, {name: value, other: "a"}, {name: value, "other": 1}):
        assert not check.is_valid(body)
        with pytest.raises(ApiError):
            structured_outputs("structured_outputs", body)


@pytest.mark.parametrize("schema", [STRUCTURED_OUTPUTS, RESPONSE_FORMAT])
def test_a_schema_is_one(schema: Schema) -> None:
    Draft202012Validator.check_schema(schema)


def test_a_structural_tag_has_one_of_two_forms() -> None:
    check = Draft202012Validator(RESPONSE_FORMAT)
    assert check.is_valid(GRAMMAR_SCHEMAS_TAG)
    assert check.is_valid({"type": "structural_tag", "format": {"type": "any_text"}})
    assert not check.is_valid({**GRAMMAR_SCHEMAS_TAG, "format": {}})
    assert not check.is_valid({"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": []})


# --- Parts of JSON schemas --------------------------------------------------------------------------------------------


# Accepted values, then refused ones.
CASES: list[tuple[Schema, list[Any], list[Any]]] = [
    (or_null(Text(1, 3)), ["a", "abc", None], ["", "abcd", 5]),
    (options({"a": Flag(), "b": re.compile("x+")}), [{}, {"a": True, "b": None}, {"b": "xx"}], [{"a": 1}, {"b": "xy"}]),
    (map_of(1, Text(1, 2), Integer(0, 5)), [{}, {"ab": 5}], [{"a": 1, "b": 1}, {"": 1}, {"abc": 1}, {"a": 6}]),
    (or_null(COUNT), [0, 5, None], [-1, "5"]),
    (any_of(TEXT, FLAG), ["x", True], [1, None]),
    (array(TEXT, low=1, high=2), [["a"], ["a", "b"]], [[], ["a", "b", "c"], [1], "a"]),
    (array(TEXT), [[], ["a"] * 99], [{}]),
    (record({"b": TEXT}, a=COUNT), [{"a": 1}, {"a": 1, "c": 1}], [{}, {"a": 1, "b": 1}]),
    (closed({"a": {}}, {"b": TEXT}), [{"a": 1}, {"a": None, "b": "x"}], [{}, {"a": 1, "c": 1}, {"a": 1, "b": None}]),
    (with_nulls({"a": {}}, {"b": TEXT}), [{"a": 1, "b": None, "c": None}, {"a": 1, "b": "x"}], [{"a": 1, "c": 1}]),
    (READERS["json"][1]["anyOf"][1], ["{}", ' {"a":\n1} '], ["", "[]", "x", "5", {}]),
]


@pytest.mark.parametrize(("schema", "accepted", "refused"), CASES)
def test_a_part_accepts_what_it_describes(schema: Schema, accepted: list[Any], refused: list[Any]) -> None:
    schema = schema_of(schema)
    Draft202012Validator.check_schema(schema)
    check = Draft202012Validator(schema)
    assert [value for value in accepted if not check.is_valid(value)] == []
    assert [value for value in refused if check.is_valid(value)] == []
