"""GET /openapi.json: the OpenAPI 3.1 document of a gateway, from which the page `/docs` is rendered."""

from __future__ import annotations

import json
from functools import lru_cache
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.headers import CLIENT_ID_HEADER, NO_EFFECT_HEADER, SERVER_ID_HEADER
from quire.gateway.api.labels import NO_EFFECT
from quire.gateway.api.messages.headers import ANSWER_ID, BETA, VERSION
from quire.gateway.api.messages.parameters import WITHOUT_EFFECT
from quire.gateway.api.schema_parts import TEXT, Schema, ref
from quire.gateway.features.openapi.answers import SCHEMAS
from quire.gateway.features.openapi.endpoints import (
    BYTES,
    ENDPOINTS,
    EVENTS,
    EVERY,
    FORM,
    HTML,
    JSON,
    Endpoint,
)
from quire.gateway.features.openapi.parameter_schemas import body_schema
from quire.shared.process.version import installed_version

_VISIBLE = {"type": "string", "pattern": "^[!-~]{1,255}$"}
_EVENT_ID = {"type": "string", "pattern": r"^(0|[1-9][0-9]{0,9})(\.[1-9][0-9]{0,5})?$"}

_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9_999_999_999}


def _parameter(name: str, place: str, schema: Schema, what: str) -> Schema:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": schema, "description": what, **required}


def _id(prefix: str, what: str = "call") -> Schema:
    schema = {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{32}}$"}
    return _parameter("id", "path", schema, f"the id of the {what}")


PARAMETERS: Schema = {
    "ChatId": _id("chatcmpl-"),
    "CompletionId": _id("cmpl-"),
    "MessageId": _id("msg_"),
    "ResponseId": _id("resp_"),
    "FileId": _id("file-", "file"),
    "BatchId": _id("batch_", "batch"),
    "FileLimit": _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000}, "files per page"),
    "Purpose": _parameter("purpose", "query", {"enum": ["batch", "batch_output"]}, "only files of this purpose"),
    "Stream": _parameter("stream", "query", {"type": "boolean"}, "events instead of the response"),
    "StartingAfterNumber": _parameter(
        "starting_after", "query", _NUMBER, "the `sequence_number` of the last event that the client has"
    ),
    "LastNumber": _parameter("Last-Event-ID", "header", _NUMBER, "the same as `starting_after`, with precedence"),
    "Limit": _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}, "items per page"),
    "Order": _parameter("order", "query", {"enum": ["asc", "desc"]}, "by default `desc`: the newest item first"),
    "After": _parameter("after", "query", TEXT, "the id of the item before the page"),
    "ModelName": _parameter("name", "path", TEXT, "the name of the model"),
    "Days": _parameter("days", "query", {"type": "integer", "minimum": 1, "maximum": 400}, "days, today included"),
    "UsageFormat": _parameter("format", "query", {"enum": ["json", "csv"]}, "by default `json`; `csv` for a table"),
    "StartingAfter": _parameter("starting_after", "query", _EVENT_ID, "the last event that the client has"),
    "LastEventId": _parameter("Last-Event-ID", "header", _EVENT_ID, "the same as `starting_after`, with precedence"),
    "IdempotencyKey": _parameter(
        "Idempotency-Key", "header", _VISIBLE, "calls with the same key, path and body are one call"
    ),
    "RequestTimeout": _parameter(
        "X-Request-Timeout",
        "header",
        {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"},
        "the deadline in seconds, if the body has no `timeout`",
    ),
    "Traceparent": _parameter("traceparent", "header", TEXT, "the W3C trace of the caller, if tracing is on"),
    "ClientRequestId": _parameter(
        CLIENT_ID_HEADER,
        "header",
        {"type": "string", "pattern": "^[!#-&(-~]{1,128}$"},
        "an id of the caller: the answer and the log have it",
    ),
    "AnthropicVersion": _parameter(
        VERSION,
        "header",
        {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "any date: this server has one version of the API",
    ),
    "AnthropicBeta": _parameter(
        BETA,
        "header",
        {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}(, ?[A-Za-z0-9][A-Za-z0-9._-]{0,99}){0,63}$"},
        f"names of features; the header {NO_EFFECT_HEADER} of the answer has those without effect",
    ),
    "Model": _parameter("model", "query", TEXT, "the name of a model; by default the first one"),
    "Worker": _parameter("worker", "query", TEXT, "the id of a worker; by default the first one"),
    "Follow": _parameter(
        "follow", "query", _VISIBLE, "an Idempotency-Key: the worker that runs most requests of its call"
    ),
}
HEADERS: Schema = {
    "ClientRequestId": {"schema": TEXT, "description": "the id that the client gave, or else the server's"},
    "ServerRequestId": {"schema": TEXT, "description": "the server's id of the request, as its log has it"},
    "NoEffect": {"schema": TEXT, "description": "names of the given parameters that have no effect on this server"},
    "AnswerId": {"schema": TEXT, "description": "the id of the request, as in the Messages API"},
    "RetryAfter": {"schema": {"type": "string"}, "description": "seconds to wait before the next attempt"},
}
_IDS: Schema = {
    CLIENT_ID_HEADER: {"$ref": "#/components/headers/ClientRequestId"},
    SERVER_ID_HEADER: {"$ref": "#/components/headers/ServerRequestId"},
}
# The names of headers by those of the document's headers.
_HEADER_NAMES = {"AnswerId": ANSWER_ID}
_PHRASES = {499: "The request was cancelled"}
# The path is not known yet, so this error has the same shape on every path.
_BEFORE_PATH = (431,)


def _given(name: str) -> Schema:
    """Return the schema of bodies that have this parameter, and not as null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def document(model: str) -> Schema:
    """Return the document of a gateway that serves `model`."""
    requests: Schema = {}
    errors: dict[str, tuple[Endpoint, int]] = {}
    paths: Schema = {}
    for endpoint in ENDPOINTS:
        if endpoint.request:
            requests[endpoint.request] = body_schema(endpoint.table, model, endpoint.unsupported)
        errors |= {_error_of(endpoint, status): (endpoint, status) for status in (*EVERY, *endpoint.errors)}
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
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
            "schemas": {**requests, **SCHEMAS},
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "responses": {name: _error(*errors[name]) for name in sorted(errors)},
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


@lru_cache(maxsize=8)
def _written(model: str) -> bytes:
    return json.dumps(document(model), separators=(",", ":")).encode()


def handler(model: str) -> Handler:
    """Return the handler of the document of a gateway that serves `model`. The document is written once."""
    body = _written(model)

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-cache"})

    return show


def _operation(endpoint: Endpoint) -> Schema:
    parameters = (*endpoint.parameters, "ClientRequestId")
    operation: Schema = {
        "operationId": f"{endpoint.method}_" + "_".join(part.strip("{}") for part in endpoint.path.split("/") if part),
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "responses": {"200": _answer(endpoint)},
    }
    if endpoint.request:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(endpoint.request)}}}
    if endpoint.form:
        operation["requestBody"] = {"required": True, "content": {FORM: {"schema": ref(endpoint.form)}}}
    if endpoint.not_ready:
        content = {JSON: {"schema": ref(endpoint.not_ready)}}
        operation["responses"]["503"] = {"description": "Not ready", "headers": _IDS, "content": content}
    for status in sorted({*EVERY, *endpoint.errors}):
        reference = f"#/components/responses/{_error_of(endpoint, status)}"
        operation["responses"].setdefault(str(status), {"$ref": reference})
    return operation


def _answer(endpoint: Endpoint) -> Schema:
    content: Schema = {}
    for kind, name in endpoint.answers.items():
        if kind == EVENTS:
            content[kind] = {"schema": _event(name)}
        elif kind in (HTML, BYTES):
            content[kind] = {"schema": TEXT}
        else:
            content[kind] = {"schema": ref(name) if name else {"type": "object"}}
    can_be_without_effect = not endpoint.table.keys().isdisjoint(NO_EFFECT.keys() | WITHOUT_EFFECT.keys())
    no_effect = {NO_EFFECT_HEADER: {"$ref": "#/components/headers/NoEffect"}} if can_be_without_effect else {}
    return {"description": "Success", "headers": _headers(endpoint) | no_effect, "content": content}


def _headers(endpoint: Endpoint) -> Schema:
    return _IDS | {_HEADER_NAMES[name]: {"$ref": f"#/components/headers/{name}"} for name in endpoint.headers}


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
        return {"description": phrase, "headers": _IDS, "content": {JSON: {"schema": ref("Error")}}}
    content = {JSON: {"schema": ref(endpoint.error)}}
    return {"description": phrase, "headers": _headers(endpoint) | wait, "content": content}
