"""Prefix affinity in the model of the protocol, and as actions of its machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from quire.shared.protocol.broker import Admission, StreamEntry
from quire.shared.protocol.broker.affinity import AffinityVerbs
from quire.shared.protocol.messages import WorkerCard
from tests.support.fair_model import Share
from tests.support.protocol_driver import KEYS, finished
from tests.support.protocol_gateways import BOUNDS, GatewayActions, classes, losses, picks, shares
from tests.support.protocol_model import ProtocolModel, Request

PREFIX = b"prefix-of-12"
WORKERS = ("w0", "w1", "w2")
ROWS = 64
ENDS = st.sampled_from(("read in time", "claimed just in time", "read too late", "never read"))


def submit(model: ProtocolModel, request: Request, holder: str) -> Any:
    """Submit a request, and deliver it to the holder of its prefix, unless that one is busy."""
    reply, name = model.submit(request, BOUNDS, "", ""), request.priority_class
    if model.unplaced and model.unplaced[-1][0] is request and request.queue == name:
        own = sum(queue == name and pending.worker == holder for (queue, _), pending in model.pending.items())
        part = math.ceil(1.25 * (len(model.streams[name]) + 1) / len(WORKERS))
        if own < min(ROWS, max(2, part)):
            model.unplaced[-1] = (request, holder)
            request.is_left = True
    return reply


def withdraw(model: ProtocolModel, request_ids: Sequence[str]) -> int:
    """Queue requests for all workers."""
    withdrawn = 0
    for request_id in request_ids:
        request = model.requests.get(request_id)
        if request is not None and request.state == "queued" and request.is_left:
            model._take_off(request.queue, request.entry)
            model.fair.refund_prompt(request.priority_class, request.share, request.prompt_tokens)
            arrivals, model.totals["arrivals"] = model.totals["arrivals"], request.arrival - 1
            model._enqueue_fairly(request)
            model.totals["arrivals"] = arrivals
            withdrawn += 1
    return withdrawn


class AffinityActions(GatewayActions):
    """A request is left to a worker, and withdrawn."""

    workers: Any

    @rule(name=st.sampled_from(WORKERS), priority_class=classes, share=shares, ends=ENDS, lost=losses)
    def leave(self, name: str, priority_class: str, share: Share, ends: str, lost: bool) -> None:
        """Submit a request with a prefix that a worker holds. The worker reads it in time, too late, or never."""
        client: Any = self.lane.client
        # All workers beat, and this one has just claimed a request with the prefix.
        for worker in self.workers.values():
            client.delete(KEYS.worker(worker.name))
            finished(
                self.lane.broker.beat(
                    WorkerCard(worker.name, worker.incarnation, "lane", 99, ROWS, 9, (2,), 16, 9, 9, 0, 0, 7)
                )
            )
        client.hset(KEYS.prefixes, PREFIX, f"{self.workers[name].incarnation} {name}")
        client.expire(KEYS.prefixes, 5)
        request = self.new_request(priority_class, 10, "g0")
        request.share, request.prompt_tokens = share, 5
        terms = Admission(
            "g0",
            BOUNDS,
            cost=10,
            prompt_tokens=5,
            priority_class=priority_class,
            deadline_ms=3_600_000,
            metadata=request.metadata,
            traceparent=request.traceparent,
            prefixes=(PREFIX,),
            left_ms=60_000,
            **share._asdict(),
        )
        self.call(
            lambda: self.lane.broker.submit(request.request_id, request.body, terms),
            lambda: submit(self.model, request, name),
            lost,
        )
        if request.is_left:
            assert client.xlen(KEYS.left(name)) == 1
            if ends != "never read":
                self.take(name, [StreamEntry(request.queue, request.entry, request.request_id, request.cost)])
            if ends == "claimed just in time":
                self.claim_all(self.workers[name])
            if ends != "read in time":
                self.withdraw_all([request.request_id], lost)
        client.delete(KEYS.left(name))

    @precondition(GatewayActions.has_requests)
    @rule(which=picks, lost=losses)
    def withdraw(self, which: int, lost: bool) -> None:
        """The time is over for which requests are left to their workers."""
        self.withdraw_all([self.pick(which).request_id], lost)

    def withdraw_all(self, ids: list[str], lost: bool) -> None:
        verbs = AffinityVerbs(self.lane.broker.client, "lane")
        self.call(lambda: verbs.withdraw(ids), lambda: withdraw(self.model, ids), lost)

    def take(self, name: str, deliveries: list[StreamEntry]) -> None:
        raise NotImplementedError

    def claim_all(self, worker: Any) -> None:
        raise NotImplementedError
