"""The fields of a share, as the scripts write them."""

from __future__ import annotations

import pytest

from quire.shared.share import Share


@pytest.mark.parametrize(
    ("tenant", "user", "expected"),
    [
        ("standard 100 anonymous", "12 ", Share()),
        ("batch 7 acme/web", "0 0123456789abcdef", Share("acme/web", "0123456789abcdef", 7)),
        ("batch 1000 acme/web", "5 ", Share("acme/web", "", 1000)),
    ],
)
def test_the_fields_of_a_request_are_read_as_they_are_written(tenant: str, user: str, expected: Share) -> None:
    assert Share.of_fields(tenant, user) == expected


@pytest.mark.parametrize(
    ("tenant", "user"),
    [
        ("", ""),
        ("acme/web", "0 "),
        ("standard 0 acme/web", "0 "),
        ("standard 1001 acme/web", "0 "),
        ("standard 100 acme web", "0 "),
        ("standard 100 acme/web", "clear text"),
        ("standard 100 acme/web", "-1 aa"),
    ],
)
def test_corrupt_fields_count_for_calls_without_a_key(tenant: str, user: str) -> None:
    assert Share.of_fields(tenant, user) == Share()
