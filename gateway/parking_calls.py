"""The verbs that park a call and continue it: POST .../{id}/park and POST .../{id}/unpark."""

from __future__ import annotations

from aiohttp import web

from quire.gateway import calls
from quire.gateway.admission.parking import ParkingState
from quire.gateway.api.call_metadata import request_id
from quire.gateway.api.caller import caller_of
from quire.gateway.api.resume import StoredCall
from quire.gateway.directory.dispatch import ModelDirectory, by_id
from quire.gateway.service import Gateway
from quire.shared.accounts.charge import Charge


def routes(directory: ModelDirectory, path: str, dialect: calls.Dialect) -> list[web.RouteDef]:
    """Returns the routes of a dialect whose calls are created at `path`."""

    async def park(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        call_id, known = await calls.find(gateway, dialect, request)
        return await park_call(gateway, dialect.prefix, call_id, known)

    async def unpark(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        call_id, known = await calls.find(gateway, dialect, request)
        return await unpark_call(gateway, dialect.prefix, call_id, known, request)

    return [
        web.post(f"{path}/{{id}}/park", by_id(directory, park)),
        web.post(f"{path}/{{id}}/unpark", by_id(directory, unpark)),
    ]


async def park_call(gateway: Gateway, prefix: str, call_id: str, known: StoredCall) -> web.Response:
    """Parks a call. A call that has ended, or is about to end, stays as it is. Raises ParkingIsFull or BrokerDown."""
    return _answer(prefix + call_id, await gateway.parking.park(_requests(call_id, known)))


async def unpark_call(
    gateway: Gateway, prefix: str, call_id: str, known: StoredCall, request: web.Request
) -> web.Response:
    """Queues a parked call again. A call that is not parked stays as it is. Raises ApiError."""
    accounts = caller_of(request).accounts
    charge = Charge(accounts, gateway.model.name) if accounts else None
    return _answer(prefix + call_id, await gateway.parking.unpark(_requests(call_id, known), charge))


def _requests(call_id: str, known: StoredCall) -> list[str]:
    return [request_id(call_id, index) for index in range(known.about.requests)]


def _answer(public_id: str, state: ParkingState) -> web.Response:
    return web.json_response(
        {
            "id": public_id,
            "parked": state.is_parked,
            "ended": state.has_ended,
            "expires_at": None if state.until is None else int(state.until),
        }
    )
