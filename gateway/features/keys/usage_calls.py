"""GET /v1/usage: the usage of the caller's key. GET /admin/usage: that of all keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from quire.gateway.admission.retry import AccountRetry
from quire.gateway.api.caller import caller_of
from quire.gateway.errors.api_errors import ApiKeyWrong, refused
from quire.shared.accounts.usage import MAX_DAYS, UsageRow, as_csv
from quire.shared.config.validators import shown

DEFAULT_DAYS = 31
FORMATS = ("json", "csv")


class UsageCalls:
    """Handlers of one gateway process. usage: returns the usage of the last days of a key, or of all keys."""

    def __init__(self, retry: AccountRetry, usage: Callable[[int, str], Awaitable[list[UsageRow]]]) -> None:
        self._retry = retry
        self._usage = usage

    async def own(self, request: web.Request) -> web.Response:
        """GET /v1/usage: requests and tokens of the caller's key by day and model."""
        owner = caller_of(request).owner
        if not owner:
            raise ApiKeyWrong("The usage is counted by API key; send one.", headers={"WWW-Authenticate": "Bearer"})
        return await self._answer(request, owner)

    async def all(self, request: web.Request) -> web.Response:
        """GET /admin/usage: the usage of all keys."""
        return await self._answer(request, "")

    async def _answer(self, request: web.Request, owner: str) -> web.Response:
        days, form = _read_query(request)
        rows = await self._retry(partial(self._usage, days, owner))
        if form == "csv":
            return web.Response(text=as_csv(rows), content_type="text/csv", charset="utf-8")
        return web.json_response({"object": "list", "data": [row.shown() for row in rows]})


def _read_query(request: web.Request) -> tuple[int, str]:
    """Read the number of days and the format. Raises InvalidRequest."""
    for name in request.query:
        if name not in ("days", "format") or len(request.query.getall(name)) > 1:
            raise refused(name[:80], f"{name[:80]} is not a parameter of this call, or is given twice.")
    days = request.query.get("days", str(DEFAULT_DAYS))
    if not days.isascii() or not days.isdigit() or len(days) > 3 or not 1 <= int(days) <= MAX_DAYS:
        raise refused("days", f"days must be an integer from 1 to {MAX_DAYS}, not {shown(days)}.")
    form = request.query.get("format", "json")
    if form not in FORMATS:
        raise refused("format", f"format must be {' or '.join(FORMATS)}, not {shown(form)}.")
    return int(days), form
