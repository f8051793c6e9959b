"""`response_format`: the worker gets a grammar with the schema as it was written, or the call is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from quire.gateway.api.given_grammars import GivenGrammar
from quire.gateway.api.response_format import response_format
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.model.renderer import Renderer
from quire.shared.messages import GenerationRequest, SamplingParams
from quire.shared.sampling_params import MAX_SCHEMA_LENGTH
from quire.shared.text.grammar import ANY_OBJECT, write
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["ä", 1]}}, "required": ["b"]}


def wanted(schema: Any = SCHEMA, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | changes}


@pytest.fixture
async def server(start_gateway: Start) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway()
    yield gateway
    assert await gateway.accepted() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "json_object"}, ANY_OBJECT),
        (wanted(), write("json_schema", SCHEMA)),
        (wanted({}, strict=True, description="what it is for"), write("json_schema", {})),
        (wanted({}, strict=None, description=None), write("json_schema", {})),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_worker_gets_the_schema_as_it_was_written(
    gateway: RunningGateway, path: str, response_format: Any, expected: str
) -> None:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    async with gateway.worker(emit(tokens("{}"))) as worker:
        reply = await gateway.post(path, body | {"response_format": response_format})
    assert reply.status == 200
    [request] = worker.claimed
    assert request.sampling.grammar == expected


REFUSED: dict[str, tuple[Any, str, str]] = {
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


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_name(server: RunningGateway, path: str, name: str) -> None:
    response_format, param, says = REFUSED[name]
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    reply = await server.post(path, body | {"response_format": response_format})
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert says in reply.error["message"]


@pytest.mark.parametrize("depth", [200, 900, 5000])
async def test_a_schema_that_is_nested_deeply_is_refused(server: RunningGateway, depth: int) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    body = json.dumps(chat_body(response_format=wanted("HERE"))).replace('"HERE"', schema)
    reply = await server.post(CHAT, body.encode())
    assert reply.status == 400, reply.error
    assert reply.error["param"] in ("response_format.json_schema.schema", None)


@pytest.mark.parametrize("name", ["ignore_eos", "min_tokens", "use_beam_search"])
async def test_what_contradicts_it_is_refused(server: RunningGateway, name: str) -> None:
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
        grammar_tokens={},
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


@pytest.mark.parametrize("name", DEADLY)
async def test_a_schema_that_would_end_the_process_is_refused(server: RunningGateway, name: str) -> None:
    reply = await server.post(CHAT, chat_body(response_format=wanted(DEADLY[name])))
    assert (reply.status, reply.error["param"]) == (400, "response_format.json_schema.schema"), reply.error
    assert "it is too large, or takes too long" in reply.error["message"]
