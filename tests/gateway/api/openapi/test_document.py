"""/openapi.json is a valid document of OpenAPI 3.1."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from quire.gateway.admission.admission_options import REQUEST_TIMEOUT
from quire.gateway.api.headers import IDEMPOTENCY_KEY
from quire.gateway.api.messages.headers import ANSWER_ID, BETA, VERSION
from quire.gateway.api.openapi.document import document
from quire.gateway.api.openapi.endpoints import ENDPOINTS, EVERY
from quire.gateway.api.resume import LAST_EVENT_ID, STARTING_AFTER
from quire.gateway.errors.message_errors import is_messages_path
from tests.support.gateway.running import MODEL, RunningGateway

DOCUMENT = document("served")
OPERATIONS = [operation for operations in DOCUMENT["paths"].values() for operation in operations.values()]


def test_the_document_is_valid() -> None:
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []
    # The validator finds faults at all.
    broken = json.loads(json.dumps(DOCUMENT))
    broken["paths"]["/v1/models"]["get"]["parameters"] = [{"name": "x", "in": "nowhere"}]
    assert not OpenAPIV31SpecValidator(broken).is_valid()


def test_every_component_is_used() -> None:
    text = json.dumps(DOCUMENT)
    for kind, components in DOCUMENT["components"].items():
        if kind != "securitySchemes":
            for name in components:
                assert f'"#/components/{kind}/{name}"' in text, f"{kind}/{name}"


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for operation in OPERATIONS]
    assert len(set(names)) == len(names) == len(ENDPOINTS)
    assert "post_v1_chat_completions" in names


def test_a_path_has_the_parameters_in_its_braces() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            found: list[dict[str, Any]] = [
                DOCUMENT["components"]["parameters"][one["$ref"].rsplit("/", 1)[1]] for one in operation["parameters"]
            ]
            in_path = [one["name"] for one in found if one["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)


def test_every_answer_that_is_an_error_has_the_shape_of_errors() -> None:
    for operation in OPERATIONS:
        assert {str(status) for status in EVERY} < set(operation["responses"])
    for name, response in DOCUMENT["components"]["responses"].items():
        shape = name.rstrip("0123456789")
        assert response["content"] == {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}


def test_errors_of_messages_have_a_shape_of_their_own() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            names = {one["$ref"].rsplit("/", 1)[1] for one in operation["responses"].values() if "$ref" in one}
            # The head of a request is refused before its path is known.
            shapes = {name.rstrip("0123456789") for name in names - {"Error431"}}
            assert shapes == {"MessageError" if is_messages_path(path) else "Error"}
            assert "Error431" in names


def test_answers_of_messages_have_their_id() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            assert (ANSWER_ID in operation["responses"]["200"]["headers"]) == is_messages_path(path)


def test_only_the_served_model_is_a_model() -> None:
    for name in ("ChatCompletionRequest", "CompletionRequest", "MessageRequest", "MessageCountRequest"):
        assert DOCUMENT["components"]["schemas"][name]["properties"]["model"]["enum"] == ["served"]
    assert DOCUMENT["components"]["schemas"]["TokenizeRequest"]["properties"]["model"]["enum"] == ["served", None]


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        ({"input": "Hello"}, True),
        ({"previous_response_id": "resp_1"}, True),
        ({"input": None, "previous_response_id": "resp_1"}, True),
        ({}, False),
        ({"input": None}, False),
        ({"previous_response_id": None}, False),
    ],
    ids=str,
)
def test_a_response_needs_an_input_or_a_previous_response(body: dict[str, object], accepted: bool) -> None:
    schema = {"$ref": "#/components/schemas/ResponseRequest", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"model": "served", **body}) == accepted


async def test_the_document_is_that_of_the_served_model(gateway: RunningGateway) -> None:
    reply = await gateway.get("/openapi.json")
    assert (reply.status, reply.json) == (200, document(MODEL))
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["cache-control"] == "no-cache"


def test_the_parameters_of_a_resumed_stream_are_those_of_the_code() -> None:
    parameters = DOCUMENT["components"]["parameters"]
    assert parameters["LastEventId"]["name"] == LAST_EVENT_ID
    assert parameters["StartingAfter"]["name"] == STARTING_AFTER
    assert parameters["IdempotencyKey"]["name"] == IDEMPOTENCY_KEY
    assert parameters["RequestTimeout"]["name"] == REQUEST_TIMEOUT
    assert parameters["AnthropicVersion"]["name"] == VERSION
    assert parameters["AnthropicBeta"]["name"] == BETA


def test_the_inputs_of_embeddings_are_described_as_the_prompts_of_completions() -> None:
    found = []
    for path, name in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
        schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        found.append(schema["properties"][name]["anyOf"])
    assert found[0] == found[1]
    assert {"type": "string", "minLength": 1} in found[0]
