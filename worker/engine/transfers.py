"""Copies between the host and the device for which no side waits."""

from __future__ import annotations

import numpy as np
import torch


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy host memory to a device, in the order of its stream and without waiting.

    From memory that is not pinned, a copy to a CUDA device would wait for all launched steps. The pinned copy belongs
    to torch's allocator, which reuses it only after the device has read it; so `values` may change at once. On a CPU
    nothing is copied.
    """
    if device.type == "cuda" and values.numel():
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class StreamMark:
    """A position in the device's stream of operations. On a CPU it has always been reached.

    A thread that waits sleeps. By default CUDA keeps a core busy instead, with little gain: the next step is launched
    before the tokens of a step are waited for.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        # Asked for once, since torch reads the environment for each answer.
        self._stream = torch.cuda.current_stream(device) if is_cuda else None
        self._event: torch.Event | None = (
            torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]
        )

    def set(self) -> None:
        """Move the mark to the end of the stream, after all operations launched so far."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        """Wait until the device has reached the mark."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class SampledTokens:
    """Tokens sampled on the device, on their way to the host."""

    def __init__(self, host: torch.Tensor, count: int, copied: StreamMark) -> None:
        self._host, self._count, self._copied = host, count, copied

    def wait(self) -> np.ndarray:
        """Wait for the device. Returns the tokens: int32 [R]."""
        self._copied.wait()
        tokens: np.ndarray = self._host[: self._count].numpy().copy()
        return tokens
