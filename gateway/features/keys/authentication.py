"""The middleware that finds the caller of an HTTP request. Without a key, only PUBLIC paths are open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from quire.gateway.api.caller import CALLER, Caller
from quire.gateway.errors.api_errors import ApiKeyWrong
from quire.shared.accounts.secret import PREFIX

API_KEY = "x-api-key"

# Probes, and files that are the same for everyone. The admin API has a key of its own.
PUBLIC = frozenset(("/health", "/healthz", "/ping", "/readyz", "/version", "/openapi.json", "/docs"))
ADMIN = "/admin/"
_STATIC = (".js", ".css", ".svg")


def authentication(find: Callable[[str], Awaitable[Caller]], is_open: bool) -> Middleware:
    """Return the middleware.

    find: returns the caller of a secret, or raises ApiKeyWrong. is_open: calls without a key of Quire are accepted.
    """

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith(ADMIN):
            secret = read_secret(request)
            if secret.startswith(PREFIX):
                request[CALLER] = await find(secret)
            elif not is_open and not is_public(request):
                raise ApiKeyWrong(
                    "This server needs an API key. Send one as Authorization: Bearer KEY or x-api-key: KEY.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return authenticate


def read_secret(request: web.BaseRequest) -> str:
    """Return the bearer token or the x-api-key of a request; empty without one. Raises ApiKeyWrong for two."""
    secrets = {value.strip() for value in request.headers.getall(API_KEY, [])}
    for value in request.headers.getall(hdrs.AUTHORIZATION, []):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            secrets.add(token.strip())
    secrets.discard("")
    keys = [secret for secret in secrets if secret.startswith(PREFIX)]
    if len(keys) > 1:
        raise ApiKeyWrong("The request has two API keys; send one.", headers={"WWW-Authenticate": "Bearer"})
    return keys[0] if keys else next(iter(secrets), "")


def is_public(request: web.Request) -> bool:
    """Return True if a request is answered without a key: a probe, a static file, or a page without its data."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else ""
    return path in PUBLIC or path in ("/", "/engine") or path.endswith(_STATIC)
