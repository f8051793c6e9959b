"""The table of the routes of the APIs. A verb of a dialect is a row, as is an endpoint that only one API has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.chat import ChatDialect
from quire.gateway.api.completions import CompletionDialect
from quire.gateway.api.messages.answer import MessageDialect
from quire.gateway.api.responses.body import PREFIX
from quire.gateway.routes import message_routes, responses
from quire.gateway.routes.responses import of_caller
from quire.gateway.serving import embedding_calls
from quire.gateway.serving.calls import cancel, park, resume, serve, unpark
from quire.gateway.serving.dispatch import ModelDirectory, by_body, by_charged_body, by_id

# An id of a response has its prefix, so that other paths below are not taken for one.
RESPONSE = f"/v1/responses/{{id:{PREFIX}[^/]*}}"


# The verbs of a dialect that streams: method, end of the path, how the model of a request is found, and the verb.
VERBS = (
    ("POST", "", by_charged_body, serve),
    ("GET", "/{id}/stream", by_id, resume),
    ("POST", "/{id}/cancel", by_id, cancel),
    ("POST", "/{id}/park", by_id, park),
    ("POST", "/{id}/unpark", by_id, unpark),
)
DIALECTS = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionDialect(),
    "/v1/messages": MessageDialect(),
}
# Method, path, how the model of a request is found, and the handler. A GET has no HEAD, which would attach to the
# generation request.
ROUTES: tuple[tuple[str, str, Callable[[ModelDirectory, Any], Handler], Callable[..., Any]], ...] = (
    *(
        (method, path + end, found_by, partial(verb, dialect))
        for path, dialect in DIALECTS.items()
        for method, end, found_by, verb in VERBS
    ),
    ("POST", "/v1/embeddings", by_charged_body, embedding_calls.serve),
    ("POST", "/v1/messages/count_tokens", by_body, message_routes.count),
    ("POST", "/v1/responses", by_charged_body, of_caller(serve)),
    ("POST", "/v1/responses/input_tokens", by_body, of_caller(responses.count)),
    ("GET", RESPONSE, by_id, of_caller(responses.retrieve)),
    ("DELETE", RESPONSE, by_id, of_caller(responses.delete)),
    ("POST", f"{RESPONSE}/cancel", by_id, of_caller(responses.cancel)),
    ("POST", f"{RESPONSE}/park", by_id, of_caller(park)),
    ("POST", f"{RESPONSE}/unpark", by_id, of_caller(unpark)),
    ("GET", f"{RESPONSE}/input_items", by_id, of_caller(responses.input_items)),
)


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes of the APIs for the models of a directory."""
    return [
        web.RouteDef(method, path, found_by(directory, handler), {"allow_head": False} if method == "GET" else {})
        for method, path, found_by, handler in ROUTES
    ]
