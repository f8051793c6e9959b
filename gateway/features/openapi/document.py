"""GET /openapi.json: the OpenAPI 3.1 document of a gateway, from which the page `/docs` is rendered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.headers import NO_EFFECT_HEADER
from quire.gateway.api.parameters import Body
from quire.gateway.features.openapi.answers import SCHEMAS
from quire.gateway.features.openapi.endpoints import (
    BYTES,
    ENDPOINTS,
    EVENTS,
    EVERY,
    FORM,
    HEADER_NAMES,
    HEADERS,
    HTML,
    IDS,
    JSON,
    PARAMETERS,
    Endpoint,
)
from quire.gateway.features.openapi.parameter_schemas import body_schema, schema_of
from quire.shared.config.schema_parts import NULL, TEXT, Schema, ref
from quire.shared.process.version import installed_version

_PHRASES = {499: "The request was cancelled"}
# The path is not known yet, so this error has the same shape on every path.
_BEFORE_PATH = (431,)


def _given(name: str) -> Schema:
    """Return the schema of bodies that have this parameter, and not as null."""
    return {"required": [name], "properties": {name: {"not": NULL}}}


def document(model: str, bodies: Mapping[str, Body], answers: Schema, parameters: Schema) -> Schema:
    """Return the document of a gateway that serves `model`.

    bodies: of all requests, by the name of the schema. answers, parameters: besides SCHEMAS and PARAMETERS.
    """
    requests: Schema = {}
    errors: dict[str, tuple[Endpoint, int]] = {}
    paths: Schema = {}
    for endpoint in ENDPOINTS:
        for name in endpoint.request.split():
            requests[name] = body_schema(bodies[name].table, model, bodies[name].unsupported)
        errors |= {_error_of(endpoint, status): (endpoint, status) for status in (*EVERY, *endpoint.errors)}
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, bodies)
    requests["TokenizeRequest"]["oneOf"] = [_given(name) for name in ("prompt", "messages")]
    # A response without items continues the previous one.
    requests["ResponseRequest"]["anyOf"] = [_given(name) for name in ("input", "previous_response_id")]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": installed_version("0 (not installed)"),
            "description": "Generates text. A parameter is honoured, refused with a 400 that names it, or named in the "
            f"header {NO_EFFECT_HEADER}. Calls need an API key (`Authorization: Bearer` or `x-api-key`) unless the "
            "gateway accepts anonymous calls, as it does by default on a loopback address.",
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": requests | schema_of(SCHEMAS | answers),
            "parameters": schema_of(PARAMETERS | parameters),
            "headers": HEADERS,
            "responses": {name: _error(*errors[name]) for name in sorted(errors)},
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def handler(model: str, bodies: Mapping[str, Body], answers: Schema, parameters: Schema) -> Handler:
    """Return the handler of the document, which is written once. The arguments are those of `document`."""
    body = json.dumps(document(model, bodies, answers, parameters), separators=(",", ":")).encode()

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-cache"})

    return show


def _operation(endpoint: Endpoint, bodies: Mapping[str, Body]) -> Schema:
    parameters = (*endpoint.parameters, "ClientRequestId")
    operation: Schema = {
        "operationId": f"{endpoint.method}_" + "_".join(part.strip("{}") for part in endpoint.path.split("/") if part),
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "responses": {str(endpoint.success[0]): _answer(endpoint, bodies)},
    }
    if names := [ref(name) for name in endpoint.request.split()]:
        schema = names[0] if len(names) == 1 else {"anyOf": names}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if endpoint.form:
        operation["requestBody"] = {"required": True, "content": {FORM: {"schema": ref(endpoint.form)}}}
    if endpoint.not_ready:
        content = {JSON: {"schema": ref(endpoint.not_ready)}}
        operation["responses"]["503"] = {"description": "Not ready", "headers": IDS, "content": content}
    for status in sorted({*EVERY, *endpoint.errors}):
        reference = f"#/components/responses/{_error_of(endpoint, status)}"
        operation["responses"].setdefault(str(status), {"$ref": reference})
    return operation


def _answer(endpoint: Endpoint, bodies: Mapping[str, Body]) -> Schema:
    content: Schema = {}
    answers = {JSON: endpoint.answers} if isinstance(endpoint.answers, str) else endpoint.answers
    for kind, name in answers.items():
        if kind == EVENTS:
            content[kind] = {"schema": _event(name)}
        elif kind in (HTML, BYTES):
            content[kind] = {"schema": TEXT}
        else:
            content[kind] = {"schema": ref(name) if name else {"type": "object"}}
    asked = [bodies[name] for name in endpoint.request.split()]
    can_be_without_effect = any(not body.table.keys().isdisjoint(body.without_effect) for body in asked)
    no_effect = {NO_EFFECT_HEADER: {"$ref": "#/components/headers/NoEffect"}} if can_be_without_effect else {}
    return {"description": endpoint.success[1], "headers": _headers(endpoint) | no_effect, "content": content}


def _headers(endpoint: Endpoint) -> Schema:
    return IDS | {HEADER_NAMES[name]: {"$ref": f"#/components/headers/{name}"} for name in endpoint.headers}


def _event(name: str) -> Schema:
    """Return the schema of one event of a stream, whose data has the schema `name`.

    The data of an event that ends a failed call is the error. The data of the last event is `[DONE]`, except in the
    Messages API.
    """
    data = TEXT | ({"contentMediaType": JSON, "contentSchema": ref(name)} if name else {})
    return {"type": "object", "properties": {"id": TEXT, "event": TEXT, "data": data}, "required": ["data"]}


def _error_of(endpoint: Endpoint, status: int) -> str:
    """Return the name of the response with an error."""
    return f"{'Error' if status in _BEFORE_PATH else endpoint.error}{status}"


def _error(endpoint: Endpoint, status: int) -> Schema:
    phrase = _PHRASES.get(status) or HTTPStatus(status).phrase
    wait = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}} if status in (429, 503) else {}
    if status in _BEFORE_PATH:
        return {"description": phrase, "headers": IDS, "content": {JSON: {"schema": ref("Error")}}}
    content = {JSON: {"schema": ref(endpoint.error)}}
    return {"description": phrase, "headers": _headers(endpoint) | wait, "content": content}
