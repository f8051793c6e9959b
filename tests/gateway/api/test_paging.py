"""The query of a list."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from quire.gateway.api.paging import PageQuery, read_page_query
from quire.gateway.errors.api_errors import InvalidRequest


def read(query: str, more: tuple[str, ...] = ()) -> PageQuery:
    return read_page_query(make_mocked_request("GET", f"/?{query}"), 20, 100, more)


def test_defaults_and_given_values() -> None:
    assert read("") == PageQuery(20, "", {})
    assert read("limit=100&after=x&order=asc", ("order",)) == PageQuery(100, "x", {"order": "asc"})


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=1.5", "limit"),
        ("limit=%D9%A1", "limit"),
        ("limit=1000000", "limit"),
        ("limit=1&limit=2", "limit"),
        ("after=a&after=b", "after"),
        ("order=asc", "order"),
        ("before=x", "before"),
    ],
)
def test_other_values_are_refused_by_name(query: str, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(query)
    assert caught.value.param == name
