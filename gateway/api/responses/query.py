"""Reads the query strings of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from quire.gateway.api.responses.events import START
from quire.gateway.api.responses.parameters import LOGPROBS, NOT_HERE
from quire.gateway.api.resume import LAST_EVENT_ID, STARTING_AFTER
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, InvalidRequest, refused
from quire.shared.config.validators import shown

# Items per page of the input items (OpenAI API reference).
DEFAULT_PAGE, MAX_PAGE = 20, 100


def read_place(request: web.Request) -> tuple[bool, int]:
    """Reads whether a GET asks for events, and the number of the client's last event. Raises InvalidRequest."""
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
            if not given.isascii() or not given.isdigit() or len(given) > 10:
                raise wrong_place(f"{name} must be the sequence_number of an event, not {shown(given)}.", name)
            return True, int(given)
    return True, START


def read_page(request: web.Request) -> tuple[int, str, str]:
    """The limit, the order and the item before the page. Raises InvalidRequest."""
    query = _only(request, ("limit", "order", "after"))
    limit = query.get("limit", str(DEFAULT_PAGE))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= MAX_PAGE:
        raise refused("limit", f"limit must be an integer from 1 to {MAX_PAGE}, not {shown(limit)}.")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refused("order", f"order must be asc or desc, not {shown(order)}.")
    return int(limit), order, query.get("after", "")


def _only(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """The query of a request, each parameter once; `include` has no effect and is named. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for name, value in request.query.items():
        if name in ("include", "include[]"):
            if value != LOGPROBS and value not in NOT_HERE:
                raise refused("include", f"include has no {shown(value)}.")
            request[NO_EFFECT_NAMES] = "include"
            continue
        if name not in known:
            raise InvalidRequest(
                f"{name[:80]!r} is not a parameter of this call; it has {', '.join(known)}.",
                param=name[:80],
                code="unknown_parameter",
            )
        if name in found:
            raise refused(name, f"{name} is given twice; give it once.")
        found[name] = value
    return found


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise refused(name, f"{name} must be true or false, not {shown(value)}.")
    return value == "true"


def index_of(items: Sequence[Mapping[str, Any]], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise refused("after", f"after names no item of this response: {shown(item_id)}.")


def wrong_place(message: str, name: str = STARTING_AFTER) -> InvalidRequest:
    return InvalidRequest(message, param=name, code="invalid_event_id")
