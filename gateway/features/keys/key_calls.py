"""/admin/keys: makes, lists, limits, rotates and revokes API keys; /admin/projects and /admin/organisations: limits."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from quire.gateway.admission.retry import AccountRetry
from quire.gateway.api.parsing import read_object
from quire.gateway.errors.api_errors import NotFound, of_check, refused
from quire.gateway.features.keys.key_ring import KeyRing
from quire.shared.accounts.account import DEFAULT_NAME
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import UnknownAccount
from quire.shared.config.validators import Integer, InvalidValue

T = TypeVar("T")

PATH = "/admin/keys"
MAX_BODY_BYTES = 65_536
# Longest life of a key, and longest time for which a rotated secret stays valid, in seconds.
MAX_LIFE_S = 100 * 366 * 86_400
MAX_GRACE_S = 30 * 86_400
MAX_AUDIT_PAGE = 1000


class KeyCalls:
    """Handlers of the admin API for API keys."""

    def __init__(self, ring: KeyRing, retry: AccountRetry, body_timeout_s: float) -> None:
        self._ring = ring
        self._store = ring.store
        self._retry = retry
        self._body_timeout_s = body_timeout_s

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. The admin API checks its key before it calls a handler."""
        key_path = PATH + "/{id:[0-9a-f]{16}}"
        return [
            web.get(PATH, self.all, allow_head=False),
            web.post(PATH, self.create),
            web.get(key_path, self.show, allow_head=False),
            web.delete(key_path, self.revoke),
            web.post(key_path + "/rotate", self.rotate),
            web.put(key_path + "/limits", partial(self.limit, "key")),
            web.put("/admin/projects/{id:[^/]+/[^/]+}/limits", partial(self.limit, "project")),
            web.put("/admin/organisations/{id:[^/]+}/limits", partial(self.limit, "organisation")),
            web.get("/admin/accounts", self.accounts, allow_head=False),
            web.get("/admin/audit", self.audit, allow_head=False),
        ]

    async def all(self, request: web.Request) -> web.Response:
        """GET /admin/keys: all keys."""
        accounts = await self._retry(self._store.all)
        return _list([account.shown() for account in accounts if account.kind == "key"])

    async def accounts(self, request: web.Request) -> web.Response:
        """GET /admin/accounts: all organisations, projects and keys."""
        return _list([account.shown() for account in await self._retry(self._store.all)])

    async def create(self, request: web.Request) -> web.Response:
        """POST /admin/keys: makes a key; only this answer has its secret."""
        body = await self._body(request, ("name", "project", "organisation", "expires_in_s", "limits"))
        organisation, project, name = (body.get(part, DEFAULT_NAME) for part in ("organisation", "project", "name"))
        life_s = _whole(body, "expires_in_s", MAX_LIFE_S)
        limits = _limits(body.get("limits", {}))
        expires = await self._retry(partial(self._store.expiry, life_s))
        account, secret = await self._changed(self._store.create(organisation, project, name, limits, expires))
        return web.json_response({**account.shown(), "key": secret}, status=201)

    async def show(self, request: web.Request) -> web.Response:
        """GET /admin/keys/{id}: one key."""
        place = f"key:{request.match_info['id']}"
        return web.json_response((await self._changed(self._store.get(place))).shown())

    async def revoke(self, request: web.Request) -> web.Response:
        """DELETE /admin/keys/{id}: makes a key invalid; this cannot be undone."""
        return web.json_response((await self._changed(self._store.revoke(request.match_info["id"]))).shown())

    async def rotate(self, request: web.Request) -> web.Response:
        """POST /admin/keys/{id}/rotate: gives a key a new secret; only this answer has it."""
        grace_s = _whole(await self._body(request, ("grace_s",)), "grace_s", MAX_GRACE_S)
        account, secret = await self._changed(self._store.rotate(request.match_info["id"], grace_s))
        return web.json_response({**account.shown(), "key": secret})

    async def limit(self, kind: str, request: web.Request) -> web.Response:
        """PUT /admin/.../{id}/limits: replaces the limits of a key, a project or an organisation."""
        body = await read_object(request, MAX_BODY_BYTES, self._body_timeout_s)
        place = f"{kind}:{request.match_info['id']}"
        return web.json_response((await self._changed(self._store.limit(place, _limits(body)))).shown())

    async def audit(self, request: web.Request) -> web.Response:
        """GET /admin/audit: the newest changes of keys, projects and organisations."""
        rows = await self._retry(partial(self._store.audit, MAX_AUDIT_PAGE))
        return _list(
            [
                {"at": row.at_ms / 1000, "actor": row.actor, "action": row.action, "accounts": row.accounts.split()}
                | {"change": row.change}
                for row in rows
            ]
        )

    async def _body(self, request: web.Request, known: tuple[str, ...]) -> dict[str, Any]:
        """Read the body of a call, which may be missing. Raises ApiError."""
        if not request.body_exists:
            return {}
        body = await read_object(request, MAX_BODY_BYTES, self._body_timeout_s)
        if unknown := sorted(body.keys() - set(known)):
            first = unknown[0][:100]
            raise refused(first, f"{first} is not a parameter of this call; it has {', '.join(known)}.")
        return body

    async def _changed(self, work: Awaitable[T]) -> T:
        """Wait for a change, and drop what this gateway remembers. Raises ApiError.

        A change is not repeated if the reply of Redis is lost: its effect is unknown, and the audit log has it.
        """
        try:
            return await self._retry.once(work)
        except UnknownAccount as error:
            raise NotFound(f"There is no account {str(error)[:200]!r}.", param="id") from None
        except InvalidValue as error:
            raise of_check(error) from None
        finally:
            self._ring.forget()


def _list(data: list[dict[str, Any]]) -> web.Response:
    return web.json_response({"object": "list", "data": data})


def _whole(body: dict[str, Any], name: str, most: int) -> int:
    try:
        return Integer(0, most)(name, body.get(name, 0))
    except InvalidValue as error:
        raise of_check(error) from None


def _limits(given: Any) -> AccountLimits:
    if type(given) is not dict:
        raise refused("limits", "limits must be an object.")
    try:
        return AccountLimits.of(given)
    except InvalidValue as error:
        raise of_check(error) from None
