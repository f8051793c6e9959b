"""Finds the model of an HTTP request before its handler runs: by the body's `model`, or by the id of a call.

Handlers serve one model and do not know of others.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.caller import caller_of
from quire.gateway.api.headers import IDEMPOTENCY_KEY
from quire.gateway.api.parsing import BODY, read_object
from quire.gateway.errors.api_errors import ApiError, NotFound
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.shared.protocol.keys import LaneKeys

__all__ = ["ModelDirectory", "ModelHandler", "by_body", "by_charged_body", "by_conversation", "by_id"]

# Handles a request for one model.
ModelHandler = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]

_CALL_ID = re.compile(r"[0-9a-f]{32}$", re.ASCII)


def by_body(directory: ModelDirectory, handler: ModelHandler, *, is_charged: bool = False) -> Handler:
    """Return a handler for requests whose body names the model.

    The body is read once, and the handler gets it from `read_object`. An error is raised there as well, so that it is
    counted with the handler's calls; without any model it is raised at once.

    is_charged: the request is a call of its API key, which is refused unread if the key's limit is known to be reached.
    A repeated call is read: one that was accepted before is not charged again.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        settings = directory.process.settings
        try:
            if is_charged and IDEMPOTENCY_KEY not in request.headers:
                directory.process.keys.check_reached(caller_of(request))
            body = request[BODY] = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
            gateway = directory.choose(body.get("model"), caller_of(request))
            del body  # the handler drops it before the answer is written
        except ApiError as error:
            models = directory.gateways
            if not models:
                raise
            request[BODY], gateway = error.with_traceback(None), models[0]
        try:
            return await handler(gateway, request)
        finally:
            request.pop(BODY, None)

    return handle


def by_charged_body(directory: ModelDirectory, handler: ModelHandler) -> Handler:
    """Like `by_body`, for a call of an API key."""
    return by_body(directory, handler, is_charged=True)


def by_id(
    directory: ModelDirectory, handler: ModelHandler, *, key: Callable[[LaneKeys, str], str] = LaneKeys.request
) -> Handler:
    """Return a handler for requests whose path ends an id with that of a call; the id is checked by the handler.

    key: of the hash in Redis that has this id, by default that of a request.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        match = _CALL_ID.search(request.match_info["id"])
        models = directory.gateways
        gateway = (await directory.holding(match[0], key)) if match else (models[0] if models else None)
        if gateway is None:
            raise NotFound("There is no such call: this server has no model yet.")
        return await handler(gateway, request)

    return handle


# Like `by_id`, for the id of a conversation.
by_conversation = partial(by_id, key=LaneKeys.kept_conversation)
