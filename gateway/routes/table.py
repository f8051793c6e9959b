"""The table of the routes of the APIs. A verb of a dialect is a row, as is an endpoint that only one API has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.chat import ChatDialect
from quire.gateway.api.completions import CompletionDialect
from quire.gateway.api.messages.answer import MessageDialect
from quire.gateway.api.responses.body import PREFIX
from quire.gateway.features.tokenization import tokenization
from quire.gateway.routes import message_routes, responses
from quire.gateway.serving import embedding_calls
from quire.gateway.serving.calls import cancel, park, resume, serve, unpark
from quire.gateway.serving.dispatch import ModelDirectory, ModelHandler, by_body, by_id
from quire.gateway.serving.service import Gateway

CHAT, TEXT, MESSAGE = ChatDialect(), CompletionDialect(), MessageDialect()
# An id of a response has its prefix, so that other paths below are not taken for one.
RESPONSE = f"/v1/responses/{{id:{PREFIX}[^/]*}}"


def _of_caller(verb: Callable[..., Awaitable[web.StreamResponse]]) -> ModelHandler:
    """Return the handler of a verb for the responses of the caller."""

    async def handle(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        return await verb(responses.dialect(gateway, request), gateway, request)

    return handle


def by_charged_body(directory: ModelDirectory, handler: ModelHandler) -> Handler:
    """Like `by_body`, for a call of an API key."""
    return by_body(directory, handler, is_charged=True)


# Method, path, how the model of a request is found, and the handler. A GET has no HEAD without a row for it: a HEAD
# request would attach to the generation request.
ROUTES: tuple[tuple[str, str, Callable[[ModelDirectory, Any], Handler], Callable[..., Any]], ...] = (
    ("POST", "/v1/chat/completions", by_charged_body, partial(serve, CHAT)),
    ("GET", "/v1/chat/completions/{id}/stream", by_id, partial(resume, CHAT)),
    ("POST", "/v1/chat/completions/{id}/cancel", by_id, partial(cancel, CHAT)),
    ("POST", "/v1/chat/completions/{id}/park", by_id, partial(park, CHAT)),
    ("POST", "/v1/chat/completions/{id}/unpark", by_id, partial(unpark, CHAT)),
    ("POST", "/v1/completions", by_charged_body, partial(serve, TEXT)),
    ("GET", "/v1/completions/{id}/stream", by_id, partial(resume, TEXT)),
    ("POST", "/v1/completions/{id}/cancel", by_id, partial(cancel, TEXT)),
    ("POST", "/v1/completions/{id}/park", by_id, partial(park, TEXT)),
    ("POST", "/v1/completions/{id}/unpark", by_id, partial(unpark, TEXT)),
    ("POST", "/v1/embeddings", by_charged_body, embedding_calls.serve),
    ("POST", "/v1/messages", by_charged_body, partial(serve, MESSAGE)),
    ("POST", "/v1/messages/count_tokens", by_body, message_routes.count),
    ("GET", "/v1/messages/{id}/stream", by_id, partial(resume, MESSAGE)),
    ("POST", "/v1/messages/{id}/cancel", by_id, partial(cancel, MESSAGE)),
    ("POST", "/v1/messages/{id}/park", by_id, partial(park, MESSAGE)),
    ("POST", "/v1/messages/{id}/unpark", by_id, partial(unpark, MESSAGE)),
    ("POST", "/tokenize", by_body, tokenization.tokenize),
    ("POST", "/detokenize", by_body, tokenization.detokenize),
    ("GET", "/tokenizer_info", lambda directory, handler: partial(handler, directory), tokenization.info),
    ("HEAD", "/tokenizer_info", lambda directory, handler: partial(handler, directory), tokenization.info),
    ("POST", "/v1/responses", by_charged_body, _of_caller(serve)),
    ("POST", "/v1/responses/input_tokens", by_body, _of_caller(responses.count)),
    ("GET", RESPONSE, by_id, _of_caller(responses.retrieve)),
    ("DELETE", RESPONSE, by_id, _of_caller(responses.delete)),
    ("POST", f"{RESPONSE}/cancel", by_id, _of_caller(responses.cancel)),
    ("POST", f"{RESPONSE}/park", by_id, _of_caller(park)),
    ("POST", f"{RESPONSE}/unpark", by_id, _of_caller(unpark)),
    ("GET", f"{RESPONSE}/input_items", by_id, _of_caller(responses.input_items)),
)


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes of the APIs for the models of a directory."""
    return [
        web.RouteDef(method, path, found_by(directory, handler), {"allow_head": False} if method == "GET" else {})
        for method, path, found_by, handler in ROUTES
    ]
