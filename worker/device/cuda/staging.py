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


class Column(NamedTuple):
    """The numbers of a column in one step. Fewer than `length` are followed by the filler."""

    values: np.ndarray
    length: int = 0
    filler: int = 0


class Staging:
    """Columns in one buffer, filled in pinned memory of the host and copied to the device at once.

    fields: those that few steps send come last, since a copy ends with the last column that is sent.
    """

    def __init__(self, fields: SequenceOf[StagingField], device: torch.device) -> None:
        sizes = [np.dtype(field.numpy).itemsize * field.length for field in fields]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        names = [field.name for field in fields]
        ends = [start + size for start, size in zip(starts, sizes, strict=False)]
        self._places = {name: place for place, name in enumerate(names)}
        on_device = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        # Views at fixed addresses, which CUDA graphs read.
        self.on_device = {
            field.name: on_device[start:end].view(_TORCH[field.numpy])
            for field, start, end in zip(fields, starts, ends, strict=False)
        }
        # The bytes that a copy of the columns up to each one writes, and those that it reads in a buffer of the host.
        self._targets = [on_device[:end] for end in ends]
        self._hosts = deque(
            (
                {name: host.numpy()[starts[at] : ends[at]].view(fields[at].numpy) for at, name in enumerate(names)},
                [host[:end] for end in ends],
                copied,
            )
            for host, copied in pinned_buffers(starts[-1], torch.uint8, device)
        )

    def send(self, columns: dict[str, Column]) -> None:
        """Copy columns to the device, each at most as long as its field. All other contents become undefined."""
        fields, sources, copied = self._hosts[0]
        self._hosts.rotate(-1)
        copied.wait()
        for name, (values, length, filler) in columns.items():
            field = fields[name]
            field[: len(values)] = values
            field[len(values) : length] = filler
        last = max(map(self._places.__getitem__, columns))
        self._targets[last].copy_(sources[last], non_blocking=True)
        copied.set()


def pinned_buffers(length: int, dtype: torch.dtype, device: torch.device) -> deque[tuple[torch.Tensor, StreamMark]]:
    """Allocate host buffers for the steps in flight, each with a mark for the end of its last copy."""
    is_pinned = device.type == "cuda"
    return deque((torch.zeros(length, dtype=dtype, pin_memory=is_pinned), StreamMark(device)) for _ in range(IN_FLIGHT))
