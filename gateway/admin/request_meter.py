"""The counts of a gateway: a `CallMeter` per call, and their sums, which `gateway/admin/metrics.py` exports.

Each call is counted once when it ends, under one outcome: how generation ended, `refused` before it was accepted (or
joined), `gone` where the client left first. What runs for every group of events is `CallMeter.wrote`, two or three
observations.
"""

from __future__ import annotations

import time
from collections import Counter

from aiohttp import web

from quire.gateway.api.call_metadata import DIALECTS
from quire.gateway.api.error_responses import reasons
from quire.shared.messages import OUTCOMES
from quire.shared.telemetry.prometheus import STEP_S, TOKEN_S, WAIT_S, Histogram

# How a call came to its requests: it made them, it repeated an idempotency key, or it took up a stream again.
KINDS = ("new", "joined", "resumed")
CALL_OUTCOMES = (*OUTCOMES, "refused", "gone")

clock = time.perf_counter


class RequestMeters:
    """The numbers of one gateway."""

    def __init__(self) -> None:
        # By (route, status), and by (dialect, kind, outcome).
        self.http: Counter[tuple[str, str]] = Counter()
        self.calls = Counter({(d, k, o): 0 for d in DIALECTS for k in KINDS for o in CALL_OUTCOMES})
        # A counter that only appears with its first event hides that event from `rate`.
        self.refusals = Counter(dict.fromkeys(reasons(), 0))
        self.open_calls = dict.fromkeys(DIALECTS, 0)
        self.open_streams = 0
        self.slow_clients = 0
        self.corrupt_abouts = 0
        self.prompt_tokens = dict.fromkeys(DIALECTS, 0)
        self.completion_tokens = dict.fromkeys(DIALECTS, 0)
        self.first_token_s = {dialect: Histogram(WAIT_S) for dialect in DIALECTS}
        self.between_tokens_s = {dialect: Histogram(TOKEN_S) for dialect in DIALECTS}
        self.complete_s = {dialect: Histogram(WAIT_S) for dialect in DIALECTS}
        self.overhead_s = {part: Histogram(STEP_S) for part in ("accept", "deliver")}

    def refused(self, route: str, status: str, reason: str) -> None:
        """An HTTP request that never became a call."""
        self.http[route, status] += 1
        self.refusals[reason] += 1

    def open(self, dialect: str, kind: str, began: float) -> CallMeter:
        """A call that came at `began`, on this module's clock. Close it."""
        return CallMeter(self, dialect, kind, began)


class CallMeter:
    """One call."""

    __slots__ = ("_began", "_dialect", "_last_at", "first_at", "kind", "meters", "tokens")

    def __init__(self, meters: RequestMeters, dialect: str, kind: str, began: float) -> None:
        self.meters = meters
        self._dialect = dialect
        self._began = began
        self._last_at = 0.0
        # When the first token was written to the stream of a new call; 0 before.
        self.first_at = 0.0
        self.kind = kind
        # Of the answer, that the client has.
        self.tokens = 0
        meters.open_calls[dialect] += 1

    def accepted(self, prompt_tokens: int) -> None:
        """All requests of the call are in the queue."""
        self.meters.overhead_s["accept"].observe(clock() - self._began)
        self.meters.prompt_tokens[self._dialect] += prompt_tokens

    def wrote(self, tokens: int, came_at: float) -> None:
        """Events were written, up to this token of the answer. `came_at`: when the first of them came from a worker, 0
        for what the log had."""
        now = clock()
        if came_at:
            self.meters.overhead_s["deliver"].observe(now - came_at)
        if tokens <= self.tokens:
            return
        self.meters.completion_tokens[self._dialect] += tokens - self.tokens
        self.tokens = tokens
        if self._last_at:
            self.meters.between_tokens_s[self._dialect].observe(now - self._last_at)
        elif self.kind == "new":
            self.first_at = now
            self.meters.first_token_s[self._dialect].observe(now - self._began)
        self._last_at = now

    @property
    def first_s(self) -> float | None:
        """From the call to its first token; None without one, or where it leaves with all the others."""
        return self.first_at - self._began if self.first_at else None

    def collected(self, tokens: int) -> None:
        """The answer is complete and leaves in one piece."""
        self.meters.completion_tokens[self._dialect] += tokens

    def close(self, outcome: str) -> None:
        """The call is over; `outcome` is one of CALL_OUTCOMES."""
        self.meters.open_calls[self._dialect] -= 1
        self.meters.calls[self._dialect, self.kind, outcome] += 1
        if self.kind == "new" and outcome in ("stop", "length"):
            self.meters.complete_s[self._dialect].observe(clock() - self._began)


# When an HTTP request came, on `clock`, and its meter if it is a call.
BEGAN = web.RequestKey("began", float)
METER = web.RequestKey("meter", CallMeter)
