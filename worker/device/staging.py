"""What goes to the device for a step in one copy, and the tokens that come back.

Nothing here makes the host wait for the device, but for a buffer that it has not read yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch

# Steps whose inputs or outputs may be under way at once: the one before is settled when the next has been launched.
IN_FLIGHT = 3
ALIGNMENT = 16  # bytes; kernels are compiled for pointers that are so aligned, and again for others

_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float64: torch.float64, np.float32: torch.float32}


class StagingField(NamedTuple):
    name: str
    numpy: Any
    length: int


class StreamMark:
    """A place in the order of a device's stream, and whether the device has passed it. On a CPU it always has."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        # Asked for once: for the current stream torch looks at the environment, each time.
        self._stream = torch.cuda.current_stream(device) if is_cuda else None
        self._event = torch.cuda.Event() if is_cuda else None

    def set(self) -> None:
        """Behind all that is launched by now."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class Staging:
    """Columns in one buffer: filled on the host, pinned, and copied to the device in one go."""

    def __init__(self, fields: SequenceOf[StagingField], device: torch.device) -> None:
        sizes = [np.dtype(field.numpy).itemsize * field.length for field in fields]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self._spans = [
            (field, start, start + size) for field, start, size in zip(fields, starts[:-1], sizes, strict=True)
        ]
        self._device_bytes = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._hosts = pinned_buffers(starts[-1], torch.uint8, device)
        # Views that stay where they are: graphs read them.
        self.on_device = {
            field.name: self._device_bytes[start:end].view(_TORCH[field.numpy]) for field, start, end in self._spans
        }

    def send(self, columns: dict[str, np.ndarray]) -> None:
        """Copy columns to the device, each as long as its field or shorter. What is not named may be anything."""
        host, copied = self._hosts[0]
        self._hosts.rotate(-1)
        copied.wait()
        whole = host.numpy()
        for field, start, end in self._spans:
            if (column := columns.get(field.name)) is not None:
                whole[start:end].view(field.numpy)[: len(column)] = column
        self._device_bytes.copy_(host, non_blocking=True)
        copied.set()


def pinned_buffers(length: int, dtype: torch.dtype, device: torch.device) -> deque[tuple[torch.Tensor, StreamMark]]:
    """Host memory of the steps under way, each with the mark behind its copy from or to the device."""
    is_pinned = device.type == "cuda"
    return deque((torch.zeros(length, dtype=dtype, pin_memory=is_pinned), StreamMark(device)) for _ in range(IN_FLIGHT))


def padded(values: np.ndarray, count: int, filler: int) -> np.ndarray:
    """The values, and the filler behind them up to `count`."""
    filled = np.full(count, filler, dtype=values.dtype)
    filled[: len(values)] = values
    return filled


class SampledTokens:
    """Tokens that were drawn on the device, on their way to the host."""

    def __init__(self, host: torch.Tensor, count: int, copied: StreamMark) -> None:
        self._host, self._count, self._copied = host, count, copied

    def wait(self) -> np.ndarray:
        """int32 [R], once the device has drawn them."""
        self._copied.wait()
        tokens: np.ndarray = self._host[: self._count].numpy().copy()
        return tokens
