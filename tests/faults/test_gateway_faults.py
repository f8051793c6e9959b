"""Clients of a dead gateway resume at another gateway and get exactly the tokens that they have not received."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.faults.calls import FAST, REQUESTS, body, start_streams, undisturbed
from tests.support.faults.stack import FaultStack, Stream, said


@pytest.mark.faults
@pytest.mark.promise
def test_a_killed_gateways_clients_go_on_at_another_where_they_were(stack: FaultStack) -> None:
    """Case 11: clients name their last event in either way. No request is cancelled within the orphans' grace time."""
    gateway, url = stack.gateway()
    _, other = stack.gateway()
    stack.worker("a", *FAST)
    expected = undisturbed(other)
    streams = start_streams(url)
    os.kill(gateway.pid, signal.SIGKILL)
    rests = {}
    for (name, stream), by_header in zip(streams.items(), (True, False, True), strict=True):
        stream.wait_end()
        assert not stream.is_complete
        path, last = f"/v1/completions/{stream.parsed[0]['id']}/stream", stream.events[-1].id
        if by_header:
            rests[name] = Stream(other, {}, {"Last-Event-ID": last}, path, "GET")
        else:
            rests[name] = Stream(other, {}, {}, f"{path}?starting_after={last}", "GET")
    for name, rest in rests.items():
        rest.wait_end()
        assert rest.is_complete, rest.error
        for index, text in enumerate(expected[name]):
            assert said(streams[name].choices(index) + rest.choices(index)) == text
    # The stream stays live to its end, and only the surviving gateway serves new requests.
    assert Stream(other, body("greedy")).wait_end().answer["choices"][0]["text"] == expected["greedy"][0]
    stack.assert_invariants()
    assert stack.totals() == {"accepted": 2 * len(REQUESTS) + 1, "length": 2 * len(REQUESTS) + 1}
