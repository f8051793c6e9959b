"""The parameters of a new batch."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.batch_parameters import BATCHES, MAX_WINDOW_S, expires_after, window_s
from quire.gateway.api.parameters import read
from quire.gateway.errors.api_errors import InvalidRequest

GIVEN = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("window", "seconds"), [("1m", 60), ("90m", 5400), ("24h", 86_400), ("7d", 604_800), ("14d", MAX_WINDOW_S)]
)
def test_windows(window: str, seconds: int) -> None:
    assert read(GIVEN | {"completion_window": window}, BATCHES, {})["completion_window"] == window
    assert window_s(window) == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("completion_window", value) for value in ("0h", "24", "h", "-1h", "1.5h", "15d", "24H", "24h ", 24)),
        ("completion_window", "999999h"),
        ("endpoint", "/v1/messages"),
        ("endpoint", ["/v1/embeddings"]),
        ("input_file_id", ""),
        ("input_file_id", 5),
        ("input_file_id", "x" * 129),
        ("metadata", {"k" * 65: "x"}),
        ("output_expires_after", 3600),
        ("output_expires_after", {"anchor": "created_at"}),
        ("output_expires_after", {"anchor": "now", "seconds": 3600}),
        ("output_expires_after.seconds", {"anchor": "created_at", "seconds": 3599}),
        ("output_expires_after.seconds", {"anchor": "created_at", "seconds": True}),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(GIVEN | {name.partition(".")[0]: value}, BATCHES, {})
    assert caught.value.param == name


@pytest.mark.parametrize("name", GIVEN)
def test_the_first_three_are_required(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is required") as caught:
        read({key: value for key, value in GIVEN.items() if key != name}, BATCHES, {})
    assert caught.value.param == name


def test_an_expiry_is_a_number_of_seconds() -> None:
    assert expires_after("x", {"anchor": "created_at", "seconds": 2_592_000}) == 2_592_000
