"""Routes published items to the calls that listen to their requests.

Usually one call listens to a request. More calls listen if a client resumed the stream or repeated an idempotency key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from quire.gateway.stream.buffer import ClosedOutcome, NotLoadedOutcome, NoWorkerOutcome, OutputBuffer, StreamStats
from quire.gateway.stream.silence import SilenceMonitor
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import StepItem


class FrameRouter:
    """Feeds the items of each frame to the buffers of the open calls.

    Buffers are flushed when the event loop runs its next callbacks, after all frames that are at hand have been fed: a
    gateway that falls behind writes several tokens of a stream at once.
    """

    def __init__(self, broker: Broker, keepalive_s: float) -> None:
        self._broker = broker
        self._keepalive_s = keepalive_s
        self.stats = StreamStats()
        self.silence = SilenceMonitor(broker)
        self._by_request: dict[str, list[OutputBuffer]] = {}
        self._open: set[OutputBuffer] = set()
        # Buffers that were fed and not flushed; the keys are in order of arrival.
        self._fed: dict[OutputBuffer, None] = {}

    def open(self, request_ids: Sequence[str], owner: str | None = None) -> OutputBuffer:
        """Return a buffer that gets the output of these requests until `close`. owner: see `OutputBuffer`."""
        buffer = OutputBuffer(self._broker, request_ids, self._keepalive_s, self.stats, self.silence.check_at, owner)
        self._open.add(buffer)
        for request_id in request_ids:
            self._by_request.setdefault(request_id, []).append(buffer)
        self.silence.check_at(buffer, 0.0)
        return buffer

    def close(self, buffer: OutputBuffer) -> None:
        """Stop feeding and checking a buffer. Closing it again has no effect."""
        if buffer not in self._open:
            return
        self._open.remove(buffer)
        self.silence.remove(buffer)
        for request_id in buffer.cursors:
            listeners = self._by_request[request_id]
            listeners.remove(buffer)
            if not listeners:
                del self._by_request[request_id]

    def has(self, request_id: str) -> bool:
        """Return True if an open call listens to the request."""
        return request_id in self._by_request

    def feed(self, items: Sequence[StepItem], now: float) -> None:
        """Route the items of one frame that arrived at `now` on the loop's clock."""
        find, fed = self._by_request.get, self._fed
        self.stats.frame_at = time.perf_counter()
        if not fed:
            asyncio.get_running_loop().call_soon(self._flush)
        for item in items:
            # A request has no listener when its client has left, or the gateway was restarted.
            for buffer in find(item.request_id, ()):
                buffer.feed(item, now)
                fed[buffer] = None

    def _flush(self) -> None:
        fed, self._fed = self._fed, {}
        for buffer in fed:
            buffer.flush()

    def suspect_all(self) -> int:
        """Have every open call compared with its log, because frames may be lost. Returns the number of calls."""
        for buffer in list(self._open):
            buffer.suspect()
        return self.calls

    def give_up_queued(self, waited_s: float, fault: str = "") -> None:
        """End the calls that have waited for this time without a token; called while no worker is alive.

        fault: why no worker can load the model; empty if none tries to.
        """
        detail = f"No worker of this model is alive, and the request has waited for {waited_s:g} s; send it again."
        outcome = NoWorkerOutcome(NoWorkerOutcome.NAME, detail)
        if fault:
            outcome = NotLoadedOutcome(NotLoadedOutcome.NAME, f"The model cannot be loaded: {fault}")
        opened_before = asyncio.get_running_loop().time() - waited_s
        for buffer in list(self._open):
            # A call in the background has no client that waits, and stays in the queue until its deadline.
            if buffer.accepted and buffer.is_responsible and buffer.opened_at <= opened_before:
                buffer.give_up(outcome)

    @property
    def owners(self) -> set[str]:
        """The ids of the API keys with open calls."""
        return {buffer.owner for buffer in self._open if buffer.owner}

    def close_streams(self, outcome: ClosedOutcome, owner: str | None = None) -> None:
        """End the accepted calls of clients, those of one API key or all, before their requests end."""
        for buffer in list(self._open):
            if buffer.accepted and buffer.owner is not None and owner in (None, buffer.owner):
                buffer.close(outcome)

    @property
    def calls(self) -> int:
        """The number of open calls."""
        return len(self._open)
