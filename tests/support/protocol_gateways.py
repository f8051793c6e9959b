"""The actions of gateways in random walks: submissions, listeners, ends and parking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from quire.shared.protocol.broker import (
    Admission,
    Claim,
    IdempotencyConflict,
    NoRoom,
    QueueBounds,
    QueueFull,
    StepReply,
    StreamEntry,
    Submitted,
)
from quire.shared.protocol.keys import PRIORITY_CLASSES
from tests.support.fair_model import Share
from tests.support.protocol_checks import ProtocolChecks
from tests.support.protocol_driver import API_KEYS, KEYS, SHARES, Lane, finished
from tests.support.protocol_model import AHEAD, NONE, Request

BOUNDS = QueueBounds(requests=5, tokens=100, stored_bytes=15_000, key_bytes=9000)
GATEWAYS = ("g0", "g1")
# Retention of stored responses.
STORED_S = 7200

gateways = st.sampled_from(GATEWAYS)
# An index into a list of the model's objects, taken modulo the length of the list.
picks = st.integers(0, 63)
shares = st.sampled_from(SHARES)
# Sequences of a request that run at once.
widths = st.sampled_from((1, 1, 1, 2, 4))
# True if the reply of a call is lost, so that the caller repeats the call.
losses = st.sampled_from((False, False, True))
classes = st.sampled_from(PRIORITY_CLASSES)
# Idempotency keys and fingerprints.
calls = st.sampled_from((("", ""), ("", ""), ("k0", "f0"), ("k0", "f1"), ("k1", "f0")))


class GatewayActions(ProtocolChecks):
    lane: Lane
    new_ids: Any  # of requests and attempts
    transitions: ClassVar[set[tuple[str, str, str]]]  # script, state before and state after it

    # --- calling ------------------------------------------------------------------------------------------------------

    def call(self, real: Callable[[], Any], model: Callable[[], Any], lost: bool = False) -> Any:
        """Call the broker and the model, twice if `lost`. Check that the answers agree, and return the last one."""
        for _ in range(1 + lost):
            before = self.model.states()
            expected = model()
            try:
                got = finished(real())
            except QueueFull as full:
                got = ("full", full.requests, full.tokens)
            except NoRoom as error:
                got = ("no_room", error.key, error.held)
            except IdempotencyConflict:
                got = "conflict"
            if isinstance(got, StepReply):
                got, expected = _unordered(got), _unordered(expected)
            elif isinstance(got, Submitted):
                got = got.id
            elif isinstance(got, Claim):
                got = replace(got, waited_ms=0, placement="", holder="")
            for request, worker in self.model.unplaced:
                entry = self.lane.client.hget(KEYS.request(request.request_id), "entry")
                assert isinstance(entry, bytes)
                self.model.place(request, entry.decode(), worker)
            if isinstance(expected, list) and all(isinstance(one, StreamEntry) for one in expected):
                expected = [
                    one if one.entry_id else replace(one, entry_id=self.model.requests[one.request_id].entry)
                    for one in expected
                ]
            assert got == expected
            self.model.unplaced.clear()
            after = self.model.states()
            for request_id in before.keys() | after.keys():
                step = before.get(request_id, ""), after.get(request_id, "")
                if step[0] != step[1]:
                    self.transitions.add((self.lane.latest_script, *step))
        # What went for others.
        self.settled = {name: length for name, length in self.settled.items() if name in self.model.requests}
        return got

    def pick(self, index: int) -> Request:
        requests = list(self.model.requests.values())
        return requests[-1 - index % len(requests)]

    def new_request(
        self, priority_class: str, cost: int, gateway: str, is_background: bool = False, deadline: int = AHEAD
    ) -> Request:
        return Request(f"r{next(self.new_ids)}", priority_class, cost, gateway, is_background, deadline)

    def has_requests(self) -> bool:
        return bool(self.model.requests)

    # --- gateways -----------------------------------------------------------------------------------------------------

    @rule(priority_class=classes, gateway=gateways, share=shares, rows=widths)
    def submit_plainly(self, priority_class: str, gateway: str, share: Share, rows: int) -> None:
        self.submit(priority_class, 10, gateway, AHEAD, False, ("", ""), False, share=share, rows=rows)

    @rule(priority_class=classes, order=st.lists(st.tuples(shares, widths), min_size=2, max_size=4))
    def crowd(self, priority_class: str, order: list[tuple[Share, int]]) -> None:
        """Several tenants and users come at once, so that some of them wait in lines."""
        for share, rows in order:
            self.submit(priority_class, 6, "g0", AHEAD, False, ("", ""), False, share=share, rows=rows)

    @rule(
        priority_class=classes,
        cost=st.integers(1, 60),
        gateway=gateways,
        deadline=st.sampled_from((NONE, AHEAD)),
        is_background=st.booleans(),
        call=calls,
        lost=losses,
        other=st.none() | picks,
        retention_s=st.sampled_from((0, 0, STORED_S)),
        share=shares,
        counts_stored=st.booleans(),
        rows=widths,
        api_key=st.sampled_from(API_KEYS),
    )
    def submit(
        self,
        priority_class: str,
        cost: int,
        gateway: str,
        deadline: int,
        is_background: bool,
        call: tuple[str, str],
        lost: bool,
        other: int | None = None,
        retention_s: int = 0,
        share: Share = SHARES[0],
        counts_stored: bool = True,
        rows: int = 1,
        api_key: str = "",
    ) -> None:
        key, fingerprint = call
        beside = "" if other is None or not self.has_requests() else self.pick(other).request_id
        request = self.new_request(priority_class, cost, gateway, is_background, deadline)
        request.retention_s, request.is_stored = retention_s, retention_s > 0
        request.share, request.prompt_tokens = share, cost // 2
        request.counts_stored, request.rows, request.key = counts_stored, rows, api_key
        self.call(
            lambda: self.lane.broker.submit(
                request.request_id,
                request.body,
                Admission(
                    gateway=gateway,
                    cost=cost,
                    bounds=BOUNDS,
                    priority_class=priority_class,
                    deadline_ms=3_600_000 if deadline == AHEAD else 0,
                    metadata=request.metadata,
                    is_background=is_background,
                    idempotency_key=key,
                    fingerprint=fingerprint,
                    traceparent=request.traceparent,
                    beside=beside,
                    retention_s=retention_s,
                    conversation=request.conversation,
                    prompt_tokens=request.prompt_tokens,
                    **share._asdict(),
                    counts_stored=counts_stored,
                    rows=rows,
                    owner=api_key,
                ),
            ),
            lambda: self.model.submit(request, BOUNDS, key, fingerprint, beside),
            lost,
        )
        if request.request_id in self.model.requests:
            self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, gateway=gateways, lost=losses)
    def submit_what_is_there(self, which: int, gateway: str, lost: bool) -> None:
        """Submit a known request again, as the gateway of a second call with the same idempotency key does."""
        known = self.pick(which)
        again = replace(known, gateway=gateway)
        self.call(
            lambda: self.lane.broker.submit(
                known.request_id, known.body, Admission(gateway=gateway, cost=known.cost, bounds=BOUNDS)
            ),
            lambda: self.model.submit(again, BOUNDS, "", ""),
            lost,
        )
        self.check_listeners(known)

    @precondition(has_requests)
    @rule(which=picks, beside=st.sampled_from((None, None, (), ("g0",), GATEWAYS)), lost=losses)
    def cancel(self, which: int, beside: tuple[str, ...] | None, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(
            lambda: self.lane.broker.cancel(request_id, beside), lambda: self.model.cancel(request_id, beside), lost
        )

    @precondition(has_requests)
    @rule(which=picks, lost=losses)
    def delete(self, which: int, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(lambda: self.lane.broker.delete(request_id), lambda: self.model.delete(request_id), lost)

    @precondition(has_requests)
    @rule(which=picks, lost=losses)
    def expire(self, which: int, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(lambda: self.lane.broker.expire(request_id), lambda: self.model.expire(request_id), lost)

    @precondition(has_requests)
    @rule(which=picks, gateway=gateways, lost=losses)
    def attach(self, which: int, gateway: str, lost: bool) -> None:
        request = self.pick(which)
        request_id = request.request_id
        self.call(
            lambda: self.lane.broker.attach(request_id, gateway),
            lambda: self.model.attach(request_id, gateway),
            lost,
        )
        self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, gateway=gateways, lost=losses)
    def detach(self, which: int, gateway: str, lost: bool) -> None:
        request = self.pick(which)
        request_id = request.request_id
        self.call(
            lambda: self.lane.broker.detach(request_id, gateway),
            lambda: self.model.detach(request_id, gateway),
            lost,
        )
        self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, most=st.sampled_from(((0, 0), (0, 0), (1, 0), (0, 1))), lost=losses)
    def park(self, which: int, most: tuple[int, int], lost: bool) -> None:
        request = self.pick(which)
        request_id = request.request_id
        park = partial(self.lane.broker.park, request_id, retention_s=STORED_S, bounds=BOUNDS)
        self.call(
            lambda: park(max_parked=most[0], max_parked_of_key=most[1]),
            lambda: self.model.park(request_id, "", *most, BOUNDS),
            lost,
        )
        self.check_listeners(request)

    @precondition(has_requests)
    @rule(which=picks, lost=losses)
    def unpark(self, which: int, lost: bool) -> None:
        request_id = self.pick(which).request_id
        self.call(
            lambda: self.lane.broker.unpark(request_id, BOUNDS),
            lambda: self.model.unpark(request_id, BOUNDS, STORED_S),
            lost,
        )

    @precondition(has_requests)
    @rule(which=picks)
    def parking_lapses(self, which: int) -> None:
        """The time for which a request may be parked is over."""
        request = self.pick(which)
        if request.state == "parked":
            request.has_lapsed = True
            self.lane.client.zadd(KEYS.parked, {request.request_id: 1})

    def check_listeners(self, request: Request) -> None:
        listeners = {} if request.is_background else {request.request_id: request.listeners}
        assert finished(self.lane.broker.listeners_of([request.request_id, "nobody"])) == listeners


def _unordered(reply: StepReply) -> StepReply:
    return StepReply(
        tuple(sorted(reply.lost)),
        tuple(sorted(reply.cancelled)),
        tuple(sorted(reply.expired)),
        reply.behind,
        tuple(sorted(reply.notices)),
    )
