"""Staging buffers: the inputs of a step go to the device in one copy, and its tokens come back in one.

The host waits for the device only if the device has not read the staging buffer yet that is to be reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch

from quire.worker.engine.transfers import StreamMark

# Buffers in rotation. A step is collected once the next one has been launched, so at most two steps are in flight, and
# the device has finished with the third buffer.
IN_FLIGHT = 3
ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers with another alignment

Number = np.int64 | np.int32 | np.float64 | np.float32

_TORCH: dict[type[Number], torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float64: torch.float64,
    np.float32: torch.float32,
}


class StagingField(NamedTuple):
    """A column of a staging buffer: `length` numbers."""

    name: str
    numpy: type[Number]
    length: int


class Staging:
    """Columns in one buffer, filled in pinned memory of the host and copied to the device at once."""

    def __init__(self, fields: SequenceOf[StagingField], device: torch.device) -> None:
        sizes = [np.dtype(field.numpy).itemsize * field.length for field in fields]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self._spans = [
            (field, start, start + size) for field, start, size in zip(fields, starts[:-1], sizes, strict=True)
        ]
        self._device_bytes = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._hosts = pinned_buffers(starts[-1], torch.uint8, device)
        # Views at fixed addresses, which CUDA graphs read.
        self.on_device = {
            field.name: self._device_bytes[start:end].view(_TORCH[field.numpy]) for field, start, end in self._spans
        }

    def send(self, columns: dict[str, np.ndarray]) -> None:
        """Copy columns to the device, each at most as long as its field. All other contents become undefined."""
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
    """Allocate host buffers for the steps in flight, each with a mark for the end of its last copy."""
    is_pinned = device.type == "cuda"
    return deque((torch.zeros(length, dtype=dtype, pin_memory=is_pinned), StreamMark(device)) for _ in range(IN_FLIGHT))


def padded(values: np.ndarray, count: int, filler: int) -> np.ndarray:
    """Return the values, extended to `count` numbers by the filler."""
    filled = np.full(count, filler, dtype=values.dtype)
    filled[: len(values)] = values
    return filled
