"""A call is counted once when it ends; its tokens and times are counted as they are written."""

from __future__ import annotations

import pytest

from quire.gateway.stream.call_metadata import DIALECTS
from quire.gateway.telemetry import request_meter
from quire.gateway.telemetry.request_meter import CALL_OUTCOMES, KINDS, RequestMeters

NONE = dict.fromkeys(DIALECTS, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_meter, "clock", clock)
    return clock


def test_the_tokens_and_times_of_a_stream(clock: Clock) -> None:
    meters = RequestMeters()
    meter = meters.open("chat", "new", began=clock.now)
    assert meters.open_calls == {**NONE, "chat": 1}
    assert meter.first_s is None
    clock.now += 0.5
    meter.accepted(7)
    meter.wrote(0, 0.0)  # the opening of the stream brings no token
    clock.now += 1.5
    meter.wrote(3, came_at=clock.now - 0.25)
    clock.now += 1
    meter.wrote(4, came_at=clock.now)
    meter.wrote(4, 0.0)  # the end brings no token
    meter.close("stop")
    assert meter.first_s == 2.0
    assert meters.prompt_tokens["chat"] == 7
    assert meters.completion_tokens == {**NONE, "chat": 4}
    assert (meters.first_token_s["chat"].count, meters.first_token_s["chat"].sum) == (1, 2.0)
    assert (meters.between_tokens_s["chat"].count, meters.between_tokens_s["chat"].sum) == (1, 1.0)
    assert (meters.complete_s["chat"].count, meters.complete_s["chat"].sum) == (1, 3.0)
    assert (meters.overhead_s["accept"].count, meters.overhead_s["accept"].sum) == (1, 0.5)
    assert (meters.overhead_s["deliver"].count, meters.overhead_s["deliver"].sum) == (2, 0.25)
    assert meters.open_calls == NONE


def test_a_resumed_stream_counts_new_tokens_only_and_no_time_to_the_first(clock: Clock) -> None:
    meters = RequestMeters()
    meter = meters.open("completion", "resumed", began=clock.now)
    meter.tokens = 5
    meter.wrote(5, 0.0)
    meter.wrote(8, 0.0)
    meter.close("stop")
    assert meters.completion_tokens["completion"] == 3
    assert meters.first_token_s["completion"].count == meters.complete_s["completion"].count == 0
    assert meters.calls["completion", "resumed", "stop"] == 1


def test_every_outcome_is_there_from_the_start() -> None:
    """A counter that appears with its first event hides that event from Prometheus."""
    meters = RequestMeters()
    assert set(meters.calls) == {
        (dialect, kind, outcome) for dialect in DIALECTS for kind in KINDS for outcome in CALL_OUTCOMES
    }
    assert not any(meters.calls.values())
    assert {"queue_full", "invalid_request", "internal"} <= set(meters.refusals)


def test_open_streams_and_stalled_clients_are_counted() -> None:
    meters = RequestMeters()
    meter = meters.open("chat", "new", began=0.0)
    meter.stream_opened()
    assert meters.open_streams == 1
    meter.client_stalled()
    meter.stream_closed()
    assert (meters.open_streams, meters.slow_clients) == (0, 1)
