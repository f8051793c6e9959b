"""Streams and events. Operations of a stream run in their order, as late as possible."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.simulated_cuda.driver import Driver

Operation = Callable[[], Any]


class SimulatedStream:
    """Stands in for torch.cuda.Stream. recorded: the operations of the capture under way; None: none is."""

    driver: Driver

    def __init__(self, device: Any = None, priority: int = 0, **_: object) -> None:
        self.of_device = self.driver.device_of(device)
        self.recorded: list[Operation] | None = None
        self._waiting: deque[Operation] = deque()
        self.num_submitted = self.num_done = 0
        self.of_device_streams = self.driver.streams[self.of_device.index]
        self.of_device_streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.of_device.index)

    @property
    def cuda_stream(self) -> int:
        return self.of_device_streams.index(self)

    def submit(self, operation: Operation) -> None:
        """Launch an operation, or record it."""
        self.of_device.check()
        if self.recorded is not None:
            self.recorded.append(operation)
            return
        self._waiting.append(operation)
        self.num_submitted += 1
        draw = self.driver.draw
        if not self.driver.is_late:
            self.run(self.num_submitted)
        elif draw is not None and draw.random() < 0.1:
            self.run(draw.randint(self.num_done, self.num_submitted))

    def run(self, until: int) -> None:
        """Run all submitted operations, or the first `until` of them."""
        with self.driver.lock, torch._C.DisableTorchFunction(), torch.inference_mode():
            while self.num_done < until:
                self.num_done += 1
                self.of_device.run(self._waiting.popleft())

    def synchronize(self) -> None:
        self.driver.wait("cudaStreamSynchronize", self, self.num_submitted)

    def query(self) -> bool:
        self.driver.check_allowed("cudaStreamQuery")
        return self.num_done == self.num_submitted

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())


class SimulatedEvent:
    """Stands in for torch.cuda.Event. It reads the clock of the host, so durations mean nothing."""

    driver: Driver

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._stream: SimulatedStream | None = None
        self._at = 0
        self._is_captured = False
        self._time = 0.0

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._stream = stream = stream or self.driver.current_stream()
        self._is_captured = stream.recorded is not None
        stream.submit(self._note_time)
        self._at = stream.num_submitted

    def _note_time(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        self._check("cudaEventQuery")
        return self._stream is None or self._stream.num_done >= self._at

    def synchronize(self) -> None:
        self._check("cudaEventSynchronize")
        if self._stream is not None:
            self.driver.wait("cudaEventSynchronize", self._stream, self._at)

    def _check(self, call: str) -> None:
        self.driver.check_allowed(call)
        if self._is_captured:
            raise RuntimeError(f"{call}: the event was recorded in a capture, and tells nothing about a replay")

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Let later operations of a stream run after the event."""
        other, at = self._stream, self._at
        stream = stream or self.driver.current_stream()
        if other is not None and other is not stream and not self._is_captured:
            stream.submit(lambda: other.run(at))

    def elapsed_time(self, end: SimulatedEvent) -> float:
        return max(1e-3, 1e3 * (end._time - self._time))
