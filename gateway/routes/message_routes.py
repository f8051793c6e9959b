"""The routes of the Messages API. Resuming, cancelling and parking are extensions, as for chats."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api.messages.answer import MessageDialect, count_tokens
from quire.gateway.api.messages.headers import check_headers
from quire.gateway.api.parsing import read_object
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES
from quire.gateway.errors.message_errors import PATH
from quire.gateway.serving import calls
from quire.gateway.serving.dispatch import ModelDirectory, by_body, by_id
from quire.gateway.serving.service import Gateway

DIALECT = MessageDialect()


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Returns the routes of the Messages API."""
    return [
        web.post(PATH, by_body(directory, _create, is_charged=True)),
        web.post(f"{PATH}/count_tokens", by_body(directory, _count_tokens)),
        # No HEAD: a HEAD request would attach to the generation request.
        web.get(f"{PATH}/{{id}}/stream", by_id(directory, _resume), allow_head=False),
        web.post(f"{PATH}/{{id}}/cancel", by_id(directory, _cancel)),
        web.post(f"{PATH}/{{id}}/park", by_id(directory, _park)),
        web.post(f"{PATH}/{{id}}/unpark", by_id(directory, _unpark)),
    ]


async def _create(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/messages: generates a message."""
    request[NO_EFFECT_NAMES] = ", ".join(check_headers(request.headers))
    return await calls.serve(gateway, DIALECT, request)


async def _resume(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """GET /v1/messages/{id}/stream"""
    return await calls.resume(gateway, DIALECT, request)


async def _cancel(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/messages/{id}/cancel"""
    return await calls.cancel(gateway, DIALECT, request)


async def _park(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/messages/{id}/park"""
    return await calls.park(gateway, DIALECT, request)


async def _unpark(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/messages/{id}/unpark"""
    return await calls.unpark(gateway, DIALECT, request)


async def _count_tokens(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: counts the tokens of a prompt without generating."""
    betas = check_headers(request.headers)
    settings = gateway.settings
    body = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
    tokens, no_effect = await count_tokens(body, gateway.limits, gateway.renderer)
    request[NO_EFFECT_NAMES] = ", ".join((*betas, *no_effect))
    return web.json_response({"input_tokens": tokens})
