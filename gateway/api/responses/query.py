"""Reads the query strings of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from quire.gateway.api.paging import AFTER, LIMIT, ORDER, ListQuery, PageQuery, read_query
from quire.gateway.api.responses.body import PREFIX
from quire.gateway.api.responses.events import START
from quire.gateway.api.responses.parameters import IMAGE_URLS, LOGPROBS, NOT_HERE
from quire.gateway.api.resume import AS_STARTING_AFTER, LAST_EVENT_ID, STARTING_AFTER
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, InvalidRequest, refused
from quire.shared.config.schema_parts import FLAG, Schema, id_parameter, request_parameter
from quire.shared.config.validators import Integer, shown

# The input items, with the default and the limit of the OpenAI API reference.
ITEMS = ListQuery(20, 100, (LIMIT, ORDER, AFTER))
# Digits of the number of an event.
MAX_NUMBER_DIGITS = 10
_NUMBER = Integer(0, 10**MAX_NUMBER_DIGITS - 1)
# By their names in /openapi.json.
PARAMETERS: Schema = {
    "ResponseId": id_parameter(PREFIX),
    "Stream": request_parameter("query", "stream", FLAG, "events instead of the response"),
    "StartingAfterNumber": request_parameter(
        "query", STARTING_AFTER, _NUMBER, "the `sequence_number` of the last event that the client has"
    ),
    "LastNumber": request_parameter("header", LAST_EVENT_ID, _NUMBER, AS_STARTING_AFTER),
    "ItemsLimit": ITEMS.limit_parameter,
}
_INCLUDE = ("include", "include[]")


def read_place(request: web.Request) -> tuple[bool, int]:
    """Read whether a GET asks for events, and the number of the client's last event. Raises InvalidRequest."""
    query = _only(request, ("stream", STARTING_AFTER, "include_obfuscation"))
    is_stream = _flag("stream", query.get("stream", "false"))
    if _flag("include_obfuscation", query.get("include_obfuscation", "false")):
        raise refused("include_obfuscation", "include_obfuscation must be false: this server adds no random text.")
    if not is_stream:
        if STARTING_AFTER in query:
            raise refused(STARTING_AFTER, f"{STARTING_AFTER} is allowed only with stream=true; leave it out.")
        return False, START
    # The header has precedence: browsers that reconnect update only the header.
    places = ((LAST_EVENT_ID, request.headers.get(LAST_EVENT_ID)), (STARTING_AFTER, query.get(STARTING_AFTER)))
    for name, given in places:
        if given is not None:
            if not given.isascii() or not given.isdigit() or len(given) > MAX_NUMBER_DIGITS:
                raise wrong_place(f"{name} must be the sequence_number of an event, not {shown(given)}.", name)
            return True, int(given)
    return True, START


def read_page(request: web.Request) -> PageQuery:
    """Return the page of input items that a query asks for. Raises InvalidRequest."""
    return ITEMS.page(_only(request, ITEMS.names))


def read_item(request: web.Request) -> bool:
    """Return whether a query for one item asks for the URLs of images. Raises InvalidRequest."""
    _only(request, ())
    return shows_images(request)


def shows_images(request: web.Request) -> bool:
    """Return whether a query asks for the URLs of images."""
    return any(name in _INCLUDE and value == IMAGE_URLS for name, value in request.query.items())


def _only(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """Return the query of a request, each parameter once; without effect, `include` is named. Raises InvalidRequest."""
    query = list(request.query.items())
    for name, value in query:
        if name in _INCLUDE:
            if value not in (LOGPROBS, IMAGE_URLS, *NOT_HERE):
                raise refused("include", f"include has no {shown(value)}.")
            if value != IMAGE_URLS:
                request[NO_EFFECT_NAMES] = "include"
    return read_query(((name, value) for name, value in query if name not in _INCLUDE), known)


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise refused(name, f"{name} must be true or false, not {shown(value)}.")
    return value == "true"


def index_of(items: Sequence[Mapping[str, Any]], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise refused("after", f"after names no item of this list: {shown(item_id)}.")


def wrong_place(message: str, name: str = STARTING_AFTER) -> InvalidRequest:
    return InvalidRequest(message, param=name, code="invalid_event_id")
