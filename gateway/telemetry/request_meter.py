"""The counts of a gateway: a `CallMeter` per call, and their sums, which `gateway/features/admin/metrics.py` exports.

Each call is counted once, when it ends, under one outcome: the outcome of its generation, `refused` if it was not
accepted, `parked` if its request was parked, `closed` if the gateway ended its stream, or `gone` if the client left
first. `CallMeter.wrote` runs for every write of tokens and makes two or three observations.
"""

from __future__ import annotations

import time
from collections import Counter

from aiohttp import web

from quire.gateway.errors.api_errors import Parked
from quire.gateway.errors.error_responses import reasons
from quire.gateway.stream.buffer import ClosedOutcome
from quire.gateway.stream.call_metadata import DIALECTS
from quire.shared.protocol.messages import OUTCOMES
from quire.shared.protocol.states import COMPLETE
from quire.shared.telemetry.prometheus import STEP_S, TOKEN_S, WAIT_S, Histogram

# Kinds of calls: a call makes new requests, repeats an idempotency key, or resumes a stream.
KINDS = ("new", "joined", "resumed")
CALL_OUTCOMES = (*OUTCOMES, Parked.code, ClosedOutcome.NAME, "refused", "gone")

clock = time.perf_counter


class RequestMeters:
    """The counts of one gateway."""

    def __init__(self) -> None:
        # By (route, status), and by (dialect, kind, outcome).
        self.http: Counter[tuple[str, str]] = Counter()
        self.calls = Counter({(d, k, o): 0 for d in DIALECTS for k in KINDS for o in CALL_OUTCOMES})
        # All reasons start at 0: Prometheus' `rate` does not see the first event of a counter that appears with it.
        self.refusals = Counter(dict.fromkeys(reasons(), 0))
        self.open_calls = dict.fromkeys(DIALECTS, 0)
        self.open_streams = 0
        self.slow_clients = 0
        self.corrupt_metadata = 0
        self.prompt_tokens = dict.fromkeys(DIALECTS, 0)
        self.completion_tokens = dict.fromkeys(DIALECTS, 0)
        self.first_token_s = {dialect: Histogram(WAIT_S) for dialect in DIALECTS}
        self.between_tokens_s = {dialect: Histogram(TOKEN_S) for dialect in DIALECTS}
        self.complete_s = {dialect: Histogram(WAIT_S) for dialect in DIALECTS}
        self.overhead_s = {part: Histogram(STEP_S) for part in ("accept", "deliver")}

    def refused(self, route: str, status: str, reason: str) -> None:
        """Count an HTTP request that was refused before it reached the application."""
        self.http[route, status] += 1
        self.refusals[reason] += 1

    def client_stalled(self) -> None:
        """Count a client that has not read its answer in time."""
        self.slow_clients += 1

    def open(self, dialect: str, kind: str, began: float) -> CallMeter:
        """Return the meter of a call that was received at `began`, on `clock`. The caller closes it."""
        return CallMeter(self, dialect, kind, began)


class CallMeter:
    """The counts of one call."""

    __slots__ = ("_began", "_between", "_deliver", "_dialect", "_last_at", "first_at", "kind", "meters", "tokens")

    def __init__(self, meters: RequestMeters, dialect: str, kind: str, began: float) -> None:
        self.meters = meters
        self._dialect = dialect
        self._began = began
        self._deliver = meters.overhead_s["deliver"]
        self._between = meters.between_tokens_s[dialect]
        self._last_at = 0.0
        # Time at which the first token was written to the stream of a new call; 0 before.
        self.first_at = 0.0
        self.kind = kind
        # Tokens of the answer that the client has.
        self.tokens = 0
        meters.open_calls[dialect] += 1

    def accepted(self, prompt_tokens: int) -> None:
        """Count that all requests of the call are in the queue."""
        self.meters.overhead_s["accept"].observe(clock() - self._began)
        self.meters.prompt_tokens[self._dialect] += prompt_tokens

    def wrote(self, tokens: int, came_at: float) -> None:
        """Count that events were written.

        `tokens`: tokens of the answer that the client has now. `came_at`: arrival time of the oldest item that was
        written, by time.perf_counter; 0 if it was read from the log.
        """
        now = clock()
        if came_at:
            self._deliver.observe(now - came_at)
        if tokens <= self.tokens:
            return
        self.meters.completion_tokens[self._dialect] += tokens - self.tokens
        self.tokens = tokens
        if self._last_at:
            self._between.observe(now - self._last_at)
        elif self.kind == "new":
            self.first_at = now
            self.meters.first_token_s[self._dialect].observe(now - self._began)
        self._last_at = now

    @property
    def first_s(self) -> float | None:
        """Seconds from receiving the call to its first token; None without one, or if the call is not streamed."""
        return self.first_at - self._began if self.first_at else None

    def collected(self, tokens: int) -> None:
        """Count the tokens of an answer that is written as one body."""
        self.meters.completion_tokens[self._dialect] += tokens

    def stream_opened(self) -> None:
        self.meters.open_streams += 1

    def stream_closed(self) -> None:
        self.meters.open_streams -= 1

    def client_stalled(self) -> None:
        """Count that the connection was closed because the client did not read."""
        self.meters.client_stalled()

    def close(self, outcome: str) -> None:
        """End the call; `outcome` is one of CALL_OUTCOMES."""
        self.meters.open_calls[self._dialect] -= 1
        self.meters.calls[self._dialect, self.kind, outcome] += 1
        if self.kind == "new" and outcome in COMPLETE:
            self.meters.complete_s[self._dialect].observe(clock() - self._began)


# The time at which an HTTP request was received, on `clock`, and its meter if it is a call.
BEGAN = web.RequestKey("began", float)
METER = web.RequestKey("meter", CallMeter)
