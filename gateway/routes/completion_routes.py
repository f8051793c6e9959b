"""The routes of chats and completions."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api.chat import ChatDialect
from quire.gateway.api.completions import CompletionDialect
from quire.gateway.serving import calls
from quire.gateway.serving.dispatch import ModelDirectory, by_body, by_id

DIALECTS: dict[str, calls.Dialect] = {"/v1/chat/completions": ChatDialect(), "/v1/completions": CompletionDialect()}


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Returns the routes of chats and completions."""
    return [route for path, dialect in DIALECTS.items() for route in _routes(directory, path, dialect)]


def _routes(directory: ModelDirectory, path: str, dialect: calls.Dialect) -> list[web.RouteDef]:
    return [
        web.post(
            path,
            by_body(directory, lambda gateway, request: calls.serve(gateway, dialect, request), is_charged=True),
        ),
        # No HEAD: a HEAD request would attach to the generation request.
        web.get(
            f"{path}/{{id}}/stream",
            by_id(directory, lambda gateway, request: calls.resume(gateway, dialect, request)),
            allow_head=False,
        ),
        web.post(
            f"{path}/{{id}}/cancel", by_id(directory, lambda gateway, request: calls.cancel(gateway, dialect, request))
        ),
        web.post(
            f"{path}/{{id}}/park", by_id(directory, lambda gateway, request: calls.park(gateway, dialect, request))
        ),
        web.post(
            f"{path}/{{id}}/unpark", by_id(directory, lambda gateway, request: calls.unpark(gateway, dialect, request))
        ),
    ]
