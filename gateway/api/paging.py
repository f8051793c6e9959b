"""The query of a list: how many items, and after which one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from quire.gateway.errors.api_errors import InvalidRequest, refused
from quire.shared.config.validators import shown


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page that a client asks for. after: the id of the item before it; empty for the first page. more: other
    parameters of the query that were given."""

    limit: int
    after: str
    more: dict[str, str] = field(default_factory=dict)


def read_page_query(request: web.Request, default: int, most: int, more: Sequence[str] = ()) -> PageQuery:
    """Read `limit`, `after` and the parameters `more`, each at most once. Raises InvalidRequest."""
    fields: dict[str, str] = {}
    known = ("limit", "after", *more)
    for name, value in request.query.items():
        if name not in known:
            raise InvalidRequest(
                f"{name[:80]!r} is not a parameter of this call; it has {', '.join(known)}.",
                param=name[:80],
                code="unknown_parameter",
            )
        if name in fields:
            raise refused(name, f"{name} is given twice; give it once.")
        fields[name] = value
    limit = fields.pop("limit", str(default))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 6 or not 1 <= int(limit) <= most:
        raise refused("limit", f"limit must be an integer from 1 to {most}, not {shown(limit)}.")
    return PageQuery(int(limit), fields.pop("after", ""), fields)
