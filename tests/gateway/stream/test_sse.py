"""Ids of events are read strictly and ordered; clients that fail on ids get none."""

from __future__ import annotations

import json

import pytest

from quire.gateway.stream.sse import BEGINNING, EventId, dumps, event, quote, takes_ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", EventId(0)),
        ("12", EventId(12)),
        ("0.1", EventId(0, 1)),
        ("9999999999.999999", EventId(9999999999, 999999)),
        ("12.0", None),
        ("012", None),
        ("12.01", None),
        ("12.", None),
        (".1", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1\n", None),
        ("١", None),
        ("10000000000", None),
        ("1.1000000", None),
        ("", None),
    ],
)
def test_an_id_is_read_strictly_and_written_as_it_was(text: str, expected: EventId | None) -> None:
    found = EventId.parse(text)
    assert found == expected
    if found is not None:
        assert str(found) == text


def test_ids_are_ordered_by_tokens_then_by_what_follows_them() -> None:
    texts = ["0", "0.1", "0.2", "1", "1.1", "9", "10", "10.2", "10.10"]
    ids = [EventId.parse(text) for text in texts]
    assert None not in ids
    assert ids == sorted(ids)  # type: ignore[type-var]
    assert ids[0] == BEGINNING


@pytest.mark.parametrize(
    ("agent", "accept", "expected"),
    [
        ("", "", True),
        ("OpenAI/Python 1.0", "application/json", True),
        ("Python/3.11 aiohttp/3.9", "*/*", False),
        ("Python/3.11 aiohttp/3.9", "text/event-stream", True),
    ],
)
def test_bare_aiohttp_gets_ids_only_if_it_accepts_event_streams(agent: str, accept: str, expected: bool) -> None:
    assert takes_ids({"User-Agent": agent, "Accept": accept}) is expected
    assert takes_ids({})


def test_no_text_can_end_the_line_of_an_event() -> None:
    text = 'a\nb\r\n\u2028\u2029\x85\x00"\\ \ud800 😀'
    data = f'{{"text":{quote(text)},"list":{dumps([1, 2])}}}'
    written = event(data)
    assert written.splitlines() == [f"data: {data}", ""]
    assert written.isascii()
    assert json.loads(written.removeprefix("data: ")) == {"text": text, "list": [1, 2]}
