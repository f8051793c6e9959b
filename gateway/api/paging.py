"""The query of a list: how many items, after which one, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from quire.gateway.errors.api_errors import InvalidRequest, refused
from quire.shared.config.schema_parts import TEXT, Schema, request_parameter
from quire.shared.config.validators import Integer, OneOf, shown

LIMIT, AFTER, ORDER = "limit", "after", "order"
ORDERS = ("asc", "desc")
# By their names in /openapi.json.
PARAMETERS: Schema = {
    "After": request_parameter("query", AFTER, TEXT, "the id of the item before the page"),
    "Order": request_parameter("query", ORDER, OneOf(ORDERS), "by default `desc`: the newest item first"),
}


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page that a client asks for. after: the id of the item before it; empty for the first page. more: other
    parameters of the query that were given."""

    limit: int
    after: str
    order: str
    more: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The query of one list. default, most: items per page. names: of its parameters."""

    default: int
    most: int
    names: tuple[str, ...] = (LIMIT, AFTER)

    @property
    def limit_parameter(self) -> Schema:
        """The parameter `limit` for /openapi.json."""
        return request_parameter("query", LIMIT, Integer(1, self.most), "items per page")

    def read(self, request: web.Request) -> PageQuery:
        """Read the parameters of a query, each at most once. Raises InvalidRequest."""
        return self.page(read_query(request.query.items(), self.names))

    def page(self, fields: dict[str, str]) -> PageQuery:
        """Return the page that these parameters ask for. Raises InvalidRequest."""
        limit = fields.pop(LIMIT, str(self.default))
        if not limit.isascii() or not limit.isdigit() or len(limit) > 6 or not 1 <= int(limit) <= self.most:
            raise refused(LIMIT, f"{LIMIT} must be an integer from 1 to {self.most}, not {shown(limit)}.")
        order = fields.pop(ORDER, "desc")
        if order not in ORDERS:
            raise refused(ORDER, f"{ORDER} must be {' or '.join(ORDERS)}, not {shown(order)}.")
        return PageQuery(int(limit), fields.pop(AFTER, ""), order, fields)


def read_query(query: Iterable[tuple[str, str]], known: Sequence[str]) -> dict[str, str]:
    """Return the parameters of a query, each of which is known and given once. Raises InvalidRequest."""
    fields: dict[str, str] = {}
    for name, value in query:
        if name not in known:
            raise InvalidRequest(
                f"{name[:80]!r} is not a parameter of this call; it has {', '.join(known)}.",
                param=name[:80],
                code="unknown_parameter",
            )
        if name in fields:
            raise refused(name, f"{name} is given twice; give it once.")
        fields[name] = value
    return fields
