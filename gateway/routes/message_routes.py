"""The handler that only the Messages API has: count tokens."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api.messages.answer import MessageDialect, count_tokens
from quire.gateway.api.parsing import read_object
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES
from quire.gateway.serving.service import Gateway


async def count(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: counts the tokens of a prompt without generating."""
    betas = MessageDialect().check_headers(request.headers)
    settings = gateway.settings
    body = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
    tokens, no_effect = await count_tokens(body, gateway.limits, gateway.renderer_for(request))
    request[NO_EFFECT_NAMES] = ", ".join((*betas, *no_effect))
    return web.json_response({"input_tokens": tokens})
