"""Which calls listen to which request: usually one, more where clients came back or share a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.silence import SilenceMonitor
from quire.shared.broker import Broker
from quire.shared.messages import StepItem

log = logging.getLogger("gateway")


class FrameRouter:
    """Hands what workers published to the open calls.

    Calls are told of it (`OutputBuffer.flush`) when the event loop gets its turn again, so once every frame that was at
    hand has been fed: a gateway that is behind writes several tokens of a stream at once.
    """

    def __init__(self, broker: Broker, keepalive_s: float) -> None:
        self._broker = broker
        self._keepalive_s = keepalive_s
        self.watch = SilenceMonitor(broker)
        self._by_request: dict[str, list[OutputBuffer]] = {}
        self._open: set[OutputBuffer] = set()
        # What was fed and not flushed.
        self._fed: dict[OutputBuffer, None] = {}
        self.corrupt_logs = 0
        self.log_reads = 0
        # How often the log had what was published and did not arrive.
        self.repairs = 0
        # When the latest frame came, by time.perf_counter.
        self.frame_at = 0.0

    def open(self, request_ids: Sequence[str]) -> OutputBuffer:
        outputs = OutputBuffer(self, self._broker, request_ids, self._keepalive_s)
        self._open.add(outputs)
        for request_id in request_ids:
            self._by_request.setdefault(request_id, []).append(outputs)
        self.watch.add(outputs, 0.0)
        return outputs

    def close(self, outputs: OutputBuffer) -> None:
        if outputs not in self._open:
            return
        self._open.remove(outputs)
        self.watch.remove(outputs)
        for request_id in outputs.cursors:
            listeners = self._by_request[request_id]
            listeners.remove(outputs)
            if not listeners:
                del self._by_request[request_id]

    def has(self, request_id: str) -> bool:
        """Whether some call listens to the request."""
        return request_id in self._by_request

    def feed(self, items: Sequence[StepItem], now: float) -> None:
        """The items of one frame, at `now` on the loop's clock."""
        find, fed = self._by_request.get, self._fed
        self.frame_at = time.perf_counter()
        if not fed:
            asyncio.get_running_loop().call_soon(self._flush)
        for item in items:
            # Without any its client has gone, or the gateway was started anew.
            for outputs in find(item.request_id, ()):
                outputs.feed(item, now)
                fed[outputs] = None

    def _flush(self) -> None:
        fed, self._fed = self._fed, {}
        for outputs in fed:
            outputs.flush()

    def note_corrupt_log(self, request_id: str, error: Exception) -> None:
        """The output log of a request cannot be read; its calls end with an error."""
        self.corrupt_logs += 1
        if self.corrupt_logs == 1:
            log.error(
                "the output log of request %s is corrupt (this is said once): %s",
                request_id,
                error,
                extra={"request_id": request_id},
            )

    def each(self, act: Callable[[OutputBuffer], None]) -> None:
        for outputs in list(self._open):
            act(outputs)

    @property
    def calls(self) -> int:
        return len(self._open)
